"""AWQ files, version GEMM, as AutoAWQ writes them.

Per linear of shape [N, K] with G groups: `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], `scales` fp16
[G, N]. Nibble i of word c holds output 8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]. Four bits only; a symmetric weight
has the zero point 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nc.errors import UnsupportedError
from nc.interchange.layer import (
    GroupCodes,
    StoredLayer,
    check_of_words,
    check_settings,
    codes_in,
    codes_of,
    groups_in,
    layer_of,
    one_format,
    refuse,
    size_of_groups,
    stored_scale,
    taken,
    words,
)

NAME = "AWQ"
GROUPS = (16, 32, 64, 128)
#: The output that nibble i of a word holds.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Where files say their layout.
_VERSION = ("version", "format", "checkpoint_format")
#: Settings that are read, or say how the codes were found, or how other tools run them.
_KNOWN = """
    quant_method method bits group_size zero_point version format checkpoint_format
    modules_to_not_convert ignore
    lm_head sym desc_act pack_dtype dynamic meta backend do_fuse fuse_max_seq_len
    modules_to_fuse exllama_config
"""


def write(
    layers: Mapping[str, StoredLayer], floats: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and `quantization_config` of a file; arguments and errors as for `gptq.write`."""
    found = {name: codes_of(layer, name, NAME) for name, layer in layers.items()}
    one_format(found, NAME)
    tensors = {}
    for name, codes in found.items():
        _check(name, layers[name], codes)
        tensors[f"{name}.qweight"] = packed(codes.codes.T)
        tensors[f"{name}.qzeros"] = packed(codes.zeros.T)
        tensors[f"{name}.scales"] = stored_scale(codes.scale, (torch.float16,), name, NAME).T.contiguous()
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size_of_groups(found),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(floats) or None,
    }
    return tensors, config


def _check(name: str, layer: StoredLayer, codes: GroupCodes) -> None:
    if codes.bits != 4:
        refuse(name, NAME, f"it has 4 bits, and the weight {codes.bits}", 'Quantize with w_dtype="int4"')
    check_of_words(name, NAME, layer, codes, 8, GROUPS)


def packed(codes: torch.Tensor, order: Sequence[int] = ORDER) -> torch.Tensor:
    """Nibbles in AWQ's order: uint8 [rows, 8 n] → int32 [rows, n]."""
    return words(codes.reshape(codes.shape[0], -1, 8)[:, :, list(order)].flatten(1), 4)


def unpacked(stored: torch.Tensor, order: Sequence[int] = ORDER) -> torch.Tensor:
    """Return the inverse of `packed`."""
    inverse = sorted(range(8), key=order.__getitem__)
    return codes_in(stored, 4, stored.shape[1] * 8).reshape(stored.shape[0], -1, 8)[:, :, inverse].flatten(1)


def read(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """Return the low-bit linears of a file; errors as for `gptq.read`."""
    check_settings(config, _KNOWN.split(), "quantization_config")
    said, width = [str(config[key]).lower() for key in _VERSION if config.get(key)], config.get("bits", 4)
    if {*said} - {"gemm"} or width != 4:
        msg = (
            f"AWQ of version {' and '.join(map(repr, said))} with {width} bits is not read; nc reads version "
            "'gemm' with 4 bits."
        )
        raise UnsupportedError(msg)
    names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    return {name: _layer(tensors, name, int(config.get("group_size", -1))) for name in names}


def _layer(tensors: dict[str, torch.Tensor], name: str, group: int) -> StoredLayer:
    qweight = taken(tensors, f"{name}.qweight", (torch.int32,), (None, None))
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    scales = taken(tensors, f"{name}.scales", _FLOATS, (None, outputs))
    groups_in(scales.shape[0], inputs, name, group)
    qzeros = taken(tensors, f"{name}.qzeros", (torch.int32,), (scales.shape[0], qweight.shape[1]))
    codes = GroupCodes(4, unpacked(qweight).T, scales.T.float(), unpacked(qzeros).T)
    return layer_of(codes, scales.dtype, f"Layer {name!r}")

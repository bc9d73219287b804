"""GPTQ files, version 1 and 2, as AutoGPTQ and GPTQModel write and read them.

Per linear of shape [N, K] with G groups: `qweight` int32 [K b / 32, N], input channels packed from the lowest
bits; `qzeros` int32 [G, N b / 32], outputs packed likewise; `scales` fp16 [G, N]; `g_idx` int32 [K], the
group of each input channel. Version 1 (`checkpoint_format` "gptq") stores zero - 1 and so has no zero point
0: readers add 1 to each field of a word, and from the highest code 1 would be carried into the next field.
Version 2 ("gptq_v2") stores the zero point. GPTQModel says the version as `format` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nc.errors import ArtefactCorruptError, UnsupportedError
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
    ordered_groups,
    refuse,
    size_of_groups,
    stored_scale,
    taken,
    words,
)
from nc.process.warn import warn

NAME = "GPTQ"
BITS = (2, 4, 8)
GROUPS = (16, 32, 64, 128, 256, 512, 1024)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Where files say their version.
_VERSION = ("checkpoint_format", "format")
#: Settings that are read, or say how the codes were found, or how other tools run them.
_KNOWN = """
    quant_method method bits group_size desc_act sym lm_head dynamic pack_dtype checkpoint_format format meta
    true_sequential static_groups damp_percent damp_auto_increment act_group_aware mse hyb_act v2 v2_alpha
    gptaq foem failsafe fallback smoother mock_quantization device offload_to_disk offload_to_disk_path
    compute_device_filter auto_forward_data_parallelism vram_strategy gc_mode wait_for_submodule_finalizers
    model_name_or_path model_file_base_name base_model_name_or_path quantizer version
    tokenizer dataset backend use_cuda_fp16 model_seqlen block_name_to_quantize use_exllama disable_exllama
    module_name_preceding_first_block batch_size pad_token_id max_input_length exllama_config
    hessian_chunk_size cache_block_outputs modules_in_block_to_quantize modules_to_not_convert
"""


def write(
    layers: Mapping[str, StoredLayer], floats: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and `quantization_config` of a file.

    Args:
        layers: low-bit linears by name.
        floats: names of the linears that stay as they are.

    Raises:
        UnsupportedError: the format cannot hold a layer; says which and why.
    """
    found = {name: codes_of(layer, name, NAME) for name, layer in layers.items()}
    first = one_format(found, NAME)
    for name, codes in found.items():
        _check(name, layers[name], codes)
    version_1 = all(codes.zero is None or bool((codes.zero >= 1).all()) for codes in found.values())
    if not version_1:
        name = next(
            name for name, codes in found.items() if codes.zero is not None and bool((codes.zero == 0).any())
        )
        msg = (
            f"Layer {name!r} has groups whose zero point is 0, which version 1 of GPTQ files cannot hold: "
            "this is version 2 (gptq_v2)."
        )
        warn(msg)
    tensors = {
        f"{name}.{part}": t
        for name, codes in found.items()
        for part, t in _tensors(name, codes, version_1).items()
    }
    config = {
        "quant_method": "gptq",
        "bits": first.bits,
        "group_size": size_of_groups(found),
        "desc_act": False,
        "sym": all(codes.zero is None for codes in found.values()),
        "lm_head": "lm_head" in found,
        "checkpoint_format": "gptq" if version_1 else "gptq_v2",
        "pack_dtype": "int32",
        "true_sequential": True,
        "dynamic": {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in floats if name != "lm_head"}
        or None,
    }
    return tensors, config


def _check(name: str, layer: StoredLayer, codes: GroupCodes) -> None:
    if codes.bits not in BITS:
        refuse(
            name,
            NAME,
            f"{codes.bits} bits are packed in different ways by its readers",
            f"Quantize with one of {BITS} bits",
        )
    check_of_words(name, NAME, layer, codes, max(32 // codes.bits, 8), GROUPS)


def _tensors(name: str, codes: GroupCodes, version_1: bool) -> dict[str, torch.Tensor]:
    zeros = codes.zeros - 1 if version_1 else codes.zeros
    return {
        "qweight": words(codes.codes, codes.bits).T.contiguous(),
        "qzeros": words(zeros.T, codes.bits),
        "scales": stored_scale(codes.scale, (torch.float16,), name, NAME).T.contiguous(),
        "g_idx": torch.arange(codes.codes.shape[1], dtype=torch.int32) // codes.group,
    }


def read(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """Return the low-bit linears of a file; their tensors are taken out of `tensors`.

    Bits and groups of a layer are read from the sizes of its tensors where `g_idx` tells the number of input
    channels.

    Raises:
        UnsupportedError: other bits, or groups whose channels are not neighbours.
        ArtefactCorruptError: a tensor is missing or contradicts the others.
    """
    check_settings(config, _KNOWN.split(), "quantization_config")
    said = [str(config[key]) for key in _VERSION if config.get(key)] or ["gptq"]
    if not {*said} <= {"gptq", "gptq_v2"} or len({*said}) > 1:
        msg = (
            f"GPTQ files of {' or '.join(_VERSION)} {' and '.join(map(repr, said))} are not read; nc reads "
            "'gptq' and 'gptq_v2'."
        )
        raise UnsupportedError(msg)
    version_1 = said[0] == "gptq"
    names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    return {name: _layer(tensors, name, config, version_1) for name in names}


def _layer(
    tensors: dict[str, torch.Tensor], name: str, config: Mapping[str, Any], version_1: bool
) -> StoredLayer:
    qweight = taken(tensors, f"{name}.qweight", (torch.int32,), (None, None))
    g_idx = (
        taken(tensors, f"{name}.g_idx", (torch.int32, torch.int64), (None,))
        if f"{name}.g_idx" in tensors
        else None
    )
    width = (
        config.get("bits") if g_idx is None or not g_idx.numel() else qweight.shape[0] * 32 // g_idx.numel()
    )
    if width not in BITS:
        msg = f"Layer {name!r}: GPTQ with {width} bits is not read; nc reads {BITS} bits."
        raise UnsupportedError(msg)
    inputs, outputs = qweight.shape[0] * 32 // width, qweight.shape[1]
    if g_idx is not None and g_idx.numel() not in (0, inputs):
        msg = (
            f"Layer {name!r}: g_idx has {g_idx.numel()} entries for {inputs} input channels. The files "
            "contradict themselves."
        )
        raise ArtefactCorruptError(msg)
    scales = taken(tensors, f"{name}.scales", _FLOATS, (None, outputs))
    count = scales.shape[0]
    groups_in(count, inputs, name)
    qzeros = taken(tensors, f"{name}.qzeros", (torch.int32,), (count, -(-outputs * width // 32)))
    zeros = codes_in(qzeros, width, outputs)
    if version_1:
        if bool((zeros == 2**width - 1).any()):
            msg = (
                f"Layer {name!r}: a zero point of 0 in a GPTQ file of version 1, which cannot hold it. It is "
                "read as 0, but the writer may have damaged its neighbours; compare the results with those "
                "of the float model."
            )
            warn(msg)
        zeros = (zeros + 1) & (2**width - 1)
    scale, zero = scales.T.float(), zeros.T
    if g_idx is not None and g_idx.numel():
        order = ordered_groups(g_idx, count, name)
        scale, zero = scale[:, order], zero[:, order]
    return layer_of(
        GroupCodes(width, codes_in(qweight.T, width, inputs), scale, zero), scales.dtype, f"Layer {name!r}"
    )

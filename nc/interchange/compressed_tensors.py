"""compressed-tensors files, as llm-compressor writes them and vLLM and transformers read them.

They are "pack-quantized" and "int-quantized".

Per linear of shape [N, K] with G groups:

* pack-quantized: `weight_packed` int32 [N, ceil(K b / 32)], codes from the lowest bits; `weight_scale` [N, G]
  in the dtype of the scales; `weight_zero_point` int32 [ceil(N b / 32), G], packed along N, where the weight
  is asymmetric; `weight_shape` int64 [2].
* int-quantized: `weight` int8 [N, K], `weight_scale` [N, G], `weight_zero_point` int8 [N, G]; codes are
  signed.

A `config_groups` entry says which modules have which bits and groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from nc.errors import ArtefactCorruptError, UnsupportedError
from nc.interchange.layer import (
    GroupCodes,
    StoredLayer,
    check_settings,
    codes_in,
    codes_of,
    groups_in,
    layer_of,
    ordered_groups,
    refuse,
    stored_scale,
    taken,
    words,
)

NAME = "compressed-tensors"
BITS = (2, 4, 8)
PACKED, INTEGERS, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Settings that are read, or change no result: of a file, of a scheme, of its weights or activations.
_KNOWN = (
    "quant_method",
    "format",
    "quantization_status",
    "config_groups",
    "ignore",
    "global_compression_ratio",
    "version",
    "compressed-tensors_version",
    "provider",
)
_OF_SCHEME = ("targets", "weights", "input_activations", "format")
_OF_NUMBERS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "dynamic",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)
_FORMATS = (PACKED, INTEGERS, MIXED, "naive-quantized")
_STRATEGIES = (None, "tensor", "channel", "group")
_DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def write(
    layers: Mapping[str, StoredLayer], floats: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and `quantization_config` of a file; arguments and errors as for `gptq.write`.

    Layers of 8 bits whose activations are int8 are int-quantized, all others pack-quantized. Negative scales
    stay, as AutoRound writes them too.
    """
    tensors: dict[str, torch.Tensor] = {}
    schemes: list[dict[str, Any]] = []
    for name, layer in layers.items():
        # vLLM has kernels on CPUs for symmetric weights alone, and turned ones are not
        codes = codes_of(layer, name, NAME, positive=False)
        if codes.bits not in BITS:
            reason = f"its versions pack {codes.bits} bits in different ways"
            refuse(name, NAME, reason, f"Quantize with one of {BITS} bits")
        if layer.act_dtype == "int8_block32":
            refuse(
                name,
                NAME,
                "it has no activations in int8 blocks, as this layer's are",
                'Quantize with act_dtype="int8"',
            )
        scheme = _scheme(layer, codes)
        alike = next(
            (known for known in schemes if {**known, "targets": 0} == {**scheme, "targets": 0}), None
        )
        if alike is None:
            schemes.append(alike := scheme)
        alike["targets"].append(name)
        scale = layer.weight.scale
        storage = scale.dtype if scale.dtype in _FLOATS else torch.float32
        parts = _packed(codes) if scheme["format"] == PACKED else _integers(codes)
        parts["weight_scale"] = stored_scale(codes.scale, (storage,), name, NAME).contiguous()
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    if not schemes:
        msg = f"There is no low-bit linear that {NAME} could hold."
        raise UnsupportedError(msg)
    formats = {scheme["format"] for scheme in schemes}
    if len(schemes) == 1:
        schemes[0]["targets"] = ["Linear"]
    config = {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": scheme for i, scheme in enumerate(schemes)},
        "ignore": list(floats),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return tensors, config


def _scheme(layer: StoredLayer, codes: GroupCodes) -> dict[str, Any]:
    row = codes.scale.shape[1] == 1
    weights = {
        "num_bits": codes.bits,
        "type": "int",
        "symmetric": codes.zero is None,
        "strategy": "channel" if row else "group",
        "group_size": None if row else codes.group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    int8 = layer.act_dtype == "int8"
    return {
        "targets": [],
        "weights": weights,
        "input_activations": dict(_DYNAMIC_INT8) if int8 else None,
        "output_activations": None,
        "format": INTEGERS if int8 and codes.bits == 8 else PACKED,
    }


def _packed(codes: GroupCodes) -> dict[str, torch.Tensor]:
    parts = {
        "weight_packed": words(codes.codes, codes.bits),
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }
    if codes.zero is not None:
        parts["weight_zero_point"] = words(codes.zero.T, codes.bits).T.contiguous()
    return parts


def _integers(codes: GroupCodes) -> dict[str, torch.Tensor]:
    parts = {"weight": (codes.codes ^ 128).view(torch.int8)}
    if codes.zero is not None:
        parts["weight_zero_point"] = (codes.zero ^ 128).view(torch.int8)
    return parts


def read(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """Return the low-bit linears of a file; errors as for `gptq.read`."""
    check_settings(config, _KNOWN, "quantization_config")
    names = [key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")]
    integers = [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]
    integers = [name for name in integers if name not in names]
    found = {}
    for name in [*names, *integers]:
        scheme = _scheme_of(name, config)
        weights, inputs = scheme["weights"], scheme.get("input_activations")
        check_settings(scheme, _OF_SCHEME, f"Layer {name!r}: its entry of config_groups")
        formats = [each["format"] for each in (config, scheme) if each.get("format")]
        _check_known(name, weights, inputs, formats)
        read_one = _read_packed if name in names else _read_integers
        codes, storage = read_one(tensors, name, int(weights["num_bits"]))
        found[name] = layer_of(codes, storage, f"Layer {name!r}", "fp32" if inputs is None else "int8")
    return found


def _check_known(
    name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, formats: Collection[str]
) -> None:
    """Raise UnsupportedError for formats of a layer's weights and activations that are not read."""
    check_settings(weights, _OF_NUMBERS, f"Layer {name!r}: weights")
    if unknown := sorted(set(formats) - set(_FORMATS)):
        msg = f"Layer {name!r}: files of format {unknown[0]!r} are not read; nc reads {', '.join(_FORMATS)}."
        raise UnsupportedError(msg)
    is_integer = weights.get("type", "int") == "int" and weights.get("num_bits") in BITS
    if not is_integer or weights.get("dynamic") or weights.get("strategy") not in _STRATEGIES:
        what = f"integers of {BITS} bits in groups, channels or tensors"
        msg = f"Layer {name!r}: weights {weights} are not read; nc reads {what}."
        raise UnsupportedError(msg)
    if inputs is None:
        return
    known = [each for each in _OF_NUMBERS if each != "group_size"]
    check_settings(inputs, known, f"Layer {name!r}: activations")
    # what is not said is what compressed-tensors takes
    said = {"type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False, **inputs}
    if any(said.get(key) != value for key, value in _DYNAMIC_INT8.items()):
        msg = (
            f"Layer {name!r}: activations {dict(inputs)} are not read; nc reads float ones, and symmetric "
            'int8 with a dynamic scale for each token (strategy "token").'
        )
        raise UnsupportedError(msg)


def _scheme_of(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of `config_groups` of a module.

    One that has its name has priority over one that has its class.
    """
    groups = list(config.get("config_groups", {}).values())
    for scheme in groups:
        for target in scheme.get("targets", []):
            if target == name or (target.startswith("re:") and re.match(target[3:], name)):
                return dict(scheme)
    for scheme in groups:
        if "Linear" in scheme.get("targets", []) and scheme.get("weights"):
            return dict(scheme)
    msg = f"Layer {name!r} has packed weights, but no entry of config_groups in config.json is for it."
    raise ArtefactCorruptError(msg)


def _scales(tensors: dict[str, torch.Tensor], name: str, outputs: int, inputs: int) -> torch.Tensor:
    stored = tensors.get(f"{name}.weight_scale")
    if stored is not None and stored.numel() == 1 and stored.dtype in _FLOATS:  # one for the whole tensor
        del tensors[f"{name}.weight_scale"]
        return stored.reshape(1, 1).expand(outputs, 1)
    found = taken(tensors, f"{name}.weight_scale", _FLOATS, (outputs, None))
    groups_in(found.shape[1], inputs, name)
    return found


def _ordered(tensors: dict[str, torch.Tensor], name: str, inputs: int, codes: GroupCodes) -> GroupCodes:
    if f"{name}.weight_g_idx" not in tensors:
        return codes
    g_idx = taken(tensors, f"{name}.weight_g_idx", (torch.int32, torch.int64), (inputs,))
    if bool((g_idx == -1).all()):  # a placeholder
        return codes
    order = ordered_groups(g_idx, codes.scale.shape[1], name)
    return GroupCodes(
        codes.bits, codes.codes, codes.scale[:, order], None if codes.zero is None else codes.zero[:, order]
    )


def _read_packed(tensors: dict[str, torch.Tensor], name: str, width: int) -> tuple[GroupCodes, torch.dtype]:
    shape = taken(tensors, f"{name}.weight_shape", (torch.int64, torch.int32), (2,))
    outputs, inputs = (int(length) for length in shape)
    packed = taken(tensors, f"{name}.weight_packed", (torch.int32,), (outputs, -(-inputs * width // 32)))
    scale = _scales(tensors, name, outputs, inputs)
    zero = None
    if f"{name}.weight_zero_point" in tensors:
        stored = taken(
            tensors, f"{name}.weight_zero_point", (torch.int32,), (-(-outputs * width // 32), scale.shape[1])
        )
        zero = codes_in(stored.T, width, outputs).T
    return _ordered(
        tensors, name, inputs, GroupCodes(width, codes_in(packed, width, inputs), scale.float(), zero)
    ), scale.dtype


def _read_integers(tensors: dict[str, torch.Tensor], name: str, width: int) -> tuple[GroupCodes, torch.dtype]:
    weight = taken(tensors, f"{name}.weight", (torch.int8,), (None, None))
    middle = 2 ** (width - 1)
    if bool((weight < -middle).any()) or bool((weight > middle - 1).any()):
        msg = f"Layer {name!r}: codes that {width} bits cannot hold. The files contradict themselves."
        raise ArtefactCorruptError(msg)
    outputs, inputs = weight.shape
    scale = _scales(tensors, name, outputs, inputs)
    zero = None
    if f"{name}.weight_zero_point" in tensors:
        stored = taken(tensors, f"{name}.weight_zero_point", (torch.int8,), (outputs, scale.shape[1]))
        zero = (stored.to(torch.int16) + middle).to(torch.uint8)
    codes = (weight.to(torch.int16) + middle).to(torch.uint8)
    return _ordered(tensors, name, inputs, GroupCodes(width, codes, scale.float(), zero)), scale.dtype

"""Quark's files for transformers ("quark" mode), with weights of 4 and 8 bits per group.

Per linear of shape [N, K] with G groups: `weight_scale` [G, N]; 4 bits: `weight` int32 [K, N / 8] and
`weight_zero_point` int32 [G, N / 8], nibbles in AWQ's order (`pack_method` "reorder") or from the lowest bits
("order"); 8 bits: int8 or uint8, [K, N] and [G, N]. int4 and int8 are two's complement and symmetric; uint4
and uint8 have zero points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nc.errors import UnsupportedError
from nc.interchange import awq
from nc.interchange.layer import (
    INT8,
    GroupCodes,
    StoredLayer,
    check_settings,
    codes_of,
    groups_in,
    layer_of,
    one_format,
    refuse,
    size_of_groups,
    stored_scale,
    taken,
)

NAME = "Quark"
BITS = (4, 8)
ORDERS = {"reorder": awq.ORDER, "order": tuple(range(8))}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Settings that are read, or change no result: of a file, of its export, of its weights.
_KNOWN = (
    "quant_method",
    "quant_mode",
    "global_quant_config",
    "exclude",
    "algo_config",
    "export",
    "version",
    "log_severity_level",
)
_OF_EXPORT = ("weight_format", "pack_method", "min_kv_scale", "weight_merge_groups")
_OF_WEIGHTS = (
    "dtype",
    "qscheme",
    "ch_axis",
    "group_size",
    "symmetric",
    "round_method",
    "scale_type",
    "scale_format",
    "scale_calculation_mode",
    "observer_cls",
    "zero_point_type",
)
#: Algorithms after which linears compute as ever.
_ALGORITHMS = ("awq", "gptq", "gptaq", "autosmoothquant", "smooth", "smoothquant")


def write(
    layers: Mapping[str, StoredLayer], floats: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and `quantization_config` of a file; arguments and errors as for `gptq.write`."""
    found = {name: codes_of(layer, name, NAME) for name, layer in layers.items()}
    first = one_format(found, NAME)
    group = size_of_groups(found)
    symmetric = all(codes.zero is None for codes in found.values())
    tensors = {}
    for name, codes in found.items():
        _check(name, layers[name], codes, group)
        scale = layers[name].weight.scale
        storage = scale.dtype if scale.dtype in _FLOATS else torch.float32
        tensors[f"{name}.weight"] = _stored(codes.codes, codes.bits, symmetric)
        tensors[f"{name}.weight_zero_point"] = _stored(codes.zeros, codes.bits, symmetric)
        tensors[f"{name}.weight_scale"] = stored_scale(codes.scale, (storage,), name, NAME).T.contiguous()
    return tensors, _config(f"{'' if symmetric else 'u'}int{first.bits}", group, symmetric, floats)


def _check(name: str, layer: StoredLayer, codes: GroupCodes, group: int) -> None:
    if codes.bits not in BITS:
        refuse(
            name,
            NAME,
            f"nc writes {BITS} bits, and the weight has {codes.bits}",
            f"Quantize with one of {BITS} bits",
        )
    if codes.bits == 4 and codes.codes.shape[0] % 8:
        refuse(
            name,
            NAME,
            f"N = {codes.codes.shape[0]} outputs are not a multiple of 8",
            "Leave this layer out (exclude)",
        )
    if group == -1:
        refuse(
            name, NAME, "its rows are one group each and of different lengths", "Quantize with a group_size"
        )
    if layer.act_dtype in INT8:
        refuse(
            name,
            NAME,
            "nc writes weights only, and this layer's activations are int8",
            'Use format="compressed-tensors"',
        )


def _stored(codes: torch.Tensor, width: int, symmetric: bool) -> torch.Tensor:
    """Codes or zero points, [N, n] → as they are stored. Signed ones differ in the highest bit."""
    turned = (codes ^ 2 ** (width - 1) if symmetric else codes).T
    if width == 4:
        return awq.packed(turned)
    return turned.contiguous().view(torch.int8) if symmetric else turned.contiguous()


def _config(dtype: str, group: int, symmetric: bool, floats: Sequence[str]) -> dict[str, Any]:
    weight = {
        "dtype": dtype,
        "is_dynamic": False,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": group,
        "symmetric": symmetric,
        "round_method": "half_even",
        "scale_type": "float",
        "observer_cls": "PerGroupMinMaxObserver",
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": None,
            "output_tensors": None,
            "bias": None,
            "target_device": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": list(floats),
        "algo_config": None,
        "export": {
            "weight_format": "real_quantized",
            "pack_method": "reorder",
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "weight_merge_groups": None,
        },
    }


def read(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """Return the low-bit linears of a file; errors as for `gptq.read`."""
    schemes = config.get("global_quant_config") or {}
    weight, export = dict(schemes.get("weight") or {}), dict(config.get("export") or {})
    check_settings(config, (*_KNOWN, "layer_quant_config", "layer_type_quant_config"), "quantization_config")
    check_settings(export, _OF_EXPORT, "export")
    check_settings(weight, _OF_WEIGHTS, "weight of global_quant_config")
    algorithms = config.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = str(algorithm.get("name", algorithm)).lower()
        check_settings({name: algorithm}, _ALGORITHMS, "algo_config")
    order = ORDERS.get(str(export.get("pack_method", "reorder")))
    if order is None or not (_is_known(weight) and _is_uniform(config, export)):
        msg = (
            f"These Quark files are not read: {weight}, {export}. nc reads real quantized int4, uint4, int8 "
            "and uint8 weights per group along the input channels, one format for all layers."
        )
        raise UnsupportedError(msg)
    check_settings(schemes, ("weight", "target_device"), "global_quant_config")  # e.g. input_tensors, bias
    names = [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]
    return {name: _layer(tensors, name, weight, order) for name in names}


def _is_known(weight: Mapping[str, Any]) -> bool:
    """Return whether weights have a format that is read."""
    is_integer = str(weight.get("dtype")) in ("int4", "uint4", "int8", "uint8")
    return is_integer and weight.get("qscheme") == "per_group" and weight.get("ch_axis", -1) in (1, -1)


def _is_uniform(config: Mapping[str, Any], export: Mapping[str, Any]) -> bool:
    """Return whether the files hold codes, and have one format for all layers."""
    is_real = export.get("weight_format") == "real_quantized"
    return is_real and not config.get("layer_quant_config") and not config.get("layer_type_quant_config")


def _layer(
    tensors: dict[str, torch.Tensor], name: str, spec: Mapping[str, Any], order: Sequence[int]
) -> StoredLayer:
    kind = str(spec["dtype"])
    width, signed = int(kind[-1]), kind.startswith("int")
    storage = torch.int32 if width == 4 else torch.int8 if signed else torch.uint8
    weight = taken(tensors, f"{name}.weight", (storage,), (None, None))
    inputs, outputs = weight.shape[0], weight.shape[1] * (8 if width == 4 else 1)
    scale = taken(tensors, f"{name}.weight_scale", _FLOATS, (None, outputs))
    groups_in(scale.shape[0], inputs, name, int(spec["group_size"]))
    zero = None
    if f"{name}.weight_zero_point" in tensors:
        stored = taken(tensors, f"{name}.weight_zero_point", (storage,), (scale.shape[0], weight.shape[1]))
        zero = _codes(stored, width, signed, order)
    codes = GroupCodes(width, _codes(weight, width, signed, order), scale.T.float(), zero)
    return layer_of(codes, scale.dtype, f"Layer {name!r}")


def _codes(stored: torch.Tensor, width: int, signed: bool, order: Sequence[int]) -> torch.Tensor:
    """Return the inverse of `_stored`."""
    codes = (awq.unpacked(stored, order) if width == 4 else stored.view(torch.uint8)).T
    return codes ^ 2 ** (width - 1) if signed else codes

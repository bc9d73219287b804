"""model.json of schema 1 → schema 2: quantize and dequantize nodes became operators that say the dtype of codes; `noise_db` was renamed."""

from __future__ import annotations

from typing import Any

_UINT8, _INT8 = {"dtype": "uint8"}, {"dtype": "int8"}


def upgrade(document: dict[str, Any]) -> dict[str, Any]:
    """The same model in schema 2; KeyError, TypeError or ValueError where it is not what nc wrote."""
    nodes = {entry["name"]: entry for entry in document["nodes"]}
    renamed = {"sqnr_vs_fp32_db": document["noise_db"]}
    rest = {key: value for key, value in document.items() if key != "noise_db"}
    return {**rest, **renamed, "nodes": [_upgraded(entry, nodes) for entry in document["nodes"]]}


def _upgraded(entry: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    prefix, _, name = entry["target"].partition("qdq.")
    if entry["op"] != "call_function" or prefix or not name:
        return entry
    args = list(entry.get("args", []))
    match name:
        case "quantize_per_tensor":
            args.append(_dtype(args[3]))
        case "dequantize_per_tensor":
            source = nodes[args[0]["node"]]
            args.append(_INT8 if source["op"] == "get_attr" else _dtype(source["args"][3]))
        case "dequantize_per_channel":
            args = [*args[:2], None, *args[2:], _INT8]
        case "quantize_dequantize_dynamic":
            args.append(_dtype(args[2]))
        case "lstm_dynamic" | "gru_dynamic":
            args.append(_dtype(args[7]))
    return {**entry, "target": f"nc.{name}.default", "args": args}


def _dtype(quant_min: int) -> dict[str, str]:
    """In schema 1 the lowest code says which dtype codes have."""
    return _UINT8 if quant_min >= 0 else _INT8

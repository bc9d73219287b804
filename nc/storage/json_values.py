"""Plain values ↔ JSON: arguments of operators, constants of a call, keys of outputs.

Numbers, strings, None and lists are themselves; everything else is an object with one key that says what it
is: {"node": "linear_1"}, {"tuple": [...]}, {"float": "-inf"}, {"complex": [re, im]}, {"dtype": "float32"},
{"device": "cpu"}, {"layout": "strided"}, {"memory_format": "channels_last"}, {"slice": [start, stop, step]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from nc.errors import ArtefactError, InputError
from nc.text.plain import shown

#: JSON as the standard library reads it.
Json = None | bool | int | float | str | list[Any] | dict[str, Any]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}
_FORMATS: dict[str, torch.memory_format] = {
    "contiguous": torch.contiguous_format,
    "preserve": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_LAYOUTS: dict[str, torch.layout] = {"strided": torch.strided}
_FLOATS = {str(value): value for value in (math.inf, -math.inf, math.nan)}
_NO_NODES: Mapping[str, fx.Node] = {}


def encode(value: object, where: str) -> Json:
    """Return a value as JSON.

    Args:
        value: see the module text.
        where: what it belongs to, for the message.

    Raises:
        ArtefactError: JSON has no form for it here.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [encode(value.real, where), encode(value.imag, where)]}
        case fx.Node():
            return {"node": value.name}
        case tuple():
            return {"tuple": [encode(v, where) for v in value]}
        case list():
            return [encode(v, where) for v in value]
        case slice():
            return {"slice": [encode(v, where) for v in (value.start, value.stop, value.step)]}
        case torch.device() if value.type == "cpu":
            return {"device": "cpu"}
    for tag, table in (("dtype", DTYPES), ("layout", _LAYOUTS), ("memory_format", _FORMATS)):
        for name, known in table.items():
            if value is known:
                return {tag: name}
    raise ArtefactError(_unstorable(value, where))


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the name that `DTYPES` has for a dtype; ArtefactError where it has none."""
    for name, known in DTYPES.items():
        if dtype is known:
            return name
    raise ArtefactError(_unstorable(dtype, where))


def _unstorable(value: object, where: str) -> str:
    return (
        f"{where} holds {value!r} ({type(value).__name__}), which an artefact can't store; use numbers, "
        "strings or tensors."
    )


def decode(data: Json, nodes: Mapping[str, fx.Node] = _NO_NODES) -> Any:
    """Return the inverse of `encode`.

    Args:
        data: parsed JSON.
        nodes: nodes that may be referred to, by name.

    Raises:
        ValueError, KeyError, TypeError: it is not what `encode` writes.
    """
    if isinstance(data, list):
        return [decode(v, nodes) for v in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    match tag:
        case "node":
            return nodes[content]
        case "tuple":
            return tuple(decode(v, nodes) for v in content)
        case "slice":
            return slice(*(decode(v, nodes) for v in content))
        case "float":
            return _FLOATS[content]
        case "complex":
            real, imaginary = (float(decode(v)) for v in content)
            return complex(real, imaginary)
        case "device":
            return {"cpu": torch.device("cpu")}[content]
        case "dtype":
            return DTYPES[content]
        case "layout":
            return _LAYOUTS[content]
        case "memory_format":
            return _FORMATS[content]
    msg = f"unknown kind of value {tag!r}"
    raise ValueError(msg)


def check_letters(document: Json, names: Iterable[str]) -> None:
    """Refuse half a surrogate pair in a document or in names of tensors, before a file is begun.

    Raises:
        InputError: no reader of JSON or safetensors takes it.
    """
    try:
        json.dumps([document, list(names)], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        begin = error.object.rfind('"', 0, error.start) + 1
        name = error.object[begin : error.object.find('"', error.start)]
        msg = (
            f"The name {shown(name)} holds half a surrogate pair, which files can't: give modules, arguments "
            "and keys names of whole letters."
        )
        raise InputError(msg) from error

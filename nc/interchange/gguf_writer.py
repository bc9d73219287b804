"""GGUF files: writing. The layout is described in `nc.interchange.gguf`."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nc.errors import UnsupportedError
from nc.interchange.gguf import ALIGNMENT, ARRAY, FLOATS, GROUP, MAGIC, SCALARS, STRING, TYPES, Bytes
from nc.numerics.packed_weight import PackedWeight
from nc.storage import marks
from nc.storage.atomic import replaced


def type_of(weight: PackedWeight, where: str) -> str:
    """Return the name of the type that stores a weight exactly.

    Args:
        weight: any.
        where: of the weight, for the message.

    Raises:
        UnsupportedError: no type does; says why and what to ask for instead.
    """
    form = weight.form
    group = form.group(weight.shape[1])
    for name, found in TYPES.items():
        if found.form is not None and (form.bits, form.symmetric, form.float_zero) == (
            found.form.bits,
            found.form.symmetric,
            found.form.float_zero,
        ):
            if (
                group == GROUP
                and form.scale_dtype == "fp16"
                and form.double_quant is None
                and form.dtype.kind == "integer"
            ):
                return name
            break
    msg = (
        f"{where}: GGUF cannot hold {form}. It has blocks of {GROUP} with fp16 scales: int4 symmetric "
        "(Q4_0), uint4 with float zeros "
        '(Q4_1) or int8 symmetric (Q8_0). Quantize with group_size=32, scale_dtype="fp16".'
    )
    raise UnsupportedError(msg)


def encode(weight: PackedWeight, where: str = "the weight") -> tuple[str, Bytes]:
    """Return the name of a weight's GGUF type, and the bytes of its tensor.

    Args:
        weight: the weight.
        where: name of the weight, for the message.

    Raises:
        UnsupportedError: no type stores the weight exactly, see `type_of`.
    """
    name = type_of(weight, where)
    codes = weight.unpacked().reshape(-1, GROUP)
    stored = codes[:, :16] | codes[:, 16:] << 4 if weight.form.bits == 4 else codes ^ 128
    heads = [
        np.frombuffer(part.numpy().tobytes(), np.uint8).reshape(-1, 2)
        for part in (weight.scale, weight.minimum)
        if part is not None
    ]
    return name, np.concatenate([*heads, stored.numpy()], 1).reshape(-1)


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PackedWeight | torch.Tensor],
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write a GGUF file of version 3.

    Args:
        path: the file; created with its parents, replaced as a whole.
        tensors: packed weights, and float tensors (fp32, fp16, bf16).
        values: key/values: str, bool, int, float, and lists of one of them. Integers are stored in 32 bits
            where they fit.

    Raises:
        UnsupportedError: a weight, tensor or value that GGUF cannot hold; the message names it.
        ArtefactError: a file is there that is not from an earlier export, or it cannot be written.
    """
    kept = {"general.quantized_by": marks.MARK, "general.alignment": ALIGNMENT}
    kept |= {"general.quantization_version": 2, **(values or {})}
    bodies = {name: _body(tensor, name) for name, tensor in tensors.items()}
    head = [MAGIC, struct.pack("<IQQ", 3, len(bodies), len(kept))]
    for key, value in kept.items():
        kind = _kind(value, key)
        head += [_text(key), struct.pack("<I", kind), _value(value, kind, key)]
    offset = 0
    for name, (kind_name, shape, body) in bodies.items():
        lengths = shape[::-1]
        head += [
            _text(name),
            struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths),
            struct.pack("<IQ", TYPES[kind_name].code, offset),
        ]
        offset += len(body) + -len(body) % ALIGNMENT
    start = b"".join(head)
    with replaced(path, marks.program) as staged, staged.open("wb") as file:
        file.write(start + bytes(-len(start) % ALIGNMENT))
        for _, _, body in bodies.values():
            body.tofile(file)
            file.write(bytes(-len(body) % ALIGNMENT))


def _body(tensor: PackedWeight | torch.Tensor, name: str) -> tuple[str, tuple[int, ...], Bytes]:
    if isinstance(tensor, PackedWeight):
        kind, body = encode(tensor, f"Tensor {name!r}")
        return kind, tensor.shape, body
    for kind, stored in FLOATS.items():
        if tensor.dtype == stored and 1 <= tensor.dim() <= 4:
            return (
                kind,
                tuple(tensor.shape),
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
            )
    msg = (
        f"Tensor {name!r}: GGUF cannot hold {tensor.dtype} of {tensor.dim()} dimensions; it takes 1 to 4 of "
        f"{', '.join(FLOATS)}."
    )
    raise UnsupportedError(msg)


def _kind(value: Any, key: str) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 2**32 else 11 if -(2**63) <= value < 2**63 else 10
    if isinstance(value, (float, str, list, tuple)):
        return 6 if isinstance(value, float) else STRING if isinstance(value, str) else ARRAY
    msg = f"Key {key!r}: GGUF cannot hold a {type(value).__name__}."
    raise UnsupportedError(msg)


def _text(text: str) -> bytes:
    found = text.encode("utf-8")
    return struct.pack("<Q", len(found)) + found


def _value(value: Any, kind: int, key: str) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack(f"<{SCALARS[kind]}", value)
    kinds = {_kind(item, key) for item in value}
    if len(kinds) > 1 or ARRAY in kinds:
        msg = f"Key {key!r}: GGUF holds lists of values of one type."
        raise UnsupportedError(msg)
    item_kind = kinds.pop() if kinds else 4
    return struct.pack("<IQ", item_kind, len(value)) + b"".join(
        _value(item, item_kind, key) for item in value
    )

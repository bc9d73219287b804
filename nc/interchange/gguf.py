"""GGUF files, as llama.cpp and its relatives write them, read tensor by tensor.

The layout is that of the GGUF specification, version 3 (ggml, docs/gguf.md), little-endian: a header,
key/values, descriptions of tensors, and the data of the tensors at multiples of the alignment. Nothing is
executed and nothing is allocated by a count that the file could not hold. Blocks of 32 elements are stored as

* Q4_0: fp16 d, 16 bytes: `(code - 8) * d`
* Q4_1: fp16 d, fp16 m, 16 bytes: `code * d + m`
* Q8_0: fp16 d, 32 int8: `value * d`

where byte i of a 4-bit block has element i in its low half and element i + 16 in its high half.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from nc.errors import (
    ArtefactCorruptError,
    ArtefactError,
    ArtefactMissingError,
    ArtefactSchemaError,
    UnsupportedError,
)
from nc.formats import dtype
from nc.formats.tensor_format import TensorFormat, low_bit
from nc.numerics import bits
from nc.numerics.packed_weight import PackedWeight

Bytes = npt.NDArray[np.uint8]

MAGIC = b"GGUF"
ALIGNMENT = 32
GROUP = 32
#: Types of values → struct's letter.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _Type:
    """How tensors of one type are stored.

    Attributes:
        code: its number in the file.
        elements: of one block.
        size: bytes of one block.
        form: of the packed weight; None for floats.
    """

    code: int
    elements: int
    size: int
    form: TensorFormat | None = None


TYPES = {
    "F32": _Type(0, 1, 4),
    "F16": _Type(1, 1, 2),
    "BF16": _Type(30, 1, 2),
    "Q4_0": _Type(2, GROUP, 18, low_bit(dtype=dtype("int4"), group_size=GROUP, scale_dtype="fp16")),
    "Q4_1": _Type(
        3,
        GROUP,
        20,
        low_bit(dtype=dtype("uint4"), group_size=GROUP, symmetric=False, float_zero=True, scale_dtype="fp16"),
    ),
    "Q8_0": _Type(8, GROUP, 34, low_bit(dtype=dtype("int8"), group_size=GROUP, scale_dtype="fp16")),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {found.code: name for name, found in TYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is.

    Attributes:
        type: a key of `TYPES`, or "type 12" for one that is not read here.
        shape: as torch has it: the last dimension is contiguous.
        start: first byte in the file.
    """

    type: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file. Tensors are read when they are asked for.

    Attributes:
        path: of the file.
        values: key/values: numbers, strings, booleans and lists of them.
        tensors: by name.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _data: Bytes = field(repr=False)

    def packed(self, name: str) -> PackedWeight:
        """Return a quantized matrix as it is stored, shape [N, K].

        Raises:
            ArtefactError: there is no such tensor.
            UnsupportedError: its type is not Q4_0, Q4_1 or Q8_0, or it is not a matrix.
            ArtefactCorruptError: a scale or minimum is not finite.
        """
        info = self._info(name)
        form = TYPES[info.type].form
        if form is None or len(info.shape) != 2:
            msg = (
                f"Tensor {name!r} of {str(self.path)!r} is not a quantized matrix: {info.type} "
                f"{list(info.shape)}. Read it with `float`."
            )
            raise UnsupportedError(msg)
        return _packed(
            self._raw(name),
            info.type,
            (info.shape[0], info.shape[1]),
            f"Tensor {name!r} of {str(self.path)!r}",
        )

    def float(self, name: str) -> torch.Tensor:
        """Return a tensor of any type that is read here as fp32.

        Raises:
            ArtefactError, UnsupportedError, ArtefactCorruptError: as `packed`.
        """
        info = self._info(name)
        raw = self._raw(name)
        if info.type in FLOATS:
            return torch.from_numpy(raw.copy()).view(FLOATS[info.type]).float().reshape(info.shape)
        rows = (int(np.prod(info.shape[:-1])), info.shape[-1])
        return (
            _packed(raw, info.type, rows, f"Tensor {name!r} of {str(self.path)!r}")
            .dequantize()
            .reshape(info.shape)
        )

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            msg = f"{str(self.path)!r} has no tensor {name!r}."
            raise ArtefactError(msg)
        info = self.tensors[name]
        if info.type not in TYPES:
            msg = (
                f"Tensor {name!r} of {str(self.path)!r} is stored as {info.type}; nc reads "
                f"{', '.join(TYPES)}."
            )
            raise UnsupportedError(msg)
        return info

    def _raw(self, name: str) -> Bytes:
        info = self.tensors[name]
        return self._data[info.start : info.start + _size(info.type, info.shape)]


def _size(type_name: str, shape: tuple[int, ...]) -> int:
    found = TYPES[type_name]
    count = 1
    for length in shape:  # not numpy's product, which wraps
        count *= length
    return count // found.elements * found.size


def _packed(raw: Bytes, type_name: str, shape: tuple[int, int], where: str) -> PackedWeight:
    found = TYPES[type_name]
    assert found.form is not None
    blocks = torch.from_numpy(raw.copy()).reshape(-1, found.size)
    groups = (shape[0], shape[1] // GROUP)
    heads = (found.size - GROUP * found.form.bits // 8) // 2
    head = blocks[:, : 2 * heads].contiguous().view(torch.float16)
    if not bool(torch.isfinite(head).all()):
        msg = f"{where}: a scale is not finite. Get the file again."
        raise ArtefactCorruptError(msg)
    stored = blocks[:, 2 * heads :]
    codes = torch.cat([stored & 15, stored >> 4], 1) if found.form.bits == 4 else stored ^ 128  # int8 + 128
    return PackedWeight(
        form=found.form,
        shape=shape,
        codes=bits.pack(codes.reshape(shape), found.form.bits),
        scale=head[:, 0].reshape(groups).contiguous(),
        minimum=head[:, 1].reshape(groups).contiguous() if heads == 2 else None,
    )


class _Reader:
    """A position in the bytes of a file, which no read can leave."""

    def __init__(self, data: Bytes, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def fail(self, what: str) -> NoReturn:
        msg = f"{str(self.path)!r}, byte {self.at}: {what}. The file is truncated or altered; get it again."
        raise ArtefactCorruptError(msg)

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            self.fail(f"{count} bytes are needed, but the file ends after {len(self.data) - self.at}")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(letter)))[0]

    def text(self) -> str:
        found = self.take(self.number("Q"))
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            self.fail("text that is not UTF-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            self.fail(f"a value of the unknown type {kind}")
        return self.number(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.text() for _ in range(self.bounded(count, 8))]
        if kind not in SCALARS:
            self.fail(f"an array of the type {kind}, which nc does not read")
        size = struct.calcsize(SCALARS[kind])
        return list(struct.unpack(f"<{self.bounded(count, size)}{SCALARS[kind]}", self.take(count * size)))

    def bounded(self, count: int, size: int) -> int:
        """Return a count of things of at least `size` bytes each, if the rest of the file can hold them."""
        if count * size > len(self.data) - self.at:
            self.fail(f"{count} entries do not fit the rest of the file")
        return count


def read(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file of version 2 or 3 and check that it holds all of its tensors.

    Raises:
        ArtefactMissingError: there is no such file.
        ArtefactSchemaError: not a GGUF file, or of another version or byte order.
        ArtefactCorruptError: truncated, or it contradicts itself; the message has the place.
    """
    where = Path(path)
    if not where.is_file():
        msg = f"There is no file {str(where)!r}."
        raise ArtefactMissingError(msg)
    data: Bytes = np.memmap(where, np.uint8, "r") if where.stat().st_size else np.empty(0, np.uint8)
    reader = _Reader(data, where)
    if data[:4].tobytes() != MAGIC:
        msg = f"{str(where)!r} is not a GGUF file: it does not begin with {MAGIC.decode()!r}."
        raise ArtefactSchemaError(msg)
    reader.at = 4
    version = reader.number("I")
    if version not in (2, 3):
        msg = f"{str(where)!r} has GGUF version {version}; nc reads versions 2 and 3, little-endian."
        raise ArtefactSchemaError(msg)
    tensors, pairs = reader.number("Q"), reader.number("Q")
    values: dict[str, Any] = {}
    for _ in range(reader.bounded(pairs, 13)):
        key = reader.text()
        if key in values:
            reader.fail(f"key {key!r} a second time")
        values[key] = reader.value(reader.number("I"))
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        reader.fail(f"general.alignment is {alignment!r}")
    found = [_described(reader) for _ in range(reader.bounded(tensors, 24))]
    base = -(-reader.at // alignment) * alignment
    return GGUFFile(where, values, _placed(reader, found, base, alignment), data)


def _described(reader: _Reader) -> tuple[str, str, tuple[int, ...], int]:
    """Name, type, shape and offset of the next tensor."""
    name = reader.text()
    rank = reader.number("I")
    if not 1 <= rank <= 4:
        reader.fail(f"tensor {name!r} has {rank} dimensions")
    shape = tuple(reader.number("Q") for _ in range(rank))[::-1]
    code = reader.number("I")
    return name, _NAMES.get(code, f"type {code}"), shape, reader.number("Q")


def _placed(
    reader: _Reader, found: list[tuple[str, str, tuple[int, ...], int]], base: int, alignment: int
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in found:
        if name in tensors:
            reader.fail(f"tensor {name!r} a second time")
        if offset % alignment:
            reader.fail(f"tensor {name!r} begins at {offset}, no multiple of {alignment}")
        if kind in TYPES and shape[-1] % TYPES[kind].elements:
            reader.fail(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {TYPES[kind].elements}")
        end = base + offset + (_size(kind, shape) if kind in TYPES else 0)
        if end > len(reader.data):
            reader.fail(f"tensor {name!r} ends at byte {end}, the file at {len(reader.data)}")
        tensors[name] = TensorInfo(kind, shape, base + offset)
    return tensors

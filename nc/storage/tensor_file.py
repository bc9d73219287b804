"""One safetensors file, written tensor by tensor from tensors in memory and in other files.

The whole file is never in memory.

The layout is that of the safetensors library: a JSON header, then the tensors, those of wide elements first,
so that all are aligned.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open

from nc.errors import ArtefactCorruptError
from nc.storage.json_file import check_is_file
from nc.text.json_text import parsed

#: safetensors' names, in its order of layout from the back.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
#: What a float model is of.
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = list(_DTYPES)
_PIECE = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        path: the file.
        dtype: of the tensor.
        shape: of the tensor.
        start: where its bytes begin in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def part(self, index: int) -> StoredTensor:
        """One of the tensors [...] of a tensor [E, ...]."""
        one = dataclasses.replace(self, shape=self.shape[1:])
        return dataclasses.replace(one, start=self.start + index * _size(one))

    def read(self) -> torch.Tensor:
        """Return the tensor in newly allocated memory: nothing is mapped."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self.path.open("rb") as opened:
            opened.seek(self.start)
            if opened.readinto(_bytes(tensor)) != _size(tensor):
                raise ArtefactCorruptError(_cut(self.path))
        return tensor


class Source(Protocol):
    """A tensor that is read when it is needed, as `StoredTensor` is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    def read(self) -> torch.Tensor:
        """Return its values, in newly allocated memory."""


def stored_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; only the header is read.

    Raises:
        ArtefactMissingError: there is no such file.
        ArtefactCorruptError: it is not a safetensors file, is cut, or has a tensor of a dtype that torch has
            not.
    """
    check_is_file(path)
    try:
        with safe_open(path, "pt"):  # checks the header against the size of the file
            pass
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = parsed(opened.read(length))
        return {
            name: StoredTensor(
                path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (SafetensorError, OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}."
        raise ArtefactCorruptError(msg) from error
    except KeyError as error:
        msg = (
            f"{path} cannot be read: it has a tensor of dtype {error}; dtypes that can be read: "
            f"{', '.join(_DTYPES)}."
        )
        raise ArtefactCorruptError(msg) from error


def views(content: mmap.mmap | bytearray) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, in the memory of its content.

    Their addresses may be unaligned.

    Raises:
        ValueError, KeyError, TypeError: it is not a safetensors file, or is cut.
    """
    length = int.from_bytes(content[:8], "little")
    entries = {
        name: entry for name, entry in parsed(content[8 : 8 + length]).items() if name != "__metadata__"
    }
    found, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, count = end, math.prod(shape)
        end += count * dtype.itemsize
        if entry["data_offsets"] != [begin, end] or min(shape, default=0) < 0:
            msg = f"the tensor {name!r} does not begin where the one before it ends, or has another size"
            raise ValueError(msg)
        flat = (
            torch.frombuffer(content, dtype=dtype, count=count, offset=8 + length + begin)
            if count
            else torch.empty(0, dtype=dtype)
        )
        found[name] = flat.view(shape)
    if 8 + length + end != len(content):
        msg = f"{end} bytes of tensors were expected, but there are {len(content) - 8 - length}"
        raise ValueError(msg)
    return found


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor, made by this thread alone.

    Torch's threads would wait for the one that hashes.
    """
    result = torch.empty_like(tensor)
    _bytes(result)[:] = _bytes(tensor)
    return result


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor | Source],
    told: Callable[[bytes | memoryview], object] = len,
) -> None:
    """Write a file.

    Args:
        path: of the file.
        tensors: by name; those in memory are contiguous CPU tensors of a dtype that safetensors has. Others
            are read one at a time.
        told: gets all bytes in order, e.g. the `update` of a checksum.
    """
    names = sorted(tensors, key=lambda name: (-_ORDER.index(_NAMES[tensors[name].dtype]), name))
    header, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + _size(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as opened:

        def put(piece: bytes | memoryview) -> None:
            opened.write(piece)
            told(piece)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name in names:
            tensor = tensors[name]
            if isinstance(tensor, StoredTensor):
                _copy(tensor, put)
            else:
                put(_bytes(tensor if isinstance(tensor, torch.Tensor) else tensor.read().contiguous()))


def _copy(source: StoredTensor, put: Callable[[bytes | memoryview], None]) -> None:
    left = _size(source)
    with source.path.open("rb") as opened:
        opened.seek(source.start)
        while left:
            piece = _piece(opened, min(left, _PIECE), source.path)
            put(piece)
            left -= len(piece)


def _piece(opened: BinaryIO, count: int, path: Path) -> bytes:
    piece = opened.read(count)
    if not piece:
        raise ArtefactCorruptError(_cut(path))
    return piece


def _cut(path: Path) -> str:
    return f"{path} became shorter while it was read."


def _size(tensor: torch.Tensor | Source) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat = tensor.detach().reshape(-1)
    # a single value is contiguous whatever its stride is, and `view` asks for one of 1
    array: Any = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()
    return memoryview(array)

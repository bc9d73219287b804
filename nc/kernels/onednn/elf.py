"""Addresses of functions that a loaded shared library contains but does not export.

They are read from the symbol table of its file (ELF, 64 bits). PyTorch's wheels link oneDNN into
`libtorch_cpu.so` and hide its functions at link time, but keep the symbol table.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nc.process import cache
from nc.text.json_text import parsed

_SYMTAB, _NOTE, _FUNCTION, _BUILD_ID = 2, 7, 2, 3
_INSTRUCTIONS = 4  # flag of a section
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
#: Written into the cache; a file of another version is not read.
_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A library in the memory of this process.

    Attributes:
        path: its file.
        base: the address that offsets in it count from.
        code: addresses that hold its instructions.
    """

    path: Path
    base: int
    code: tuple[range, ...]

    def executes(self, offset: int) -> bool:
        """Return whether the library has instructions at an offset."""
        return any(self.base + offset in code for code in self.code)


def loaded(name: str) -> Image | None:
    """Return a library that this process has loaded; None where it has none of that file name."""
    found: Image | None = None
    for line in Path("/proc/self/maps").read_text().splitlines():
        if not line.endswith(f"/{name}"):
            continue
        addresses, rights, offset, _, _, path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if found is None:
            found = Image(Path(path), start - int(offset, 16), ())
        if "x" in rights and Path(path) == found.path:
            found = dataclasses.replace(found, code=(*found.code, range(start, end)))
    return found


def functions(library: Image, prefix: str) -> Mapping[str, int]:
    """Offsets in a loaded library of all functions whose name begins with `prefix`.

    The result is empty where the file has no symbol table.

    Reading 100 MB of names takes 0.1 to 1.4 s, so the result is kept in the user's cache folder under the
    build id of the library.

    Raises:
        ValueError: the file is damaged, or its table names places that hold no instructions.
        OSError: it can't be read.
    """
    with library.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        try:
            sections = _sections(image)
            identity = _build_id(image, sections)
            kept = cache.folder() / f"functions-{prefix}{identity}.json" if identity else None
            known = _read(kept, identity) if kept is not None else None
            code = [
                range(address, address + size)
                for _, _, flags, address, _, size, *_ in sections
                if flags & _INSTRUCTIONS
            ]
            if known is not None and not _outside(library, code, known):
                return known
            known = _functions(image, sections, prefix.encode())
        except (struct.error, IndexError, OverflowError) as error:
            msg = f"its tables can't be read: {error}"
            raise ValueError(msg) from error
    if outside := _outside(library, code, known):
        msg = f"its symbol table puts {outside} where it has no instructions"
        raise ValueError(msg)
    if kept is not None and known:
        content = {"version": _VERSION, "build_id": identity, "functions": known}
        cache.write(kept, json.dumps(content).encode())
    return known


def _outside(library: Image, code: Sequence[range], found: Mapping[str, int]) -> str:
    """Return the first function at an address without instructions; "" for none.

    It is in no section with instructions, or in memory that can't be executed.
    """
    return next(
        (
            name
            for name, at in found.items()
            if not (any(at in section for section in code) and library.executes(at))
        ),
        "",
    )


def _sections(image: mmap.mmap) -> list[tuple[int, ...]]:
    if image[:5] != b"\x7fELF\x02":
        return []
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", image, start + i * size) for i in range(count)]


def _build_id(image: mmap.mmap, sections: list[tuple[int, ...]]) -> str:
    for _, kind, _, _, offset, size, *_ in sections:
        if kind == _NOTE and size >= 16:
            name, length, number = struct.unpack_from("<III", image, offset)
            if number == _BUILD_ID:
                begin = offset + 12 + (name + 3) // 4 * 4
                return image[begin : begin + length].hex()
    return ""


def _functions(image: mmap.mmap, sections: list[tuple[int, ...]], prefix: bytes) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SYMTAB:
            continue
        text_offset, text_size = sections[link][4:6]
        names = dict(_names(image[text_offset : text_offset + text_size], prefix))
        if not names:
            continue
        table = np.frombuffer(image[offset : offset + size], _SYMBOL)
        keys = np.array(sorted(names))
        index = np.searchsorted(keys, table["name"])
        index[index == len(keys)] = 0
        hit = (keys[index] == table["name"]) & (table["info"] & 15 == _FUNCTION) & (table["value"] != 0)
        found |= {
            names[int(key)]: int(value)
            for key, value in zip(table["name"][hit], table["value"][hit], strict=True)
        }
    return found


def _names(text: bytes, prefix: bytes) -> Iterator[tuple[int, str]]:
    """Position and text of all names that begin with `prefix`.

    `find` is ten times as fast as a regular expression here.
    """
    position = text.find(b"\0" + prefix)
    while position >= 0:
        end = text.index(b"\0", position + 1)
        yield position + 1, text[position + 1 : end].decode()
        position = text.find(b"\0" + prefix, end)


def _read(path: Path, identity: str) -> dict[str, int] | None:
    """Return what `functions` wrote; None where there is nothing, or nothing that can be trusted."""
    try:
        content = parsed(cache.read(path))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or (content.get("version"), content.get("build_id")) != (
        _VERSION,
        identity,
    ):
        return None
    found = content.get("functions")
    return found if isinstance(found, dict) and all(isinstance(v, int) for v in found.values()) else None

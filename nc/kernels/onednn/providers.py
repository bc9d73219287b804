"""Where oneDNN comes from: libraries in an order, the first that passes a test.

The order is torch's own copy, a Python package, the system. Torch's copy costs nothing, has the version that
torch's operators run, so results are the same bit for bit, and shares torch's threads. It is not exported,
and a future torch may leave its symbol table out: then the others serve.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from nc.errors import BackendError, BackendUnavailableError
from nc.kernels.onednn import elf
from nc.kernels.onednn.api import NEEDED, OPTIONAL, Library
from nc.kernels.onednn.primitives import Maker
from nc.kernels.onednn.self_test import why_wrong
from nc.process import env
from nc.process.unavailable import Unavailable

_SONAME = "libdnnl.so.3"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Provider:
    """A library that works here.

    Attributes:
        name: "torch", "package", "system", or the path that the user named.
        maker: makes primitives with it.
        passed_over: why those before it were not taken, one text each.
    """

    name: str
    maker: Maker
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        version = ".".join(map(str, self.maker.library.version))
        where = {"torch": "inside torch", "package": "of a Python package", "system": "of the system"}.get(
            self.name, self.name
        )
        return f"oneDNN {version} {where}"


def provider() -> Provider:
    """Return the first library that passes the test.

    It is looked for once in a process for each value of `NC_ONEDNN`.

    Raises:
        BackendUnavailableError: there is none, with the reasons.
    """
    found = _find(env.NC_ONEDNN.get())
    if isinstance(found, Unavailable):
        raise BackendUnavailableError(found.reason)
    return found


@functools.cache
def _find(named: str) -> Provider | Unavailable:
    """Return the provider, or why there is none."""
    if named == "none":
        return Unavailable(f"{env.NC_ONEDNN.name} is 'none'")
    sources = dict(_SOURCES)
    if named:
        sources = {named: sources[named]} if named in sources else {named: lambda: _exported(named)}
    passed_over: list[str] = []
    for name, addresses in sources.items():
        try:
            maker = Maker(Library(addresses()))
            why = why_wrong(maker)
        except (BackendError, BackendUnavailableError) as error:
            why = str(error)
        else:
            if not why:
                return Provider(name, maker, tuple(passed_over))
        passed_over.append(f"{name}: {why}")
    return Unavailable(f"no oneDNN library can be used ({'; '.join(passed_over)})")


def _hidden() -> Mapping[str, int]:
    """Return the functions inside torch's own library."""
    try:
        library = elf.loaded("libtorch_cpu.so")
        if library is None:
            msg = "libtorch_cpu.so is not loaded"
            raise BackendUnavailableError(msg)
        addresses = {name: library.base + offset for name, offset in elf.functions(library, "dnnl_").items()}
    except (OSError, ValueError) as error:
        msg = f"torch's library can't be read: {error}"
        raise BackendUnavailableError(msg) from error
    if not addresses:
        msg = f"torch {torch.__version__} has no symbol table, or no oneDNN inside"
        raise BackendUnavailableError(msg)
    return addresses


def _package() -> Mapping[str, int]:
    """Return the functions of a library that a Python package has put beside this interpreter."""
    for path in _candidates():
        if path.exists():
            return _exported(str(path))
    msg = f"no Python package has {_SONAME}; `pip install onednn-cpu-gomp` brings one"
    raise BackendUnavailableError(msg)


def _candidates() -> Iterator[Path]:
    yield Path(sys.prefix) / "lib" / _SONAME
    yield from (
        Path(entry).parents[2] / "lib" / _SONAME for entry in sys.path if entry.endswith("site-packages")
    )


def _exported(path: str) -> Mapping[str, int]:
    """Return the functions that a library exports."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        msg = f"it can't be loaded: {error}"
        raise BackendUnavailableError(msg) from error
    names = [f"dnnl_{name}" for name in sorted(NEEDED | OPTIONAL)]
    found = {
        name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for name in names
        if hasattr(library, name)
    }
    return {name: address for name, address in found.items() if address}


_SOURCES: tuple[tuple[str, Callable[[], Mapping[str, int]]], ...] = (
    ("torch", _hidden),
    ("package", _package),
    ("system", lambda: _exported(_SONAME)),
)

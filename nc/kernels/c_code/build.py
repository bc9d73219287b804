"""Compile and load a C source of this package.

The library is shipped in the wheel, kept from an earlier process, or compiled now.
"""

from __future__ import annotations

import _ctypes
import ctypes
import dataclasses
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from nc.errors import BackendUnavailableError
from nc.kernels.c_code import emulation, flags, isas, limit, openmp
from nc.process import cache, env
from nc.process.unavailable import Unavailable
from nc.process.warn import warn

_HERE = Path(__file__).parent
_TIMEOUT_S = 300
#: Files of a source that the cache keeps: several checkouts and compilers share it.
_MOST_KEPT = 8


#: Where a library comes from: the package, the cache folder, or the compiler in this process. In the order in
#: which they are tried.
ORIGINS = ("shipped", "kept", "compiled")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A loaded C library of this package.

    Attributes:
        library: the library.
        origin: one of `ORIGINS`.
        where: where it comes from, as text.
        compiler: the compiler that compiled it.
        isas: instruction sets that it has code for.
        missing: instruction sets that it has no code for, because the compiler does not know them.
        passed_over: why earlier origins were not used, one text each.
    """

    library: ctypes.CDLL
    origin: str
    where: str
    compiler: str
    isas: tuple[str, ...]
    missing: tuple[str, ...]
    passed_over: tuple[str, ...]


def load(name: str) -> ctypes.CDLL:
    """Return the library of the source `name`.c.

    Raises:
        BackendUnavailableError: it is not shipped, and can't be compiled or loaded here; says why and what to
            do.
    """
    return loaded(name).library


def loaded(name: str) -> Loaded:
    """Return the library of the source `name`.c, and where it comes from.

    It is looked for once in a process, also where there is none.

    Raises:
        BackendUnavailableError: see `load`.
    """
    source = _HERE / f"{name}.c"
    try:
        identity = flags.source_hash(source, emulation.options(source))
    except OSError as error:
        msg = f"the source {name}.c can't be read: {error}"
        raise BackendUnavailableError(msg) from error
    found = _found(source, identity, _compiler(), cache.folder())
    if isinstance(found, Unavailable):
        raise BackendUnavailableError(found.reason)
    return found


def sources() -> tuple[str, ...]:
    """Names of all sources."""
    return tuple(sorted(path.stem for path in _HERE.glob("*.c")))


def all_sources() -> str:
    """Return a hash of all sources, headers and flags, whatever is emulated."""
    return flags.short_hash("".join(flags.source_hash(_HERE / f"{name}.c") for name in sources()).encode())


def is_shipped(name: str) -> bool:
    """Return whether the installed package has a library of a source, be it one that can't be loaded here."""
    return (_HERE / f"{name}.so").exists()


def load_on_threads(name: str) -> ctypes.CDLL | Unavailable:
    """Load the library of a source that includes openmp.h, and let it use the threads of torch's operators.

    If this fails, return the reason as `Unavailable`.
    """
    try:
        library = load(name)
        openmp.connect(library)
    except (BackendUnavailableError, OSError) as error:
        return Unavailable(str(error))
    return library


@functools.cache
def _found(source: Path, identity: str, compiler: str, folder: Path) -> Loaded | Unavailable:
    """Return the first library that can be loaded: the shipped one, that of an earlier process, a new one."""
    kept = folder / f"{source.stem}-{identity}-{_identity_of(compiler)}.so"
    passed_over: list[str] = []
    ways: tuple[Callable[[], tuple[ctypes.CDLL, str]], ...] = (
        lambda: _shipped(source, identity),
        lambda: _kept(kept, identity, passed_over, "kept"),
        lambda: _compiled(source, kept, identity, compiler, passed_over),
    )
    for origin, way in zip(ORIGINS, ways, strict=True):
        found = _attempt(way, passed_over)
        if found is not None:
            library, where = found
            limit.restrict(library)
            library.nc_compiler.restype = ctypes.c_char_p
            compiler, code = library.nc_compiler().decode(), isas.compiled(library)
            return Loaded(library, origin, where, compiler, code, isas.missing(library), tuple(passed_over))
    return Unavailable(
        "; ".join(reversed(passed_over))
    )  # the last one is what the user can do something about


def _attempt(
    way: Callable[[], tuple[ctypes.CDLL, str]], passed_over: list[str]
) -> tuple[ctypes.CDLL, str] | None:
    """Return what a way gives.

    None is returned where it gives nothing, for a reason that is noted unless there is nothing to load.
    """
    try:
        return way()
    except FileNotFoundError:
        return None
    except (OSError, BackendUnavailableError) as error:
        passed_over.append(str(error))
        return None


def _shipped(source: Path, identity: str) -> tuple[ctypes.CDLL, str]:
    """Return the library beside its source."""
    path = source.with_suffix(".so")
    try:
        _check_whole(path.read_bytes())
        return _opened(str(path), identity), f"shipped as {path}"
    except FileNotFoundError:
        raise
    except OSError as error:  # another C library than that of the machine that built the wheel
        msg = f"{path.name} of the package: {error}"
        raise OSError(msg) from error


def _kept(path: Path, identity: str, passed_over: list[str], made: str) -> tuple[ctypes.CDLL, str]:
    """Load a library from the cache; return it, and where it is from, as text.

    The open descriptor is loaded rather than the path, where another file may be by then.

    Raises:
        FileNotFoundError: the cache does not have it.
        OSError: it can't be loaded.
    """
    try:
        with cache.opened(path) as handle:
            os.utime(handle)  # the cache drops what was not used for long
            content = cache.content(handle)
            _check_whole(content)
            lasting = os.dup(
                handle
            )  # the loader tells libraries apart by their names: this one must not be given away
        try:
            return _opened(f"/proc/self/fd/{lasting}", identity), f"{made} as {path}"
        except OSError as error:
            os.close(lasting)
            passed_over.append(f"{path}: {error}")
        return _elsewhere(path.name, content, identity, passed_over, f"{made} as {path}")
    except FileNotFoundError:
        raise
    except OSError as error:
        msg = f"{path}: {error}"
        raise OSError(msg) from error


def _compiled(
    source: Path, kept: Path, identity: str, compiler: str, passed_over: list[str]
) -> tuple[ctypes.CDLL, str]:
    """Return a new library, kept for the next process if that is possible."""
    try:
        with tempfile.TemporaryDirectory(prefix="nc-") as directory:
            target = Path(directory) / kept.name
            compile_source(source, target, compiler)
            content = target.read_bytes()
    except OSError as error:
        msg = f"{source.name} can't be compiled: {error}"
        raise BackendUnavailableError(msg) from error
    if cache.write(kept, content):
        cache.prune(f"{source.stem}-*.so", _MOST_KEPT)
        try:
            return _kept(kept, identity, passed_over, "compiled in this process, kept")
        except OSError as error:
            passed_over.append(str(error))
            if isinstance(error.__cause__, PermissionError):
                _say_not_kept(str(error.__cause__))
    else:
        passed_over.append(f"{kept}: it can't be written")
        _say_not_kept(f"{kept.parent} can't be written")
    return _elsewhere(kept.name, content, identity, passed_over, "compiled in this process")


@functools.cache
def _say_not_kept(why: str) -> None:
    """Warn once in a process that each one compiles anew."""
    warn(
        f"C kernels are compiled in each process anew, as nothing can be kept between them: {why}. Let only "
        "yourself write that folder, or name another one by the environment variable XDG_CACHE_HOME."
    )


def _elsewhere(
    name: str, content: bytes, identity: str, passed_over: list[str], made: str
) -> tuple[ctypes.CDLL, str]:
    """Return a library loaded from a private folder of temporary files, or from memory.

    The cache may be in a folder that does not allow execution.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="nc-") as directory:
            path = Path(directory) / name
            path.write_bytes(content)
            return _opened(
                str(path), identity
            ), f"{made}, loaded from {tempfile.gettempdir()}"  # it outlives its file
    except OSError as error:
        passed_over.append(f"the folder of temporary files: {error}")
    handle = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(content)  # all of it: a process that loads a part may be killed
        return _opened(f"/proc/self/fd/{handle}", identity), f"{made}, loaded from memory"
    except OSError as error:
        os.close(handle)
        msg = f"memory: {error}"
        raise OSError(msg) from error


def _opened(path: str, identity: str) -> ctypes.CDLL:
    """Return a library of these sources.

    Raises:
        OSError: it can't be loaded, or is of other sources.
    """
    library = ctypes.CDLL(path)
    of = getattr(library, "nc_source_hash", None)
    if of is not None:
        of.restype = ctypes.c_char_p
    if of is None or of() != identity.encode():
        _ctypes.dlclose(library._handle)  # else the loader gives it again for its name
        msg = "it was made of other sources"
        raise OSError(msg)
    return library


def _check_whole(content: bytes) -> None:
    """Raise OSError for a file without its end, where linkers put the table of sections.

    A process that loads it may be killed.
    """
    if content[:5] != b"\x7fELF\x02" or len(content) < 64:
        msg = "it is not a 64-bit library"
        raise OSError(msg)
    (start,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    if start + size * count > len(content):
        msg = "its end is missing"
        raise OSError(msg)


def compile_source(source: Path, target: Path, compiler: str) -> None:
    """Compile one C file to a shared library.

    Raises:
        BackendUnavailableError: there is no compiler, or it fails.
    """
    if not compiler:
        msg = "there is no C compiler: install gcc or clang, or set the environment variable CC"
        raise BackendUnavailableError(msg)
    try:
        command = flags.command(compiler, source, target, emulation.options(source))
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        msg = f"the C compiler {compiler!r} (CC) can't be run: {error}"
        raise BackendUnavailableError(msg) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        msg = f"the C compiler {compiler!r} fails on {source.name}: {(lines or ['it says nothing'])[0]}"
        raise BackendUnavailableError(msg)


def _identity_of(compiler: str) -> str:
    """Return a compiler's command, with what changes when another version of it is installed.

    Newer ones know more instruction sets.
    """
    try:
        program = shutil.which(flags.words(compiler)[0]) if compiler else None
        status = Path(program).stat() if program else None
    except (OSError, ValueError, IndexError):  # what is wrong with it is said where it is run
        program, status = None, None
    text = f"{compiler} {program} {(status.st_size, int(status.st_mtime)) if status else ()}"
    return flags.short_hash(text.encode())


def _compiler() -> str:
    return flags.compiler(env.CC.get())

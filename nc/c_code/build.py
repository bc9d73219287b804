"""Compile and load a C source of this package: shipped in the wheel, kept from an earlier process, or compiled now."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nc.c_code import cache, openmp
from nc.errors import BackendUnavailableError

_HERE = Path(__file__).parent
#: No -march: a kernel that needs an instruction set says so itself, and asks the CPU at run time.
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-fno-math-errno")
_TIMEOUT_S = 120


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library of the source `name`.c.

    Raises:
        BackendUnavailableError: it is not shipped, and can't be compiled here; says why and what to do.
    """
    shipped = _HERE / f"{name}.so"
    if shipped.exists():
        with contextlib.suppress(OSError):  # another C library than that of the machine that built the wheel
            return ctypes.CDLL(str(shipped))
    source = _HERE / f"{name}.c"
    compiler = _compiler()
    sources = b"".join(path.read_bytes() for path in (source, *sorted(_HERE.glob("*.h"))))
    identity = hashlib.sha256(sources + " ".join((*FLAGS, compiler)).encode()).hexdigest()[:16]
    kept = cache.folder() / f"{name}-{identity}.so"
    if cache.trusted(kept):
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        target = Path(directory) / kept.name
        compile_source(source, target, compiler)
        if cache.write(kept, target.read_bytes()) and cache.trusted(kept):
            return ctypes.CDLL(str(kept))
        return ctypes.CDLL(str(target))  # a loaded library outlives its file


def load_on_threads(name: str) -> ctypes.CDLL | str:
    """The library of a source that includes openmp.h, on the threads of torch's operators; or why there is none."""
    try:
        library = load(name)
        openmp.connect(library)
    except (BackendUnavailableError, OSError) as error:
        return str(error)
    return library


def compile_source(source: Path, target: Path, compiler: str) -> None:
    """Compile one C file to a shared library.

    Raises:
        BackendUnavailableError: there is no compiler, or it fails.
    """
    if not compiler:
        msg = "there is no C compiler: install gcc or clang, or set the environment variable CC"
        raise BackendUnavailableError(msg)
    command = [*compiler.split(), *FLAGS, "-o", str(target), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"the C compiler {compiler!r} can't be run: {error}"
        raise BackendUnavailableError(msg) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        msg = f"the C compiler {compiler!r} fails on {source.name}: {(lines or ['it says nothing'])[0]}"
        raise BackendUnavailableError(msg)


def _compiler() -> str:
    return os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")

"""How the C sources are compiled, in a wheel and at first use. Imports nothing of nc: setup.py runs this file where there is no torch."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

#: No -march: a kernel that needs an instruction set says so itself, and asks the CPU at run time.
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-fno-math-errno")
#: In front of each source: what a library says of itself.
_HEADER = "identity.h"


def compiler(named: str) -> str:
    """Return the command that compiles C: the one that the user named, or the first of those that there are; "" for none."""
    return named or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")


def source_hash(source: Path) -> str:
    """Return what a library of this source says that it was made of: the source, the headers beside it, and the flags."""
    files = (source, *sorted(source.parent.glob("*.h")))
    content = b"\0".join((*(path.read_bytes() for path in files), *map(str.encode, FLAGS)))
    return short_hash(content)


def short_hash(content: bytes) -> str:
    """16 digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def command(compiler: str, source: Path, target: Path) -> list[str]:
    """Return the command that compiles a source to a shared library."""
    identity = (f'-DNC_SOURCE_HASH="{source_hash(source)}"', "-include", str(source.parent / _HEADER))
    return [*compiler.split(), *FLAGS, *identity, "-o", str(target), str(source)]

"""How the C sources are compiled, in a wheel and at first use.

Imports nothing of nc: setup.py runs this file where there is no torch.
"""

from __future__ import annotations

import functools
import hashlib
import runpy
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

#: No -march: a kernel that needs an instruction set says so itself, and asks the CPU at run time.
FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-fno-math-errno")
_HERE = Path(__file__).parent
#: Included before each source: what a library says of itself.
_HEADER = "identity.h"


def compiler(named: str) -> str:
    """Return the command that compiles C: the one that the user named, or the first one that is installed.

    It is "" if there is none.
    """
    return named.strip() or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")


def words(compiler: str) -> list[str]:
    """Return the words of a command as a shell takes them apart; raises ValueError as `command`."""
    return shlex.split(compiler)


def source_hash(source: Path, options: Sequence[str] = ()) -> str:
    """Return what a library of a source says that it was made of: source, all headers, flags and options."""
    files = (source, *sorted(source.parent.glob("*.h")))
    content = b"\0".join(
        (*(path.read_bytes() for path in files), *map(str.encode, (made_header(), *FLAGS, *options)))
    )
    return short_hash(content)


@functools.cache
def made_header() -> str:
    """Return the header that is made of `abi.py`, `tuning.py` and `gelu.py`."""
    files = _HERE / "abi.py", _HERE.parent / "tuning.py", _HERE / "gelu.py"
    table, numbers, gelu = (runpy.run_path(str(path)) for path in files)
    return "\n".join((table["header"](), numbers["definitions"](), gelu["definitions"]()))


def short_hash(content: bytes) -> str:
    """16 digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def command(compiler: str, source: Path, target: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command that compiles a source to a library; write the header of `abi.py` beside that.

    Args:
        compiler: its command.
        source: the file.
        target: the library.
        options: after `FLAGS`.

    Raises:
        ValueError: the compiler's command has a quotation mark without its other one.
    """
    made = target.with_suffix(".abi")
    made.write_text(made_header(), encoding="utf-8")
    included = ("-include", str(made), "-include", str(source.parent / _HEADER))
    defined = f'-DNC_SOURCE_HASH="{source_hash(source, options)}"'
    return [*words(compiler), *FLAGS, *options, defined, *included, "-o", str(target), str(source)]


if __name__ == "__main__":
    print(made_header(), end="")

"""An instruction set that nc's own tests emulate, by the environment variable `NC_EMULATE`.

The C sources are compiled for a CPU with AVX2 alone, against a header of the tests that gives all other
intrinsics in portable C. The C code then counts on an instruction set that this CPU may lack. What is
concluded about torch, FBGEMM and oneDNN is still of the CPU itself: see `nc.kernels.cpu`.
"""

from __future__ import annotations

import os
from pathlib import Path

from nc.errors import ConfigError
from nc.kernels.c_code import flags
from nc.kernels.c_code.isas import ISAS
from nc.process import env

#: After all others. Products and sums are not fused, so that results do not depend on the compiler's choice.
_OPTIONS = ("-O1", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-Wno-psabi")
#: Sources that measure this CPU, in assembler: they are compiled as always.
_OF_THE_MACHINE = ("peak",)


def emulated() -> str:
    """Return the instruction set that is emulated; "" for none.

    Raises:
        ConfigError: it is asked for without the tests' headers, or names none.
    """
    name = env.NC_EMULATE.get()
    if name and (name not in ISAS or not env.NC_EMULATE_HEADERS.get()):
        msg = (
            f"{env.NC_EMULATE.name}={name!r} is for nc's own tests, which name one of {', '.join(ISAS)}, and "
            f"say in {env.NC_EMULATE_HEADERS.name} where their headers are. Unset it; {env.NC_MAX_ISA.name} "
            "limits instruction sets."
        )
        raise ConfigError(msg)
    return name


def options(source: Path) -> tuple[str, ...]:
    """Return what the compiler is told besides, for a source; nothing unless something is emulated.

    Raises:
        ConfigError: see `emulated`.
        OSError: the tests' headers can't be read.
    """
    if not emulated() or source.stem in _OF_THE_MACHINE:
        return ()
    folders = env.NC_EMULATE_HEADERS.get().split(os.pathsep)
    headers = b"\0".join(path.read_bytes() for path in sorted(Path(folders[0]).glob("*.h")))
    return (*_OPTIONS, f"-DNC_EMULATED={flags.short_hash(headers)}", *(f"-I{folder}" for folder in folders))

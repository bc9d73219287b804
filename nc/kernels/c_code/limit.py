"""The best instruction set that kernels may use, by the environment variable `NC_MAX_ISA`."""

from __future__ import annotations

import ctypes

from nc.errors import ConfigError
from nc.kernels.c_code import emulation
from nc.kernels.c_code.isas import ISAS, NUMBERS, named
from nc.process import env

VARIABLE = env.NC_MAX_ISA.name


def limit() -> str:
    """Return the instruction set that the environment variable names, or the emulated one; "" for no limit.

    Raises:
        ConfigError: it names none.
    """
    found = env.NC_MAX_ISA.get() or emulation.emulated()
    if found and found not in ISAS:
        msg = (
            f"{VARIABLE}={found!r} names no instruction set. Set it to one of {', '.join(ISAS)}, or unset it."
        )
        raise ConfigError(msg)
    return found


def permits(flag: str) -> bool:
    """Return whether the limit leaves a feature of the CPU; the best instruction set leaves all.

    Raises:
        ConfigError: see `limit`.
    """
    return leaves(limit(), flag)


def leaves(best: str, flag: str) -> bool:
    """Return whether a limit, as `limit` returns it, leaves a feature of the CPU."""
    return best in ("", list(ISAS)[-1]) or flag in ISAS[best]


def permitted() -> tuple[str, ...]:
    """Return the instruction sets that the limit leaves.

    Raises:
        ConfigError: see `limit`.
    """
    return tuple(name for name, flags in ISAS.items() if all(map(permits, flags)))


def restrict(library: ctypes.CDLL) -> None:
    """Let a library refuse to use instruction sets above the limit, from now on.

    Raises:
        ConfigError: see `limit`.
    """
    library.nc_permit.argtypes = (ctypes.c_int64,)
    library.nc_permit(sum(1 << NUMBERS[name] for name in permitted()))


def used(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the instruction sets that a library has code for and may use.

    Whether the CPU has them, its callers ask.
    """
    library.nc_may_use.restype = ctypes.c_int64
    return named(library.nc_may_use())

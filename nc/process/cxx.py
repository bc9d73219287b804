"""The C++ compiler of the machine, which Inductor needs."""

from __future__ import annotations

import shutil

from nc.errors import BackendUnavailableError
from nc.process import env


def check_compiler(what: str) -> None:
    """Raise BackendUnavailableError when there is no C++ compiler for what needs one."""
    compiler = env.CXX.get("g++")
    if shutil.which(compiler) is None:
        msg = (
            f"{what} needs a C++ compiler, and {compiler!r} is not found: install g++, or name one by the "
            "variable CXX."
        )
        raise BackendUnavailableError(msg)

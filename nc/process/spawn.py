"""Start Python in a child process with the same import path."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nc.process import env

_PR_SET_PDEATHSIG = 1
#: The child imports from the same folders as this process, without the user's working directory: that may be
#: the folder of an artefact, and nothing in it may run.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import importlib
getattr(importlib.import_module(sys.argv[2]), "main")(*sys.argv[3:])
"""


def search_path() -> list[str]:
    """Where the child imports from."""
    root, here = str(Path(__file__).resolve().parents[2]), Path.cwd()
    paths = [p for p in sys.path if p and Path(p).resolve() != here]
    return paths if root in paths else [*paths, root]


def run_module(
    module: str,
    *arguments: str,
    folder: str,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call `main(*arguments)` of a module in a child process.

    Args:
        module: its name.
        arguments: texts.
        folder: the child's working directory.
        time_limit_s: seconds until it is killed.
        environment: variables that it gets besides this process's.

    Raises:
        TimeoutExpired: it did not come back; it has ended.
    """
    return subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(search_path()), module, *arguments],
        capture_output=True,
        text=True,
        timeout=time_limit_s,
        check=False,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        env=env.extended(environment or {}),
    )


def end_with_parent(parent: int) -> bool:
    """In the child: end with the process PARENT, however that ends; False when it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent

"""The first fused run in a child process.

The fuser can hang or crash, and must not take the user's process with it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx

from nc.backends.ipex import child
from nc.backends.ipex.patterns import patterns
from nc.backends.ipex.tested_patterns import TESTED
from nc.errors import BackendError, NCError
from nc.process.spawn import run_module

TIME_LIMIT_S = 300.0


def is_tested(module: fx.GraphModule) -> bool:
    """Return whether every int8 pattern of the graph is one that the test suite runs."""
    return patterns(module) <= TESTED


def first_run_in_child(
    frozen: torch.jit.ScriptModule, inputs: tuple[torch.Tensor, ...], time_limit_s: float = TIME_LIMIT_S
) -> None:
    """Run the frozen module three times in a child process.

    Args:
        frozen: what will run here afterwards.
        inputs: example inputs.
        time_limit_s: seconds until a child that does not come back counts as hung.

    Raises:
        BackendError: the child crashed, raised, or did not come back.
    """
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        folder = Path(directory)
        torch.jit.save(frozen, str(folder / "model.pt"))
        torch.save(list(inputs), folder / "inputs.pt")
        arguments = [directory, str(torch.get_num_threads()), str(os.getpid())]
        try:
            done = run_module(child.__name__, *arguments, folder=directory, time_limit_s=time_limit_s)
        except subprocess.TimeoutExpired as error:
            msg = (
                f"IPEX did not finish fusing this graph within {time_limit_s:.0f} s in a child process. "
                f"{_ADVICE}"
            )
            raise BackendError(msg) from error
    if done.returncode < 0:
        msg = f"IPEX crashed (signal {-done.returncode}) on this graph in a child process. {_ADVICE}"
        raise BackendError(msg)
    if done.returncode > 0:
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        msg = f"IPEX failed on this graph in a child process: {last}. {_ADVICE}"
        raise BackendError(msg)


@contextlib.contextmanager
def failures_named() -> Iterator[None]:
    """Turn what IPEX's fuser and kernels raise into a BackendError that says what to do.

    Errors of nc itself stay as they are.
    """
    try:
        yield
    except NCError:
        raise
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        first = lines[-1] if lines[0].startswith("The following operation failed") else lines[0]
        msg = f"IPEX failed on this graph: {first.strip()} {_ADVICE}"
        raise BackendError(msg) from error


_ADVICE = (
    'Give fp32 to the operators that are new to it (matmul and add first: set_local("matmul", '
    'StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))), or use backend="native".'
)

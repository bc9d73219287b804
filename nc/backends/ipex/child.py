"""Run a frozen module in a child process; `isolate.py` starts it."""

from __future__ import annotations

from pathlib import Path

import torch

from nc.backends.ipex.quiet import import_ipex
from nc.backends.low_bit import graph
from nc.process.spawn import end_with_parent


def main(folder: str, threads: str, parent: str) -> None:
    """Load FOLDER/model.pt and run it three times on FOLDER/inputs.pt.

    It ends with the process PARENT, however that ends.
    """
    if not end_with_parent(int(parent)):
        return
    torch.set_num_threads(int(threads))
    import_ipex()
    graph.library()  # its operator
    inputs = torch.load(Path(folder) / "inputs.pt", weights_only=True)
    frozen = torch.jit.load(str(Path(folder) / "model.pt"))  # type: ignore[no-untyped-call] # torch does not annotate it
    with torch.no_grad():
        for _ in range(3):
            frozen(*inputs)

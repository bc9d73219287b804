"""Runs a frozen module in a process of its own: `python -m nc.backends.ipex.child FOLDER THREADS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nc.backends.ipex.quiet import import_ipex


def main(folder: str, threads: str) -> None:
    """Load FOLDER/model.pt and run it three times on FOLDER/inputs.pt."""
    torch.set_num_threads(int(threads))
    import_ipex()
    inputs = torch.load(Path(folder) / "inputs.pt", weights_only=True)
    frozen = torch.jit.load(str(Path(folder) / "model.pt"))
    with torch.no_grad():
        for _ in range(3):
            frozen(*inputs)


if __name__ == "__main__":
    main(*sys.argv[1:])

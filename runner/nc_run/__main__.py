"""Load a folder, say what it takes and gives, and run it on a file of arrays."""

from __future__ import annotations

import argparse
import sys
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from nc_run.errors import InputError, RunnerError
from nc_run.model import load


def run() -> None:
    """Run the command line; the exit code is 1 where the folder or the inputs are refused."""
    parser = argparse.ArgumentParser("nc-run", description=__doc__)
    parser.add_argument("folder", help="what nc.export_runner() wrote")
    parser.add_argument("inputs", nargs="?", help="an .npz file with the inputs by name")
    parser.add_argument("outputs", nargs="?", help="the .npz file to write")
    parser.add_argument("--threads", type=int, help="the most that a call runs on")
    options = parser.parse_args()
    try:
        model = load(options.folder, threads=options.threads)
        print(f"{', '.join(model.inputs)} -> {', '.join(model.outputs)}: the example gives what it should")
        if options.inputs:
            found = model(**_arrays(options.inputs))
            for name, value in found.items():
                print(f"{name}: {value.dtype} {list(value.shape)}")
            if options.outputs:
                np.savez(options.outputs, **found)  # type: ignore[arg-type] # names of arrays
    except (RunnerError, IndexError, OSError) as error:
        sys.exit(f"nc-run: {error}")


def _arrays(path: str) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        msg = f"{path} is not an .npz file of arrays: {error}"
        raise InputError(msg) from error


if __name__ == "__main__":
    run()

"""Profile of a quantized model, measured in a child process.

A child does it because oneDNN's verbose output is for a whole process. The parent hands over the model as an
artefact and the name of the backend's class; the child lowers it again and measures.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from nc.backends.base import Backend, check_available
from nc.errors import BackendError, UnsupportedError
from nc.graph.qdq import QDQGraph
from nc.process.spawn import end_with_parent, run_module
from nc.profiling.hardware import measured
from nc.profiling.onednn_verbose import TIMESTAMPS
from nc.profiling.profile import Profile
from nc.storage import store
from nc.text.json_text import parsed

TIME_LIMIT_S = 900.0


def profile_in_child(
    graph: QDQGraph, backend: Backend, inputs: Sequence[torch.Tensor], time_limit_s: float = TIME_LIMIT_S
) -> Profile:
    """Lower a graph in a child process, as it was lowered here, and measure it there.

    The child has as many threads as torch has here.

    Args:
        graph: the quantized model.
        backend: an instance of a class that is made without arguments, and that another process can import.
        inputs: flat tensors.
        time_limit_s: seconds until a child that does not come back counts as hung.

    Raises:
        UnsupportedError: another process can't import the backend's class.
        ArtefactError, ArtefactOperatorError: the graph holds something that an artefact can't.
        BackendError: the child crashed, raised, or did not come back.
    """
    maker = type(backend)
    if maker.__module__ == "__main__" or "<locals>" in maker.__qualname__:
        msg = (
            f"Backend {backend.name!r} can't be profiled: its class {maker.__qualname__} is defined in a "
            "script or function, and another process, where it is measured, can't import it from there. "
            "Define the class at the top of a module."
        )
        raise UnsupportedError(msg)
    with tempfile.TemporaryDirectory(prefix="nc-") as directory:
        folder = Path(directory)
        store.write(graph, backend.name, folder / "model")
        torch.save(list(inputs), folder / "inputs.pt")
        try:
            done = run_module(
                __name__,
                directory,
                maker.__module__,
                maker.__qualname__,
                str(torch.get_num_threads()),
                str(os.getpid()),
                folder=directory,
                time_limit_s=time_limit_s,
                environment={
                    **dict([TIMESTAMPS]),
                    "TMPDIR": directory,
                },  # what torch writes there goes with it
            )
        except subprocess.TimeoutExpired as error:
            msg = (
                f"Profiling backend {backend.name!r} did not end within {time_limit_s:.0f} s. Profile "
                "smaller inputs."
            )
            raise BackendError(msg) from error
        result = folder / "profile.json"
        if done.returncode or not result.exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            why = (
                f"crashed (signal {-done.returncode})"
                if done.returncode < 0
                else f"failed: {last or 'it ended without a result'}"
            )
            msg = (
                f"Profiling backend {backend.name!r} in a separate process {why}. The model here is not "
                "affected."
            )
            raise BackendError(msg)
        return Profile.from_dict(parsed(result.read_text(), finite=False))


def main(directory: str, module: str, name: str, threads: str, parent: str) -> None:
    """In the child: measure DIRECTORY/model on DIRECTORY/inputs.pt and write DIRECTORY/profile.json."""
    if not end_with_parent(int(parent)):
        return
    torch.set_num_threads(int(threads))
    folder = Path(directory)
    backend = getattr(importlib.import_module(module), name)()
    check_available(backend)
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    options = {"isolate": "never"} if "isolate" in backend.options else {}  # this is a separate process
    engine = backend.lower(store.read(folder / "model").graph(), verify="off", **options)
    profile = dataclasses.replace(engine.profile(inputs), limits=measured(int(threads)))
    (folder / "profile.json").write_text(json.dumps(dataclasses.asdict(profile)))

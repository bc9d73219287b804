"""OpenVINO itself: imported here only, compiled models, and one infer request for each thread."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from nc.errors import BackendError

#: OpenVINO has types that numpy lacks; their bits go as integers.
_BITS = {torch.bfloat16: (torch.int16, "bf16")}


@dataclasses.dataclass(frozen=True, slots=True)
class _Started:
    """OpenVINO's core, and the process that started it."""

    core: Any
    process: int


@functools.cache
def _started() -> _Started:
    import openvino

    return _Started(openvino.Core(), os.getpid())


def core() -> Any:
    """OpenVINO's core in this process.

    Raises:
        BackendError: this is a fork of the process that started it.
    """
    started = _started()
    if started.process != os.getpid():
        msg = (
            "OpenVINO was started before this process was forked, and its threads do not exist here: a call "
            "would never end. Start "
            'processes by "spawn", or load the model in the forked process and not before.'
        )
        raise BackendError(msg)
    return started.core


def version() -> str:
    """Return the version of OpenVINO."""
    import openvino

    return str(openvino.__version__).partition("-")[0]


def compiled(model: Any, threads: int, *, bf16: bool) -> Any:
    """Return an OpenVINO model compiled for this CPU.

    Args:
        model: it stays as it is.
        threads: that compute a call.
        bf16: compute what is not int8 in bf16.
    """
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # activations of compressed weights stay what the graph says
    }
    return core().compile_model(model, "CPU", options)


class Requests(threading.local):
    """An infer request for each thread; a request computes one call at a time.

    Args:
        model: compiled.
    """

    def __init__(self, model: Any) -> None:
        """In each thread, at its first call."""
        self._outputs, self._request = len(model.outputs), model.create_infer_request()

    def infer(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return outputs in new memory; contiguous inputs are read without a copy.

        This is not `__call__`, because torch.compile fails at `__call__` of thread-local objects.
        """
        core()
        if torch._C._is_tracing():
            msg = "OpenVINO's outputs would be constants of the trace."
            raise RuntimeError(msg)
        request = self._request
        held = [tensor.detach().contiguous() for tensor in inputs]  # OpenVINO keeps addresses only
        for index, tensor in enumerate(held):
            request.set_input_tensor(index, _shared(tensor))
        results = request.infer(share_outputs=True)
        return [_copied(results[index], request, index) for index in range(self._outputs)]


def _shared(tensor: torch.Tensor) -> Any:
    """OpenVINO's tensor over the memory of a contiguous tensor."""
    import openvino

    if tensor.dtype in _BITS:
        bits, name = _BITS[tensor.dtype]
        return openvino.Tensor(tensor.view(bits).numpy(), list(tensor.shape), getattr(openvino.Type, name))
    return openvino.Tensor(tensor.numpy(), shared_memory=True)


def _copied(value: Any, request: Any, index: int) -> torch.Tensor:
    """Return an output in memory that no later call writes to."""
    for dtype, (bits, name) in _BITS.items():
        if request.get_output_tensor(index).element_type.get_type_name() == name:
            return torch.from_numpy(value).view(bits).clone().view(dtype)
    return torch.from_numpy(value).clone()

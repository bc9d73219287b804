"""Executors that run the lowered graph, in the order in which they are tried. TorchScript needs no Python between the calls.

The kernels of small models take less time than Python needs to call them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.backends.torchscript import script
from nc.errors import BackendError
from nc.global_lock import LOCK
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import from_bf16, to_bf16

_SPELLING: dict[Callable[..., object], str] = {
    quantize: "self._codes(torch.quantize_per_tensor({}, {}, {}, torch.quint8))",
    dequantize: "torch._make_per_tensor_quantized_tensor({}, {}, {}).dequantize()",
    to_bf16: "{}.to(torch.bfloat16)",
    from_bf16: "{}.to(torch.float32)",
    torch.ops.aten.reshape.default: "{}.reshape({})",  # not the copy that a fuser needs
}
#: All executors run the same kernels; bits differ at most where memory is aligned otherwise.
_SAME_DB = 60.0
# `int_repr` copies them
_CODES = """
def _codes(self, q: Tensor) -> Tensor:
    if q.is_contiguous():
        return torch.empty([0], dtype=torch.uint8).set_(q, 0, q.size(), q.stride())
    return q.int_repr()
"""

#: Flat tensors in, outputs back; safe to call from several threads.
Call = Callable[..., Sequence[Any]]


class Executor(Protocol):
    """Something that can run a lowered graph."""

    name: str

    def why_not(self, module: fx.GraphModule) -> str:
        """Why it can't run this graph here, as far as that is known without building; "" when it may."""

    def build(self, module: fx.GraphModule, example: Sequence[torch.Tensor]) -> Call:
        """What runs the graph.

        Args:
            module: lowered graph; stays as it is.
            example: flat inputs.

        Raises:
            BackendError: it can't run this graph.
        """


class TorchScriptExecutor:
    """TorchScript's interpreter, in which threads don't wait for each other."""

    name = "TorchScript"

    def why_not(self, module: fx.GraphModule) -> str:
        """PyTorch deprecates it."""
        return "" if hasattr(torch.jit, "script") else f"torch {torch.__version__} has no TorchScript"

    def build(self, module: fx.GraphModule, example: Sequence[torch.Tensor]) -> Call:
        """See `Executor.build`."""
        with LOCK, warnings.catch_warnings():  # torch 2.13 deprecates TorchScript, which users can do nothing about
            warnings.simplefilter("ignore")
            scripted = script(module, _SPELLING, _CODES).module

        def run(*inputs: torch.Tensor) -> Sequence[Any]:
            # nothing is left to fuse; optimized, the first calls would be slow, and IPEX, where it is imported, would rewrite the graph
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined] # not in its __all__
                outputs: Sequence[Any] = scripted(*inputs)
                return outputs

        return run


class PythonExecutor:
    """Python, call by call: it runs every graph, and is what the others are compared with."""

    name = "Python"

    def why_not(self, module: fx.GraphModule) -> str:
        """It runs every graph."""
        return ""

    def build(self, module: fx.GraphModule, example: Sequence[torch.Tensor]) -> Call:
        """The graph itself."""
        return module


PYTHON = PythonExecutor()
#: In the order in which they are tried. Python is not among them: it runs what none of them can.
EXECUTORS: tuple[Executor, ...] = (TorchScriptExecutor(),)


def executable(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> tuple[Call, str]:
    """What runs the graph: the first executor that gives on the example what Python gives.

    An executor may read the graph otherwise than Python does: to TorchScript `True` as an argument for a number is 1, and `2 ** 2` is 4.0.

    Args:
        module: lowered graph.
        example: flat inputs.

    Returns:
        The callable, and who runs it with why those before it can't, as text; "" when the first one does.
    """
    passed_over: list[str] = []
    for executor in EXECUTORS:
        why = executor.why_not(module)
        call = None
        if not why:
            try:
                call = executor.build(module, example)
            except BackendError as error:
                why = str(error).splitlines()[0]
        if call is not None:
            why = _why_wrong(call, executor.name, module, example)
            if not why:
                return call, f"{executor.name}: {'; '.join(passed_over)}" if passed_over else ""
        passed_over.append(why)
    return PYTHON.build(module, example), f"{PYTHON.name}: {'; '.join(passed_over) or 'there is no other executor'}"


def _why_wrong(call: Call, name: str, module: fx.GraphModule, example: Sequence[torch.Tensor]) -> str:
    """Why what an executor built is of no use: it fails, or gives something else than Python; "" when it is right."""
    with torch.no_grad():
        expected = module(*(t.clone() for t in example))
        try:
            got = call(*(t.clone() for t in example))
        except RuntimeError as error:
            return f"{name} fails: {str(error).strip().splitlines()[-1]}"
    if [_kind(v) for v in got] != [_kind(v) for v in expected] or worst_sqnr_db(expected, got) < _SAME_DB:
        return f"{name} computes something else"
    return ""


def _kind(value: object) -> object:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else (type(value), value)

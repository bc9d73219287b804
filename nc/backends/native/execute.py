"""The lowered graph without Python between its calls: the kernels of small models take less time than Python needs to call them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.backends.torchscript import script
from nc.errors import BackendError
from nc.global_lock import LOCK
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import from_bf16, to_bf16

_SPELLING = {
    quantize: "self._codes(torch.quantize_per_tensor({}, {}, {}, torch.quint8))",
    dequantize: "torch._make_per_tensor_quantized_tensor({}, {}, {}).dequantize()",
    to_bf16: "{}.to(torch.bfloat16)",
    from_bf16: "{}.to(torch.float32)",
    torch.ops.aten.reshape.default: "{}.reshape({})",  # not the copy that a fuser needs
}
#: Both run the same kernels; bits differ at most where memory is aligned otherwise.
_SAME_DB = 60.0
# `int_repr` copies them
_CODES = """
def _codes(self, q: Tensor) -> Tensor:
    if q.is_contiguous():
        return torch.empty([0], dtype=torch.uint8).set_(q, 0, q.size(), q.stride())
    return q.int_repr()
"""


def executable(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> tuple[Callable[..., Sequence[Any]], str]:
    """What runs the graph: TorchScript's interpreter, in which threads don't wait for each other, or else Python.

    TorchScript reads some Python otherwise: `True` as an argument for a number is 1 to it, and `2 ** 2` is 4.0. So both run the example
    once, and must agree.

    Args:
        module: lowered graph.
        example: flat inputs.

    Returns:
        The callable, flat tensors in and outputs back, and why it is Python; "" when it is not.
    """
    try:
        with LOCK, warnings.catch_warnings():  # torch 2.13 deprecates TorchScript, which users can do nothing about
            warnings.simplefilter("ignore")
            scripted = script(module, _SPELLING, _CODES).module
    except BackendError as error:
        return module, str(error).splitlines()[0]

    def run(*inputs: torch.Tensor) -> Sequence[Any]:
        # nothing is left to fuse; optimized, the first calls would be slow, and IPEX, where it is imported, would rewrite the graph
        with torch.jit.optimized_execution(False):
            return scripted(*inputs)

    with torch.no_grad():
        expected = module(*(t.clone() for t in example))
        try:
            got = run(*(t.clone() for t in example))
        except RuntimeError as error:
            return module, f"TorchScript fails: {str(error).strip().splitlines()[-1]}"
    if [_kind(v) for v in got] != [_kind(v) for v in expected] or worst_sqnr_db(expected, got) < _SAME_DB:
        return module, "TorchScript computes something else"
    return run, ""


def _kind(value: object) -> object:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else (type(value), value)

"""`compile=True`: compile the fp32 operators between the int8 kernels with `torch.compile`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.backends.native.torch_library import ACCUMULATOR, SUM, functional_sum
from nc.errors import BackendError
from nc.graph.catalogue import input_node, schema_arguments
from nc.graph.fx_utils import inline, retarget
from nc.graph.views import set_argument
from nc.ops import dequantize_per_tensor, quantize_per_tensor
from nc.process.cxx import check_compiler

#: The operator of all convolutions that Inductor knows, under the name that it knows.
_CONVOLUTION = torch.ops.onednn.qconv_pointwise.default
_CONV3D = "onednn::qconv3d_pointwise"
_SYNONYMS = ("onednn::qconv1d_pointwise", "onednn::qconv2d_pointwise", _CONV3D)


def compiled(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """Return a callable that compiles at its first call.

    Sizes stay free, except for size 1, which gets separate code.

    Args:
        module: lowered graph; changed so that the compiler can read it.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
    """
    check_compiler("compile=True")
    for node in list(module.graph.nodes):
        if node.target is quantize:  # with tensors that hold codes, which the compiler does not know
            retarget(node, quantize_per_tensor)
            node.args = (*node.args, 0, 255, torch.uint8)
        elif node.target is dequantize:
            retarget(node, dequantize_per_tensor)
            node.args = (*node.args, torch.uint8)
    functional(module)
    inline(module)
    module.recompile()
    call = torch.compile(module, dynamic=True)

    def run(*inputs: torch.Tensor) -> Sequence[Any]:
        try:
            with _FREEZING:
                outputs: Sequence[Any] = call(*inputs)
                return outputs
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            msg = (
                f"torch.compile failed on the lowered graph: {str(error).strip().splitlines()[0]} Leave "
                "compile=True out."
            )
            raise BackendError(msg) from error

    return run


class _Freezing:
    """Constants stay constants for the compiler, while any call is under way.

    Each may compile for other sizes.

    The switch is the process's, and `torch.compile` has no option that does the same.
    """

    def __init__(self) -> None:
        self._lock, self._calls, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._calls:
                self._before, torch._inductor.config.freezing = torch._inductor.config.freezing, True
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                torch._inductor.config.freezing = self._before


_FREEZING = _Freezing()


def functional(module: fx.GraphModule) -> None:
    """Let sums return a new tensor.

    Compilers can't follow an operator with packed weights that changes its arguments.
    """
    for node in [n for n in module.graph.nodes if n.target is SUM]:
        accumulator = schema_arguments(node)[ACCUMULATOR]
        set_argument(
            node, ACCUMULATOR, input_node(accumulator)
        )  # not the copy, or the layout, that was made for this node alone
        retarget(node, functional_sum())
        module.graph.erase_node(accumulator)


def name_convolutions(module: fx.GraphModule) -> None:
    """Replace all convolution kernels by calls of `_CONVOLUTION`.

    Inductor fuses a following relu as a post-operation. The kernel of conv3d has none, so its relu becomes a
    clamp_min, which Inductor does not fuse.
    """
    for node in module.graph.nodes:
        if (
            node.op == "call_function"
            and getattr(node.target, "_overloadname", "") == "default"
            and node.target._schema.name in _SYNONYMS
        ):
            if node.target._schema.name == _CONV3D:
                for user in [u for u in node.users if u.target is torch.ops.aten.relu.default]:
                    user.target, user.args = torch.ops.aten.clamp_min.default, (node, 0.0)
            retarget(node, _CONVOLUTION)

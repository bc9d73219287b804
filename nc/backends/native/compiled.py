"""The lowered graph through `torch.compile`: its kernels stay, and what is fp32 between them becomes fused C++."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.qdq_rewrites import dequantize, quantize
from nc.errors import BackendError, BackendUnavailableError
from nc.graph.functions import dequantize_per_tensor, quantize_per_tensor

_kernel = torch.ops.onednn.qconv2d_pointwise.binary


def compiled(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """A callable that compiles at its first call; sizes stay free, but for 1, which gets code of its own.

    Args:
        module: lowered graph; changed so that the compiler can read it.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
    """
    check_compiler("compile=True")
    for node in list(module.graph.nodes):
        if node.target is quantize:  # with tensors that hold codes, which the compiler does not know
            node.target, node.args = quantize_per_tensor, (*node.args, 0, 255)
        elif node.target is dequantize:
            node.target = dequantize_per_tensor
        elif node.target is _kernel:
            _functional(module, node)
    module.recompile()
    call = torch.compile(module, dynamic=True)

    def run(*inputs: torch.Tensor) -> Sequence[Any]:
        try:
            with _FREEZING:
                return call(*inputs)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            msg = f"torch.compile failed on the lowered graph: {str(error).strip().splitlines()[0]} Leave compile=True out."
            raise BackendError(msg) from error

    return run


def check_compiler(what: str) -> None:
    """Raise BackendUnavailableError when there is no C++ compiler for what needs one."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        msg = f"{what} needs a C++ compiler, and {compiler!r} is not found: install g++, or name one by the variable CXX."
        raise BackendUnavailableError(msg)


class _Freezing:
    """Constants stay constants for the compiler, while any call is under way: each may compile for other sizes.

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


def _functional(module: fx.GraphModule, node: fx.Node) -> None:
    """Let a sum return a new tensor: the compiler can't follow an operator with packed weights that changes its arguments."""
    accumulator = node.args[6]
    node.update_arg(6, accumulator.args[0])  # not the copy, or the layout, that was made for this node alone
    node.target = _operator()[0]
    module.graph.erase_node(accumulator)


@functools.cache
def _operator() -> tuple[torch._ops.OpOverload, torch.library.Library]:
    """The kernel on a copy, and the library with which it would go; registered when it is needed first."""
    schema = str(_kernel._schema)
    library = torch.library.Library("nc_native", "FRAGMENT")
    arguments = schema[schema.index("(") : schema.rindex("->")].replace("Tensor(a!)", "Tensor")
    library.define(f"qconv2d_sum{arguments} -> Tensor")

    def run(*arguments: Any) -> torch.Tensor:
        own = arguments[6].clone(memory_format=torch.channels_last)
        return _kernel(*arguments[:6], own, *arguments[7:])

    def shape(*arguments: Any) -> torch.Tensor:
        return torch.empty_like(arguments[6], memory_format=torch.channels_last)

    library.impl("qconv2d_sum", run, "CompositeExplicitAutograd")
    torch.library.register_fake("nc_native::qconv2d_sum", shape, lib=library)
    return torch.ops.nc_native.qconv2d_sum.default, library

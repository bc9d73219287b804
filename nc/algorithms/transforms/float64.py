"""A copy of a module that computes in float64, also where its code asks for fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nc.modules.block_calls import BlockCall, run
from nc.modules.copies import own_tensors, sharing


class Float64(TorchFunctionMode):
    """Inside, float32 means float64.

    Norms and softmax of many models convert to fp32, which would hide an error of 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call with float64 in place of float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


class WideCopy:
    """A copy with float64 parameters and buffers, or with fp32 ones where the module cannot run in float64.

    Attributes:
        module: the copy; ties inside it stay.
        dtype: torch.float64, or torch.float32.
        output: its output for the sample.
    """

    def __init__(self, module: torch.nn.Module, call: BlockCall) -> None:
        self.dtype = torch.float64
        self.module = sharing(module)
        own_tensors(self.module)
        self.module.double()
        try:
            self.output = self.run(call)
        except (
            RuntimeError,
            TypeError,
        ):  # an operator without a float64 kernel, e.g. grouped_mm of mixtures of experts
            self.dtype = torch.float32
            self.module = self.module.float()
            self.output = self.run(call)

    def run(self, call: BlockCall) -> torch.Tensor:
        """Its first output."""
        with computing_in(self.dtype):
            output: torch.Tensor = run(self.module, in_dtype(call, self.dtype))
        return output

    @property
    def bound(self) -> float:
        """Return the largest difference of the output for which two modules are the same.

        It is relative to the output's largest magnitude.
        """
        return BOUNDS[self.dtype]


BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}


def computing_in(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Float64 means float64 all the way."""
    return Float64() if dtype == torch.float64 else contextlib.nullcontext()


def in_dtype(call: BlockCall, dtype: torch.dtype) -> BlockCall:
    """Return arguments with floats of a dtype."""

    def part(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    made: BlockCall = pytree.tree_map(part, call)
    return made

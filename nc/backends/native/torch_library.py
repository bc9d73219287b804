"""Operators of our own in lowered graphs.

Some are for compilers, which can follow neither packed weights nor a kernel that changes its arguments. They
stand for oneDNN's own in what `torch.export` and `torch.compile` read, and never run in a `.pt2` program:
weights are packed when it is compiled, and `in_place` puts oneDNN's operator back. The product of two
activations is for plans, because torch has no int8 kernel for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from nc.errors import BackendError
from nc.graph.catalogue import schema_arguments
from nc.graph.fx_utils import call_function, retarget, take_over
from nc.graph.views import set_argument
from nc.numerics import affine

_onednn = torch.ops.onednn
SUM = _onednn.qconv2d_pointwise.binary
#: Its argument for the tensor that it adds to, and the position of that argument.
ACCUMULATOR = "qaccum"
_POSITION = [a.name for a in SUM._schema.arguments].index(ACCUMULATOR)


@functools.cache
def library() -> torch.library.Library:
    """Namespace `nc_native` with the operators below; registered when it is needed first."""
    own = torch.library.Library("nc_native", "FRAGMENT")  # type: ignore[no-untyped-call] # torch does not annotate it
    for kernel in (_onednn.qlinear_prepack.default, _onednn.qconv_prepack.default):
        _define(own, kernel._schema.name.partition("::")[2], kernel, kernel, _packed)
    _define(own, "qconv2d_sum", SUM, _sum, _like_accumulator)
    return own


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Return a new operator of the namespace; call it once for each.

    Args:
        schema: as torch writes it, without the namespace.
        run: computes it, in fp32: a plan has kernels instead, or the report says that it has none.
        fake: gives tensors with the shapes and dtypes of the results.
    """
    own, name = library(), schema[: schema.index("(")]
    own.define(schema)  # type: ignore[no-untyped-call] # torch does not annotate it
    own.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake(f"nc_native::{name}", fake, lib=own)
    found: torch._ops.OpOverload = getattr(torch.ops.nc_native, name).default
    return found


def only_in_plans(what: str) -> Callable[..., Any]:
    """Return what raises `BackendError` for an operator that torch does not compute.

    Args:
        what: that torch does not have.
    """

    def raises(*_: Any, **__: Any) -> Any:
        msg = f"torch has no {what}; plans have"
        raise BackendError(msg)

    return raises


def functional_sum() -> torch._ops.OpOverload:
    """`qconv2d_pointwise.binary` that returns a new tensor; arguments are the same."""
    library()
    return torch.ops.nc_native.qconv2d_sum.default


def prepack(kind: str) -> torch._ops.OpOverload:
    """Return what packs the weight of a linear or a convolution; arguments as in oneDNN's."""
    library()
    packets = torch.ops.nc_native
    return packets.qlinear_prepack.default if kind == "linear" else packets.qconv_prepack.default


def in_place(graph: fx.Graph) -> None:
    """Replace each functional sum in a graph by oneDNN's kernel, which adds in place.

    The kernel overwrites the result of a convolution that nothing else reads, or else a copy.
    """
    target = functional_sum()
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is target]:
        accumulator = schema_arguments(node)[ACCUMULATOR]
        if len(accumulator.users) > 1 or not _is_convolution(accumulator):
            with graph.inserting_before(node):
                copy = call_function(
                    graph,
                    torch.ops.aten.clone.default,
                    (accumulator,),
                    {"memory_format": torch.channels_last},
                )
            take_over(copy, accumulator)
            set_argument(node, ACCUMULATOR, copy)
        retarget(node, SUM)


def _is_convolution(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and str(node.target._schema.name).startswith(
        "onednn::qconv"
    )


def _define(
    own: torch.library.Library, name: str, kernel: torch._ops.OpOverload, run: Any, fake: Any
) -> None:
    schema = str(kernel._schema)
    arguments = schema[schema.index("(") : schema.rindex("->")].replace("Tensor(a!)", "Tensor")
    own.define(f"{name}{arguments} -> Tensor")  # type: ignore[no-untyped-call] # as above
    own.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake(f"nc_native::{name}", fake, lib=own)


def _packed(weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """Kernels read a linear's weight transposed."""
    return torch.empty_like(weight.t() if weight.dim() == 2 else weight)


def _sum(*arguments: Any) -> torch.Tensor:
    own = arguments[_POSITION].clone(memory_format=torch.channels_last)
    total: torch.Tensor = SUM(*arguments[:_POSITION], own, *arguments[_POSITION + 1 :])
    return total


def _like_accumulator(*arguments: Any) -> torch.Tensor:
    return torch.empty_like(arguments[_POSITION], memory_format=torch.channels_last)


def stored(values: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values as the result of a kernel: as they are, or as codes."""
    if dtype.is_floating_point:
        return values.to(dtype)
    limits = torch.iinfo(dtype)
    return affine.quantize(values, scale, zero_point, limits.min, limits.max, dtype=dtype)


#: Activations by the names that oneDNN's operators of torch have for them; arguments are values, numbers and
#: the algorithm.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, Sequence[float], str], torch.Tensor]] = {
    "none": lambda x, _, __: x,
    "relu": lambda x, _, __: functional.relu(x),
    "gelu": lambda x, _, algorithm: functional.gelu(x, approximate=algorithm),
    "swish": lambda x, _, __: functional.silu(x),
    "leaky_relu": lambda x, numbers, _: functional.leaky_relu(x, numbers[0]),
    "hardtanh": lambda x, numbers, _: x.clamp(numbers[0], numbers[1]),
    "hardswish": lambda x, _, __: functional.hardswish(x),
    "tanh": lambda x, _, __: x.tanh(),
}

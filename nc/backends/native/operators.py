"""Operators for compilers, which can follow neither packed weights nor a kernel that changes its arguments.

They stand for oneDNN's own in what `torch.export` and `torch.compile` read, and never run in a `.pt2` program: weights are packed when it
is compiled, and `in_place` puts oneDNN's operator back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import schema_arguments
from nc.graph.views import set_argument

_onednn = torch.ops.onednn
SUM = _onednn.qconv2d_pointwise.binary
#: Its argument for the tensor that it adds to, and where that stands.
ACCUMULATOR = "qaccum"
_POSITION = [a.name for a in SUM._schema.arguments].index(ACCUMULATOR)


@functools.cache
def library() -> torch.library.Library:
    """Namespace `nc_native` with `qlinear_prepack`, `qconv_prepack` and `qconv2d_sum`; registered when it is needed first."""
    own = torch.library.Library("nc_native", "FRAGMENT")  # type: ignore[no-untyped-call] # torch does not annotate it
    for kernel in (_onednn.qlinear_prepack.default, _onednn.qconv_prepack.default):
        _define(own, kernel._schema.name.partition("::")[2], kernel, kernel, _packed)
    _define(own, "qconv2d_sum", SUM, _sum, _like_accumulator)
    return own


def functional_sum() -> torch._ops.OpOverload:
    """`qconv2d_pointwise.binary` that returns a new tensor; arguments are the same."""
    library()
    return torch.ops.nc_native.qconv2d_sum.default


def prepack(kind: str) -> torch._ops.OpOverload:
    """What packs the weight of a linear or a convolution; arguments as in oneDNN's."""
    library()
    packets = torch.ops.nc_native
    return packets.qlinear_prepack.default if kind == "linear" else packets.qconv_prepack.default


def in_place(graph: fx.Graph) -> None:
    """Replace sums that return a new tensor by the kernel, which adds in place: to a copy, or to what only it reads."""
    target = functional_sum()
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is target]:
        accumulator = schema_arguments(node)[ACCUMULATOR]
        if len(accumulator.users) > 1 or not _is_convolution(accumulator):
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (accumulator,), {"memory_format": torch.channels_last})
            copy.meta.update(accumulator.meta)
            set_argument(node, ACCUMULATOR, copy)
        node.target = SUM


def _is_convolution(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and str(node.target._schema.name).startswith("onednn::qconv")


def _define(own: torch.library.Library, name: str, kernel: torch._ops.OpOverload, run: Any, fake: Any) -> None:
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

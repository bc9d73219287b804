"""Norms and products whose rows are rounded where they are made, as functions in C (`rows.c`).

A row that the next linear reads rounded is rounded while it is in the cache. Where nothing else reads it,
there is no fp32 copy of it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import torch
from torch import fx

from nc.backends.dynamic import DYNAMIC_KERNEL
from nc.backends.native.fuse import constant
from nc.backends.native.operators.bf16_linear import bf16_linear, bf16_rows
from nc.backends.native.operators.row_linear import rounded_rows, row_linear
from nc.backends.native.plans import row_linears
from nc.backends.native.plans.ways import PlannedOperator
from nc.backends.native.torch_library import define, only_in_plans
from nc.graph.catalogue import input_node, op_name, schema_arguments
from nc.graph.fx_utils import call_function, constant_value, give_values_of, note_value_of, take_over
from nc.graph.placement import works_in_place
from nc.kernels.c_code import abi

_NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
_FOLLOWERS = "str norm, Tensor? norm_weight, Tensor? norm_bias, float epsilon, bool symmetric"


_in_torch = only_in_plans("rows in tile order")


@functools.cache
def norm_rows() -> torch._ops.OpOverload:
    """Return what norms rows of `x` and rounds them: the normed rows in fp32, and the rounded ones."""
    return define(
        f"norm_rows(Tensor x, {_FOLLOWERS}, bool keeps_normed, bool bf16) -> (Tensor, Tensor)",
        _in_torch,
        lambda x, *a: (torch.empty_like(x), x.new_empty(x.shape, dtype=_dtype(bf16=a[-1]))),
    )


@functools.cache
def row_chain() -> torch._ops.OpOverload:
    """Return the linear of rounded rows whose results are normed, where there is a norm, and rounded.

    It gives the linear's results and the normed ones, both in fp32 and only where they are kept, and the
    rounded ones.
    """
    return define(
        "row_chain(Tensor rows, Tensor weight, Tensor? scale, Tensor? bias, Tensor? other, int outputs, "
        f"str activation, float[] scalars, str algorithm, {_FOLLOWERS}, bool keeps_sum, bool keeps_normed, "
        "bool bf16) -> (Tensor, Tensor, Tensor)",
        _in_torch,
        _shapes_of_chain,
    )


def _dtype(*, bf16: bool) -> torch.dtype:
    return torch.bfloat16 if bf16 else torch.uint8


def _shapes_of_chain(x: torch.Tensor, *a: Any) -> tuple[torch.Tensor, ...]:
    shape, dtypes = (*x.shape[:-1], a[4]), (torch.float32, torch.float32, _dtype(bf16=a[-1]))
    first, second, third = (x.new_empty(shape, dtype=dtype) for dtype in dtypes)
    return first, second, third


# ---- how they are found in a graph ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Norm:
    """A norm over the last dimension: its node, and what C is given."""

    node: fx.Node
    name: str
    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float


def chain_rows(module: fx.GraphModule) -> None:
    """Let what makes rows round them, where C can.

    Not where operators work in place: there a value depends on when it is read.
    """
    if works_in_place(module):
        return
    for node in list(module.graph.nodes):
        if node.target in (rounded_rows(), bf16_rows()) and _has_a_range_for_each_row(node):
            _chain(module, node)


def _has_a_range_for_each_row(node: fx.Node) -> bool:
    return bool(schema_arguments(node).get("per_row", True))


def _chain(module: fx.GraphModule, rounded: fx.Node) -> None:
    """Let the norm or the linear that makes these rows round them."""
    source = input_node(rounded)
    norm = _norm_of(module, source)
    product = source if norm is None else input_node(norm.node)
    linear = bf16_linear() if rounded.target is bf16_rows() else row_linear()
    if product.target is linear and (norm is None or norm.weight.numel() == _outputs(product)):
        _replace_product(module, product, norm, rounded)
    elif norm is not None:
        _replace_norm(module, norm, rounded)


def _outputs(product: fx.Node) -> int:
    return int(schema_arguments(product)["outputs"])


def _norm_of(module: fx.GraphModule, node: fx.Node) -> _Norm | None:
    """Return what a node computes, where that is a norm of rows that C knows."""
    name = op_name(node)
    if name not in _NORMS:
        return None
    a = schema_arguments(node)
    width, source = a["normalized_shape"], a["input"].meta.get("val")
    fp32 = getattr(source, "dtype", None) is torch.float32
    if len(width) != 1 or not isinstance(width[0], int) or not fp32:
        return None
    given = [a["weight"], a.get("bias")]
    values = [None if value is None else constant_value(module, value) for value in given]
    unknown = any(
        value is None for value, argument in zip(values, given, strict=True) if argument is not None
    )
    if unknown or not 0 < width[0] <= abi.CONSTANTS.most_normed:
        return None
    weight, bias = (
        torch.full((width[0],), fill, dtype=torch.float32, device="cpu")
        if value is None
        else value.detach().float().contiguous()
        for value, fill in zip(values, (1.0, 0.0), strict=True)
    )
    epsilon = torch.finfo(torch.float32).eps if a["eps"] is None else float(a["eps"])
    return _Norm(node, _NORMS[name], weight, bias, epsilon)


def _followers(module: fx.GraphModule, norm: _Norm | None, rounded: fx.Node) -> tuple[Any, ...]:
    """Arguments of the new node, inserted where the graph inserts."""
    symmetric = bool(schema_arguments(rounded).get("symmetric", False))
    if norm is None:
        return "none", None, None, 0.0, symmetric
    factors = (
        constant(module, f"{norm.node.name}_{name}_of_rows", value)
        for name, value in (("weight", norm.weight), ("bias", norm.bias))
    )
    return norm.name, *factors, norm.epsilon, symmetric


def _replace_norm(module: fx.GraphModule, norm: _Norm, rounded: fx.Node) -> None:
    keeps, bf16 = len(norm.node.users) > 1, rounded.target is bf16_rows()
    with module.graph.inserting_before(norm.node):
        arguments = (input_node(norm.node), *_followers(module, norm, rounded), keeps, bf16)
        new = call_function(module.graph, norm_rows(), arguments)
        parts = [call_function(module.graph, operator.getitem, (new, number)) for number in range(2)]
    take_over(new, norm.node)
    give_values_of(new)
    new.meta["operators"] = _operators(norm.node)
    _put(new, parts, [norm.node], rounded)


def _replace_product(module: fx.GraphModule, product: fx.Node, norm: _Norm | None, rounded: fx.Node) -> None:
    replaced = [product] if norm is None else [product, norm.node]
    keeps = [len(node.users) > 1 for node in (product, norm.node if norm else rounded)]
    a, bf16 = schema_arguments(product), rounded.target is bf16_rows()
    own = [a[name] for name in ("rows", "weight")] + [a.get("scale")]
    own += [a[name] for name in ("bias", "other", "outputs", "activation", "scalars", "algorithm")]
    with module.graph.inserting_before(product):
        followers = _followers(module, norm, rounded)
        both = keeps[0], norm is not None and keeps[1]
        new = call_function(module.graph, row_chain(), (*own, *followers, *both, bf16))
        parts = [call_function(module.graph, operator.getitem, (new, number)) for number in range(3)]
    take_over(new, product)
    give_values_of(new)
    new.meta["operators"] = [name for node in replaced for name in _operators(node)]
    for key in (DYNAMIC_KERNEL, "bf16_operators"):
        if key in product.meta:
            new.meta[key] = product.meta[key]
    _put(new, [*parts[: len(replaced)], parts[2]], replaced, rounded, shown=parts[0])


def _operators(node: fx.Node) -> list[str]:
    own = node.meta.get("operator")
    return list(node.meta.get("operators", [] if own is None else [own]))


def _put(
    new: fx.Node,
    parts: list[fx.Node],
    replaced: list[fx.Node],
    rounded: fx.Node,
    shown: fx.Node | None = None,
) -> None:
    """Give the parts the places of what they replace; the last one is that of the rounded rows.

    Parts that nothing reads go, but for what is shown: for who compares it, the call keeps it.
    """
    for part, old in zip(parts, [*replaced, rounded], strict=True):
        note_value_of(part, old)
        give_values_of(part, *([] if old is rounded else [old]))
        old.replace_all_uses_with(part)
    for old in (rounded, *reversed(replaced)):
        old.graph.erase_node(old)
    for part in list(new.users):
        if not part.users and part is not shown:
            part.graph.erase_node(part)


OPERATORS = (
    PlannedOperator((norm_rows(),), {"C": row_linears.norm}),
    PlannedOperator((row_chain(),), {"C": row_linears.chain}),
)

"""QDQ graph → a graph whose sums fit kernels that add pairs of products in 16 bits.

Operators that may not fit are quantized again.

Such a kernel multiplies unsigned codes x with signed codes w and adds two products before it widens them.
With 0 <= x <= h a pair fits when h times its weights of one sign, and h times those of the other, fit 16
bits. So of the activation only the highest code counts: how low its codes go makes room for nothing, since
two weights of different signs never exceed 255 * 128. What the graph proves of h is the highest code that its
quantize node gives.

Weights that do not fit are quantized again from their codes, with `nc.numerics.int16_pairs`. The second input
of a matmul, which is not a constant, gets 7 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from nc.formats import Capabilities, TensorFormat
from nc.graph.catalogue import BINARY, WEIGHTED, first_input, groups_of, kind_of_node, weight_axis
from nc.graph.fx_utils import (
    add_constant,
    call_operator,
    constant_of,
    constant_value,
    copy_module,
    drop_unused,
    fqn_of,
)
from nc.graph.plan import Plan
from nc.graph.qdq import QDQGraph
from nc.graph.views import Binary, Dequantize, Quantize, set_argument
from nc.numerics import affine
from nc.numerics.metrics import worst_sqnr_db
from nc.numerics.weights import pairs_fit, quantize_weight
from nc.ops import DEQUANTIZE, QUANTIZE, dequantize_per_channel, dequantize_per_tensor, quantize_per_tensor

_LARGEST = 2**15 - 1
#: Kernels take unsigned activations and signed second inputs; codes of the other kind are shifted by this.
_SHIFT = 128
_ALL_CODES = 255
_NAMED = 5

#: Operators that were quantized again → the call that dequantizes their codes.
_Done = dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]


#: (codes of a weight, output axis, groups, limit) → whether all its pairs fit.
PairsFit = Callable[[torch.Tensor, int | None, int, int], bool]


def saturating(graph: QDQGraph, capabilities: Capabilities, fit: PairsFit = pairs_fit) -> tuple[str, ...]:
    """Return the operators whose sums are not proven to fit the kernels that would run them.

    They are names, in execution order.

    Args:
        graph: the quantized model.
        capabilities: of the engine, with the operators whose sums count.
        fit: which codes of a weight its kernels add as pairs; by default two neighbouring input channels.
    """
    run_so = {d.operator for d in graph.plan.quantized if capabilities.sums_narrow(d.kind, d.spec)}
    nodes = (node for node in graph.module.graph.nodes if node.meta.get("operator") in run_so)
    return tuple(dict.fromkeys(node.meta["operator"] for node in nodes if not _fits(graph.module, node, fit)))


def narrow(graph: QDQGraph, capabilities: Capabilities) -> tuple[QDQGraph, tuple[str, ...]]:
    """Return the graph for an engine and CPU, and which operators were quantized again for it.

    The others keep their codes.

    Args:
        graph: shares its other constants with the result; nothing of it changes.
        capabilities: of the engine that will run it, here.

    Returns:
        A graph whose plan, `changes` and codes tell what was done, and the operators' names; with none of
        them the codes are the same.
    """
    if not capabilities.narrow_sums:
        return graph, ()
    names = saturating(graph, capabilities)
    plan = dataclasses.replace(_narrowed(graph.plan, names), isa=capabilities.isa)
    if not names:
        return dataclasses.replace(graph, plan=plan), ()
    module, _ = copy_module(graph.module)
    done: _Done = {}
    for node in [n for n in module.graph.nodes if n.meta.get("operator") in names]:
        spec = plan[node.meta["operator"]].spec
        if spec.weight is not None:
            for weight in _weights(node):
                _requantize_weight(module, node, weight, spec.weight, done)
        elif spec.right is not None:
            _requantize_input(node, spec.right, done)
    _drop_unused(module)
    changed = dataclasses.replace(graph, module=module, plan=plan, expected=None)
    return dataclasses.replace(changed, changes=(*graph.changes, _account(graph, changed, names))), names


def _fits(module: fx.GraphModule, node: fx.Node, fit: PairsFit) -> bool:
    """Return whether no input whatever can make the sums of an operator saturate."""
    weights = _weights(node)
    highest = _highest_code(first_input(node))
    if not weights:
        return (
            kind_of_node(node) not in BINARY or 2 * highest * _largest_size(Binary.of(node).right) <= _LARGEST
        )
    return all(
        fit(constant_of(module, Dequantize.of(w).codes), *_layout(node), _LARGEST // highest) for w in weights
    )


def _weights(node: fx.Node) -> list[fx.Node]:
    """Return the dequantize nodes of an operator's constant weights."""
    return [
        n for n in node.all_input_nodes if n.target in DEQUANTIZE and Dequantize.of(n).codes.op == "get_attr"
    ]


def _layout(node: fx.Node) -> tuple[int | None, int]:
    """Output axis and groups of an operator's weights."""
    return (weight_axis(node), groups_of(node)) if kind_of_node(node) in WEIGHTED else (0, 1)


def _quantize_of(value: object) -> fx.Node | None:
    """Return the quantize node whose codes a value has, or None."""
    codes = (
        Dequantize.of(value).codes
        if isinstance(value, fx.Node) and value.target is dequantize_per_tensor
        else None
    )
    return codes if codes is not None and codes.target is quantize_per_tensor else None


def _highest_code(value: object) -> int:
    """Return the highest unsigned code of an activation."""
    quantize = _quantize_of(value)
    if quantize is None:
        return _ALL_CODES
    low, high = Quantize.of(quantize).quant_min, Quantize.of(quantize).quant_max
    return max(high + _SHIFT if low < 0 else high, 1)


def _largest_size(value: object) -> int:
    """Return the largest absolute signed code of a matmul's second input.

    It is 0 where it has no codes, and so no integer kernel.
    """
    quantize = _quantize_of(value)
    if quantize is None:
        return 0
    low, high = Quantize.of(quantize).quant_min, Quantize.of(quantize).quant_max
    shift = 0 if low < 0 else _SHIFT
    return max(shift - low, high - shift)


def _requantize_weight(
    module: fx.GraphModule, node: fx.Node, old: fx.Node, spec: TensorFormat, done: _Done
) -> None:
    """Requantize an operator's weight so that it fits; operators that read the same codes alike share it."""
    axis, groups = _layout(node)
    key = (old.args, spec, axis, groups)
    if key not in done:
        done[key] = _new_weight(module, old, spec, axis, groups)
    with module.graph.inserting_before(node):
        operator, arguments = done[key]
        new = call_operator(module.graph, operator, *arguments)
    new.meta["val"] = old.meta.get("val")
    node.replace_input_with(old, new)


def _new_weight(
    module: fx.GraphModule, old: fx.Node, spec: TensorFormat, axis: int | None, groups: int
) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that dequantizes a weight's new codes, which become constants of the graph."""
    value, source = constant_value(module, old), Dequantize.of(old).codes
    assert value is not None
    codes, scale = quantize_weight(value, spec, axis, groups)
    name, fqn, first = f"{source.target}_paired", fqn_of(source), next(iter(module.graph.nodes))
    constant = add_constant(module, first, name, codes, fqn)
    if not scale.dim():
        return dequantize_per_tensor, (constant, float(scale), 0, codes.dtype)
    scale_node = add_constant(module, first, f"{name}_scale", scale, f"{fqn}.scale")
    return dequantize_per_channel, (constant, scale_node, None, axis, codes.dtype)


def _requantize_input(node: fx.Node, spec: TensorFormat, done: _Done) -> None:
    """Give a matmul codes of its second input in 7 bits, for the same range of values.

    Others that read the old codes keep them.
    """
    right, graph = Binary.of(node).right, node.graph
    old = Dequantize.of(right).codes
    if (old, spec) not in done:
        view = Quantize.of(old)
        assert isinstance(view.zero_point, int)
        assert not isinstance(view.scale, fx.Node)
        low, high = (
            torch.tensor((end - view.zero_point) * view.scale, dtype=torch.float32)
            for end in (view.quant_min, view.quant_max)
        )
        limits = {"quant_min": spec.quant_min, "quant_max": spec.quant_max}
        new_scale, new_zero_point = affine.choose_qparams(low, high, symmetric=spec.symmetric, **limits)
        qparams, dtype = (float(new_scale), int(new_zero_point)), spec.dtype.storage
        with graph.inserting_after(old):  # where the value is what it was: operators may change it in place
            codes = call_operator(graph, quantize_per_tensor, view.input, *qparams, *limits.values(), dtype)
        codes.meta["val"] = old.meta.get("val")
        done[old, spec] = dequantize_per_tensor, (codes, *qparams, dtype)
    with graph.inserting_before(node):
        operator, arguments = done[old, spec]
        value = call_operator(graph, operator, *arguments)
    value.meta["val"] = right.meta.get("val")
    set_argument(node, "right", value)


def _drop_unused(module: fx.GraphModule) -> None:
    """Remove the old pairs and codes that nothing reads any more."""
    ours = QUANTIZE | DEQUANTIZE
    for node in reversed(list(module.graph.nodes)):
        if not node.users and node.target in ours:
            module.graph.erase_node(node)
    drop_unused(module)
    module.graph.lint()
    module.recompile()


def _narrowed(plan: Plan, names: tuple[str, ...]) -> Plan:
    decisions = (
        dataclasses.replace(d, spec=d.spec.narrow()) if d.operator in names else d for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=tuple(decisions))


def _account(before: QDQGraph, after: QDQGraph, names: tuple[str, ...]) -> str:
    """Return a line for the report."""
    with torch.no_grad():
        distance = worst_sqnr_db(before.module(*before.example), after.module(*after.example))
    share = f"{len(names)} of {len(after.plan.quantized)} layers"
    return (
        f"re-quantized from int8 for a CPU that adds products in 16 bits: {share}: {named(names)}; outputs "
        f"before and after agree to {distance:.1f} dB, the figure against fp32 is from before"
    )


def named(names: tuple[str, ...]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")

"""Simulated operators in a graph: which ranges they need, and the nodes that simulate their formats.

Constants become codes that dequantize nodes read. Activations go through one node that rounds them to values
of the format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from nc.errors import ConfigError
from nc.formats import TensorFormat
from nc.graph.catalogue import is_float_tensor
from nc.graph.fx_utils import add_constant, call_operator, constant_of, drop_unused
from nc.graph.placement import works_in_place
from nc.graph.plan import Plan
from nc.graph.views import Embedding, Weighted, set_argument
from nc.numerics import affine, fake_quant, weight_mse
from nc.ops import dequantize_float, dequantize_tensor, fake_quantize, fake_quantize_dynamic

#: Kinds that can be simulated though no kernel computes them in integers.
SIMULATED_ONLY = frozenset({"embedding"})
#: (operator, role) → scale and zero point.
Ranges = Mapping[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An activation whose range comes from calibration.

    Attributes:
        operator: name of the operator.
        role: "input" or "output".
        node: the tensor.
        reader: the node before which the tensor has the value that counts.
        form: what it is simulated in.
    """

    operator: str
    role: str
    node: fx.Node
    reader: fx.Node
    form: TensorFormat


def roles_of(node: fx.Node, kind: str) -> dict[str, fx.Node]:
    """Return the tensors of an operator by role: constants, float activations."""
    if kind == "embedding":
        weight = Embedding.of(node).weight
        return {"weight": weight, "output": node} if weight.op == "get_attr" else {}
    view = Weighted.of(node)
    found = {"input": view.input, "output": node}
    found |= {
        role: n
        for role, n in (("weight", view.weight), ("bias", view.bias))
        if n is not None and n.op == "get_attr"
    }
    return {role: n for role, n in found.items() if is_float_tensor(n)}


def static_sites(module: fx.GraphModule, plan: Plan) -> list[Site]:
    """All activations of simulated operators that need calibration."""
    specs = {d.operator: d for d in plan.quantized if d.spec.fake is not None}
    sites = []
    for node in module.graph.nodes:
        decision = specs.get(node.meta.get("operator"))
        if decision is None or decision.spec.fake is None:
            continue
        tensors = roles_of(node, decision.kind)
        for role, spec in decision.spec.fake.roles.items():
            if role in ("input", "output") and not spec.dynamic:
                sites.append(
                    Site(decision.operator, role, tensors[role], node if role == "input" else node.next, spec)
                )
    return sites


def insert_fake_quant(module: fx.GraphModule, plan: Plan, ranges: Ranges) -> None:
    """Simulate the formats of a plan in a graph.

    Args:
        module: changed in place.
        plan: gives the formats of each operator.
        ranges: of all `static_sites`.
    """
    in_place = works_in_place(module)
    decisions = {d.operator: d for d in plan.quantized if d.spec.fake is not None}
    constants: dict[tuple[str, TensorFormat], tuple[fx.Node, ...]] = {}
    inputs: dict[tuple[fx.Node, TensorFormat | str], fx.Node] = {}
    for node in [n for n in module.graph.nodes if n.meta.get("operator") in decisions]:
        decision = decisions[node.meta["operator"]]
        assert decision.spec.fake is not None
        tensors = roles_of(node, decision.kind)
        for role, spec in decision.spec.fake.roles.items():
            source = tensors[role]
            if role in ("weight", "bias"):
                key = str(source.target), spec
                if key not in constants:
                    constants[key] = _constants(module, source, spec, decision.operator)
                set_argument(node, role, _dequantize(module.graph, node, source, constants[key], spec))
            elif role == "input":
                key_of_input = source, spec if spec.dynamic else decision.operator
                if key_of_input not in inputs or in_place:
                    arguments = _arguments(module, node, spec, decision.operator, role, ranges)
                    with module.graph.inserting_before(node):
                        inputs[key_of_input] = _simulate(module.graph, source, spec, arguments)
                set_argument(node, "input", inputs[key_of_input])
            else:
                readers = list(node.users)
                arguments = _arguments(module, node, spec, decision.operator, role, ranges)
                with module.graph.inserting_after(node):
                    simulated = _simulate(module.graph, node, spec, arguments)
                for reader in readers:
                    reader.replace_input_with(node, simulated)
    drop_unused(module)
    module.graph.lint()
    module.recompile()


def constant_codes(
    value: torch.Tensor, spec: TensorFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scale and zero point of a constant.

    Args:
        value: any float tensor.
        spec: resolved.

    Returns:
        Codes of the shape of `value`; scale fp32 and zero point int32 (None: 0) of shape [] per tensor, else
        of the shape of the grid of blocks.

    Raises:
        ConfigError: the blocks do not cover the constant.
    """
    form, block = spec.dtype, spec.granularity.block_size(value.shape)
    value = value.detach().float()
    low, high = affine.block_range(value, block)
    method, seed = spec.round_method, spec.seed
    if spec.algo == "mse":
        rows, grid = affine.block_rows(value, block)
        row = (1, rows.shape[1])

        def rounded(limit: torch.Tensor) -> torch.Tensor:
            scale, zero_point = fake_quant.choose(-limit, limit, spec)
            codes = fake_quant.codes_of(rows, scale, zero_point, form, method, seed, row)
            return fake_quant.values_of(codes, scale, zero_point, form, row)

        low, high = (end.reshape(grid) for end in weight_mse.best_range(rows, rounded))
    scale, zero_point = fake_quant.choose(low, high, spec)
    codes = fake_quant.codes_of(value, scale, zero_point, form, method, seed, block)
    if block == tuple(value.shape):
        return codes, scale.reshape(()), None if zero_point is None else zero_point.reshape(())
    return codes, scale, zero_point


def _constants(
    module: fx.GraphModule, source: fx.Node, spec: TensorFormat, operator: str
) -> tuple[fx.Node, ...]:
    """Nodes of the codes, the scale, and the zero point if there is one."""
    try:
        values = constant_codes(constant_of(module, source), spec)
    except ConfigError as error:
        msg = f"Operator {operator!r}: {source.meta.get('fqn', source.target)} as {spec}: {error}"
        raise ConfigError(msg) from error
    fqn, first = source.meta.get("fqn", str(source.target)), next(iter(module.graph.nodes))
    names = (str(spec.dtype), "scale", "zero_point")
    return tuple(
        add_constant(module, first, f"{source.target}_{name}", value, fqn if i == 0 else f"{fqn}.{name}")
        for i, (name, value) in enumerate(zip(names, values, strict=True))
        if value is not None
    )


def _dequantize(
    graph: fx.Graph, reader: fx.Node, source: fx.Node, constants: Sequence[fx.Node], spec: TensorFormat
) -> fx.Node:
    codes, scale, *rest = constants
    with graph.inserting_before(reader):
        if spec.dtype.kind == "float":
            node = call_operator(graph, dequantize_float, codes, scale, str(spec.dtype))
        else:
            node = call_operator(
                graph, dequantize_tensor, codes, scale, rest[0] if rest else None, spec.dtype.storage
            )
    node.meta["val"] = source.meta["val"]
    return node


def _arguments(
    module: fx.GraphModule, node: fx.Node, spec: TensorFormat, operator: str, role: str, ranges: Ranges
) -> tuple[object, ...]:
    """Return what follows the tensor in the call that simulates it."""
    if spec.dynamic:
        how = str(spec.granularity), spec.symmetric, spec.round_method, spec.scale_dtype, spec.tensor_scale
        return str(spec.dtype), *how, spec.seed
    scale, zero_point = ranges[operator, role]
    first = next(iter(module.graph.nodes))
    name = f"{node.name}_{role}"
    scale_node = add_constant(module, first, f"{name}_scale", scale, f"{operator}.{role}.scale")
    zero_node = (
        None
        if zero_point is None
        else add_constant(module, first, f"{name}_zero_point", zero_point, f"{operator}.{role}.zero_point")
    )
    return scale_node, zero_node, str(spec.dtype), spec.round_method, spec.seed


def _simulate(graph: fx.Graph, source: fx.Node, spec: TensorFormat, arguments: Sequence[object]) -> fx.Node:
    operator = fake_quantize_dynamic if spec.dynamic else fake_quantize
    node = call_operator(graph, operator, source, *arguments)  # type: ignore[arg-type]
    node.meta["val"] = source.meta.get("val")
    return node

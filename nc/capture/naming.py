"""Names of operators: module paths, and paths plus a kind for functional operators."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from nc.formats.reasons import Cause, Reason
from nc.graph import catalogue
from nc.graph.recurrent import why_not_recurrent
from nc.graph.views import Binary, Weighted
from nc.graph.weight_reads import Weight, varying, weights_read, why_float


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """One named operator of a captured graph.

    Attributes:
        name: unique. "encoder.layer.0.attention.self.query", "layer1.0.add", "block.matmul_1"; "shared@1" for
            a second call of a module.
        module_name: the name without call number ("shared"), which rules match too.
        kind: catalogue kind of a quantizable operator, else the ATen name.
        module_type: qualified class name of the innermost module that it runs in.
        node: name of its fx node.
        quantizable: whether some integer kernel exists for its kind.
        why: why it cannot be quantized; None if it can.
        followed_by: the operators after it, as long as each is the only reader of the result before it:
            ("add", "relu").
        weights: the weights that it reads.
    """

    name: str
    module_name: str
    kind: str
    module_type: str
    node: str
    quantizable: bool
    why: Reason | None = None
    followed_by: tuple[str, ...] = ()
    weights: tuple[Weight, ...] = ()

    @property
    def reason(self) -> str:
        """Why it can't be quantized, as text; "" when it can."""
        return "" if self.why is None else str(self.why)


def name_operators(module: fx.GraphModule, model: torch.nn.Module) -> tuple[Operator, ...]:
    """Decide the kind of every node, and name every operator that a user may want to see.

    Names are given in execution order.
    """
    catalogue.decide_kinds(module)
    modules = dict(model.named_modules())
    seen: dict[str, int] = collections.Counter()
    operators = []
    weights = weights_read(module, {name for name, _ in model.named_parameters(remove_duplicate=False)})
    reasons = _reasons(module)
    # users' rules have the names of these, so operators that are listed only because they read a weight are
    # numbered after them
    listed = [node for node in module.graph.nodes if _is_listed(node, reasons)]
    others = [node for node in weights if node not in set(listed)]
    for node in (*listed, *others):
        kind = catalogue.kind_of_node(node)
        shown = kind or catalogue.op_name(node)
        why = _why_not_quantized(node, kind, reasons, reads_weight=node in weights)
        path, owned, module_type = _owner(node, shown, modules)
        base = path if owned else ".".join(filter(None, (path, shown)))
        name = _numbered(base, seen[base], owned=owned)
        seen[base] += 1
        node.meta["operator"] = name
        operators.append(
            Operator(
                name=name,
                module_name=base if owned else name,
                kind=shown,
                module_type=module_type,
                node=node.name,
                quantizable=kind is not None and why is None,
                why=why,
                followed_by=tuple(_chain(node)),
                weights=weights.get(node, ()),
            )
        )
    order = {node.name: i for i, node in enumerate(module.graph.nodes)}
    return tuple(sorted(operators, key=lambda operator: order[operator.node]))


def _numbered(base: str, count: int, *, owned: bool) -> str:
    """Return a unique name for an operator that has `count` operators with the same base before it.

    A module that is called again (`owned`) has the number of the call.
    """
    if count == 0:
        return base
    return f"{base}@{count}" if owned else f"{base}_{count}"


def _why_not_quantized(
    node: fx.Node,
    kind: str | None,
    reasons: Mapping[fx.Node, Reason | None],
    *,
    reads_weight: bool,
) -> Reason | None:
    """Return why an operator can't be quantized; None if it can, or is of no kind that can be quantized."""
    if node not in reasons:
        return catalogue.FLOAT_OPS.get(catalogue.op_name(node)) or (why_float(node) if reads_weight else None)
    why = reasons[node]
    return Cause.CONSTANT_SIDE() if kind == "add" and why is not None else why


def _reasons(module: fx.GraphModule) -> dict[fx.Node, Reason | None]:
    """For each node of a quantizable kind, and each with a low-bit weight, why it can't be quantized.

    It is None where it can.
    """
    activations, changing = _activations(module), varying(module)
    found: dict[fx.Node, Reason | None] = {}
    for node in module.graph.nodes:
        kind = catalogue.kind_of_node(node)
        if catalogue.op_name(node) in catalogue.LOW_BIT:
            found[node] = Cause.LOW_BIT(dtype=catalogue.schema_arguments(node)["dtype"])
        elif kind is not None and (catalogue.is_float_tensor(node) or kind in catalogue.RECURRENT):
            found[node] = _why_not(node, kind, activations, changing)
    return found


def _is_listed(node: fx.Node, reasons: Mapping[fx.Node, Reason | None]) -> bool:
    """Return whether users may look for an operator, whether it reads a weight or not."""
    if node in reasons:
        return not (
            catalogue.kind_of_node(node) == "add" and reasons[node] is not None
        )  # of a constant or of a mask
    op = catalogue.op_name(node)
    return catalogue.is_float_tensor(node) and (
        op in catalogue.FLOAT_OPS or op in catalogue.ACTIVATIONS or op in catalogue.POOLS
    )


def _chain(node: fx.Node) -> Iterator[str]:
    """Names of the additions and activations that a result goes through, as long as nothing else reads it."""
    while len(node.users) == 1:
        (node,) = node.users
        name = catalogue.op_name(node).rstrip("_")
        if name != "add" and name not in catalogue.ACTIVATIONS:
            return
        yield name


def _activations(module: fx.GraphModule) -> set[fx.Node]:
    """Float tensors that depend on data.

    They depend on float inputs or look-ups, not on positions, masks and constants alone.
    """
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        is_source = node.op == "placeholder" or catalogue.op_name(node) in (
            "embedding",
            "embedding_bag",
            "quant_embedding",
        )
        if (is_source and catalogue.is_float_tensor(node)) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _why_not(node: fx.Node, kind: str, activations: set[fx.Node], changing: set[fx.Node]) -> Reason | None:
    """Why an operator of a quantizable kind can't be quantized; None when it can."""
    if kind in catalogue.RECURRENT:
        return why_not_recurrent(node)
    dtype = node.meta["val"].dtype
    if dtype != torch.float32:
        return Cause.NOT_FP32(dtype=dtype)
    if kind in catalogue.WEIGHTED:
        if Weighted.of(node).weight.op != "get_attr":
            return Cause.COMPUTED_WEIGHT()
        if computed := catalogue.computed_options(node):
            return Cause.COMPUTED_OPTIONS(names=", ".join(computed))
        if Weighted.of(node).weight.meta["val"].dim() < 2:
            return Cause.VECTOR_WEIGHT()
        return None if Weighted.of(node).input in changing else Cause.CONSTANT_INPUT()
    left, right = Binary.of(node).sides
    if not {left, right} <= activations:
        return Cause.CONSTANT_SIDE()
    if not (catalogue.is_float_tensor(left) and catalogue.is_float_tensor(right)):
        return Cause.NO_ACTIVATION()
    if kind == "add":
        if Binary.of(node).alpha != 1:
            return Cause.ALPHA()
        if not _same_shape(left, right):
            return Cause.SHAPES_DIFFER()
    return None


def _same_shape(left: fx.Node, right: fx.Node) -> bool:
    """Return whether two shapes are equal without broadcasting.

    A free size can equal any other size, but not a fixed 1.
    """
    a, b = left.meta["val"].shape, right.meta["val"].shape
    return len(a) == len(b) and all(_same_size(x, y) for x, y in zip(a, b, strict=True))


def _same_size(x: object, y: object) -> bool:
    if isinstance(x, int) and isinstance(y, int):
        return x == y
    return not (isinstance(x, int) and x == 1) and not (isinstance(y, int) and y == 1)


def _holder(weight: object) -> str | None:
    """Return the path of the module whose parameter "weight" a node reads.

    None is returned for other nodes, and for no node.
    """
    fqn = weight.meta.get("fqn", "") if isinstance(weight, fx.Node) else ""
    return fqn.removesuffix(".weight") if fqn.endswith(".weight") else None


def _owner(node: fx.Node, kind: str, modules: dict[str, torch.nn.Module]) -> tuple[str, bool, str]:
    """Return (module path, whether the node *is* that module, class of that module)."""
    stack = [entry for entry in node.meta.get("nn_module_stack", {}).values() if isinstance(entry, tuple)]
    path = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
    path = path if path in modules else ""
    weight = Weighted.of(node).weight if kind in catalogue.WEIGHTED else None
    parent = _holder(weight)
    is_inside = parent is not None and (parent == path or parent.startswith(f"{path}." if path else ""))
    if parent in modules and is_inside:
        return parent, True, _class_name(modules[parent])
    inner = modules.get(path)
    own_weight = getattr(inner, "weight", None) if weight is not None else None
    if isinstance(own_weight, torch.Tensor) and path:
        return (
            path,
            True,
            _class_name(inner),
        )  # tied or parametrised weight: stored elsewhere, called as this module
    if kind in catalogue.LOW_BIT and path:
        return path, True, _class_name(inner)
    is_module = weight is None and inner is not None and path and _is_plain(inner)
    return path, bool(is_module), _class_name(inner)


def _is_plain(module: torch.nn.Module) -> bool:
    """Tell whether a torch.nn module is one operator: no children, and not a container."""
    return type(module).__module__.startswith("torch.nn.modules") and not any(True for _ in module.children())


def _class_name(module: torch.nn.Module | None) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}" if module is not None else ""

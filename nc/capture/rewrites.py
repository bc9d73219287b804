"""Rewrites from an exported program to plain inference operators; one visible, ordered list (`normalise`)."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from nc.capture.decompose import decompose_attention
from nc.capture.fold_numbers import drop_neutral_numbers, fold_numbers_behind, fold_numbers_in_front
from nc.capture.recurrent import steps_as_one
from nc.errors import CaptureError
from nc.graph.catalogue import (
    CHECKS,
    CONVOLUTIONS,
    IDENTITIES,
    POOLS,
    WEIGHTED,
    computed_options,
    first_input,
    input_node,
    may_be_view,
    op_name,
    schema_arguments,
    works_in_place,
)
from nc.graph.fx_utils import (
    add_constant,
    call_function,
    constant_number,
    constant_value,
    drop_unused,
    fqn_of,
    retarget,
    take_over,
)
from nc.graph.numbers import is_varying
from nc.graph.schemas import schema_of
from nc.graph.views import Binary, Weighted, returned, set_argument

aten = torch.ops.aten
#: Operators in place whose functional form gives booleans, and int64 of integers, whatever they are given.
_GIVES_BOOL = frozenset(
    {
        *("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "not_equal_", "less_", "less_equal_", "greater_"),
        *("greater_equal_", "logical_and_", "logical_not_", "logical_or_", "logical_xor_"),
    }
)
_GIVES_INT64 = frozenset({"cumprod_", "cumsum_"})
#: See `own_inputs`.
Written = tuple[tuple[fx.Node, ...], tuple[tuple[int, int], ...]]


def normalise(
    module: fx.GraphModule, own: int, reads: int = 0, first: Sequence[Callable[[fx.GraphModule], object]] = ()
) -> Written:
    """All rewrites, in order; each leaves a valid graph.

    Args:
        module: changed in place.
        own: see `own_inputs`.
        reads: likewise.
        first: rewrites that come before the list of this module.

    Returns:
        What the model writes: see `own_inputs`.
    """
    for rewrite in (*first, steps_as_one, drop_checks, drop_identities):
        rewrite(module)
        _sweep(module)
    written = own_inputs(module, own, reads)
    for rewrite in REWRITES:
        rewrite(module)
        _sweep(module)
    module.graph.lint()
    module.recompile()
    return written


def drop_checks(module: fx.GraphModule) -> None:
    """Remove export's run-time assertions; `Signature.bind` checks the inputs."""
    for node in reversed(module.graph.nodes):
        if op_name(node) in CHECKS and not node.users:
            module.graph.erase_node(node)


def own_inputs(module: fx.GraphModule, own: int, reads: int) -> Written:
    """Copy each input that the model writes, so that the graph changes none.

    The graph gives the copy as a further output.

    Args:
        module: changed in place.
        own: how many of its first outputs are those of the model.
        reads: how many of its last outputs are `value_reads`. Those in between are new entries of containers.

    Returns:
        The inputs that are written, whose values are new outputs before the last `reads`; and (output,
        value) for each output of the model that is a new entry or a written input itself, which is taken out.
        Values are counted from the first entry.

    Raises:
        CaptureError: the model changes its own buffer. A graph has no state, so it cannot.
    """
    written: dict[fx.Node, fx.Node] = {}
    for root in dict.fromkeys(root for node in module.graph.nodes for root in map(_root, _changed_by(node))):
        if root.op not in ("placeholder", "get_attr"):
            continue
        if root.op == "get_attr" and not _is_lifted(root):
            name = str(root.meta.get("fqn"))
            msg = f"The model changes its buffer {name!r} while it runs; a quantized graph has no state. "
            if name.endswith("inv_freq"):  # of transformers' rope types "longrope" and "dynamic"
                msg += (
                    "Its rotary positions change with the length of the text. Choose another rope type, or "
                    "quantize weights alone, which captures nothing: WeightOnlyConfig."
                )
            else:
                msg += "Move that out of forward."
            raise CaptureError(msg)
        with module.graph.inserting_after(root):
            copy = call_function(module.graph, aten.clone.default, (root,))
        copy.meta["val"] = root.meta["val"]
        root.replace_all_uses_with(copy, delete_user_cb=functools.partial(operator.is_not, copy))
        if root.op == "placeholder":
            written[root] = copy
    outputs = returned(module)
    last = len(outputs) - reads
    values = [*outputs[own:last], *written.values()]
    place = {node: i for i, node in reversed([*enumerate(map(_itself, values))]) if isinstance(node, fx.Node)}
    same = {i: place[node] for i, node in enumerate(map(_itself, outputs[:own])) if node in place}
    kept = [output for i, output in enumerate(outputs[:own]) if i not in same]
    module.graph.output_node().args = ((*kept, *values, *outputs[last:]),)
    return tuple(written), tuple(same.items())


def _itself(node: object) -> object:
    """Return what an operator in place returns: the value that it changed."""
    while (
        isinstance(node, fx.Node)
        and works_in_place(node)
        and (changed := next(_changed_by(node), None)) is not None
    ):
        node = changed
    return node


def _changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that an operator changes."""
    if works_in_place(node):
        arguments = schema_arguments(node)
        for argument in schema_of(node.target):
            if argument.written:
                given = arguments.get(argument.name)
                yield from (
                    n
                    for n in (given if isinstance(given, (list, tuple)) else [given])
                    if isinstance(n, fx.Node)
                )


def _root(node: fx.Node) -> fx.Node:
    """Return what a value is a view of, or a changed form of; itself if it is none."""
    while may_be_view(node) or works_in_place(node):
        source = next(_changed_by(node), None) if works_in_place(node) else first_input(node)
        if source is None:
            break
        node = source
    return node


def _is_lifted(node: fx.Node) -> bool:
    """Return whether a constant is written in `forward` (`torch.tensor(0.0)`): each call makes a new one."""
    return str(node.meta.get("fqn", "")).startswith(("lifted_tensor", "c_lifted", "_tensor_constant"))


def views(module: fx.GraphModule) -> None:
    """`view` becomes `reshape`, because the rewrites below may change the strides that `view` needs."""
    for node in module.graph.nodes:
        if node.target is aten.view.default:
            retarget(node, aten.reshape.default)


def flattens(module: fx.GraphModule) -> None:
    """`flatten` becomes `reshape` with sizes that are read from the inputs.

    Fusers look through `reshape` and not through `flatten`.
    """
    for node in [n for n in module.graph.nodes if n.target is aten.flatten.using_ints]:
        a = schema_arguments(node)
        shape = list(a["self"].meta["val"].shape)
        if not shape:
            continue
        start, end = a["start_dim"] % len(shape), a["end_dim"] % len(shape)
        merged = shape[start : end + 1]
        sizes = [_size(module, s) for s in shape[:start]]
        sizes += [math.prod(merged) if all(isinstance(s, int) for s in merged) else -1]
        sizes += [_size(module, s) for s in shape[end + 1 :]]
        if None not in sizes:
            retarget(node, aten.reshape.default)
            node.args, node.kwargs = (a["self"], sizes), {}


def _size(module: fx.GraphModule, size: int | torch.SymInt) -> int | fx.Node | None:
    """Return a size as an argument of an operator: an int, or a new node that reads it from an input.

    None if no input has this size.
    """
    if isinstance(size, int):
        return size
    inputs = [
        n for n in module.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    for node in inputs:
        for dim, other in enumerate(node.meta["val"].shape):
            if not isinstance(other, int) and other.node.expr == size.node.expr:
                with module.graph.inserting_after(inputs[-1]):
                    read = call_function(module.graph, aten.sym_size.int, (node, dim))
                read.meta["val"] = size
                return read
    return None


def pool_strides(module: fx.GraphModule) -> None:
    """Give a pool without a stride its default stride, its window.

    So all later stages find numbers.
    """
    for node in module.graph.nodes:
        if op_name(node) in POOLS and schema_arguments(node).get("stride") == []:
            set_argument(node, "stride", schema_arguments(node)["kernel_size"])


def drop_identities(module: fx.GraphModule) -> None:
    """Remove what changes nothing: dropout, detach, conversions and copies.

    The conversions are to the dtype that a tensor already has, the copies of a tensor to itself. Export makes
    such a copy where `forward` assigns a buffer to itself: `self.table = self.table.to(x.device)`.
    """
    for node in list(module.graph.nodes):
        if (
            op_name(node) in IDENTITIES
            or (_is_same_dtype_cast(node) and not _is_asked_copy(node))
            or _is_copy_to_itself(node)
        ):
            _replace(node, input_node(node))


def _is_copy_to_itself(node: fx.Node) -> bool:
    return node.target is aten.copy_.default and first_input(node) is schema_arguments(node)["src"]


def _is_same_dtype_cast(node: fx.Node) -> bool:
    source = first_input(node) if op_name(node) in ("to", "type_as", "_to_copy") else None
    if source is None:
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype == after.dtype
    )


def _is_asked_copy(node: fx.Node) -> bool:
    """Return whether a cast was asked to copy its input, and something is then written in the copy."""
    asked = op_name(node) == "_to_copy" or schema_arguments(node).get("copy", False)
    return asked and any(map(works_in_place, node.graph.nodes))


def functionalise(module: fx.GraphModule) -> None:
    """`x.relu_()` → `relu(x)`, if x is a new value, or the only view of one, and no view of it exists.

    Other operators in place stay as they are.

    So does one between dtypes: `half.add_(single)` gives half, `half.add(single)` gives single.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        functional = _functional_overload(node)
        if functional is None:
            continue
        target = first_input(node)
        if target is None or not _is_new_memory(target) or _promotes(node, target):
            continue
        if any(may_be_view(user) for user in target.users):
            continue
        retarget(node, functional)
        for user in list(target.users):
            if user is not node and order[user] > order[node]:
                user.replace_input_with(target, node)


def _is_new_memory(target: fx.Node) -> bool:
    """Return whether a value is new, or a view of a new value that nothing else reads."""
    while may_be_view(target):
        source = first_input(target)
        if source is None or len(source.users) > 1:
            return False
        target = source
    # the result of an operator that stays in place is memory that others read too
    return target.op not in ("placeholder", "get_attr") and not works_in_place(target)


def _promotes(node: fx.Node, target: fx.Node) -> bool:
    """Whether the functional form of an operator in place may give another dtype than what it changes has."""
    own = target.meta["val"].dtype
    if op_name(node) in _GIVES_BOOL:
        return own is not torch.bool
    if op_name(node) in _GIVES_INT64 and not own.is_floating_point and not own.is_complex:
        return own is not torch.int64
    others = {
        n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)
    } - {own}
    return op_name(node) != "copy_" and any(
        other.is_floating_point == own.is_floating_point and other is not torch.bool for other in others
    )


def _functional_overload(node: fx.Node) -> Callable[..., torch.Tensor] | None:
    name = op_name(node)
    if not name.endswith("_") or name.endswith("__") or not isinstance(node.target, torch._ops.OpOverload):
        return None
    packet = getattr(aten, name[:-1], None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    taken = _taken(node.target)  # `pow_.Scalar` takes what `pow.Tensor_Scalar` does
    return next((each for each in overloads if _taken(each) == taken), None)


def _taken(operator: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Return names and types of the arguments of an operator."""
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


def constant_numbers(module: fx.GraphModule) -> None:
    """`item` of a constant becomes the number: plans can't follow numbers out of tensors.

    Detectors keep the strides of levels so.
    """
    for node in [n for n in module.graph.nodes if op_name(n) in ("item", "_local_scalar_dense")]:
        number = constant_number(module, node)
        if number is not None:
            _replace_by_number(node, number)


def _replace_by_number(node: fx.Node, number: float) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)
    node.graph.erase_node(node)


def linears(module: fx.GraphModule) -> None:
    """`addmm`, `mm` and `matmul` with a constant matrix become `linear`.

    A weight that is computed from constants becomes a constant.
    """
    for node in list(module.graph.nodes):
        name = op_name(node)
        if name == "addmm":
            a = schema_arguments(node)
            if a["alpha"] == a["beta"] == 1:
                _to_linear(module, node, a["mat1"], a["mat2"], a["self"])
        elif name in ("mm", "matmul"):
            _to_linear(module, node, *Binary.of(node).sides, None)
        elif name in WEIGHTED and (weight := Weighted.of(node).weight).op != "get_attr":
            value = constant_value(module, weight)
            if value is not None:
                set_argument(
                    node, "weight", add_constant(module, node, f"{node.name}_weight", value, fqn_of(weight))
                )


def _to_linear(module: fx.GraphModule, node: fx.Node, x: fx.Node, w: fx.Node, bias: fx.Node | None) -> None:
    value = constant_value(module, w)
    if value is None or value.dim() != 2 or constant_value(module, x) is not None:
        return
    if bias is not None and (not isinstance(bias, fx.Node) or bias.meta["val"].dim() != 1):
        return
    fqn = fqn_of(w)
    weight = add_constant(module, node, f"{fqn}_t", value.t(), fqn)
    retarget(node, aten.linear.default)
    node.args = (x, weight, bias)
    node.kwargs = {}


def batched_matmul(module: fx.GraphModule) -> None:
    """`matmul` of two 3-D tensors with the same batch is `bmm`, which integer kernels exist for."""
    for node in module.graph.nodes:
        if node.target is aten.matmul.default:
            a, b = (n.meta["val"].shape for n in Binary.of(node).sides)
            if len(a) == len(b) == 3 and str(a[0]) == str(b[0]):
                retarget(node, aten.bmm.default)


def tensor_limits(module: fx.GraphModule) -> None:
    """Replace `clamp` with tensors as limits by `maximum` and `minimum`.

    Later stages take `clamp` for a function of one value.
    """
    for node in [n for n in module.graph.nodes if n.target is aten.clamp.Tensor]:
        a = schema_arguments(node)
        result = a["self"]
        for target, limit in ((aten.maximum.default, a["min"]), (aten.minimum.default, a["max"])):
            if limit is not None:
                with module.graph.inserting_before(node):
                    result = call_function(module.graph, target, (result, limit))
                take_over(result, node)
        _replace(node, result)


def single_slopes(module: fx.GraphModule) -> None:
    """`prelu` with one slope for all channels is `leaky_relu`, which kernels compute."""
    for node in [n for n in module.graph.nodes if op_name(n) == "prelu"]:
        a = schema_arguments(node)
        slope = constant_value(module, a["weight"])
        if slope is not None and slope.numel() == 1:
            retarget(node, aten.leaky_relu.default)
            node.args, node.kwargs = (a["self"], float(slope)), {}


def factors_of_sums(module: fx.GraphModule) -> None:
    """Write `x + alpha * y` as a product and a sum: kernels add without a factor, and layers take it in."""
    for node in [n for n in module.graph.nodes if op_name(n) in ("add", "sub", "rsub")]:
        if computed_options(node) or node.meta["val"].dtype is not torch.float32:
            continue
        operation = Binary.of(node)
        # b - alpha * a, for rsub
        scaled = "left" if op_name(node) == "rsub" else "right"
        side = getattr(operation, scaled)
        if (
            operation.alpha == 1
            or not is_varying(module, side)
            or side.meta["val"].dtype is not torch.float32
        ):
            continue
        with module.graph.inserting_before(node):
            product = call_function(module.graph, aten.mul.Tensor, (side, float(operation.alpha)))
        take_over(product, side)
        product.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        set_argument(node, scaled, product)
        set_argument(node, "alpha", 1)


def batched_convolutions(module: fx.GraphModule) -> None:
    """Give convolutions without a batch dimension one of size 1, which kernels need."""
    for node in [n for n in module.graph.nodes if op_name(n) in WEIGHTED and op_name(n) != "linear"]:
        x = Weighted.of(node).input
        if x.meta["val"].dim() != Weighted.of(node).weight.meta["val"].dim() - 1:
            continue
        with module.graph.inserting_before(node):
            batch = call_function(module.graph, aten.unsqueeze.default, (x, 0))
        take_over(batch, x)
        batch.meta.update(
            val=x.meta["val"].unsqueeze(0), nn_module_stack=node.meta.get("nn_module_stack", {})
        )
        with module.graph.inserting_after(node):
            back = call_function(module.graph, aten.squeeze.dim, (node, 0))
        take_over(back, node)
        node.replace_all_uses_with(back, delete_user_cb=functools.partial(operator.is_not, back))
        set_argument(node, "input", batch)
        node.meta["val"] = node.meta["val"].unsqueeze(0)


def explicit_padding(module: fx.GraphModule) -> None:
    """`padding="same"` and "valid" become numbers, which kernels need.

    If the two sides differ, a padding is put in front.
    """
    for node in module.graph.nodes:
        name = op_name(node)
        if name not in CONVOLUTIONS or node.target._overloadname != "padding" or computed_options(node):
            continue
        arguments = schema_arguments(node)
        kernel = arguments["weight"].meta["val"].shape[2:]
        dilation = list(arguments["dilation"])
        dilation = dilation * len(kernel) if len(dilation) == 1 else dilation
        totals = [
            0 if arguments["padding"] == "valid" else d * (k - 1)
            for d, k in zip(dilation, kernel, strict=True)
        ]
        if any(t % 2 for t in totals):  # the end gets the larger half. `pad` lists the last dimension first
            with module.graph.inserting_before(node):
                x, ends = arguments["input"], [end for t in reversed(totals) for end in (t // 2, t - t // 2)]
                arguments["input"] = padded = call_function(
                    module.graph, aten.constant_pad_nd.default, (x, ends, 0.0)
                )
            take_over(padded, node)
            padded.meta["val"] = aten.constant_pad_nd.default(x.meta["val"], ends, 0.0)
            totals = [0] * len(totals)
        arguments["padding"] = [t // 2 for t in totals]
        retarget(node, getattr(aten, name).default)
        node.args, node.kwargs = tuple(arguments.values()), {}


def fold_padding(module: fx.GraphModule) -> None:
    """Make a padding with zeros, equal on both sides, that of the convolution that reads it.

    This is done if nothing else reads it.
    """
    for node in list(module.graph.nodes):
        name = op_name(node)
        if name not in CONVOLUTIONS or node.target._overloadname != "default" or computed_options(node):
            continue
        arguments = schema_arguments(node)
        pad = arguments["input"]
        if op_name(pad) not in ("pad", "constant_pad_nd") or len(pad.users) != 1:
            continue
        dims = arguments["weight"].meta["val"].dim() - 2
        added = _zeros_per_side(pad, dims)
        if added is None:
            continue
        own = list(arguments["padding"]) * (dims if len(arguments["padding"]) == 1 else 1)
        arguments["padding"] = [a + b for a, b in zip(own, added, strict=True)]
        arguments["input"] = schema_arguments(pad)["self"]
        node.args, node.kwargs = tuple(arguments.values()), {}


def _zeros_per_side(pad: fx.Node, dims: int) -> list[int] | None:
    """Return how many zeros a padding adds on each side of the last `dims` dimensions; None for another."""
    arguments = schema_arguments(pad)
    sizes = arguments["pad"]
    is_zero = arguments.get("mode", "constant") == "constant" and arguments.get("value") in (None, 0, 0.0)
    if not is_zero or len(sizes) > 2 * dims or not all(isinstance(s, int) and s >= 0 for s in sizes):
        return None
    # pad lists the last dimension first
    sides = [tuple(sizes[i : i + 2]) for i in range(0, len(sizes), 2)][::-1]
    if any(low != high for low, high in sides):
        return None
    return [0] * (dims - len(sides)) + [low for low, _ in sides]


def fold_batch_norm(module: fx.GraphModule) -> None:
    """Fold a batch norm after a conv or linear into that operator.

    It is computed in float64 (Jacob et al., arXiv 1712.05877, section 3.2).
    """
    for node in list(module.graph.nodes):
        if op_name(node) != "batch_norm":
            continue
        producer = input_node(node)
        kind = op_name(producer)
        if (
            kind not in WEIGHTED
            or len(producer.users) != 1
            or (kind == "linear" and producer.meta["val"].dim() != 2)
        ):
            continue
        bn = schema_arguments(node)
        gamma, beta, mean, var = (
            constant_value(module, bn[k]) for k in ("weight", "bias", "running_mean", "running_var")
        )
        conv = schema_arguments(producer)
        weight = constant_value(module, conv["weight"])
        bias = constant_value(module, conv["bias"])
        if (
            bn["training"]
            or mean is None
            or var is None
            or weight is None
            or (conv["bias"] is not None and bias is None)
        ):
            continue
        if kind.startswith("conv_transpose") and conv["groups"] != 1:
            continue
        factor = (var.double() + bn["eps"]).rsqrt() * (1.0 if gamma is None else gamma.double())
        axis = 1 if kind.startswith("conv_transpose") else 0
        new_weight, new_bias = _folded(weight, bias, factor, mean, beta, axis)
        fqn = conv["weight"].meta["fqn"]
        conv["weight"] = add_constant(module, producer, f"{fqn}_folded", new_weight, fqn)
        conv["bias"] = add_constant(
            module, producer, f"{fqn}_folded_bias", new_bias, fqn.removesuffix("weight") + "bias"
        )
        producer.args, producer.kwargs = tuple(conv.values()), {}
        # what bias absorption knows of the output without data: float64 [channels]
        producer.meta["output_mean"] = torch.zeros_like(factor) if beta is None else beta.double()
        producer.meta["output_std"] = torch.ones_like(factor) if gamma is None else gamma.double().abs()
        _replace(node, producer)


def _folded(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    factor: torch.Tensor,
    mean: torch.Tensor,
    beta: torch.Tensor | None,
    axis: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias that give `(w x + b - mean) * factor + beta` at once.

    Args:
        weight: output channels along `axis`.
        bias: shape [channels]; None: 0.
        factor: float64 [channels].
        mean: shape [channels].
        beta: shape [channels]; None: 0.
        axis: of the weight.
    """
    shape = [-1 if d == axis else 1 for d in range(weight.dim())]
    new_weight = (weight.double() * factor.reshape(shape)).to(weight.dtype)
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    new_bias = (shift * factor + (0.0 if beta is None else beta.double())).to(weight.dtype)
    return new_weight, new_bias


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _sweep(module: fx.GraphModule) -> None:
    """Remove dead nodes and the constants that only they used."""
    module.graph.eliminate_dead_code(
        lambda n: (
            n.op in ("placeholder", "output")
            or (isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable)
        )
    )
    drop_unused(module)


#: The order matters: `functionalise` looks for views, and `fold_batch_norm` needs constant weights.
REWRITES: tuple[Callable[[fx.GraphModule], None], ...] = (
    functionalise,
    views,
    flattens,
    pool_strides,
    constant_numbers,
    decompose_attention,
    linears,
    batched_matmul,
    tensor_limits,
    explicit_padding,
    batched_convolutions,
    fold_padding,
    single_slopes,
    drop_neutral_numbers,
    factors_of_sums,
    fold_numbers_behind,
    fold_batch_norm,
    fold_numbers_behind,
    fold_numbers_in_front,
)


def share_equal(module: fx.GraphModule) -> None:
    """Compute equal calls once; not those that read memory which the graph changes, nor random ones."""
    graph, first = module.graph, dict[tuple[Any, str, str], fx.Node]()
    changing = _read_what_changes(graph)
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or node in changing:
            continue
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        equal = first.setdefault((target, str(node.args), str(node.kwargs)), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)


def _read_what_changes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values depend on when they are computed."""
    found = {_root(changed) for node in graph.nodes for changed in _changed_by(node)}
    for node in graph.nodes:
        is_size = node.target is torch.ops.aten.sym_size.int
        if not is_size and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found

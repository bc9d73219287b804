"""Layer norm and RMS norm.

Those that a model writes as single operators become one call: up to ten passes over a tensor become one.

    centred = x - x.mean(d, keepdim=True)
    y = centred / (centred.pow(2).mean(d, keepdim=True) + eps).sqrt() * weight + bias

is the layer norm of ConvNeXt, Segment Anything and Detectron2, of the channels of images, and

    y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

the RMS norm of T5, Llama and others (B. Zhang and R. Sennrich, arXiv 1910.07467, equation 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.fuse import constant
from nc.backends.native.operators.elementwise import in_c
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.c_functions import FLOATS, NUMBERS, as_fp32, function
from nc.backends.native.plans.operands import Later, PlanTensor, check_sizes
from nc.backends.native.plans.products import with_qparams
from nc.backends.native.plans.readers import only_quantized
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import OutputCodes, PlannedOperator, Refused, need, why_refused
from nc.backends.native.regions import only_user
from nc.graph.catalogue import first_input, op_name, schema_arguments, works_in_place
from nc.graph.fx_utils import call_function, constant_value, give_values_of, take_over
from nc.graph.tensor_meta import TENSORS, Traced, same_shape
from nc.graph.views import Binary
from nc.kernels.onednn.descriptions import DST, SCALE, SHIFT, SRC, Attributes, contiguous_strides

_aten = torch.ops.aten
#: In reports, of norms that stay in single operators.
NAME = "norm"
#: Roots of a variance, and how a norm takes them.
_ROOTS = {"sqrt": "div", "rsqrt": "mul"}


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """A norm over one dimension.

    Attributes:
        input: fp32.
        dim: which, counted from 0.
        eps: what is added to the variance, or to the mean square.
        centred: it is a layer norm; an RMS norm takes no mean off.
        weight: fp32, [size of the dimension], or None.
        bias: the same.
        nodes: everything that computes it, in order; the last gives the result.
    """

    input: fx.Node
    dim: int
    eps: float
    centred: bool
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    nodes: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Spread:
    """The mean of squares along a dimension: of `input`, or of what is left of it without its mean.

    `nodes` compute it.
    """

    input: fx.Node
    dim: int
    centred: bool
    nodes: frozenset[fx.Node]


def recompose_norms(module: fx.GraphModule) -> None:
    """Replace every norm in single operators by `layer_norm` or `rms_norm`."""
    order = _order(module)
    for node in list(module.graph.nodes):
        try:
            found = norm_of(module, node, order)
        except Refused:  # `why_not_norm` tells
            continue
        if found is not None:
            _replace(module, found)


def why_not_norm(node: fx.Node) -> str:
    """Why `recompose_norms` leaves the norm in single operators that has this root; "" for other nodes."""
    module = node.graph.owning_module
    assert module is not None, "passes run on modules"
    return why_refused(norm_of, module, node, _order(module)) if op_name(node) in _ROOTS else ""


def _order(module: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: place for place, node in enumerate(module.graph.nodes)}


def norm_of(module: fx.GraphModule, root: fx.Node, order: dict[fx.Node, int]) -> Norm | None:
    """Return the norm that divides by a square root, or multiplies by the reciprocal of one.

    None is returned where there is none.

    Args:
        module: the graph, for constants.
        root: the node of the root.
        order: places of all nodes.

    Raises:
        Refused: it can't be one call.
    """
    shifted = first_input(root) if op_name(root) in _ROOTS else None
    if shifted is None:
        return None
    variance, eps = _number_apart(shifted)
    spread = None if variance is None else _spread(variance)
    last = next((user for user in root.users if _divided(root, user) is not None), None)
    top = None if last is None else _divided(root, last)
    if variance is None or spread is None or last is None or top is None or not eps >= 0:
        return None
    x, dim = spread.input, spread.dim
    if (_without_mean(top, dim) if spread.centred else top) is not x:
        return None
    need(is_fp32(x), "its input is not fp32")
    need(isinstance(x.meta["val"].shape[dim], int), "the size of its dimension is free")
    inner = {*spread.nodes, *(_difference(top) if spread.centred else ()), variance, shifted, root, last}
    last, weight = _constant_behind(module, last, x, dim, "mul")
    inner.add(last)
    bias = None
    if spread.centred:
        last, bias = _constant_behind(module, last, x, dim, "add")
        inner.add(last)
    readers = {user for node in inner if node is not last for user in node.users}
    need(readers <= inner, "its parts are read elsewhere too")
    nodes = tuple(sorted(inner, key=order.__getitem__))
    # what is read later could have been changed by then
    meanwhile = list(order)[order[nodes[0]] : order[nodes[-1]]]
    need(not any(map(works_in_place, meanwhile)), "something is changed in place between its parts")
    return Norm(x, dim, eps, spread.centred, weight, bias, nodes)


def _spread(node: fx.Node) -> _Spread | None:
    """Return what a node computes, if that is a variance or a mean of squares.

    The variance is without Bessel's correction.
    """
    dim, source = _kept_dim(node), first_input(node)
    if dim is None or source is None:
        return None
    if op_name(node) == "var":
        return _Spread(source, dim, True, frozenset()) if _divides_by_all(node) else None
    squared = first_input(source) if op_name(node) == "mean" and _is_square(source) else None
    if squared is None:
        return None
    x = _without_mean(squared, dim)
    if x is None:
        return _Spread(squared, dim, False, frozenset({source}))
    return _Spread(x, dim, True, frozenset({source, *_difference(squared)}))


def _divides_by_all(variance: fx.Node) -> bool:
    """Return whether a variance divides by the number of values, not by one less."""
    a = schema_arguments(variance)
    return a.get("correction") == 0 or a.get("unbiased") is False


def _is_square(node: fx.Node) -> bool:
    a = schema_arguments(node) if node.op == "call_function" else {}
    by_itself = op_name(node) == "mul" and a["self"] is a["other"]
    return by_itself or op_name(node) == "square" or (op_name(node) == "pow" and a.get("exponent") == 2)


def _without_mean(node: fx.Node, dim: int) -> fx.Node | None:
    """Return what a node subtracts the mean along a dimension from."""
    if op_name(node) != "sub" or Binary.of(node).alpha != 1:
        return None
    left, mean = Binary.of(node).sides
    return left if isinstance(left, fx.Node) and _is_mean(mean, left, dim) else None


def _is_mean(node: object, of: fx.Node, dim: int) -> bool:
    return (
        isinstance(node, fx.Node)
        and op_name(node) == "mean"
        and _kept_dim(node) == dim
        and first_input(node) is of
    )


def _difference(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return a difference, and the mean that it subtracts."""
    return node, Binary.of(node).right


def _divided(root: fx.Node, last: fx.Node) -> fx.Node | None:
    """Return what is divided by a square root, or multiplied by the reciprocal of one."""
    takes_root = op_name(last) == _ROOTS[op_name(root)] and Binary.of(last).rounding_mode is None
    left, right = Binary.of(last).sides if takes_root else (None, None)
    top = left if right is root else right if op_name(last) == "mul" else None
    return top if isinstance(top, fx.Node) and top is not root else None


def _constant_behind(
    module: fx.GraphModule, last: fx.Node, x: fx.Node, dim: int, name: str
) -> tuple[fx.Node, torch.Tensor | None]:
    """Return the product or sum of `last` and a constant, and that constant as [size].

    The constant has one value per place of a dimension. `last` and None are returned where
    something else follows.
    """
    user, shape = only_user(last), x.meta["val"].shape
    if (
        user is None
        or op_name(user) != name
        or Binary.of(user).alpha != 1
        or not same_shape(user.meta["val"].shape, shape)
    ):
        return last, None
    left, right = Binary.of(user).sides
    value, size = constant_value(module, right if left is last else left), shape[dim]
    if value is None or value.dtype is not torch.float32 or value.dim() > len(shape) or value.numel() != size:
        return last, None
    if size > 1 and (value.dim() < len(shape) - dim or value.shape[dim - len(shape)] != size):
        return last, None
    return user, value.detach().reshape(size)


def _replace(module: fx.GraphModule, norm: Norm) -> None:
    last, shape = norm.nodes[-1], norm.input.meta["val"].shape
    before = [*range(norm.dim), *range(norm.dim + 1, len(shape)), norm.dim]
    moves = norm.dim < len(shape) - 1
    with module.graph.inserting_before(last):
        moved = norm.input
        if moves:
            moved = call_function(module.graph, _aten.permute.default, (norm.input, before))
            moved.meta["val"] = Traced(torch.float32, tuple(shape[dim] for dim in before))
        weight, bias = (
            None if value is None else constant(module, f"{last.name}_{name}", value)
            for name, value in (("weight", norm.weight), ("bias", norm.bias))
        )
        if norm.centred:
            call = call_function(
                module.graph, _aten.layer_norm.default, (moved, [shape[norm.dim]], weight, bias, norm.eps)
            )
        else:
            call = call_function(
                module.graph, _aten.rms_norm.default, (moved, [shape[norm.dim]], weight, norm.eps)
            )
        take_over(call, last)
        call.meta["operators"] = [
            node.meta["operator"] for node in reversed(norm.nodes) if "operator" in node.meta
        ]
        result = call
        if moves:
            give_values_of(call)
            call.meta["val"] = moved.meta["val"]
            result = call_function(
                module.graph, _aten.permute.default, (call, [before.index(dim) for dim in range(len(shape))])
            )
            result.meta["val"] = last.meta["val"]
            give_values_of(result, last)
    last.replace_all_uses_with(result)
    for node in reversed(norm.nodes):
        module.graph.erase_node(node)


def _kept_dim(node: fx.Node) -> int | None:
    """Return the one dimension along which a node reduces, and which it keeps, counted from 0."""
    a, x = schema_arguments(node) if node.op == "call_function" else {}, first_input(node)
    keeps = x is not None and a.get("keepdim") and a.get("dtype") in (None, torch.float32)
    given, rank = a.get("dim"), x.meta["val"].dim() if x is not None and keeps else 0
    dims = [given] if isinstance(given, int) else given or []
    return dims[0] % rank if len(dims) == 1 and rank else None


def _number_apart(node: fx.Node) -> tuple[fx.Node | None, float]:
    """Return the tensor and the number that a node adds; another node adds 0, and of no tensor is None."""
    if op_name(node) != "add":
        return node, 0.0
    left, right = Binary.of(node).sides if Binary.of(node).alpha == 1 else (None, None)
    if isinstance(right, fx.Node):
        left, right = right, left
    if isinstance(left, fx.Node) and isinstance(right, int | float):
        return left, float(right)
    return None, 0.0


def is_fp32(node: fx.Node) -> bool:
    """Return whether a node gives a tensor in fp32."""
    value = node.meta.get("val")
    return isinstance(value, TENSORS) and value.dtype is torch.float32


# ---- how plans compute them ----


def layer_norm(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::layer_norm` over the last dimension by oneDNN."""
    x, weight, bias = _given(recorder, node, a)
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), torch.float32)
    primitive = recorder.maker.layer_norm(x.desc, result.desc, a["eps"], Attributes())
    recorder.call(
        primitive, {SRC: x, DST: result, SCALE: weight.contiguous(), SHIFT: bias.contiguous()}, node
    )
    return result


def layer_norm_to_codes(recorder: Recorder, node: fx.Node, later: Later, codes: OutputCodes) -> PlanTensor:
    """Return a layer norm that writes codes, by oneDNN.

    Its kernels take no zero point, but what the norm adds can have it.
    """
    x, weight, bias = _given(recorder, node, later.named)
    result = recorder.new(x.tensor.shape, contiguous_strides(x.tensor.shape), codes.dtype)
    shift = (bias.double() + codes.zero_point * codes.scale).float()
    tensors: dict[int, Any] = {SRC: x, DST: result, SCALE: weight.contiguous(), SHIFT: shift}
    attributes = with_qparams(Attributes(), tensors, DST, codes.scale, 0)
    primitive = recorder.maker.layer_norm(x.desc, result.desc, later.named["eps"], attributes)
    recorder.call(primitive, tensors, later.node)
    return result


def _given(
    recorder: Recorder, node: fx.Node, a: Mapping[str, Any]
) -> tuple[PlanTensor, torch.Tensor, torch.Tensor]:
    """Input, weight and bias of a layer norm that oneDNN computes.

    Weight and bias that it has not are 1 and 0.
    """
    x = recorder.read(a["input"])
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}, not fp32")
    need(x.tensor.is_contiguous() and x.tensor.numel(), "its input has gaps, or no element")
    _check_last(node, x, a)
    weight, bias = (recorder.optional_constant(a[name]) for name in ("weight", "bias"))
    weight = (
        torch.ones(a["normalized_shape"], dtype=torch.float32, device="cpu") if weight is None else weight
    )
    bias = torch.zeros(a["normalized_shape"], dtype=torch.float32, device="cpu") if bias is None else bias
    return x, weight, bias


def _check_last(node: fx.Node, x: PlanTensor, a: Mapping[str, Any]) -> None:
    need(len(a["normalized_shape"]) == 1 and x.tensor.dim(), "it is a norm over more than the last dimension")
    check_sizes(x.tensor.shape[-1] == a["normalized_shape"][0], node, x.tensor.shape, a["normalized_shape"])


def layer_norm_in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::layer_norm` over the last dimension, of few elements, in C."""
    return _in_c(recorder, node, a, in_c(recorder, a["input"]), (a["weight"], a["bias"]), is_layer_norm=True)


def rms_norm(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::rms_norm` over the last dimension, of any number of elements, in C.

    oneDNN has none, and torch's is seven operators.
    """
    x = _rows(recorder, a["input"])
    need(
        a["eps"] is not None or x.tensor.dtype is torch.float32,
        "its input is bf16, and no eps is given",
    )
    return _in_c(recorder, node, a, x, (a["weight"], None), is_layer_norm=False)


def rms_norm_to_codes(recorder: Recorder, _: fx.Node, later: Later, codes: OutputCodes) -> PlanTensor:
    """Return the same in fp32, as codes."""
    x = _rows(recorder, later.named["input"])
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}, not fp32")
    return _in_c(
        recorder, later.node, later.named, x, (later.named["weight"], None), is_layer_norm=False, codes=codes
    )


def _rows(recorder: Recorder, value: Any) -> PlanTensor:
    c_functions.available()
    x = recorder.read(value)
    need(x.tensor.dtype in FLOATS, f"its input is {x.tensor.dtype}, neither fp32 nor bf16")
    need(x.tensor.numel() and not x.tensor.is_neg(), "its input has no element, or a view negates it")
    return x


def _in_c(
    recorder: Recorder,
    node: fx.Node,
    a: Mapping[str, Any],
    x: PlanTensor,
    given: Sequence[Any],
    *,
    is_layer_norm: bool,
    codes: OutputCodes | None = None,
) -> PlanTensor:
    """Return a norm of the rows of x.

    `given` are weight and bias, `codes` what the result is quantized to.
    """
    constants = [recorder.optional_constant(value) for value in given]
    need(x.tensor.is_contiguous(), "its input has gaps")
    _check_last(node, x, a)
    codes = OutputCodes(1.0, 0, x.tensor.dtype) if codes is None else codes
    width = x.tensor.shape[-1]
    result = c_functions.new(recorder, x.tensor.shape, codes.dtype)
    factors = [
        torch.empty(0, dtype=torch.float32) if t is None else as_fp32(recorder, node, PlanTensor(t, None))
        for t in constants
    ]
    fields = {
        "to": NUMBERS[codes.dtype],
        "of": NUMBERS[x.tensor.dtype],
        "rows": x.tensor.numel() // width,
        "width": width,
        "centred": is_layer_norm,
        "epsilon": torch.finfo(torch.float32).eps if a["eps"] is None else a["eps"],
        "inverse": 1.0 / codes.scale,
        "zero_point": codes.zero_point,
        "threads": recorder.threads,
    }
    recorder.call_function(function("norm"), fields, [result, x, *factors], node)
    return result


OPERATORS = (
    PlannedOperator(
        (_aten.layer_norm.default,),
        {"oneDNN": layer_norm},
        {"oneDNN": layer_norm_to_codes},
        waits=only_quantized,
    ),
    PlannedOperator(
        (_aten.rms_norm.default,), {"C": rms_norm}, {"C": rms_norm_to_codes}, waits=only_quantized
    ),
    PlannedOperator((_aten.layer_norm.default,), {"C": layer_norm_in_c}, of_one_token=True),
)

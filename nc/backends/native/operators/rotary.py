"""Rotary embeddings (J. Su et al., arXiv 2104.09864, equation 34, with the halves of a head as pairs).

    y = x * cos + torch.cat((-x[..., n:], x[..., :n]), -1) * sin

as in Llama, Qwen, ModernBERT and GPT-NeoX. In single operators a tensor is read and written five times; one
function in C does it once, also where the result is quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import fx

from nc.backends.native.operators.norm import is_fp32
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.c_functions import NUMBERS, function
from nc.backends.native.plans.layouts import dense_strides
from nc.backends.native.plans.operands import Later, PlanTensor
from nc.backends.native.plans.readers import only_quantized
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import OutputCodes, PlannedOperator, Refused, need, why_refused
from nc.backends.native.torch_library import define
from nc.graph.catalogue import first_input, op_name, schema_arguments, works_in_place
from nc.graph.fx_utils import call_function, take_over
from nc.graph.tensor_meta import TENSORS, same_shape
from nc.graph.views import Binary
from nc.kernels.c_code import abi

#: In reports, of rotary embeddings that stay in single operators.
NAME = "c:rotary"
#: As in the C code: the longest row.
_ROW = abi.CONSTANTS.row


@functools.cache
def rotation() -> torch._ops.OpOverload:
    """Compute `x * cosine + (-second half of x, first half of x) * sine`, in fp32, for plans.

    It goes along the last dimension.
    """
    return define("rotation(Tensor x, Tensor cosine, Tensor sine) -> Tensor", _rotated, _rotated)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


# ---- how it is found in a graph ----


def recompose_rotary(module: fx.GraphModule) -> None:
    """Replace every rotary embedding by one call.

    Not where operators work in place: there a value depends on when it is read.
    """
    if any(works_in_place(node) for node in module.graph.nodes):
        return
    for node in list(module.graph.nodes):
        try:
            found = rotary_of(node)
        except Refused:  # `why_not_rotary` tells
            continue
        if found is None:
            continue
        (x, cosine, sine), inner = found
        with module.graph.inserting_before(node):
            call = call_function(module.graph, rotation(), (x, cosine, sine))
        take_over(call, node)
        call.meta["operators"] = [n.meta["operator"] for n in (node, *inner) if "operator" in n.meta]
        node.replace_all_uses_with(call)
        for old in (node, *inner):
            module.graph.erase_node(old)


def why_not_rotary(node: fx.Node) -> str:
    """Why `recompose_rotary` leaves the rotary embedding whose sum a node is; "" for other nodes."""
    return why_refused(rotary_of, node)


def rotary_of(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node, fx.Node], tuple[fx.Node, ...]] | None:
    """x, cos and sin of the rotary embedding whose sum a node is, and the other nodes of it, last first.

    None is returned where it is none.

    Raises:
        Refused: it can't be one call.
    """
    sides = Binary.of(node).sides if op_name(node) == "add" and Binary.of(node).alpha == 1 else (None, None)
    for straight, turned in (sides, sides[::-1]):
        if not _is_product(straight) or not _is_product(turned):
            continue
        for joined, sine in (Binary.of(turned).sides, Binary.of(turned).sides[::-1]):
            found = _turned(joined)
            if found is None or not isinstance(sine, fx.Node):
                continue
            x, parts = found
            left, right = Binary.of(straight).sides
            cosine = right if left is x else left if right is x else None
            inner = straight, turned, *parts
            if not isinstance(cosine, fx.Node) or {cosine, sine} & {*inner}:
                continue  # it would be computed from what is replaced
            need(all(map(is_fp32, (x, cosine, sine))), "one of its tensors is not fp32")
            larger = not same_shape(node.meta["val"].shape, x.meta["val"].shape)
            need(not larger, "its result is larger than its input")
            readers = {user for each in inner for user in each.users}
            need(readers <= {node, *inner}, "its parts are read elsewhere too")
            return (x, cosine, sine), inner
    return None


def _is_product(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and op_name(node) == "mul"


def _turned(node: object) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """Return the x of `cat((-x[..., n:], x[..., :n]), -1)`, and the nodes that compute this, last first."""
    if not isinstance(node, fx.Node) or not _joins_two(node):
        return None
    negative, first = schema_arguments(node)["tensors"]
    second = first_input(negative) if op_name(negative) == "neg" else None
    x = _half(first, 0)
    if x is None or second is None or _half(second, 1) is not x:
        return None
    return x, (node, negative, second, first)


def _joins_two(node: fx.Node) -> bool:
    """Return whether a node joins two tensors along the last dimension."""
    a = schema_arguments(node) if op_name(node) == "cat" else {}
    return len(a.get("tensors", ())) == 2 and _is_last(a["dim"], node)


def _is_last(dim: int, tensor: fx.Node) -> bool:
    dims = tensor.meta["val"].dim()
    return bool(dim % dims == dims - 1)


def _half(node: fx.Node, which: int) -> fx.Node | None:
    """Return what a node is the first (0) or the second (1) half of, along the last dimension."""
    if op_name(node) != "slice":
        return None
    a = schema_arguments(node)
    source: fx.Node = a["self"]
    value, start, end = source.meta.get("val"), a["start"] or 0, a["end"]
    width = value.shape[-1] if isinstance(value, TENSORS) else None  # of merged linears nothing is noted
    known = isinstance(start, int) and isinstance(end, (int, type(None)))
    if (
        not isinstance(width, int)
        or not known
        or width % 2
        or a["step"] != 1
        or not _is_last(a["dim"], source)
    ):
        return None
    begin, stop, _ = slice(start, end).indices(width)
    return source if (begin, stop) == (which * width // 2, (which + 1) * width // 2) else None


# ---- how plans compute it ----


def rotate(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::rotation` in C."""
    return _in_c(recorder, node, a, OutputCodes(1.0, 0, torch.float32))


def rotate_to_codes(recorder: Recorder, _: fx.Node, later: Later, codes: OutputCodes) -> PlanTensor:
    """Return the same as codes."""
    return _in_c(recorder, later.node, later.named, codes)


def _in_c(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], codes: OutputCodes) -> PlanTensor:
    c_functions.available()
    given = x, cosine, sine = [recorder.read(a[name]) for name in ("x", "cosine", "sine")]
    need(
        0 < x.tensor.dim() <= 4 and x.tensor.numel(), "its input has no element, or more than four dimensions"
    )
    *sizes, width = x.tensor.shape
    need(width % 2 == 0 and width <= _ROW, f"its rows are odd, or longer than {_ROW}")
    need(all(v.tensor.dtype is torch.float32 for v in given), "one of its tensors is not fp32")
    need(all(v.tensor.shape[-1] == width for v in given), "cos or sin have other rows")
    need(
        not any(v.tensor.is_neg() for v in given),
        "a view negates one of its tensors, which memory does not show",
    )
    need(all(v.tensor.stride(-1) == 1 for v in given), "rows of its tensors have gaps")
    need(not any(_is_larger(v.tensor, x.tensor) for v in given), "cos or sin are larger than its input")
    strides = dense_strides(x.tensor)
    need(strides[-1] == 1, "rows of its result have gaps")
    result = recorder.new(x.tensor.shape, strides, codes.dtype)
    missing = 3 - len(sizes)

    def steps(value: PlanTensor) -> tuple[int, ...]:
        return (0,) * missing + value.tensor.expand(x.tensor.shape).stride()[:-1]

    fields: dict[str, abi.Value] = {
        "to": NUMBERS[codes.dtype],
        "half": width // 2,
        "sizes": (1,) * missing + tuple(sizes),
        "y_strides": steps(result),
        "x_strides": steps(x),
        "cosine_strides": steps(cosine),
        "sine_strides": steps(sine),
        "inverse": 1.0 / codes.scale,
        "zero_point": codes.zero_point,
        "threads": recorder.threads,
    }
    recorder.call_function(function("rotary"), fields, [result, *given], node)
    return result


def _is_larger(value: torch.Tensor, than: torch.Tensor) -> bool:
    """Return whether a tensor can't be repeated to the sizes of another."""
    return value.dim() > than.dim() or any(
        n not in (1, m) for n, m in zip(reversed(value.shape), reversed(than.shape), strict=False)
    )


OPERATORS = (PlannedOperator((rotation(),), {"C": rotate}, {"C": rotate_to_codes}, waits=only_quantized),)

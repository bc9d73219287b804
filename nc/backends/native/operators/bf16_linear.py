"""Linears in bf16 as functions in C (`rows.c`), between tensors in fp32 that hold numbers of bf16.

A tensor is rounded once, whatever the number of linears that read it. The product's last step adds the bias
and rounds the sum to bf16, as the graph does; an activation and a sum follow in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends import cpu
from nc.backends.native.fuse import constant
from nc.backends.native.merge import is_returned, parts_of, put_in_place
from nc.backends.native.operators.row_linear import (
    MEMORY,
    after_fields,
    behind,
    for_outputs,
    library,
    tiles,
    whole,
)
from nc.backends.native.plans.layouts import in_rows
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.products import bias_of, codes_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.backends.native.regions import Activation, only_user
from nc.backends.native.torch_library import define, prepack
from nc.errors import BackendError
from nc.graph.catalogue import input_node, kind_of_node, works_in_place
from nc.graph.fx_utils import call_function, constant_of, constant_value, give_values_of, take_over
from nc.graph.views import Linear
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.c_code.isas import ISAS, NUMBERS
from nc.kernels.c_code.limit import used
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.ops import from_bf16, to_bf16
from nc.process.unavailable import Unavailable

#: Instruction sets for it, the best one first.
_ISAS = ("amx", "avx512_bf16")
#: Inputs that one instruction multiplies.
_DEPTH = 32


@functools.cache
def bf16_rows() -> torch._ops.OpOverload:
    """Return what rounds rows to bf16; only `bf16_linear` can read the result, which has the shape of `x`."""
    return define(
        "bf16_rows(Tensor x) -> Tensor", _only_in_plans, lambda x: x.new_empty(x.shape, dtype=torch.bfloat16)
    )


@functools.cache
def bf16_linear() -> torch._ops.OpOverload:
    """Return the linear of rows in bf16: `activation(bf16(x W^T + bias)) + other`, in fp32.

    `weight` is packed as for oneDNN's linears.
    """
    return define(
        "bf16_linear(Tensor rows, Tensor weight, Tensor? bias, Tensor? other, int outputs, str activation, "
        "float[] scalars, str algorithm) -> Tensor",
        _only_in_plans,
        lambda rows, _, __, ___, outputs, *____: rows.new_empty(
            (*rows.shape[:-1], outputs), dtype=torch.float32
        ),
    )


def _only_in_plans(*_: Any) -> torch.Tensor:
    msg = "torch has no linear of rows in tile order; plans have"
    raise BackendError(msg)


# ---- how it is found in a graph ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Rounded:
    """A linear whose inputs and result are rounded to bf16.

    Attributes:
        linear: the node.
        weight: the constant, in bf16.
        bias: one fp32 number for each output; None for none.
        result: the rounded result, in fp32 again.
    """

    linear: fx.Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    result: fx.Node


def replace_bf16_linears(module: fx.GraphModule) -> None:
    """Replace linears in bf16, where there are functions in C for plans.

    Those that read the same rows, and nothing else goes with, become one, of which each gets its part. Not
    where operators work in place: there a value depends on when it is read.
    """
    if why_unavailable() or any(works_in_place(node) for node in module.graph.nodes):
        return
    readers: dict[fx.Node, list[_Rounded]] = {}
    for node in module.graph.nodes:
        found = _rounded(module, node)
        if found is not None:
            readers.setdefault(_source(node), []).append(found)
    for members in readers.values():
        source = _source(members[0].linear)  # the one of the key may have become part of a linear
        with module.graph.inserting_before(members[0].linear):
            rows = call_function(module.graph, bf16_rows(), (source,))
        rows.meta["val"] = source.meta["val"]
        lone = [each for each in members if len(behind(each.result)[0]) == 1 and not is_returned(each.result)]
        groups = (
            [lone, *([each] for each in members if each not in lone)]
            if len(lone) > 1
            else [[each] for each in members]
        )
        for group in groups:
            _replace(module, group, rows)
    for node in reversed(module.graph.nodes):
        if not node.users and (node.target in (to_bf16, from_bf16) or node.op == "get_attr"):
            module.graph.erase_node(node)


def _rounded(module: fx.GraphModule, node: fx.Node) -> _Rounded | None:
    """Return a linear whose inputs and result are rounded to bf16; None for all else."""
    low = only_user(node) if kind_of_node(node) == "linear" else None
    result = only_user(low) if low is not None and low.target is to_bf16 else None
    if result is None or result.target is not from_bf16:
        return None
    linear = Linear.of(node)
    sides = [linear.input, linear.weight, *([] if linear.bias is None else [linear.bias])]
    if not all(isinstance(side, fx.Node) and side.target is from_bf16 for side in sides):
        return None
    source, weight = (input_node(side) for side in sides[:2])
    bias = None if linear.bias is None else constant_value(module, linear.bias)
    if source.target is not to_bf16 or weight.op != "get_attr" or (bias is None) != (linear.bias is None):
        return None
    if not constant_of(module, weight).numel():
        return None
    return _Rounded(node, constant_of(module, weight), bias, result)


def _source(linear: fx.Node) -> fx.Node:
    """Return what such a linear rounds, in fp32."""
    return input_node(input_node(Linear.of(linear).input))


def _replace(module: fx.GraphModule, members: Sequence[_Rounded], rows: fx.Node) -> None:
    """Replace linears of the same rows by one, and all that goes with a single one."""
    graph, first = module.graph, members[0]
    region, activation, other = behind(first.result) if len(members) == 1 else ([], Activation(), None)
    sizes = [each.weight.shape[0] for each in members]
    biases = [
        torch.zeros(size, dtype=torch.float32, device="cpu")
        if each.bias is None
        else each.bias.detach().float().expand(size)
        for each, size in zip(members, sizes, strict=True)
    ]
    with graph.inserting_before(region[-1] if region else first.linear):
        weight, bias = (
            constant(module, f"{first.linear.name}_{name}", torch.cat(values))
            for name, values in (("bf16", [each.weight for each in members]), ("bias", biases))
        )
        packed = call_function(graph, prepack("linear"), (weight, None))
        how = (activation.name, list(activation.arguments), activation.algorithm)
        new = call_function(graph, bf16_linear(), (rows, packed, bias, other, sum(sizes), *how))
        parts = parts_of(graph, new, sizes) if len(members) > 1 else []
    new.meta["bf16_operators"] = [
        each.linear.meta["operator"] for each in members if "operator" in each.linear.meta
    ]
    for each, part in zip(members, parts, strict=False):
        put_in_place(part, each.result, [each.result])
    if region:
        take_over(new, region[-1])
        give_values_of(new, region[-1])
        region[-1].replace_all_uses_with(new)
        for old in reversed(region):
            graph.erase_node(old)
    new.meta["operators"] = [
        node.meta["operator"]
        for node in (*(each.linear for each in members), *region)
        if "operator" in node.meta
    ]
    for each in members:
        (low,) = each.linear.users
        graph.erase_node(low)
        graph.erase_node(each.linear)


# ---- how plans compute it ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """The functions in C, and the best instruction set for them."""

    rows: Function
    product: Function
    isa: str


def _code() -> _Code | Unavailable:
    """Return the code for this CPU, or why there is none."""
    found = library()
    if isinstance(found, Unavailable):
        return found
    isa = next((name for name in _ISAS if name in used(found) and _has(name)), None)
    if isa is None:
        return Unavailable(
            f"there is no {', '.join(cpu.lacks(ISAS['avx512_bf16'])) or 'code for AVX512-BF16'}"
        )
    product = function_of(found, "row_product")
    return _Code(
        function_of(found, "bf16_rows"), dataclasses.replace(product, name=f"row_product {isa} bf16"), isa
    )


def _has(isa: str) -> bool:
    return not cpu.lacks(ISAS[isa]) and (isa != "amx" or tiles())


def why_unavailable() -> str:
    """Why there are no such functions here; "" when there are."""
    found = _code()
    return found.reason if isinstance(found, Unavailable) else ""


def _available() -> _Code:
    found = _code()
    if isinstance(found, Unavailable):
        raise Refused(found.reason)
    return found


def round_rows(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::bf16_rows` in C: numbers in tile order, with the shape of the input."""
    code, x = _available(), in_rows(recorder, recorder.read(a["x"]), node)
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}")
    *before, inputs = x.tensor.shape
    rows = math.prod(before)
    memory = recorder.new((held(rows, inputs),), (1,), torch.bfloat16)
    fields = {"rows": rows, "inputs": inputs, "stride": inputs, "threads": openmp.threads()}
    recorder.call_function(code.rows, fields, [memory, x], node)
    return PlanTensor(memory.tensor[: rows * inputs].view(x.tensor.shape), memory.root)


def multiply(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::bf16_linear` in C."""
    code, rows = _available(), recorder.read(a["rows"])
    weight, bias = codes_of(recorder, a["weight"]), bias_of(recorder, a["bias"])
    other = recorder.optional(a["other"])
    need(rows.tensor.dtype is torch.bfloat16, "its input is not rounded")
    (outputs, inputs), *before = weight.tensor.shape, *rows.tensor.shape[:-1]
    sizes = (*before, outputs)
    check_sizes(rows.tensor.shape[-1] == inputs, node, rows.tensor.shape, weight.tensor.shape)
    more = []
    if other is not None:
        check_sizes(tuple(other.tensor.shape) == sizes, node, other.tensor.shape, sizes)
        more.append(in_rows(recorder, other, node))
    result = recorder.new(sizes, contiguous_strides(sizes), torch.float32)
    (packed,) = recorder.weights.formed(weight, "bf16", lambda: (packed_bf16(recorder.in_memory(weight)),))
    fields: dict[str, abi.Value] = {
        "rows": math.prod(before),
        "inputs": inputs,
        "outputs": outputs,
        "threads": openmp.threads(),
        "isa": NUMBERS[code.isa],
        "bf16": True,
        **after_fields(a),
    }
    nothing = torch.zeros(1, dtype=torch.int32, device="cpu")
    factors = [nothing, nothing, for_outputs(bias, outputs, packed.shape[0] * packed.shape[3])]
    held_rows = PlanTensor(whole(rows.tensor), rows.root)
    recorder.call_function(code.product, fields, [result, held_rows, packed, *factors, *more], node, 2)
    return result


def packed_bf16(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as `row_product` reads it.

    Args:
        weight: bf16, shape [outputs, inputs].

    Returns:
        bf16, shape [outputs / 16, inputs / 32, 16, 16, 2]. Outputs are filled up with zeros to a multiple of
        32, inputs too.
    """
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -inputs % _DEPTH, 0, -outputs % 32))
    panels, blocks = filled.shape[0] // 16, filled.shape[1] // _DEPTH
    return MEMORY.copied(filled.view(panels, 16, blocks, 16, 2).permute(0, 2, 3, 1, 4))


def held(rows: int, inputs: int) -> int:
    """Return how many numbers rows hold in tiles."""
    return -(-rows // 16) * 16 * (-(-inputs // _DEPTH) * _DEPTH)


OPERATORS = (
    PlannedOperator((bf16_rows(),), {"C": round_rows}),
    PlannedOperator((bf16_linear(),), {"C": multiply}),
)

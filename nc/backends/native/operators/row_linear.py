"""Linears whose activations have a range for each row, found in each call, as functions in C (`rows.c`).

A tensor is rounded once, whatever the number of linears that read it. The product's last step applies both
scales, the zero points, the bias, an activation and a sum.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends import cpu
from nc.backends.dynamic import DYNAMIC_KERNEL
from nc.backends.low_bit.large_pages import LargePages
from nc.backends.native.fuse import constant, weight_of
from nc.backends.native.merge import is_returned, parts_of, put_in_place
from nc.backends.native.plans.layouts import in_rows
from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.products import after_of, bias_of, codes_of, post_ops_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, Refused, need, why_refused
from nc.backends.native.regions import Activation, activation_of, is_sum, only_user
from nc.backends.native.torch_library import define, prepack
from nc.errors import BackendError
from nc.graph.catalogue import kind_of_node, works_in_place
from nc.graph.fx_utils import add_constant, call_function, constant_value, fqn_of, take_over
from nc.graph.views import Binary, Dequantize, DynamicQDQ, Linear
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.c_code.isas import ISAS, NUMBERS
from nc.kernels.c_code.limit import used
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_dequantize_dynamic
from nc.process.unavailable import Unavailable

#: In reports, of the linears that have another kernel.
NAME = "c:row_product"
#: Rows of a tile, inputs that one instruction multiplies, and what outputs are filled up to.
_TILE, _DEPTH, _PAIR = 16, 64, 32
#: Bytes of the scale and the zero point of a row.
_OF_ROW = 8
#: Of packed weights: what is read from there limits the speed of few rows.
MEMORY = LargePages()
#: Instruction sets for it, the best one first.
_ISAS = ("amx", "avx512_vnni")
_ACTIVATIONS = frozenset({"relu", "leaky_relu", "hardtanh", "hardswish", "swish", "gelu"})


@functools.cache
def rounded_rows() -> torch._ops.OpOverload:
    """Return what rounds rows; only `row_linear` can read the result, which has the shape of `x`."""
    return define(
        "rounded_rows(Tensor x, bool symmetric) -> Tensor",
        _only_in_plans,
        lambda x, _: x.new_empty(x.shape, dtype=torch.uint8),
    )


@functools.cache
def row_linear() -> torch._ops.OpOverload:
    """Return the linear of rounded rows: `activation(x W^T + bias) + other`, in fp32.

    `weight` is packed as for oneDNN's linears; `scale` is of the weight, one or one for each output.
    """
    return define(
        "row_linear(Tensor rows, Tensor weight, Tensor scale, Tensor? bias, Tensor? other, int outputs, "
        "str activation, float[] scalars, str algorithm) -> Tensor",
        _only_in_plans,
        lambda rows, _, scale, __, ___, outputs, *____: scale.new_empty((*rows.shape[:-1], outputs)),
    )


def _only_in_plans(*_: Any) -> torch.Tensor:
    msg = "torch has no linear of rounded rows; plans have"
    raise BackendError(msg)


# ---- how it is found in a graph ----


def replace_row_linears(module: fx.GraphModule) -> None:
    """Replace dynamic linears with a range for each row, where there are functions in C.

    Those that read the same rows, and nothing else goes with, become one, of which each gets its part.
    An activation and a sum behind one go with it, unless operators work in place: there a value depends on
    when it is read.
    """
    alone = any(works_in_place(node) for node in module.graph.nodes)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if _is_dynamic(node) and not why_not_row_linear(node):
            readers.setdefault(Linear.of(node).input, []).append(node)
    for ranges, nodes in readers.items():
        rows = _rounded(module, ranges)
        for_one = [] if alone else [node for node in nodes if _may_merge(node)]
        if len(for_one) > 1:
            _replace_by_one(module, for_one, rows)
        for node in nodes:
            if len(for_one) < 2 or node not in for_one:
                _replace(module, node, rows, alone=alone)
    for node in reversed(module.graph.nodes):
        ours = (quantize_dequantize_dynamic, dequantize_per_channel, dequantize_per_tensor)
        if not node.users and (node.target in ours or node.op == "get_attr"):
            module.graph.erase_node(node)


def why_not_row_linear(node: fx.Node) -> str:
    """Why `replace_row_linears` leaves a dynamic linear to FBGEMM; "" where it does not, or for others."""
    return why_refused(_check, node) if _is_dynamic(node) else ""


def _is_dynamic(node: fx.Node) -> bool:
    """Whether a node is a linear whose input has ranges that are found in each call."""
    if kind_of_node(node) != "linear":
        return False
    ranges = Linear.of(node).input
    return isinstance(ranges, fx.Node) and ranges.target is quantize_dequantize_dynamic


def _check(node: fx.Node) -> None:
    """Raise `Refused` for a dynamic linear that the functions in C do not compute."""
    linear, module, missing = Linear.of(node), node.graph.owning_module, why_unavailable()
    assert module is not None, "passes run on modules"
    ranges = DynamicQDQ.of(linear.input)
    need(ranges.per_token, "its input has one range for the whole tensor")
    need(not missing, missing)
    dtype = ranges.input.meta["val"].dtype
    need(dtype is torch.float32, f"its input is {dtype}, not fp32")
    need(
        linear.weight.target in (dequantize_per_channel, dequantize_per_tensor), "its weight is not quantized"
    )
    weight = Dequantize.of(linear.weight)
    need(weight.codes.op == "get_attr", "its weight is not a constant")
    need(weight.axis in (None, 0), "its weight has a scale for each input")
    inputs, most = weight.codes.meta["val"].shape[-1], abi.CONSTANTS.most_inputs
    need(0 < inputs <= most, f"it has {inputs} inputs, and its C code takes 1 to {most}")
    bias = linear.bias
    need(bias is None or constant_value(module, bias) is not None, "its bias is computed from the inputs")


def _rounded(module: fx.GraphModule, ranges: fx.Node) -> fx.Node:
    """Return what rounds the input of dynamic linears."""
    view = DynamicQDQ.of(ranges)
    with module.graph.inserting_before(ranges):
        rows = call_function(module.graph, rounded_rows(), (view.input, view.symmetric))
    rows.meta["val"] = view.input.meta["val"]
    return rows


def _replace(module: fx.GraphModule, node: fx.Node, rows: fx.Node, *, alone: bool) -> None:
    linear = Linear.of(node)
    weight = Dequantize.of(linear.weight)
    if isinstance(weight.scale, fx.Node):
        scale = weight.scale
    else:
        first = next(iter(module.graph.nodes))
        name = f"{weight.codes.target}_scale"
        scale = add_constant(
            module,
            first,
            name,
            torch.tensor([weight.scale], dtype=torch.float32, device="cpu"),
            f"{fqn_of(weight.codes)}.scale",
        )
    region, activation, other = behind(node, alone=alone)
    with module.graph.inserting_before(region[-1]):
        packed = call_function(module.graph, prepack("linear"), (weight.codes, None))
        how = (activation.name, list(activation.arguments), activation.algorithm)
        outputs = weight.codes.meta["val"].shape[0]
        arguments = (rows, packed, scale, linear.bias, other, outputs, *how)
        new = call_function(module.graph, row_linear(), arguments)
    take_over(new, region[-1])
    new.meta["operators"] = [n.meta["operator"] for n in region if "operator" in n.meta]
    new.meta[DYNAMIC_KERNEL] = True
    region[-1].replace_all_uses_with(new)
    for old in reversed(region):
        module.graph.erase_node(old)


def _may_merge(node: fx.Node) -> bool:
    """Whether a linear can be a part of a larger one: nothing else goes with its product."""
    region, _, _ = behind(node, alone=False)
    return len(region) == 1 and not is_returned(node)


def _replace_by_one(module: fx.GraphModule, nodes: Sequence[fx.Node], rows: fx.Node) -> None:
    """Replace linears of the same rows by the parts of one."""
    graph, first = module.graph, nodes[0]
    parts = [weight_of(module, Linear.of(node).weight) for node in nodes]
    codes, scales = map(torch.cat, zip(*parts, strict=True))
    sizes = [len(of_outputs) for _, of_outputs in parts]
    biases = [_bias_of(module, node, size) for node, size in zip(nodes, sizes, strict=True)]
    with graph.inserting_before(first):
        weight, scale, bias = (
            constant(module, f"{first.name}_merged{name}", value)
            for name, value in (("", codes), ("_scales", scales), ("_bias", torch.cat(biases)))
        )
        packed = call_function(graph, prepack("linear"), (weight, None))
        none = Activation()
        how = (none.name, list(none.arguments), none.algorithm)
        merged = call_function(graph, row_linear(), (rows, packed, scale, bias, None, sum(sizes), *how))
        slices = parts_of(graph, merged, sizes)
    merged.meta["operators"] = [node.meta["operator"] for node in nodes if "operator" in node.meta]
    merged.meta[DYNAMIC_KERNEL] = True
    for node, part in zip(nodes, slices, strict=True):
        put_in_place(part, node, [node])


def _bias_of(module: fx.GraphModule, node: fx.Node, outputs: int) -> torch.Tensor:
    bias = Linear.of(node).bias
    value = None if bias is None else constant_value(module, bias)
    return (
        torch.zeros(outputs, dtype=torch.float32, device="cpu")
        if value is None
        else value.detach().float().expand(outputs)
    )


def behind(node: fx.Node, *, alone: bool = False) -> tuple[list[fx.Node], Activation, fx.Node | None]:
    """Return what becomes one call, the activation in it, and what it adds."""
    region, activation, other = [node], Activation(), None
    user = only_user(node)
    found = activation_of(user) if user is not None and not alone else None
    if user is not None and found is not None and found.name in _ACTIVATIONS:
        activation = found
        region.append(user)
    user = only_user(region[-1])
    if user is not None and not alone and is_sum(user, region[-1]):
        left, right = Binary.of(user).sides
        other = right if left is region[-1] else left
        region.append(user)
    return region, activation, other


# ---- how plans compute it ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """The functions in C, and the best instruction set for them."""

    round_rows: Function
    product: Function
    isa: str


@functools.cache
def library() -> ctypes.CDLL | Unavailable:
    """Return the library on torch's threads, or why there is none."""
    return load_on_threads("rows")


@functools.cache
def tiles() -> bool:
    """Whether the operating system lets this process use AMX."""
    found = library()
    return not isinstance(found, Unavailable) and bool(found.nc_rows_amx())


def isas() -> tuple[str, ...]:
    """Instruction sets that this CPU has and the C code may use, the best one first."""
    found = library()
    names = () if isinstance(found, Unavailable) else used(found)
    return tuple(
        name for name in _ISAS if name in names and not cpu.lacks(ISAS[name]) and (name != "amx" or tiles())
    )


def _code() -> _Code | Unavailable:
    """Return the code for this CPU, or why there is none."""
    found = library()
    if isinstance(found, Unavailable):
        return found
    if not isas():
        lacking = ", ".join(cpu.lacks(ISAS["avx512_vnni"])) or "code for AVX512-VNNI"
        return Unavailable(f"there is no {lacking}")
    rounds, product = (function_of(found, name) for name in ("round_rows", "row_product"))
    return _Code(rounds, dataclasses.replace(product, name=f"row_product {isas()[0]}"), isas()[0])


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
    """`nc_native::rounded_rows` in C: codes in tile order, with the shape of the input."""
    code, x = _available(), in_rows(recorder, recorder.read(a["x"]), node)
    need(x.tensor.dtype is torch.float32, f"its input is {x.tensor.dtype}")
    *before, inputs = x.tensor.shape
    rows = math.prod(before)
    memory = recorder.new((held(rows, inputs),), (1,), torch.uint8)
    fields = {
        "rows": rows,
        "inputs": inputs,
        "stride": inputs,
        "symmetric": int(a["symmetric"]),
        "threads": openmp.threads(),
    }
    recorder.call_function(code.round_rows, fields, [memory, x], node)
    return PlanTensor(memory.tensor[: rows * inputs].view(x.tensor.shape), memory.root)


def multiply(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::row_linear` in C."""
    code, rows = _available(), recorder.read(a["rows"])
    weight, bias = codes_of(recorder, a["weight"]), bias_of(recorder, a["bias"])
    scale, other = recorder.constant(a["scale"]), recorder.optional(a["other"])
    need(rows.tensor.dtype is torch.uint8, "its input is not rounded")
    (outputs, inputs), *before = weight.tensor.shape, *rows.tensor.shape[:-1]
    sizes = (*before, outputs)
    check_sizes(rows.tensor.shape[-1] == inputs, node, rows.tensor.shape, weight.tensor.shape)
    more = []
    if other is not None:
        check_sizes(tuple(other.tensor.shape) == sizes, node, other.tensor.shape, sizes)
        more.append(in_rows(recorder, other, node))
    result = recorder.new(sizes, contiguous_strides(sizes), torch.float32)
    packed, sums = recorder.weights.formed(weight, "rows", lambda: packed_rows(recorder.in_memory(weight)))
    fields: dict[str, abi.Value] = {
        "rows": math.prod(before),
        "inputs": inputs,
        "outputs": outputs,
        "threads": openmp.threads(),
        "isa": NUMBERS[code.isa],
        "bf16": False,
        **after_fields(a),
    }
    factors = [for_outputs(values, outputs, sums.numel()) for values in (scale, bias)]
    held_rows = PlanTensor(whole(rows.tensor), rows.root)
    recorder.call_function(code.product, fields, [result, held_rows, packed, sums, *factors, *more], node, 2)
    return result


def after_fields(a: Mapping[str, Any]) -> dict[str, abi.Value]:
    """Fields of what follows a product, of the arguments `activation`, `scalars` and `algorithm`."""
    after = after_of(post_ops_of(a, "activation"))
    number = abi.ACTIVATION.number(after.activation)
    return {"activation": number, "alpha": after.alpha, "beta": after.beta}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the memory that a tensor begins."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))


def packed_rows(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as `row_product` reads it.

    Args:
        codes: int8, shape [outputs, inputs].

    Returns:
        Codes, int8, shape [outputs / 16, inputs / 64, 16, 16, 4]; and sums, int32, shape [outputs].
        Outputs are filled up with zeros to a multiple of 32, inputs to one of 64.
    """
    outputs, inputs = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -inputs % _DEPTH, 0, -outputs % _PAIR))
    panels, blocks = codes.shape[0] // _TILE, codes.shape[1] // _DEPTH
    packed = codes.view(panels, _TILE, blocks, _TILE, 4).permute(0, 2, 3, 1, 4)
    return MEMORY.copied(packed), codes.sum(1, dtype=torch.int32)


def held(rows: int, inputs: int) -> int:
    """Return the bytes of rounded rows: codes in tiles, and a scale and a zero point for each row."""
    return -(-rows // _TILE) * _TILE * (-(-inputs // _DEPTH) * _DEPTH + _OF_ROW)


def unpacked(memory: torch.Tensor, rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [rows, inputs], scales and zero points [rows, 1] of rounded rows."""
    many, depth = -(-rows // _TILE) * _TILE, -(-inputs // _DEPTH) * _DEPTH
    tiles, scale, zero_point = torch.split(memory, [many * depth, many * 4, many * 4])
    codes = tiles.view(many // _TILE, depth // _DEPTH, _TILE, _DEPTH).transpose(1, 2).reshape(many, depth)
    numbers = scale.view(torch.float32)[:rows, None], zero_point.view(torch.int32)[:rows, None]
    return codes[:rows, :inputs], *numbers


def for_outputs(values: torch.Tensor | None, outputs: int, size: int) -> torch.Tensor:
    """Return one fp32 number for each output, 0 for those that fill up the last panels."""
    result = torch.zeros(size, dtype=torch.float32, device="cpu")
    if values is not None:
        result[:outputs] = values.detach().float().expand(outputs)
    return result


OPERATORS = (
    PlannedOperator((rounded_rows(),), {"C": round_rows}),
    PlannedOperator((row_linear(),), {"C": multiply}),
)

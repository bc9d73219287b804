"""QDQ graph → graph of operators that `torch.export` and OpenVINO's PyTorch frontend know.

OpenVINO makes one FakeQuantize of a quantize and the following dequantize. An int8 weight stays int8 where it
is written as a conversion to float and a product with its scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.passes import Pass, run_passes
from nc.backends.program import Program, fold
from nc.backends.program import program as built
from nc.backends.rewrites.attention import recompose
from nc.backends.rewrites.codes import hoist, unsigned
from nc.backends.rewrites.low_bit import constant, replace_low_bit, to_dtype, zero_codes
from nc.errors import BackendError
from nc.graph.catalogue import input_node, op_name, schema_arguments
from nc.graph.fx_utils import add_constant, call_function, constant_of, drop_unused, inline, take_over
from nc.graph.views import Dequantize, Quantize
from nc.numerics.packed_weight import PackedWeight
from nc.ops import dequantize_per_channel, dequantize_per_tensor, from_bf16, quantize_per_tensor, to_bf16

_aten = torch.ops.aten


def program(part: fx.GraphModule, example: Sequence[torch.Tensor]) -> Program:
    """Return the program for a QDQ graph, which stays as it is, and flat inputs of it.

    Raises:
        BackendError: OpenVINO translates an operator to something else.
    """
    _refuse_wrong(part)
    return built(part, example, lambda module: run_passes(module, _PASSES))


def _refuse_wrong(module: fx.GraphModule) -> None:
    """Raise BackendError for average pools whose last window OpenVINO divides by its whole size.

    It does so also where the window leaves the padded input.
    """
    for node in module.graph.nodes:
        if (op_name(node) or "").startswith("avg_pool"):
            a = schema_arguments(node)
            if a["ceil_mode"] and a["count_include_pad"] and any(a["padding"]):
                name = node.meta.get("operator", node.name)
                msg = (
                    f"OpenVINO computes {name!r} otherwise: an average pool with ceil_mode, pads that count "
                    "and a last window that may "
                    'leave the padded input. Give the pool count_include_pad=False, or use backend="native".'
                )
                raise BackendError(msg)


def _whole_windows(module: fx.GraphModule) -> None:
    """Take the mean of its input for an average pool whose window is larger, as ceil_mode allows in 2-D.

    OpenVINO refuses such pools.

    Sizes are those of the example. Inputs that are larger than the window have more than one mean; the result
    is infinite then.
    """
    graph = module.graph
    for node in [n for n in graph.nodes if n.target is _aten.avg_pool2d.default]:
        a, x = schema_arguments(node), input_node(node)
        window = [*a["kernel_size"]] * (2 // len(a["kernel_size"]))
        dims, sizes = [-2, -1], x.meta["val"].shape[-2:]
        covered = [w - size for w, size in zip(window, sizes, strict=True)]
        if min(covered) < 0 or max(covered) == 0 or any(a["padding"]) or a["divisor_override"]:
            continue
        with graph.inserting_before(node):
            mean = call_function(graph, _aten.mean.dim, (x, dims, True))
            for dim, size in zip(dims, window, strict=True):
                beyond = call_function(graph, _aten.slice.Tensor, (x, dim, size, 2**63 - 1))
                endless = call_function(graph, _aten.full_like.default, (beyond, math.inf))
                mean = call_function(
                    graph,
                    _aten.add.Tensor,
                    (mean, call_function(graph, _aten.sum.dim_IntList, (endless, dims, True))),
                )
        take_over(mean, node)
        node.replace_all_uses_with(mean)
        graph.erase_node(node)


def _without_empty(module: fx.GraphModule) -> None:
    """Join without vectors of no element, which torch takes beside tensors of any dimensions.

    Caches of transformers begin as such.
    """
    for node in [n for n in module.graph.nodes if n.target is _aten.cat.default]:
        parts, *dim = node.args
        full = [part for part in parts if part.meta["val"].shape != (0,)]
        node.args = (full or parts[:1], *dim)


def _without_bf16(module: fx.GraphModule) -> None:
    """Return values as they were before they were rounded to bf16.

    OpenVINO rounds where it computes in bf16. Constants stay rounded.
    """
    for node in [n for n in module.graph.nodes if n.target is from_bf16]:
        low = input_node(node)
        if low.target is to_bf16:
            node.replace_all_uses_with(input_node(low))
        else:
            value = constant_of(module, low).float()
            node.replace_all_uses_with(
                add_constant(module, node, node.name, value, low.meta.get("fqn", low.name))
            )
        module.graph.erase_node(node)
    for node in [n for n in module.graph.nodes if n.target is to_bf16 and not n.users]:
        module.graph.erase_node(node)


def _spell_activations(module: fx.GraphModule) -> None:
    """Quantize → quantize and dequantize, as one pair for all readers; what moves codes moves these values.

    `hoist` left no pad whose zeros have another code than 0, so values and codes move alike.
    """
    pair = _pair()
    graph = module.graph
    for node in [
        n
        for n in graph.nodes
        if n.target is dequantize_per_tensor and Dequantize.of(n).codes.op != "get_attr"
    ]:
        node.replace_all_uses_with(Dequantize.of(node).codes)
        graph.erase_node(node)
    for node in [n for n in graph.nodes if n.target is quantize_per_tensor]:
        view = Quantize.of(node)
        how = (*view.qparams, view.quant_min, view.quant_max, view.dtype)
        with graph.inserting_before(node):
            codes = call_function(graph, pair[0], (view.input, *how))
            value = call_function(graph, pair[1], (codes, *how))
        value.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    output = graph.output_node()
    for value in [n for n in output.all_input_nodes if n.target is pair[1]]:
        with graph.inserting_before(output):  # the frontend takes no pair as an output
            output.replace_input_with(value, call_function(graph, _aten.mul.Tensor, (value, 1.0)))


@functools.cache
def _pair() -> tuple[Any, Any]:
    """Return the two operators that OpenVINO knows; this import registers them."""
    import torch.ao.quantization.fx._decomposed

    known = torch.ops.quantized_decomposed
    return known.quantize_per_tensor.default, known.dequantize_per_tensor.default


def _spell_weights(module: fx.GraphModule) -> None:
    """Dequantize of a constant → its codes as float · scales."""
    graph = module.graph
    for node in [n for n in graph.nodes if n.target in (dequantize_per_tensor, dequantize_per_channel)]:
        view = Dequantize.of(node)
        codes = constant_of(module, view.codes)
        shape = [1] * codes.dim()
        if isinstance(view.scale, fx.Node):
            shape[schema_arguments(node)["axis"]] = -1
            scales = constant_of(module, view.scale).reshape(shape)
        else:
            scales = torch.full(shape, view.scale, dtype=torch.float32)
        scale = add_constant(
            module,
            node,
            f"{node.name}_scales",
            scales.float().clone(),
            f"{view.codes.meta.get('fqn', '')}.scale",
        )
        with graph.inserting_before(node):
            values = call_function(graph, _aten.to.dtype, (view.codes, torch.float32))
            product = call_function(graph, _aten.mul.Tensor, (values, scale))
        take_over(product, node)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _as_rows(module: fx.GraphModule) -> None:
    """Make a linear of one vector a linear of one row.

    OpenVINO's int8 kernel adds a dimension to the result of a vector.
    """
    graph = module.graph
    for node in [n for n in graph.nodes if n.target is _aten.linear.default and n.meta["val"].dim() == 1]:
        x = input_node(node)
        with graph.inserting_before(node):
            node.replace_input_with(x, call_function(graph, _aten.unsqueeze.default, (x, 0)))
        with graph.inserting_after(node):
            vector = call_function(graph, _aten.squeeze.dim, (node, 0))
        node.replace_all_uses_with(vector, delete_user_cb=lambda user, own=vector: user is not own)


def _compressed(module: fx.GraphModule, node: fx.Node, weight: PackedWeight) -> fx.Node:
    """Return the weight as uint8 codes, minus the code of 0, times scales; fp32, shape [N, K]."""
    graph, params = module.graph, weight.params
    rows, groups = params.scale.shape
    codes = constant(module, node, "codes", weight.unpacked().reshape(rows, groups, -1))
    zeros = constant(module, node, "zeros", zero_codes(weight).reshape(rows, groups, 1))
    scales = constant(module, node, "scales", params.scale.reshape(rows, groups, 1))
    with graph.inserting_before(node):
        shifted = call_function(
            graph,
            _aten.sub.Tensor,
            (to_dtype(graph, codes, torch.float32), to_dtype(graph, zeros, torch.float32)),
        )
        values = call_function(graph, _aten.mul.Tensor, (shifted, scales))
        return call_function(graph, _aten.reshape.default, (values, list(weight.shape)))


_PASSES = (
    Pass("low_bit_weights", functools.partial(replace_low_bit, spell=_compressed)),
    Pass("empty_vectors", _without_empty),
    Pass("bf16", _without_bf16),
    Pass("attention", recompose),
    Pass("unsigned_codes", unsigned),
    Pass("early_codes", functools.partial(hoist, coded_pads=False)),
    Pass("activations", _spell_activations),
    Pass("weights", _spell_weights),
    Pass("rows", _as_rows),
    Pass("whole_windows", _whole_windows),
    Pass("constants", fold),
    Pass("inlined_operators", inline),
    Pass("unused_constants", drop_unused),
)

"""Dynamic linears, and LSTMs and GRUs with one range per tensor.

They are computed by FBGEMM's kernels in PyTorch, which round activations while they pack them.

Per tensor there is a kernel that finds the range itself. Per token there is none: rows are divided by their
scales first, so that one scale, 1, holds for all, and the products are multiplied afterwards. With a zero
point z per row, `sum w (q - z)` is `sum w (q - 128) - (z - 128) sum w`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator

import torch
from torch import fx
from torch.fx.node import Argument

from nc.graph.catalogue import first_input, kind_of_node, op_name
from nc.graph.fx_utils import call_function, constant_of, take_over
from nc.graph.views import Dequantize, DynamicQDQ, Linear, Recurrent
from nc.numerics.recurrent import has_projections
from nc.ops import RECURRENT, dequantize_per_channel, dequantize_per_tensor, quantize_dequantize_dynamic
from nc.process.lock import LOCK

#: Mark in `node.meta` of the kernels of dynamic operators, by which reports know them; who makes one sets it.
DYNAMIC_KERNEL = "dynamic_kernel"
#: Keeps a row of zeros from dividing by zero; its codes are those of 0 whatever the scale.
_LEAST_SCALE = 2.0**-100
_MIDDLE = 128
_RECURRENT: dict[object, str] = {operator: name for name, operator in RECURRENT.items()}
_aten = torch.ops.aten
_quantized = torch.ops.quantized


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """What the kernel rounds.

    It is the input in units of `scale`, shifted by `shift`, the zero point minus 128 (None: by nothing).
    """

    values: fx.Node
    scale: fx.Node
    shift: fx.Node | None


def replace_dynamic(module: fx.GraphModule) -> None:
    """Replace what finds ranges in each call, and what computes with them, by calls of kernels.

    Weights leave the graph packed.
    """
    rows: dict[fx.Node, _Rows] = {}
    for node in [n for n in module.graph.nodes if _is_dynamic(n)]:
        with module.graph.inserting_before(node):
            if node.target is quantize_dequantize_dynamic:
                if not _finds_range_itself(node) and any(map(_is_dynamic, node.users)):
                    rows[node] = _rows(functools.partial(call_function, module.graph), node)
                continue
            if _is_layer_of_torch(node):
                new = _recurrent(module, node)
                new.meta[DYNAMIC_KERNEL] = True
            else:
                new = _linear(module, node, rows)
        take_over(new, node)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    functions = (quantize_dequantize_dynamic, dequantize_per_channel, dequantize_per_tensor)
    for node in reversed(module.graph.nodes):
        if not node.users and (node.target in functions or node.op == "get_attr"):
            module.graph.erase_node(node)


def why_not_dynamic(node: fx.Node, *, besides: Collection[str] = ()) -> str:
    """Why `replace_dynamic` left an operator alone that finds its ranges in each call; "" for other nodes.

    Args:
        node: the operator.
        besides: kinds of operators that get kernels elsewhere.
    """
    if kind_of_node(node) in besides:
        return ""
    source = first_input(node)
    per_tensor = node.target in _RECURRENT and not Recurrent.of(node).per_token
    dynamic = per_tensor or (source is not None and source.target is quantize_dequantize_dynamic)
    return f"torch has no dynamic int8 kernel for {op_name(node)}" if dynamic else ""


def quantized_weight(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Return the codes that a node dequantizes, as torch's quantized tensor."""
    view = Dequantize.of(node)
    codes = constant_of(module, view.codes)
    if not isinstance(view.scale, fx.Node):
        return torch._make_per_tensor_quantized_tensor(codes, *view.numbers)
    assert view.axis is not None, "scales of channels have an axis"
    scale = constant_of(module, view.scale).double()
    zero_points = torch.zeros(len(scale), dtype=torch.int64)
    # channels-last would save reorders, but IPEX then returned garbage to calls from several threads
    return torch._make_per_channel_quantized_tensor(codes, scale, zero_points, view.axis)


def packed_bytes(module: fx.GraphModule, besides: Collection[str] = ()) -> int:
    """Bytes of the weights of dynamic operators in a QDQ graph.

    They are the codes, and one fp32 scale and sum per output.

    Args:
        module: the graph.
        besides: names of codes that others pack.
    """
    nodes = [Dequantize.of(n).codes for n in module.graph.nodes if _is_packed(n)]
    weights = {codes.target: constant_of(module, codes) for codes in nodes}
    return sum(w.numel() + 8 * w.shape[0] for name, w in weights.items() if name not in besides)


def _is_dynamic(node: fx.Node) -> bool:
    if node.target is quantize_dequantize_dynamic:
        return any(kind_of_node(user) == "linear" for user in node.users)
    if _is_layer_of_torch(node):
        return True
    return kind_of_node(node) == "linear" and _reads_dynamic(node)


def _is_layer_of_torch(node: fx.Node) -> bool:
    """Return whether torch has a dynamic kernel for a recurrent layer.

    It has them for LSTMs without projections and GRUs with one range per tensor and int8 matrices alone.
    """
    if node.target not in (RECURRENT["lstm"], RECURRENT["gru"]):
        return False
    layer = Recurrent.of(node)
    return not (layer.per_token or layer.float_input) and not has_projections(
        layer.params, layer.has_biases, layer.num_layers * (1 + layer.bidirectional)
    )


def _is_packed(node: fx.Node) -> bool:
    """Return whether a node dequantizes a weight that only dynamic operators read."""
    weight = node.target in (dequantize_per_channel, dequantize_per_tensor)
    return weight and bool(node.users) and all(_is_dynamic(user) for user in node.users)


def _reads_dynamic(node: fx.Node) -> bool:
    source = Linear.of(node).input
    return isinstance(source, fx.Node) and source.target is quantize_dequantize_dynamic


def _finds_range_itself(ranges: fx.Node) -> bool:
    """Per tensor and affine: `quantized::linear_dynamic` does it all."""
    view = DynamicQDQ.of(ranges)
    return not view.per_token and not view.symmetric


def _rows(call: Callable[..., fx.Node], node: fx.Node) -> _Rows:
    view = DynamicQDQ.of(node)
    x, per_token = view.input, view.per_token
    over = ([-1] if per_token else [*range(node.meta["val"].dim())], True)
    if view.symmetric:
        # a zero more changes no maximum, and there is one to be found when there are no rows
        padded = (
            x
            if per_token
            else call(_aten.constant_pad_nd.default, (call(_aten.reshape.default, (x, [-1])), [0, 1]))
        )
        largest = call(
            _aten.amax.default, (call(_aten.abs.default, (padded,)), *(over if per_token else ([0], True)))
        )
        scale = call(_aten.clamp_min.default, (call(_aten.mul.Tensor, (largest, 1 / 127)), _LEAST_SCALE))
        return _Rows(call(_aten.div.Tensor, (x, scale)), scale, None)
    low = call(_aten.clamp_max.default, (call(_aten.amin.default, (x, *over)), 0.0))
    high = call(_aten.clamp_min.default, (call(_aten.amax.default, (x, *over)), 0.0))
    step = call(
        _aten.mul.Tensor, (call(_aten.sub.Tensor, (high, low)), 1 / (view.quant_max - view.quant_min))
    )
    scale = call(_aten.clamp_min.default, (step, _LEAST_SCALE))
    zero_point = call(
        _aten.neg.default, (call(_aten.round.default, (call(_aten.div.Tensor, (low, scale)),)),)
    )
    shift = call(_aten.sub.Tensor, (call(_aten.clamp.default, (zero_point, 0.0, 255.0)), float(_MIDDLE)))
    return _Rows(call(_aten.addcdiv.default, (shift, x, scale)), scale, shift)


def _linear(module: fx.GraphModule, node: fx.Node, rows: dict[fx.Node, _Rows]) -> fx.Node:
    linear = Linear.of(node)
    ranges, weight, bias = linear.input, quantized_weight(module, linear.weight), linear.bias

    def call(target: torch._ops.OpOverload, *args: Argument, **kwargs: Argument) -> fx.Node:
        result = call_function(module.graph, target, args, kwargs)
        take_over(result, node)
        return result

    def kernel(target: torch._ops.OpOverload, x: fx.Node, *args: Argument) -> fx.Node:
        is_vector = node.meta["val"].dim() < 2  # kernels take matrices only
        y = call(target, call(_aten.unsqueeze.default, x, 0) if is_vector else x, *args)
        y.meta[DYNAMIC_KERNEL] = True
        return call(_aten.squeeze.dim, y, 0) if is_vector else y

    if _finds_range_itself(ranges):
        constant = bias is None or bias.op == "get_attr"
        packed = _pack(
            module, node, weight, constant_of(module, bias) if bias is not None and constant else None
        )
        y = kernel(_quantized.linear_dynamic.default, DynamicQDQ.of(ranges).input, packed, False)
        return y if constant else call(_aten.add.Tensor, y, bias)
    x = rows[ranges]
    packed = _pack(module, node, weight, None)
    y = kernel(
        _quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default, x.values, 1.0, _MIDDLE, packed
    )
    if x.shift is not None:
        sums = _attribute(module, f"{node.name}_sums", weight.dequantize().double().sum(1).float())
        y = call(_aten.addcmul.default, y, x.shift, sums, value=-1.0)
    return (
        call(_aten.mul.Tensor, y, x.scale) if bias is None else call(_aten.addcmul.default, bias, y, x.scale)
    )


def _recurrent(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    layer = Recurrent.of(node)
    params, each = layer.params, 4 if layer.has_biases else 2
    cells = []
    for i in range(0, len(params), each):
        matrices = [quantized_weight(module, p) for p in params[i : i + 2]]
        biases = [constant_of(module, p) for p in params[i + 2 : i + each]] or [
            torch.zeros(len(w), dtype=torch.float32) for w in matrices
        ]
        with _fbgemm():
            packed = [_quantized.linear_prepack(w, b) for w, b in zip(matrices, biases, strict=True)]
        cell = _quantized.make_quantized_cell_params_dynamic(*packed, *biases, False)
        cells.append(_attribute(module, f"{node.name}_{i}", cell))
    options = (True, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first)
    if _RECURRENT[node.target] == "gru":
        return call_function(
            module.graph, _aten.quantized_gru.input, (layer.input, layer.hx, cells, *options)
        )
    kinds: dict[str, Argument] = {"dtype": torch.qint8, "use_dynamic": True}
    return call_function(
        module.graph, _aten.quantized_lstm.input, (layer.input, layer.hx, cells, *options), kinds
    )


def _pack(module: fx.GraphModule, node: fx.Node, weight: torch.Tensor, bias: torch.Tensor | None) -> fx.Node:
    with _fbgemm():
        packed = _quantized.linear_prepack(weight, bias)
    return _attribute(module, f"{node.name}_packed", packed)


def _attribute(module: fx.GraphModule, name: str, value: object) -> fx.Node:
    while hasattr(module, name):
        name += "_"
    if isinstance(value, torch.Tensor):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)
    return module.graph.create_node("get_attr", name)  # `get_attr` warns of non-tensors


@contextlib.contextmanager
def _fbgemm() -> Iterator[None]:
    """Pack for FBGEMM; torch chooses the engine process-wide."""
    with LOCK:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            yield
        finally:
            torch.backends.quantized.engine = before

"""Dynamic linears, LSTMs and GRUs in TorchScript: FBGEMM's kernels, which round activations to codes while they pack them.

Per tensor there is a kernel that finds the range itself. Per token there is none: rows are divided by their scales first, so that one
scale, 1, holds for all, and the products are multiplied afterwards. With a zero point z per row, `sum w (q - z)` is
`sum w (q - 128) - (z - 128) sum w`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from nc.graph.catalogue import op_name
from nc.graph.functions import dequantize_per_channel, dequantize_per_tensor, quantize_dequantize_dynamic
from nc.graph.recurrent import FUNCTIONS
from nc.process import LOCK

#: Keeps a row of zeros from dividing by zero; its codes are those of 0 whatever the scale.
_LEAST_SCALE = 2.0**-100
_MIDDLE = 128


_RECURRENT = {function: name for name, function in FUNCTIONS.items()}


def is_dynamic(node: fx.Node) -> bool:
    """Whether a node finds ranges in each call, or computes with them."""
    return node.target is quantize_dequantize_dynamic or node.target in _RECURRENT or (op_name(node) == "linear" and _reads_dynamic(node))


def is_packed(node: fx.Node) -> bool:
    """Whether a node dequantizes a weight that only dynamic linears read: they have it packed."""
    weight = node.target in (dequantize_per_channel, dequantize_per_tensor)
    return weight and bool(node.users) and all(is_dynamic(user) for user in node.users)


def statements(module: fx.GraphModule, root: torch.nn.Module, node: fx.Node, names: Mapping[fx.Node, str]) -> list[str]:
    """TorchScript for one such node; packed weights become attributes of `root`."""
    if node.target is quantize_dequantize_dynamic:
        return [] if _finds_range_itself(node) else _rows(node, names[node.args[0]], names[node])
    if node.target in _RECURRENT:
        return [_recurrent(module, root, node, names)]
    ranges = node.args[0]
    x, y = names[ranges], names[node]
    # kernels take matrices only: a single row becomes one
    row, vector = (".unsqueeze(0)", ".squeeze(0)") if node.meta["val"].dim() == 1 else ("", "")
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    weight = quantized_weight(module, node.args[1])
    if _finds_range_itself(ranges):
        constant = bias is None or bias.op == "get_attr"
        packed = _pack(root, node, weight, getattr(module, bias.target) if bias is not None and constant else None)
        text = f"torch.ops.quantized.linear_dynamic({names[ranges.args[0]]}{row}, {packed}, False){vector}"
        return [f"{y} = {text}" if constant else f"{y} = {text} + {names[bias]}"]
    packed = _pack(root, node, weight, None)
    lines = [f"{y} = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32({x}{row}, 1.0, {_MIDDLE}, {packed}){vector}"]
    if not ranges.args[4]:
        sums = f"w_{node.name}_sums"
        root.register_buffer(sums, weight.dequantize().double().sum(1).float())
        lines.append(f"{y} = torch.addcmul({y}, {x}_shift, self.{sums}, value=-1.0)")
    product = f"torch.addcmul({names[bias]}, {y}, {x}_scale)" if bias is not None else f"{y} * {x}_scale"
    return [*lines, f"{y} = {product}"]


def quantized_weight(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """The codes that a node dequantizes, as torch's quantized tensor."""
    codes = getattr(module, node.args[0].target)
    if node.target is dequantize_per_tensor:
        return torch._make_per_tensor_quantized_tensor(codes, node.args[1], node.args[2])
    scale = getattr(module, node.args[1].target).double()
    zero_points = torch.zeros(len(scale), dtype=torch.int64)
    # channels-last would save reorders, but IPEX then returned garbage to calls from several threads (docs/ipex.md)
    return torch._make_per_channel_quantized_tensor(codes, scale, zero_points, node.args[2])


def packed_bytes(module: fx.GraphModule) -> int:
    """Bytes of the weights of dynamic linears: codes, and one fp32 scale and sum per output."""
    names = {n.args[0].target for n in module.graph.nodes if is_packed(n)}
    weights = {name: getattr(module, name) for name in names}
    return sum(w.numel() + 8 * w.shape[0] for w in weights.values())


def _reads_dynamic(node: fx.Node) -> bool:
    return isinstance(node.args[0], fx.Node) and node.args[0].target is quantize_dequantize_dynamic


def _finds_range_itself(ranges: fx.Node) -> bool:
    """Per tensor and affine: `quantized::linear_dynamic` does it all."""
    _, per_token, _, _, symmetric = ranges.args
    return not per_token and not symmetric


def _rows(node: fx.Node, x: str, y: str) -> list[str]:
    """`y_scale`, `y_shift` (zero point minus 128) and `y`, what the kernel rounds: x in units of the scale, shifted."""
    _, per_token, quant_min, quant_max, symmetric = node.args
    over = "[-1], True" if per_token else f"{list(range(node.meta['val'].dim()))}, True"
    least = f".clamp_min({_LEAST_SCALE})"
    if symmetric:
        largest = f"{x}.abs().amax({over})" if per_token else f"(torch.zeros(1) if {x}.numel() == 0 else {x}.abs().amax({over}))"
        return [f"{y}_scale = ({largest} * {1 / 127}){least}", f"{y} = {x} / {y}_scale"]
    return [
        f"{y}_low = {x}.amin({over}).clamp_max(0.0)",
        f"{y}_scale = (({x}.amax({over}).clamp_min(0.0) - {y}_low) * {1 / (quant_max - quant_min)}){least}",
        f"{y}_shift = torch.clamp(torch.round({y}_low / {y}_scale).neg(), 0.0, 255.0) - {float(_MIDDLE)}",
        f"{y} = torch.addcdiv({y}_shift, {x}, {y}_scale)",
    ]


def _recurrent(module: fx.GraphModule, root: torch.nn.Module, node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    x, hx, params, has_biases, num_layers, bidirectional, batch_first, _, _ = node.args
    each = 4 if has_biases else 2
    cells = []
    for i in range(0, len(params), each):
        matrices = [quantized_weight(module, p) for p in params[i : i + 2]]
        biases = [getattr(module, p.target) for p in params[i + 2 : i + each]] or [torch.zeros(len(w)) for w in matrices]
        with _fbgemm():
            packed = [torch.ops.quantized.linear_prepack(w, b) for w, b in zip(matrices, biases, strict=True)]
        cells.append(f"w_{node.name}_{i}")
        setattr(root, cells[-1], torch.ops.quantized.make_quantized_cell_params_dynamic(*packed, *biases, False))
    state = f"[{', '.join(names[h] for h in hx)}]" if isinstance(hx, (list, tuple)) else names[hx]
    arguments = [names[x], state, f"[{', '.join(f'self.{name}' for name in cells)}]", True, num_layers, 0.0, False]
    arguments += [bidirectional, batch_first]
    kind = _RECURRENT[node.target]
    options = ", dtype=torch.qint8, use_dynamic=True" if kind == "lstm" else ""
    return f"{names[node]} = torch.ops.aten.quantized_{kind}({', '.join(map(str, arguments))}{options})"


def _pack(root: torch.nn.Module, node: fx.Node, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    name = f"w_{node.name}"
    with _fbgemm():
        setattr(root, name, torch.ops.quantized.linear_prepack(weight, bias))
    return f"self.{name}"


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

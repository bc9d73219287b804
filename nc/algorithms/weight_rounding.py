"""Weight rounding: int8 weights are rounded so that the outputs of their operators stay, not the weights.

It is GPTQ (arXiv 2210.17323) for the codes of static and dynamic int8 operators: scales stay, and so does the
time of a call. Operators are solved in execution order, each for the inputs that earlier ones give. All
codes together are judged at the model's outputs, on held-out batches if there are enough. If one of the
outputs gets worse, halves are tried, and halves of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import fx

from nc.algorithms.base import Batch, Bound, Context, Needs, Stage, State, Tap, WeightCodes
from nc.algorithms.bias_correction import MAC_BUDGET
from nc.algorithms.output_errors import Errors, errors_of_outputs, harmless
from nc.algorithms.side_by_side import Stream
from nc.graph.catalogue import input_node, kind_of_node
from nc.graph.plan import Applied, Plan
from nc.graph.views import Conv, Dequantize, Weighted
from nc.numerics.column_rounding import HessianFactor, factored, round_columns
from nc.numerics.weights import pairs_of_columns
from nc.ops import DEQUANTIZE

_KINDS = frozenset({"linear", "conv1d", "conv2d"})
#: Rows of columns that a Hessian is made of, for each column and at least.
_ROWS_EACH, _ROWS = 1, 2048
#: Samples of a convolution's input that rows are taken of, evenly spaced.
_SAMPLES = 32
#: One batch in so many is left out, to judge by.
_HELD_OUT = 4
#: How often the model's outputs are computed to find codes that make them worse.
_TRIALS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class WeightRounding:
    """Round int8 weights by what their operators' outputs lose (GPTQ), where that helps.

    It has no options.
    """

    name: ClassVar[str] = "weight_rounding"
    stage: ClassVar[Stage] = Stage.CODES

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return samples, as many as the operators' multiply-adds allow."""
        names = {d.operator for d in plan.quantized}
        taps = (Tap(n.meta["operator"], "output", _seen) for n in _targets(module, names))
        return Needs(samples=Bound(macs=MAC_BUDGET), taps=tuple(taps))

    def apply(self, context: Context) -> Applied:
        """Replace codes of the QDQ graph."""
        if not context.observed:
            why = (
                "no int8 operator has a weight"
                if context.batches
                else "no calibration samples were kept, each batch is too large"
            )
            return Applied(self.name, (), f"nothing: {why}")
        weights = {name: context.weight(name) for name, _ in context.observed}
        known = {name: weight for name, weight in weights.items() if weight is not None}
        kept, tried = round_weights(context.module, context.quantized, known, context.batches)
        text = f"{len(kept)} weights rounded by what their outputs lose"
        if len(kept) < tried:
            text += f"; {tried - len(kept)} taken back because the model's outputs got worse"
        return Applied(self.name, tuple(kept), text)


def _seen(state: State, _: torch.Tensor) -> State:
    """Note that a batch reached the operator."""
    return {"batches": state.get("batches", torch.tensor(0, dtype=torch.int64)) + 1}


@torch.no_grad()
def round_weights(
    fp32: fx.GraphModule,
    quantized: fx.GraphModule | None,
    weights: Mapping[str, WeightCodes],
    batches: Sequence[Batch],
) -> tuple[list[str], int]:
    """Replace codes of a QDQ graph where that makes no output worse.

    Args:
        fp32: the graph that `quantized` was made from.
        quantized: the QDQ graph.
        weights: of its operators.
        batches: flat calibration inputs, each with its own shapes.

    Returns:
        The operators with other codes, in execution order, and how many were tried.
    """
    assert quantized is not None
    judged = list(batches[_HELD_OUT - 1 :: _HELD_OUT]) or list(batches)
    used = [batch for batch in batches if not any(batch is other for other in judged)] or list(batches)
    before = {name: weight.codes for name, weight in weights.items()}
    after = _solved(fp32, quantized, weights, used)
    expected = Stream(fp32, judged).outputs()

    def put(names: Collection[str]) -> None:
        for name in after:
            setattr(quantized, weights[name].name, after[name] if name in names else before[name])

    def errors(names: Collection[str]) -> list[Errors]:
        put(names)
        return errors_of_outputs(expected, Stream(quantized, judged).outputs())

    kept = harmless(list(after), errors, _TRIALS)
    put(kept)
    return kept, len(after)


def _solved(
    fp32: fx.GraphModule,
    quantized: fx.GraphModule,
    weights: Mapping[str, WeightCodes],
    batches: Sequence[Batch],
) -> dict[str, torch.Tensor]:
    """Return new codes by operator, in execution order; the QDQ graph has them too."""
    originals = {n.meta["operator"]: Weighted.of(n).weight for n in _targets(fp32, set(weights))}
    stream, codes, known = Stream(quantized, batches), {}, set()
    shared: tuple[fx.Node | None, HessianFactor | None] = (
        None,
        None,
    )  # queries, keys and values read one tensor
    for node in _targets(quantized, set(weights)):
        name = node.meta["operator"]
        held = weights[name]
        original = originals[name]
        if held.name in known or original.op != "get_attr":
            continue
        known.add(held.name)
        read = input_node(node)
        stream.until(read)
        weight = getattr(fp32, str(original.target)).detach()
        linear = kind_of_node(node) == "linear"
        origin = Dequantize.of(read).codes if read.target in DEQUANTIZE else read
        factor = shared[1] if linear and origin is shared[0] else _factor(node, weight, held, stream[read])
        shared = (origin, factor) if linear else (None, None)
        if factor is not None:
            held.replace(_codes(weight, held, factor))
            stream.again(Weighted.of(node).weight)
            codes[name] = held.codes
    return codes


def _codes(weight: torch.Tensor, held: WeightCodes, factor: HessianFactor) -> torch.Tensor:
    """Return the codes of a weight for the inputs that its operator reads."""
    matrix = weight.float().reshape(held.groups, len(weight) // held.groups, -1)
    scale = held.scale.reshape(-1, 1).expand(len(weight), 1).reshape(held.groups, -1, 1)
    pairs = pairs_of_columns(weight, held.groups) if held.spec.paired else None
    codes = round_columns(matrix, scale, factor, (held.spec.quant_min, held.spec.quant_max), pairs)
    return torch.empty_like(held.codes).copy_(codes.reshape(weight.shape))


def _factor(
    node: fx.Node, weight: torch.Tensor, held: WeightCodes, inputs: Sequence[torch.Tensor]
) -> HessianFactor | None:
    """Return the factor for the inputs that an operator reads; None where it has none."""
    hessian = _hessian(node, held.groups, weight.numel() // len(weight), inputs)
    return None if hessian is None else factored(hessian)


def _hessian(node: fx.Node, groups: int, columns: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sums of x x^T over evenly spaced rows of an operator's inputs, float64; None without any."""
    wanted = max(_ROWS, _ROWS_EACH * columns) / len(inputs)
    # a factor of all inputs changes no code, and the squares of tiny ones would be 0
    size = max((float(value.abs().amax()) for value in inputs if value.numel()), default=0.0)
    scale = 2.0 ** -math.frexp(size)[1] if 0.0 < size < math.inf else 1.0
    total = torch.zeros(groups, columns, columns, dtype=torch.float64)
    for value in inputs:
        for part, share in _parts(node, value, max(1, _SAMPLES // len(inputs))):
            rows = part.reshape(groups, columns, -1) * scale
            rows = rows[:, :, :: max(1, math.floor(rows.shape[2] / max(1.0, wanted * share)))]
            total += (rows @ rows.transpose(1, 2)).double()
    return total if bool(total.isfinite().all()) and bool(total.any()) else None


def _parts(node: fx.Node, value: torch.Tensor, samples: int) -> list[tuple[torch.Tensor, float]]:
    """Return what an operator multiplies its weight with, [columns, rows], in parts; and their shares."""
    if kind_of_node(node) == "linear":
        return [(value.reshape(-1, value.shape[-1]).T.float(), 1.0)]
    flat = kind_of_node(node) == "conv1d"
    dims = 1 if flat else 2
    value = value if value.dim() == dims + 2 else value.unsqueeze(0)
    value = value[:: max(1, len(value) // samples)]
    return [(_unfolded(Conv.of(node), each, dims), 1 / len(value)) for each in value.float()]


def _unfolded(conv: Conv, image: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the windows of one image, [channels * window, positions]."""
    stride, padding, dilation = conv.sizes(dims)
    window = [int(size) for size in conv.weight.meta["val"].shape[2:]]
    words: Sequence[int | str] = [conv.padding] * dims if isinstance(conv.padding, str) else padding
    around = [_padding(*each) for each in zip(words, window, dilation, strict=True)]
    if dims == 1:  # a convolution of one row
        image = image.unsqueeze(1)
        stride, dilation, window, around = [1, *stride], [1, *dilation], [1, *window], [(0, 0), *around]
    (top, bottom), (left, right) = around
    padded = torch.nn.functional.pad(image, (left, right, top, bottom)).unsqueeze(0)
    columns = torch.nn.functional.unfold(padded, tuple(window), tuple(dilation), 0, tuple(stride))
    return columns[0]


def _padding(padding: int | str, window: int, dilation: int) -> tuple[int, int]:
    """Return the zeros before and after a dimension."""
    if isinstance(padding, int):
        return padding, padding
    total = dilation * (window - 1) if padding == "same" else 0
    return total // 2, total - total // 2


def _targets(module: fx.GraphModule, operators: set[str]) -> list[fx.Node]:
    return [
        n for n in module.graph.nodes if n.meta.get("operator") in operators and kind_of_node(n) in _KINDS
    ]

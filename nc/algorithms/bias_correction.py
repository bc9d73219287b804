"""Bias correction.

It subtracts the mean error of quantization in each output channel from the bias, where that helps.

`b += E[y_fp32] - E[y_int8]` per output channel over calibration samples (Nagel et al., arXiv 1906.04721,
section 4.2, the empirical form), in execution order: each operator is corrected with all earlier corrections
applied, in one pass over the graph.

A smaller mean error does not imply a smaller error of the model: a norm makes the noise in rows of padding as
large as data. So each correction is judged three times, and undone where something gets worse:

* at the operator's output, for samples that it was not computed from;
* where its output is read, after activations, additions and norms;
* all together at the model's outputs. If one of them gets worse there, halves of the corrections are tried,
  and halves of these.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from nc.algorithms.base import Batch, Bound, Context, Needs, Stage, State, Tap
from nc.algorithms.output_errors import TOLERANCE, errors_of, errors_of_outputs, is_worse, rows_of
from nc.algorithms.replay import channel_axis
from nc.algorithms.side_by_side import Stream
from nc.graph.catalogue import WEIGHTED, is_float_tensor, kind_of_node
from nc.graph.fx_utils import add_constant, call_function, constant_of, replace_constant
from nc.graph.plan import Applied, Plan
from nc.graph.views import Weighted
from nc.numerics.mean_error import mean_error

#: Multiply-adds of fp32 compute after which no further batch is taken: seconds on two cores, 140 MiniLM
#: samples or 50 of ResNet-50.
MAC_BUDGET = 2e11
#: Values of one tensor over all batches that a mean is taken of; of more, evenly spaced positions.
_VALUES = 2**23
#: How often the model's outputs are computed to find corrections that make them worse.
_TRIALS = 12
#: Why a correction was taken back.
ONE_ROW, OWN, READ, MODEL = (
    "all outputs were one row, too few to judge by",
    "outputs for left-out samples got worse",
    "what reads the outputs got worse",
    "the model's outputs got worse",
)


@dataclasses.dataclass(frozen=True, slots=True)
class BiasCorrection:
    """Subtract the mean quantization error of each output channel from the bias, where that helps.

    It has no options.
    """

    name: ClassVar[str] = "bias_correction"
    stage: ClassVar[Stage] = Stage.CODES

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return samples, as many as the operators' multiply-adds allow."""
        nodes = _targets(module, {d.operator for d in plan.quantized})
        taps = (Tap(n.meta["operator"], "output", _seen) for n in nodes)
        return Needs(samples=Bound(macs=MAC_BUDGET), taps=tuple(taps))

    def apply(self, context: Context) -> Applied:
        """Correct the biases of the QDQ graph in place."""
        if not context.observed:
            why = (
                "no int8 operator has a weight"
                if context.batches
                else "no calibration samples were kept, each batch is too large"
            )
            return Applied(self.name, (), f"nothing: {why}")
        assert context.quantized is not None
        operators = {operator for operator, _ in context.observed}
        found = correct_biases(context.module, context.quantized, operators, context.batches)
        return Applied(self.name, tuple(found.deltas), found.text())


def _seen(state: State, _: torch.Tensor) -> State:
    """Note that a batch reached the operator."""
    return {"batches": state.get("batches", torch.tensor(0, dtype=torch.int64)) + 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Corrections:
    """What was done to each operator.

    Attributes:
        deltas: of those that are kept: operator → what its bias gets, fp32 [channels], in execution order.
        refused: of the others: operator → why.
        errors: of the model's outputs: for each the square error over all rows, and over those that differ.
    """

    deltas: Mapping[str, torch.Tensor]
    refused: Mapping[str, str]
    errors: Sequence[tuple[float, float]]

    def text(self) -> str:
        """How many were kept, and which were taken back."""
        reasons = Counter(self.refused.values())
        names = {
            why: ", ".join([name for name, other in self.refused.items() if other == why][:3])
            for why in reasons
        }
        taken = [
            f"{count} taken back because {why} ({names[why]}{', …' if count > 3 else ''})"
            for why, count in reasons.items()
        ]
        return "; ".join([f"{len(self.deltas)} biases corrected", *taken])


@torch.no_grad()
def correct_biases(
    fp32: fx.GraphModule, quantized: fx.GraphModule, operators: Collection[str], batches: Sequence[Batch]
) -> Corrections:
    """Correct biases of a QDQ graph in place, where that makes no output worse on the batches.

    Args:
        fp32: the graph that `quantized` was made from.
        quantized: gets new bias constants.
        operators: names of the operators to correct.
        batches: flat calibration inputs, each with its own shapes.
    """
    found = _best(
        _Attempts(fp32, quantized, batches), [n.meta["operator"] for n in _targets(quantized, set(operators))]
    )
    for node in _targets(quantized, set(found.deltas)):
        _add_to_bias(quantized, node, found.deltas[node.meta["operator"]])
    quantized.graph.lint()
    quantized.recompile()
    return found


def _best(attempt: Callable[[Collection[str]], Corrections], operators: Sequence[str]) -> Corrections:
    """Return the corrections of as many of the operators as make no output of the model worse.

    Args:
        attempt: corrects those of some operators that pass their own tests.
        operators: in execution order.
    """
    first = attempt(operators)  # of all, which are mostly kept; what both runs share is computed once
    best = attempt(())
    refused: dict[str, str] = {}
    open_ = [list(operators)] if operators else []
    trials = 0
    while open_:
        part = open_.pop(0)
        tried = first if not trials else attempt({*best.deltas, *part}) if trials < _TRIALS else None
        trials += 1
        if tried is not None and not is_worse(best.errors, tried.errors):
            best = tried
            refused |= tried.refused
        elif len(part) > 1 and tried is not None:
            part = [name for name in part if name in tried.deltas]
            refused |= tried.refused
            half = (len(part) + 1) // 2
            open_[:0] = [each for each in (part[:half], part[half:]) if each]
        else:
            refused |= dict.fromkeys(part, MODEL)
    order = [name for name in operators if name in refused and name not in best.deltas]
    return dataclasses.replace(best, refused={name: refused[name] for name in order})


@dataclasses.dataclass(slots=True)
class _Attempts:
    """Runs both graphs, and corrects some operators on the way; neither graph is changed.

    Attributes:
        fp32: the graph that the other was made from.
        quantized: the QDQ graph.
        batches: flat inputs.
        outputs: of the fp32 graph, as soon as they are known.
    """

    fp32: fx.GraphModule
    quantized: fx.GraphModule
    batches: Sequence[Batch]
    outputs: list[tuple[Any, ...]] | None = None

    def __call__(self, operators: Collection[str]) -> Corrections:
        """Return the corrections of these operators that pass their own tests."""
        expected, got = Stream(self.fp32, self.batches), Stream(self.quantized, self.batches)
        originals = {n.meta["operator"]: n for n in _targets(self.fp32, set(operators))}
        deltas: dict[str, torch.Tensor] = {}
        refused: dict[str, str] = {}
        for node in _targets(self.quantized, set(operators)):
            name = node.meta["operator"]
            original = originals[name]
            expected.until(original)
            got.until(node)
            delta, why = _correction(node, expected[original], got[node])
            values = [] if delta is None else _shifted(node, got[node], delta)
            if delta is not None and _harms_readers(expected, original, got, node, values):
                delta, why = None, READ
            if delta is None:
                refused[name] = why
                continue
            got.replace(node, values)
            deltas[name] = delta
        if self.outputs is None:
            self.outputs = expected.outputs()
        return Corrections(deltas, refused, errors_of_outputs(self.outputs, got.outputs()))


def _correction(
    node: fx.Node, expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, str]:
    """Return what an operator's bias gets, fp32 [channels]; None and the reason, where it stays."""
    rows = [rows_of(value.movedim(channel_axis(node, value), -1), _VALUES // len(got)) for value in expected]
    quantized = [rows_of(value.movedim(channel_axis(node, value), -1), _VALUES // len(got)) for value in got]
    found = mean_error(
        torch.cat([r for r, _ in rows]), torch.cat([r for r, _ in quantized]), _samples([s for _, s in rows])
    )
    delta = found.delta.float()
    if found.held_out is None:
        return None, ONE_ROW
    if not bool(torch.isfinite(delta).all()) or found.held_out > TOLERANCE * found.before:
        return None, OWN
    return delta, ""


def _harms_readers(
    expected: Stream, original: fx.Node, got: Stream, node: fx.Node, values: Sequence[torch.Tensor]
) -> bool:
    """Return whether new values of an operator make its readers worse, up to the next products."""
    behind = {n.name: n for n in expected.behind(original)}
    copies = {n.name: n for n in got.behind(node)}
    ends = {
        name
        for name, n in behind.items()
        if name in copies and is_float_tensor(n) and not any(u.name in behind for u in n.users)
    }
    if not ends:
        return False
    names = _needed(ends, behind), _needed(ends, copies)
    wanted = list(expected.ahead(original, expected[original], names[0], ends))
    before = list(got.ahead(node, got[node], names[1], ends))
    after = list(got.ahead(node, values, names[1], ends))
    for name in sorted(ends):
        right = [each[name] for each in wanted]
        errors = [errors_of(right, [each[name] for each in found]) for found in (before, after)]
        if is_worse(errors[:1], errors[1:]):
            return True
    return False


def _needed(ends: Collection[str], nodes: dict[str, fx.Node]) -> list[fx.Node]:
    """Return the nodes that the ends are computed from, and the ends, in execution order."""
    needed: set[str] = set(ends)
    for name in reversed(nodes):
        if name in needed:
            needed.update(source.name for source in nodes[name].all_input_nodes)
    return [node for name, node in nodes.items() if name in needed]


def _samples(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers of samples, counted on over all batches."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + (int(part.max()) + 1 if len(part) else 0))
    return torch.cat([part + start for part, start in zip(parts, starts, strict=False)])


def _shifted(node: fx.Node, values: Sequence[torch.Tensor], delta: torch.Tensor) -> list[torch.Tensor]:
    return [
        v + delta.reshape([-1 if d == channel_axis(node, v) else 1 for d in range(v.dim())]) for v in values
    ]


def _targets(module: fx.GraphModule, operators: set[str]) -> list[fx.Node]:
    return [
        n for n in module.graph.nodes if n.meta.get("operator") in operators and kind_of_node(n) in WEIGHTED
    ]


def _add_to_bias(module: fx.GraphModule, node: fx.Node, delta: torch.Tensor) -> None:
    bias = Weighted.of(node).bias
    if bias is not None and bias.op != "get_attr":  # computed in the graph (Swin v2 clears part of its bias)
        constant = add_constant(
            module, node, f"{node.name}_bias_correction", delta, f"{node.name}.bias_correction"
        )
        with module.graph.inserting_before(node):
            node.replace_input_with(
                bias, call_function(module.graph, torch.ops.aten.add.Tensor, (bias, constant))
            )
        return
    replace_constant(module, node, "bias", delta if bias is None else constant_of(module, bias) + delta)

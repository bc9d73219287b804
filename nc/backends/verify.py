"""Check an engine's outputs against the quantized graph and find the first difference.

There is one threshold for all engines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.errors import ConfigError, VerificationError
from nc.graph.catalogue import ACTIVATIONS, MOVES, op_name
from nc.graph.qdq import QDQGraph
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import dequantize_per_tensor, quantize_per_tensor
from nc.process.warn import warn
from nc.proof.kernels import KernelCheck

#: Engine against reference on the example inputs. Healthy fusions of one block give 30 dB and more, the known
#: faults less than 15. Deep models amplify every rounding: where quantization itself costs more than this,
#: the engine's error is another one of the same size, and two independent errors are 3 dB further apart than
#: each is from fp32; 2 dB more for chance.
TOLERANCE_DB = 20.0
CHANCE_DB = 5.0
FLOOR_DB = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """What a search for the first operator that differs found.

    Attributes:
        operator: its name; "" where none of those that were compared differs.
        failed: operators that could not be compared, because the engine fails for the part of the graph that
            ends there.
    """

    operator: str
    failed: tuple[str, ...] = ()


def check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError for a word that an option does not know."""
    if value not in allowed:
        msg = f"Expected {name} to be one of {', '.join(map(repr, allowed))}, but got {value!r}."
        raise ConfigError(msg)


def verify_outputs(
    graph: QDQGraph,
    outputs: Sequence[Any],
    verify: str,
    engine: str,
    first: Callable[[], Search] | None = None,
    reference: Callable[[], Sequence[Any]] | None = None,
) -> float | None:
    """Compare an engine's outputs on the example inputs with the graph's own.

    Args:
        graph: the quantized model.
        outputs: what the engine gives for its example.
        verify: "raise" or "warn" when they are further apart than `TOLERANCE_DB`, or `CHANCE_DB` more than
            the graph is from fp32 where that is more; "off" measures nothing.
        engine: how it is called in messages.
        first: finds the first operator that differs; None: it is not searched.
        reference: returns the graph's own outputs, if the caller has computed them already.

    Returns:
        dB; None when nothing was measured.

    Raises:
        VerificationError: they are too far apart, or have other shapes.
    """
    if verify == "off":
        return None
    sqnr = agreement_db(graph, outputs, reference)
    if sqnr is None:
        msg = (
            f"{engine} gives outputs of other shapes than the quantized graph, so they can't be compared: "
            "the sizes of outputs depend on computed values, which rounding changes. Quantize the part of "
            "the model before that, for example model.backbone."
        )
        raise VerificationError(msg)
    required = required_db(graph)
    if sqnr < required:
        text = _disagreement(engine, None if first is None else first(), sqnr, required)
        if verify == "raise":
            raise VerificationError(text)
        warn(text)
    return sqnr


def verify_kernels(check: KernelCheck | None, verify: str, engine: str) -> None:
    """Judge the comparison of an engine's kernels for the example.

    Args:
        check: what it found; None: there was none.
        verify: as for `verify_outputs`.
        engine: how it is called in messages.

    Raises:
        VerificationError: a kernel computes something else.
    """
    faults = () if check is None else check.faults
    if verify == "off" or not faults:
        return
    text = (
        f"{engine} computes something else than the quantized graph in {len(faults)} places, although its "
        "outputs are close. The first is "
        f'{faults[0]}; give it fp32: {_rule(faults[0].operator)}. verify="warn" keeps the model all the '
        'same; backend="reference" computes '
        "the graph itself."
    )
    if verify == "raise":
        raise VerificationError(text)
    warn(text)


def agreement_db(
    graph: QDQGraph, outputs: Sequence[Any], reference: Callable[[], Sequence[Any]] | None = None
) -> float | None:
    """How far an engine's outputs on the example are from the graph's own, in dB.

    It is None where they have other shapes.

    Those that the graph knows from where it was made are enough where the engine agrees with them. Where it
    does not, the graph is run: on another CPU it may round otherwise itself.
    """
    known = graph.expected
    if known is not None and shapes(known) == shapes(outputs):
        sqnr = worst_sqnr_db(known, outputs)
        if sqnr >= required_db(graph):
            return sqnr
    expected = reference_outputs(graph) if reference is None else reference()
    return worst_sqnr_db(expected, outputs) if shapes(expected) == shapes(outputs) else None


def reference_outputs(graph: QDQGraph) -> Sequence[Any]:
    """Return what a graph computes itself for its example."""
    with torch.no_grad():
        outputs: Sequence[Any] = graph.module(*graph.example)
        return outputs


def required_db(graph: QDQGraph) -> float:
    """How close an engine has to come to a graph on its example, in dB."""
    return max(FLOOR_DB, min(TOLERANCE_DB, graph.sqnr_vs_fp32_db - CHANCE_DB))


def shapes(outputs: Sequence[Any]) -> list[torch.Size | None]:
    """Return the shape of each output; None for other values than tensors."""
    return [value.shape if isinstance(value, torch.Tensor) else None for value in outputs]


def _disagreement(engine: str, found: Search | None, sqnr: float, required: float) -> str:
    return (
        f"{engine} computes something else than the quantized graph: {sqnr:.1f} dB on the example inputs, "
        "expected at least "
        f'{required:.0f}. {"" if found is None else _where(found)}verify="warn" keeps the model all the '
        'same; backend="reference" computes '
        "the graph itself."
    )


def _rule(operator: str) -> str:
    """Return what to write so that an operator stays fp32."""
    return f'set_local({operator!r}, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))'


def _where(found: Search) -> str:
    """Return a sentence for the message."""
    failed = (
        " (not compared, because the engine fails for a part of the graph that ends there: "
        f"{', '.join(map(repr, found.failed))})"
    )
    noted = failed if found.failed else ""
    if found.operator:
        return (
            f"The first operator that differs is {found.operator!r}{noted}; give it fp32: "
            f"{_rule(found.operator)}. "
        )
    if found.failed:
        return f"No operator that was compared differs{noted}. "
    return "No single operator differs; the error accumulates. "


#: Runs a separate graph on its inputs with an engine.
RunGraph = Callable[[fx.GraphModule, tuple[torch.Tensor, ...]], Sequence[Any]]


def first_disagreement(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...], run: RunGraph) -> Search:
    """Return the first operator whose prefix graph an engine computes wrongly, by bisection.

    Args:
        module: QDQ graph.
        inputs: flat inputs.
        run: lowers a part of the graph as the whole was lowered, and runs it; it must leave the part as it
            is.
    """
    nodes = [n for n in module.graph.nodes if "operator" in n.meta]
    low, high, failed = 0, len(nodes), []
    while low < high:
        middle = (low + high) // 2
        sqnr = _prefix_sqnr_db(module, nodes[middle], inputs, run)
        if sqnr is None:
            failed.append(nodes.pop(middle).meta["operator"])
            high -= 1
        elif sqnr < TOLERANCE_DB:
            high = middle
        else:
            low = middle + 1
    return Search(nodes[low].meta["operator"] if low < len(nodes) else "", tuple(dict.fromkeys(failed)))


def _prefix_sqnr_db(
    module: fx.GraphModule, last: fx.Node, inputs: tuple[torch.Tensor, ...], run: RunGraph
) -> float | None:
    """Engine against the graph itself, for what leads to one operator's result.

    It goes to its codes, where it is quantized.

    None where the engine fails for this part: the whole, which it can run, differs all the same.
    """
    probes = _codes_of(last) or [last]
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
        if all(probe in mapping for probe in probes):
            break
    graph.output(tuple(mapping[probe] for probe in probes))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    prefix = fx.GraphModule(module, graph)
    with torch.no_grad():
        expected = prefix(*inputs)
    try:
        got = run(prefix, inputs)
    except Exception:  # whatever an engine may raise: it must not hide the error that is being explained
        return None
    return worst_sqnr_db(expected, got) if shapes(expected) == shapes(got) else -math.inf


def _codes_of(node: fx.Node) -> list[fx.Node]:
    """Return the dequantize nodes after an operator, through operators that are fused with it.

    A fault of fusion may show in codes only.
    """
    found = []
    for user in node.users:
        if user.target is dequantize_per_tensor:
            found.append(user)
        elif user.target is quantize_per_tensor or op_name(user) in ACTIVATIONS or op_name(user) in MOVES:
            found += _codes_of(user)
    return found

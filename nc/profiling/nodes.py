"""Profile of a model that PyTorch runs call by call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import first_input
from nc.profiling import onednn_verbose
from nc.profiling.profile import WARM_UP, EngineCall, Profile, repeat, timed


class _Clock(fx.Interpreter):
    """Runs a graph; takes the time of every call, and says before each which it is."""

    def __init__(self, module: fx.GraphModule, announce: Callable[[int], None]) -> None:
        super().__init__(module)
        self.announce = announce
        self.ms: list[float] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the only kind of call that these graphs have."""
        self.announce(len(self.ms))
        start = time.perf_counter()
        result = target(*args, **kwargs)
        self.ms.append(1e3 * (time.perf_counter() - start))
        return result


def profile_nodes(
    module: fx.GraphModule,
    call: Callable[..., object],
    converters: Set[object],
    inputs: Sequence[torch.Tensor],
) -> Profile:
    """Time and kernel of every call of a graph; takes the process's standard output over.

    Args:
        module: flat graph; nodes say in `meta` which operator, or operators, they compute. The steps are
            timed one by one, by Python.
        call: runs the graph the way that users do, for the time of the whole.
        converters: what quantize and dequantize nodes call.
        inputs: flat tensors.
    """
    with torch.no_grad():
        for _ in range(WARM_UP):
            call(*inputs)
        rows: list[tuple[float, list[float]]] = []
        repeat(lambda: rows.append((timed(lambda: call(*inputs)), _clocked(module, inputs))))
        with onednn_verbose.captured() as lines:
            _clocked(module, inputs, onednn_verbose.mark)
    kernels = onednn_verbose.by_mark(onednn_verbose.parse(lines))
    times = list(map(min, zip(*(row[1] for row in rows), strict=True)))
    steps = tuple(
        dataclasses.replace(s, kernels=kernels.get(i, ()))
        for i, s in enumerate(_steps(module, converters, times))
    )
    return Profile(
        steps=steps, call_ms=min(row[0] for row in rows), calls=len(rows), threads=torch.get_num_threads()
    )


def node_steps(
    module: fx.GraphModule, converters: Set[object], inputs: Sequence[torch.Tensor]
) -> tuple[EngineCall, ...]:
    """Every call of a graph with the time that it took in one run; see `profile_nodes`."""
    with torch.no_grad():
        return _steps(module, converters, _clocked(module, inputs))


def _clocked(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], announce: Callable[[int], None] = lambda _: None
) -> list[float]:
    """Milliseconds of each call of a graph."""
    clock = _Clock(module, announce)
    clock.run(*inputs)
    return clock.ms


def _steps(module: fx.GraphModule, converters: Set[object], times: Sequence[float]) -> tuple[EngineCall, ...]:
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return tuple(
        dataclasses.replace(describe(node, converters), ms=ms) for node, ms in zip(nodes, times, strict=True)
    )


def describe(node: fx.Node, converters: Set[object]) -> EngineCall:
    """Return what is known of a node's step before it runs; `converters` as in `profile_nodes`."""
    converts = node.target in converters
    return EngineCall(
        name=_name(node),
        operators=operators_of(node),
        converts=converts,
        serves=_served(node, converters) if converts else "",
    )


def operators_of(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the operators that a node computes; a changed artefact may give it none."""
    return tuple(node.meta.get("operators") or filter(None, [node.meta.get("operator")]))


def _served(node: fx.Node, converters: Set[object]) -> str:
    """Return the operator whose kernel made what a conversion reads.

    Failing that, it is the one whose kernel reads what it makes.
    """
    source = first_input(node)
    while (
        source is not None
        and source.op == "call_function"
        and source.target not in converters
        and not operators_of(source)
    ):
        source = first_input(source)  # of a move
    if source is not None and source.meta.get("operators"):
        return operators_of(source)[0]
    waiting = list(node.users)
    for user in waiting:  # which grows
        if user.meta.get("operators"):
            return operators_of(user)[0]
        if user.target not in converters:
            waiting += [u for u in user.users if u not in waiting]
    return ""


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("nc::")
    return str(getattr(node.target, "__name__", node.target))

"""Profile of a model that PyTorch runs call by call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import fx

from nc.backends.profiling import onednn_verbose
from nc.backends.profiling.profile import WARM_UP, Profile, Step, repeat, timed


class _Clock(fx.Interpreter):
    """Runs a graph; takes the time of every call, and says before each which it is."""

    def __init__(self, module: fx.GraphModule, announce: Callable[[int], None]) -> None:
        super().__init__(module)
        self.announce = announce
        self.ms: list[float] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The only kind of call that these graphs have."""
        self.announce(len(self.ms))
        start = time.perf_counter()
        result = target(*args, **kwargs)
        self.ms.append(1e3 * (time.perf_counter() - start))
        return result


def profile_nodes(module: fx.GraphModule, call: Callable[..., object], converters: Set[object], inputs: Sequence[torch.Tensor]) -> Profile:
    """Time and kernel of every call of a graph; takes the process's standard output over.

    Args:
        module: flat graph; nodes say in `meta` which operator, or operators, they compute. The steps are timed one by one, by Python.
        call: runs the graph the way that users do, for the time of the whole.
        converters: what quantize and dequantize nodes call.
        inputs: flat tensors.
    """

    def clocked(announce: Callable[[int], None]) -> list[float]:
        clock = _Clock(module, announce)
        clock.run(*inputs)
        return clock.ms

    with torch.no_grad():
        for _ in range(WARM_UP):
            call(*inputs)
        rows: list[tuple[float, list[float]]] = []
        repeat(lambda: rows.append((timed(lambda: call(*inputs)), clocked(lambda _: None))))
        with onednn_verbose.captured() as lines:
            clocked(onednn_verbose.mark)
    kernels = _by_mark(onednn_verbose.parse(lines))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    steps = tuple(
        Step(
            name=_name(node),
            operators=tuple(node.meta.get("operators") or filter(None, [node.meta.get("operator")])),
            kernels=tuple(kernels.get(i, ())),
            converts=node.target in converters,
            ms=ms,
        )
        for i, (node, ms) in enumerate(zip(nodes, map(min, zip(*(row[1] for row in rows), strict=True)), strict=True))
    )
    return Profile(steps=steps, call_ms=min(row[0] for row in rows), calls=len(rows), threads=torch.get_num_threads())


def _by_mark(stream: Sequence[onednn_verbose.Kernel | onednn_verbose.Partition | int]) -> dict[int, list[onednn_verbose.Kernel]]:
    """The kernels that follow each mark."""
    found: dict[int, list[onednn_verbose.Kernel]] = {}
    current = -1
    for entry in stream:
        if isinstance(entry, int):
            current = entry
        elif isinstance(entry, onednn_verbose.Kernel):
            found.setdefault(current, []).append(entry)
    return found


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    return node.target.__name__

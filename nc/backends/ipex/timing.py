"""Profile of a fused script.

It has the times of what the JIT interpreter runs, and the kernels of each fusion group.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from nc.backends.ipex.executed_graph import GROUP, executed_graph, line_of
from nc.profiling import onednn_verbose
from nc.profiling.profile import WARM_UP, EngineCall, Profile, repeat, timed

_CONVERTERS = frozenset({"aten::quantize_per_tensor", "aten::quantize_per_channel", "aten::dequantize"})


def profile_script(
    run: Callable[[Sequence[torch.Tensor]], object],
    operator_at: Mapping[int, str],
    inputs: Sequence[torch.Tensor],
) -> Profile:
    """Time and kernels of every node that the JIT executes; takes the process's standard output over.

    Nodes, what the profiler recorded, and the partitions in oneDNN's stream are three lists in one order. A
    convolution or linear outside of all groups has its time, but no kernel: nothing ties the primitives
    between two partitions to a node.

    Args:
        run: calls the frozen module.
        operator_at: source line of the script → operator name.
        inputs: flat tensors.
    """
    for _ in range(WARM_UP):
        run(inputs)
    nodes = list(_timed_nodes(executed_graph(run, inputs)))
    calls: list[float] = []
    records: list[list[tuple[str, float]]] = []

    def once() -> None:
        calls.append(timed(lambda: run(inputs)))
        records.append(_record(run, inputs))

    repeat(once)
    with onednn_verbose.captured() as lines:
        run(inputs)
    names = [name for name, _ in records[-1]]
    times = [
        min(column)
        for column in zip(*([ms for _, ms in r] for r in records if [n for n, _ in r] == names), strict=True)
    ]
    partitions = [
        entry for entry in onednn_verbose.parse(lines) if isinstance(entry, onednn_verbose.Partition)
    ]
    return Profile(
        steps=tuple(_steps(names, times, nodes, partitions, operator_at)),
        call_ms=min(calls),
        calls=len(calls),
        threads=torch.get_num_threads(),
    )


def _steps(
    names: Sequence[str],
    times: Sequence[float],
    nodes: Sequence[torch._C.Node],
    partitions: Sequence[onednn_verbose.Partition],
    operator_at: Mapping[int, str],
) -> Iterator[EngineCall]:
    """Yield what was recorded, with the operators of the nodes that it goes back to."""
    matcher = difflib.SequenceMatcher(None, names, [node.kind() for node in nodes], autojunk=False)
    node_of = {a + i: nodes[b + i] for a, b, size in matcher.get_matching_blocks() for i in range(size)}
    kernels = iter(
        partitions
        if len(partitions) == names.count(GROUP)
        else [onednn_verbose.Partition(())] * names.count(GROUP)
    )
    for i, (name, ms) in enumerate(zip(names, times, strict=True)):
        yield EngineCall(
            name=name,
            operators=_operators(node_of[i], operator_at) if i in node_of else (),
            kernels=next(kernels).kernels if name == GROUP else (),
            converts=name in _CONVERTERS,
            ms=ms,
        )


def _record(
    run: Callable[[Sequence[torch.Tensor]], object], inputs: Sequence[torch.Tensor]
) -> list[tuple[str, float]]:
    """Name and milliseconds of each node that one call executes.

    The profiler calls a group by its members: "dequantize+linear".
    """
    with torch.autograd.profiler.profile() as profiler:
        run(inputs)
    events = sorted(profiler.function_events, key=lambda event: event.time_range.start)
    inside = [e for e in events if e.cpu_parent is not None and e.cpu_parent.name == "forward"]
    return [(e.name if "::" in e.name else GROUP, e.time_range.elapsed_us() / 1e3) for e in inside]


def _timed_nodes(block: torch._C.Graph | torch._C.Block) -> Iterator[torch._C.Node]:
    """Yield the nodes that the profiler can record, those of groups aside."""
    for node in block.nodes():
        if not node.kind().startswith("prim::"):
            yield node
        for inner in node.blocks():
            yield from _timed_nodes(inner)


def _operators(node: torch._C.Node, operator_at: Mapping[int, str]) -> tuple[str, ...]:
    """Return the operators that a node computes, in order."""
    inside = node.g("Subgraph").nodes() if node.kind() == GROUP else [node]
    return tuple(dict.fromkeys(operator_at[line] for line in map(line_of, inside) if line in operator_at))

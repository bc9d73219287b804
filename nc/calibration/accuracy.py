"""What a model in int8 loses, measured on calibration data of several batches.

One batch may be unlike the others: silence has a signal that is hardly larger than its error. So the powers
of all batches are added up before they are compared. Of scores a task mostly reads the largest one, so it is
counted how often that is another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.accuracy import EXAMPLE, Accuracy
from nc.graph.fx_utils import call_graph
from nc.graph.signature import Signature
from nc.numerics.metrics import decibels, powers

Batch = Sequence[torch.Tensor]
#: Batches that are kept, rows of each, and bytes of all.
KEPT, _ROWS, _BYTES = 4, 8, 64 * 2**20
#: Multiply-adds of all batches that are run: some seconds for the quantized graph.
MULTIPLY_ADDS = 3e10


class Spread:
    """Some calibration batches, evenly spaced over all; of large ones some rows.

    Attributes:
        state: calls so far, of which each how manyth is kept, and flat inputs.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self.state: tuple[int, int, tuple[Batch, ...]] = 0, 1, ()

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Flat inputs."""
        return self.state[2]

    def keep(self, inputs: Batch) -> None:
        """Keep a copy of a batch, if it is its turn."""
        calls, step, batches = self.state
        if calls % step == 0 and inputs and all(t.numel() for t in inputs):
            part = rows_of(inputs, _ROWS, self._signature)
            batches = (*batches, tuple(t.detach().clone() for t in part))
            if len(batches) > KEPT or (len(batches) > 2 and sum(map(_bytes, batches)) > _BYTES):
                batches, step = batches[::2], 2 * step
        self.state = calls + 1, step, batches


def rows_of(inputs: Batch, count: int, signature: Signature) -> Batch:
    """Return evenly spaced rows of a batch; the whole batch where the model takes no other number of rows.

    Args:
        inputs: flat.
        count: of rows, at least 2.
        signature: says which sizes are free.
    """
    leaves = [leaf for leaf in signature.leaves if leaf.used]
    firsts = {leaf.dims[0] if leaf.dims else 0 for leaf in leaves}
    free = next(iter(firsts)) if len(firsts) == 1 else 0
    others = [dim for leaf in leaves for dim in leaf.dims[1:] if isinstance(dim, str)]
    is_free = isinstance(free, str) and free.isidentifier() and not any(free in dim for dim in others)
    if not is_free or signature.conditions or signature.effects or len(inputs[0]) <= count:
        return inputs
    return tuple(t[:: len(t) // count][:count] for t in inputs)


def some_of(
    batches: Sequence[Batch], example: Batch, work: float, signature: Signature, most: float = MULTIPLY_ADDS
) -> list[Batch]:
    """Return as much of each batch as some multiply-adds allow, at least two batches where there are two.

    Args:
        batches: flat inputs.
        example: flat example inputs.
        work: multiply-adds for these.
        signature: of the model.
        most: multiply-adds for all.
    """

    def work_of(batch: Batch) -> float:
        largest = max((t.numel() for t in example), default=1)
        return work * max((t.numel() for t in batch), default=1) / max(largest, 1)

    found, used = list[Batch](), 0.0
    for batch in batches:
        allowed, rows = most / len(batches), len(batch[0]) if batch and batch[0].dim() else 1
        if work_of(batch) > allowed:
            batch = rows_of(batch, max(2, int(rows * allowed / work_of(batch))), signature)
        used += work_of(batch)
        if len(found) >= 2 and used > most:
            break
        found.append(batch)
    return found


@torch.no_grad()
def accuracy_of(
    fp32: fx.GraphModule, quantized: fx.GraphModule, batches: Sequence[Batch], data: str
) -> tuple[Accuracy, Batch]:
    """Return how far a quantized graph is from fp32, and the batch that adds most of the error.

    Args:
        fp32: the captured graph.
        quantized: the QDQ graph made from it.
        batches: flat inputs.
        data: description of the batches, for reports.
    """
    signal: dict[int, float] = {}
    noise: dict[int, float] = {}
    changed = places = 0
    worst, largest = batches[0], -1.0
    for batch in batches:
        own = 0.0
        outputs, results = ([_copied(v) for v in call_graph(graph, batch)] for graph in (fp32, quantized))
        for index, (expected, got) in enumerate(zip(outputs, results, strict=True)):
            if not (isinstance(expected, torch.Tensor) and expected.is_floating_point() and expected.numel()):
                continue
            more = powers(expected, got)
            signal[index] = signal.get(index, 0.0) + more[0]
            noise[index] = noise.get(index, 0.0) + more[1]
            own += more[1]
            axis = _axis_of_scores(expected)
            if axis is not None:
                others = expected.argmax(axis) != got.argmax(axis)
                changed, places = changed + int(others.sum()), places + others.numel()
        if not own <= largest:  # also one that is not a number
            worst, largest = batch, own
    found = Accuracy(
        sqnr_db=min((decibels(signal[index], noise[index]) for index in signal), default=math.inf),
        data=data,
        changed=changed / places if places else None,
        places=places,
    )
    return found, worst


def in_words(batches: Sequence[Batch], what: str = "calibration data") -> str:
    """Return what batches are; of none that they are the example inputs."""
    return f"{len(batches)} batch{'es' if len(batches) > 1 else ''} of {what}" if batches else EXAMPLE


def _copied(value: Any) -> Any:
    """Return a copy: a graph may work in place on what it returned before."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _axis_of_scores(value: torch.Tensor) -> int | None:
    """Return the dimension that an output has scores along; None where it can have none.

    Those of pictures are along the channels.
    """
    axis = -1 if value.dim() < 4 else 1
    return axis if value.dim() > 1 and value.shape[axis] > 1 else None


def _bytes(batch: Batch) -> int:
    return sum(t.numel() * t.element_size() for t in batch)

"""Attention over texts whose rows follow each other in one tensor: which rows are of the same text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nc.backends.native.plans.operands import Later, PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.ops import segment_bias


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Where texts begin.

    Attributes:
        starts: int32, [texts + 1]; the last number is that of all rows.
        table: fp32, [1, heads or 1, places, places], what is added to scores by the places of a query and a
            key in their text; None: nothing.
        longest: the most rows of a text.
    """

    starts: PlanTensor
    table: PlanTensor | None
    longest: int

    @property
    def count(self) -> int:
        """Number of texts."""
        return int(self.starts.tensor.shape[0]) - 1


def texts_of(recorder: Recorder, value: Any) -> Texts | None:
    """Return which rows are of the same text where `nc::segment_bias` says so, else None."""
    if not isinstance(value, Later) or value.node.target is not segment_bias:
        return None
    named = value.named
    table = recorder.optional(named["table"])
    if table is not None:
        size = named["longest"]
        table = PlanTensor(table.tensor[None, :, :size, :size], table.root)
    return Texts(recorder.read(named["starts"]), table, named["longest"])


def split(
    recorder: Recorder, how: Sequence[str], others: Sequence[Any]
) -> tuple[Texts | None, list[tuple[str, PlanTensor]]]:
    """Return what keeps texts apart of what follows scores, and the rest, of which a table of places is."""
    texts, rest = None, []
    for name, other in zip(how, others, strict=True):
        found = texts_of(recorder, other) if name == "add" else None
        if found is None or texts is not None:
            rest.append((name, recorder.read(other)))
            continue
        texts = found
        if found.table is not None:
            rest.append((name, found.table))
    return texts, rest

"""Calls with texts whose tokens follow each other in one row.

transformers' `DataCollatorWithFlattening` gives them so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.errors import InputError
from nc.graph.fx_utils import sizes_of
from nc.graph.views import returned

#: Arguments that say where texts begin; those of keys must say the same.
STARTS, ALSO = "cu_seq_lens_q", "cu_seq_lens_k"
#: Arguments that nothing is computed from.
IDLE = ("max_length_q", "max_length_k")
POSITIONS, MASK = "position_ids", "attention_mask"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Flattened:
    """Texts that follow each other.

    Attributes:
        inputs: by name, padded: [texts, length].
        real: bool, [texts, length]: which tokens are real.
    """

    inputs: Mapping[str, torch.Tensor]
    real: torch.Tensor

    def row(self, value: torch.Tensor) -> torch.Tensor:
        """Return values of padded tokens as one row, [1, tokens, ...]."""
        return value[self.real][None]


def padded(inputs: Mapping[str, Any], names: Sequence[str], mask: str | None) -> Flattened:
    """Return inputs with a row for each text.

    Args:
        inputs: of the call, by name.
        names: those that the model has.
        mask: that one of them that masks padding; None: there is none.

    Raises:
        InputError: an argument has another form; says which.
    """
    tokens = {
        name: value
        for name, value in inputs.items()
        if name not in (STARTS, ALSO, *IDLE, mask) and value is not None
    }
    rows = _row(tokens)
    starts = _starts(STARTS, inputs[STARTS], rows)
    if inputs.get(ALSO) is not None and not torch.equal(starts, _starts(ALSO, inputs[ALSO], rows)):
        msg = f"{ALSO} differs from {STARTS}: a text has as many keys as queries."
        raise InputError(msg)
    counts = starts.diff()
    real = torch.arange(int(counts.max()))[None, :] < counts[:, None]
    if mask is None and not bool(real.all()):
        msg = f"{STARTS}: texts of different lengths need a mask, which the model was captured without."
        raise InputError(msg)
    _check_positions(tokens, real, names)
    found = {}
    for name, value in tokens.items():
        found[name] = torch.zeros(real.shape, dtype=value.dtype)
        found[name][real] = value[0]
    if mask is not None:
        found[mask] = real.long()
    return Flattened(found, real)


def of_tokens(module: fx.GraphModule) -> list[bool]:
    """Return for each output of a graph over padded texts whether it has a row for each token."""
    inputs = [sizes_of(node) for node in module.graph.nodes if node.op == "placeholder"]
    texts, lengths = ({sizes[dim] for sizes in inputs if len(sizes) > dim} for dim in (0, 1))
    outputs = [sizes_of(leaf) for leaf in returned(module)]
    return [len(sizes) > 1 and sizes[0] in texts and sizes[1] in lengths for sizes in outputs]


def _row(tokens: Mapping[str, Any]) -> int:
    """Return the number of tokens; raises InputError where inputs are not one row each."""
    if not tokens:
        msg = f"{STARTS} is given without tokens."
        raise InputError(msg)
    lengths = set()
    for name, value in tokens.items():
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[0] != 1:
            msg = f"{name}: with {STARTS} it has one row, [1, tokens]."
            raise InputError(msg)
        lengths.add(value.shape[1])
    if len(lengths) != 1:
        msg = f"{', '.join(tokens)} have other numbers of tokens: {', '.join(map(str, sorted(lengths)))}."
        raise InputError(msg)
    return int(lengths.pop())


def _starts(name: str, starts: Any, rows: int) -> torch.Tensor:
    """Return where texts begin; raises InputError where that is not in order."""
    if not isinstance(starts, torch.Tensor) or starts.dim() != 1 or starts.dtype.is_floating_point:
        msg = f"{name}: expected integers, one more than texts."
        raise InputError(msg)
    found: torch.Tensor = starts.long()
    if len(found) < 2 or int(found[0]) or int(found[-1]) != rows or bool((found.diff() <= 0).any()):
        msg = f"{name} is {found.tolist()[:8]}: expected numbers that rise from 0 to {rows}, the tokens."
        raise InputError(msg)
    return found


def _check_positions(tokens: dict[str, Any], real: torch.Tensor, names: Sequence[str]) -> None:
    """Take positions away that the model counts by itself; raises InputError for others."""
    positions = tokens.get(POSITIONS)
    if positions is None or POSITIONS in names:
        return
    counted = torch.arange(real.shape[1]).expand(real.shape)[real]
    if not torch.equal(positions[0].long(), counted):
        msg = f"{POSITIONS}: the model counts them from 0 in each text, and was captured without them."
        raise InputError(msg)
    del tokens[POSITIONS]

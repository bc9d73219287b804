"""Operators × backends × dtypes as a Markdown table, for docs/reference/operators.md.

It is made from the backends' capabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc.backends.base import Backend
from nc.formats import Capabilities
from nc.formats.rule_key import KIND_NAMES
from nc.graph.catalogue import PRODUCTS


def support_table(backends: Sequence[Backend]) -> str:
    """One row per operator that some backend computes in integers, one column per backend.

    Limits are numbered notes below.
    """
    capabilities = [backend.capabilities() for backend in backends]
    notes: list[str] = []
    lines = [
        "| operator | " + " | ".join(f"`{c.backend}`" for c in capabilities) + " |",
        "|---" * (len(capabilities) + 1) + "|",
    ]
    for kind, names in KIND_NAMES.items():
        cells = [_cell(kind, c, notes) for c in capabilities]
        lines.append(f"| {names[0]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))])


def _cell(kind: str, capabilities: Capabilities, notes: list[str]) -> str:
    row = capabilities.row(kind)
    bf16 = kind in PRODUCTS and bool(
        capabilities.bf16_isa or not capabilities.why_no_bf16
    )  # whatever this CPU has
    if row is None:
        return "bf16, fp32" if bf16 else "fp32"
    parts = []
    if row.activations:
        parts.append(f"static {', '.join(row.activations)}")
    if row.dynamic:
        parts.append(f"dynamic {', '.join(row.dynamic)}".replace("_", " "))
    if row.weights:
        parts.append(f"weights {', '.join(row.weights)}")
    if bf16:
        parts.append("bf16")
    if row.note and row.note not in notes:
        notes.append(row.note)
    return "; ".join(parts) + (f" ({notes.index(row.note) + 1})" if row.note else "")

"""The part of the CPU's limit that a call reaches: multiply-adds / rate / time.

The rate is that of peak.py, stored once for each machine and number of threads in results/kernels.jsonl; the
multiply-adds are those of ceiling.py there. A row of a machine or model without them has no part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from results_rows import Figure, Row

#: Name of the figure in rows of speed: percent.
PART = "part of the limit"
#: Engines whose products are not of int8 → what they are of.
_KINDS = {"nc-bf16": "bf16", "inductor-bf16": "bf16", "eager": "fp32", "ipex-fp32": "fp32"}


def with_parts(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Return the rows of speed, each with its part of the limit where that is known.

    Args:
        rows: of all files.
    """
    limits = {
        (row.machine, row.isa, row.what.get("threads")): row
        for row in rows["kernels"]
        if row.what.get("measured") == "limit"
    }
    work = {
        row.what["model"]: row.figures["work"].value
        for row in rows["kernels"]
        if row.what.get("batch") == 1 and "work" in row.figures
    }
    return [_with_part(row, limits, work) for row in rows["speed"]]


def _with_part(row: Row, limits: Mapping[object, Row], work: Mapping[str, object]) -> Row:
    limit = limits.get((row.machine, row.isa, row.what.get("threads")))
    kind = _KINDS.get(row.what.get("engine", ""), "int8")
    rate = None if limit is None or "limit" in row.what else limit.value(kind)
    products, time = work.get(row.what.get("model", "")), row.value("latency")
    if not all(isinstance(value, int | float) for value in (rate, products, time)):
        return row
    part = 100 * 1e3 * float(products) * row.what["batch"] / float(rate) / float(time)
    return dataclasses.replace(row, figures={**row.figures, PART: Figure(f"{part:.0f} %", "%")})

"""docs/models.md from the rows of a sweep."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sweep_models import Entry

from nc.backends.verify import CHANCE_DB, FLOOR_DB, TOLERANCE_DB

Row = dict[str, Any]

#: A word of a cause → what to do.
ADVICE = {
    "GuardOnDataDependentSymNode": "The model branches on values of tensors: quantize the submodules around that branch, one by one.",
    "UnfitReadError": "The model's path depends on what its layers compute: quantize the submodules around that branch, one by one.",
    "gives another output": "The model picks among nearly equal values (with random weights they all are), draws random numbers, or takes "
    "another path while it is exported. The error says which: quantize the part before the choice, or give all inputs.",
    "timeout": "The sweep's limit for one architecture; nothing says that it would fail.",
    "computes something else": "nc returns no numbers. Likely the model selects by scores that differ little with random weights.",
}


def page(rows: Sequence[Row], listed: Sequence[Entry]) -> str:
    """Return the whole page: what was run where, the numbers, the causes, the table, and what was not run."""
    rows = sorted(rows, key=lambda row: (row["source"], row["family"], row["model"]))
    tried = [row for row in rows if row["status"] != "not built"]
    parts = [
        "# Architectures\n",
        _about(rows, listed),
        _summary(rows, tried, listed),
        _failures([row for row in tried if problem(row)]),
        _table([row for row in tried if not problem(row)]),
        _not_built([row for row in rows if row["status"] == "not built"]),
        _not_run(rows, listed),
    ]
    return "\n".join(part for part in parts if part)


def problem(row: Row) -> str:
    """Why the row did not go through; "" when it did: an engine whose numbers the reference confirms, at both batch sizes."""
    if row["status"] != "ok":
        return _cause(row)
    if row.get("shapes") or row.get("shapes_other"):
        return "outputs of other shapes than the fp32 model's"
    for suffix in ("", "_other"):
        engine, quantized = row.get(f"reference_db{suffix}"), row.get(f"sqnr_db{suffix}")
        if engine is not None and engine < max(FLOOR_DB, min(TOLERANCE_DB, (quantized or 0.0) - CHANCE_DB)):
            return f"the engine is {engine:.0f} dB from its reference" + (" at another batch size" if suffix else "")
    return ""


def _cause(row: Row) -> str:
    """Return the innermost reason without names, numbers and paths, so that equal ones meet."""
    text = (row.get("cause") or row.get("reason") or "").lstrip("_")
    text = re.sub(r" \(\w+:\d+\)$", "", text)  # where in nc it was raised
    text = re.sub(r"(/[\w.+-]+){2,}/", "", text)
    text = re.sub(r"\d+", "N", re.sub(r"0x[0-9a-f]+", "…", text))
    return f"{row['error']}: {text.removeprefix(row['error'] + ': ')[:160]}"


def _about(rows: Sequence[Row], listed: Sequence[Entry]) -> str:
    where = collections.Counter(
        tuple(row[k] for k in ("cpu", "isa", "torch", "torchvision", "timm", "transformers", "python")) for row in rows
    )
    commits = ", ".join(f"`{commit}` ({n} rows)" for commit, n in collections.Counter(row["commit"] for row in rows).most_common())
    machines = [
        f"* {n} rows: {cpu} ({isa}), Python {python}, torch {torch}, torchvision {torchvision}, timm {timm}, transformers {transformers}"
        for (cpu, isa, torch, torchvision, timm, transformers, python), n in where.most_common()
    ]
    backends = ", ".join(sorted({row["backend"] for row in rows}))
    return f"""`benchmarks/sweep.py` takes {len(listed)} architectures of torchvision, timm and transformers through prepare,
calibration and convert with `StaticQuantConfig()` on backend `{backends}`. Each is built from its configuration with random weights,
as small as the library allows. The rows are regular parts of the list (`--shard`), in an order of no meaning, or whole sources.
`python benchmarks/sweep.py --table` wrote this page from rows that were run with nc at {commits}:

{chr(10).join(machines)}

SQNR is in dB against the fp32 model, for the worst of all float outputs: at the example's batch of 2, and at a batch of 3. Weights
and inputs are random: SQNR says that the operators compute what they should, not how accurate a trained model will be. "Speed" is
the time of fp32 divided by the time of the engine, from a few calls that take turns on one thread of a machine that others were
using: rough, and for models that are much smaller than real ones.
"""


def _summary(rows: Sequence[Row], tried: Sequence[Row], listed: Sequence[Entry]) -> str:
    passed = [row for row in tried if not problem(row)]
    lines = ["| | listed | run | not built | built | captured | went through | |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for source in ("torchvision", "timm", "transformers", ""):
        part = [row for row in rows if row["source"].startswith(source)]
        built = [row for row in tried if row["source"].startswith(source)]
        good = [row for row in passed if row["source"].startswith(source)]
        cells = (
            sum(entry.source.startswith(source) for entry in listed),
            len(part),
            len(part) - len(built),
            len(built),
            sum(bool(row.get("captured")) for row in built),
            len(good),
            f"{len(good) / len(built):.1%}" if built else "",
        )
        lines.append(f"| {source or 'all'} | " + " | ".join(map(str, cells)) + " |")
    noise = [row["sqnr_db"] for row in passed if row.get("sqnr_db") is not None]
    other = [row["sqnr_db_other"] for row in passed if row.get("sqnr_db_other") is not None]
    speeds = [row["speed"] for row in passed if row.get("speed")]
    asked, ran = (sum(row.get(key, 0) for row in passed) for key in ("asked", "int8"))
    facts = [
        f"* {ran} of {asked} operators that were asked to run int8 do.",
        f"* SQNR at the example's batch size: median {statistics.median(noise):.0f} dB; {_at_least(noise)}." if noise else "",
        f"* SQNR at another batch size: median {statistics.median(other):.0f} dB; {_at_least(other)}." if other else "",
        f"* {sum(row.get('other', '').startswith('fixed') for row in passed)} models keep the example's batch size.",
        f"* Rough speed: median {statistics.median(speeds):.2f}; {sum(s < 1 for s in speeds)} of {len(speeds)} are slower than fp32."
        if speeds
        else "",
        f"* {sum(row.get('error') == 'crash' for row in tried)} processes crashed, "
        f"{sum(row['status'] == 'failed' and row.get('typed') is False for row in tried)} raised something else than an `NCError`.",
    ]
    return "\n".join([*lines, "", *(fact for fact in facts if fact), ""])


def _at_least(values: Sequence[float]) -> str:
    return ", ".join(f"{sum(v >= bound for v in values)} of {len(values)} at least {bound}" for bound in (20, 10))


def _failures(failed: Sequence[Row]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in failed:
        groups.setdefault(problem(row), []).append(row)
    if not groups:
        return ""
    lines = ["## What did not go through, by cause\n"]
    for cause, members in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"* {len(members)}: {_plain(cause)}{_advice(cause)}<br>{', '.join(row['model'] for row in members)}")
    return "\n".join([*lines, ""])


def _advice(cause: str) -> str:
    """Return what a user can do; "" where the cause says it all."""
    return next((f"<br>{text}" for word, text in ADVICE.items() if word in cause), "")


def _table(passed: Iterable[Row]) -> str:
    lines = [
        "## What went through\n",
        "| family | model | engine | int8 / asked | dB | dB, other batch | speed |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in passed:
        other = "fixed" if row.get("other", "").startswith("fixed") else _db(row.get("sqnr_db_other"))
        cells = (row["family"], row["model"], row["engine"], f"{row['int8']} / {row['asked']}", _db(row.get("sqnr_db")), other)
        lines.append(f"| {' | '.join(cells)} | {row.get('speed', 0):.2f} |")
    return "\n".join([*lines, ""])


def _db(value: float | None) -> str:
    return "–" if value is None else "exact" if value >= 200 else f"{value:.0f}"


def _not_built(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        "## Not built\n",
        "The sweep's generic rules did not make these small, or found no inputs for them: a gap of the sweep, not of nc.\n",
    ]
    lines += [f"* {row['model']} ({row['family']}): {_plain(row.get('reason', ''))[:140]}" for row in rows]
    return "\n".join([*lines, ""])


def _not_run(rows: Sequence[Row], listed: Sequence[Entry]) -> str:
    seen = {row["name"] for row in rows}
    missing = sorted({entry.model for entry in listed if entry.name not in seen})
    if not missing:
        return ""
    return f"## Not run\n\nListed, and not run for this page ({len(missing)}): {', '.join(missing)}.\n"


def _plain(text: str) -> str:
    """One line that Markdown leaves alone, without paths."""
    text = re.sub(r"(/[\w.+-]+){2,}/", "", " ".join(text.split()))
    return re.sub(r"([|<>*_`])", r"\\\1", text)

"""The parts of the page about architectures: how many went through, which did not, and why."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from results_markdown import caption, grouped, markdown, text
from results_rows import Row

Rows = Mapping[str, Sequence[Row]]
FILE = "architectures"
SOURCES = ("torchvision", "timm", "transformers")
WENT, FAILED, NOT_BUILT, LISTED = "went through", "failed", "not built", "listed"

#: A word of a cause → what to do.
ADVICE = {
    "GuardOnDataDependentSymNode": (
        "The model branches on values of tensors: quantize the submodules around that branch, one by one."
    ),
    "UnfitReadError": (
        "The model's path depends on what its layers compute: quantize the submodules around that branch, "
        "one by one."
    ),
    "gives another output": (
        "The model picks among nearly equal values (with random weights they all are), draws random numbers, "
        "or takes another path while it is exported. The error says which: quantize the part in front of the "
        "choice, or give all inputs."
    ),
    "timeout": (
        "The sweep has a limit of time for one architecture. Nothing says that the architecture would fail."
    ),
    "computes something else": (
        "nc returns no numbers. Likely the model selects by scores that differ little with random weights."
    ),
}


def last(rows: Sequence[Row]) -> list[Row]:
    """Return the last row of each architecture, sorted by source, family and name."""
    kept = {(row.what["source"], row.what.get("model")): row for row in rows}
    return sorted(
        kept.values(),
        key=lambda row: tuple(str(row.what.get(key, "")) for key in ("source", "family", "model")),
    )


def with_status(rows: Sequence[Row], *status: str) -> list[Row]:
    """Return the last rows of architectures that ended so."""
    return [row for row in last(rows) if row.what["status"] in status]


def about(rows: Rows) -> str:
    """Return where the rows are from."""
    ran = with_status(rows[FILE], WENT, FAILED, NOT_BUILT)
    groups = grouped(ran, lambda row: (row.machine, row.isa, tuple(row.versions.items())))
    return "\n".join(f"* {len(group)} rows: {caption(group)}" for group in groups)


def summary(rows: Rows) -> str:
    """Return how many of each source were built, captured, and went through."""
    found = last(rows[FILE])
    body = []
    for source in (*SOURCES, ""):
        part = [row for row in found if row.what["source"].startswith(source)]
        listed = sum(int(row.value("listed") or 0) for row in part)
        count = {
            status: sum(row.what["status"] == status for row in part) for status in (WENT, FAILED, NOT_BUILT)
        }
        built = count[WENT] + count[FAILED]
        captured = sum(bool(row.what.get("captured")) for row in part)
        share = f"{count[WENT] / built:.1%}" if built else ""
        cells = (listed, built + count[NOT_BUILT], count[NOT_BUILT], built, captured, count[WENT], share)
        body.append([source or "all", *map(str, cells)])
    header = ["", "listed", "run", "not built", "built", "captured", "went through", "of those built"]
    return markdown(header, body, numbers=len(header) - 1)


def facts(rows: Rows) -> str:
    """Return what the rows say together."""
    went, failed = with_status(rows[FILE], WENT), with_status(rows[FILE], FAILED)
    noise, other, speeds = (
        [float(row.figures[name].value) for row in went if name in row.figures]
        for name in ("sqnr", "sqnr other batch", "speed")
    )
    fixed, slower = sum(row.what.get("other batch") == "fixed" for row in went), sum(s < 1 for s in speeds)
    asked, ran = (sum(int(row.value(name) or 0) for row in went) for name in ("asked", "int8"))
    lines = [
        f"{ran} of {asked} operators that were asked to run int8 do.",
        f"SQNR at the example's batch size: median {statistics.median(noise):.0f} dB; {_at_least(noise)}.",
        f"SQNR at another batch size: median {statistics.median(other):.0f} dB; {_at_least(other)}.",
        f"Models that keep the example's batch size: {fixed}.",
        f"Rough speed: median {statistics.median(speeds):.2f}; {slower} of {len(speeds)} have less than "
        "1.00.",
        f"Processes that crashed: {sum(row.what.get('error') == 'crash' for row in failed)}. "
        f"Errors that are no `NCError`: {sum(row.what.get('typed') is False for row in failed)}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def failures(rows: Rows) -> str:
    """Return the causes of what did not go through, the most frequent first."""
    groups = grouped(with_status(rows[FILE], FAILED), lambda row: row.note)
    lines = []
    for group in sorted(groups, key=len, reverse=True):
        cause = group[0].note
        advice = next((f"<br>{said}" for word, said in ADVICE.items() if word in cause), "")
        lines.append(
            f"* {len(group)}: {plain(cause)}{advice}<br>{', '.join(row.what['model'] for row in group)}"
        )
    return "\n".join(lines)


def table(rows: Rows) -> str:
    """Return a line for each architecture that went through."""
    body = []
    for row in with_status(rows[FILE], WENT):
        what = row.what
        other = "fixed" if what.get("other batch") == "fixed" else _db(row, "sqnr other batch")
        ran = f"{row.value('int8')} / {row.value('asked')}"
        body.append(
            [
                what["family"],
                what["model"],
                what["engine"],
                _padding(what),
                ran,
                _db(row, "sqnr"),
                other,
                text(row.value("speed") or "–", 2),
            ]
        )
    header = ["family", "model", "engine", "padding", "int8 / asked", "dB", "dB, other batch", "speed"]
    return markdown(header, body, numbers=4)


def _padding(what: Mapping[str, Any]) -> str:
    """Return what becomes of padding of a model of texts; "" of others, and where that is not known."""
    said = str(what.get("padding", ""))
    return "not computed" if said.startswith("not computed") else plain(said)


def not_built(rows: Rows) -> str:
    """Return why the sweep could not build the rest."""
    found = with_status(rows[FILE], NOT_BUILT)
    return "\n".join(
        f"* {row.what['model']} ({row.what['family']}): {plain(row.note)[:140]}" for row in found
    )


def plain(given: str) -> str:
    """Return one line that Markdown leaves alone, without paths."""
    given = re.sub(r"(/[\w.+-]+){2,}/", "", " ".join(given.split()))
    return re.sub(r"([|<>*_`])", r"\\\1", given)


def _at_least(values: Sequence[float]) -> str:
    return ", ".join(
        f"{sum(v >= bound for v in values)} of {len(values)} at least {bound}" for bound in (20, 10)
    )


def _db(row: Row, figure: str) -> str:
    value = row.value(figure)
    return "–" if value is None else "exact" if float(value) >= 200 else f"{float(value):.0f}"


PARTS: dict[str, Callable[[Rows], str]] = {
    "architectures-about": about,
    "architectures-summary": summary,
    "architectures-facts": facts,
    "architectures-failures": failures,
    "architectures-table": table,
    "architectures-not-built": not_built,
}

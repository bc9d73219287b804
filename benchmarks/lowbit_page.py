"""The tables of docs/lowbit.md, made from the rows of lowbit.py, and what they say: where another tool is better.

`python benchmarks/lowbit.py page --rows FILE` writes them between the two marks in docs/lowbit.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowbit_subjects import BLOCKS, FORMATS

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "lowbit.md"
MARKS = ("<!-- rows of benchmarks/lowbit.py -->", "<!-- end of rows -->")
#: Bits per weight may differ by so much and count as equal.
SLACK = 0.02


def table(rows: Iterable[Any]) -> str:
    """Markdown: per subject and format one table, the best row first in each half."""
    lines: list[str] = []
    for (subject, name, setting), some in _groups(rows):
        size = FORMATS[name].of(subject)
        notes = [f"groups of {size}"] * (size != FORMATS[name].group) + [f'setting "{setting}"'] * (setting != "fast")
        lines += ["", f"**{subject}, {name}**" + f" ({', '.join(notes)})" * bool(notes), ""]
        lines += ["| tool | method | data | bits | KL | top-1 % | perplexity |", "|---|---|---|---|---|---|---|"]
        good = [r for r in some if not r.error]
        fair = _bits(good)
        for row in sorted(good, key=lambda r: (r.data, r.kl)):
            who = f"**{row.tool}**" if row.tool == "nc" else row.tool
            bits = f"{row.bits:.2f}" + " (more)" * (row.bits > fair + SLACK)
            figures = f"{bits} | {row.kl:.{_digits(row.kl)}f} | {row.top1:.1f} | {row.perplexity:.3f}"
            lines.append(f"| {who} | {row.method} | {'yes' if row.data else 'no'} | {figures} |")
        if good:
            lines += [f"| | fp32 | | 32 | 0 | 100 | {good[0].fp32_perplexity:.3f} |"]
        failed = [f"{r.tool} {r.method}: {r.error.removeprefix('not offered: ')}" for r in some if r.error]
        if failed:
            lines += ["", f"No figures: {'; '.join(failed)}."]
    return "\n".join(lines)


def verdicts(rows: Iterable[Any]) -> list[str]:
    """One line for each table in which another tool's row has a smaller KL than our best, at no more bits than ours has.

    Two comparisons: all rows; and without data, where ours is "RTN wls".
    """
    found = []
    for (subject, name, setting), some in _groups(rows):
        good = [r for r in some if not r.error]
        where = f"{subject}, {name}" + f' (setting "{setting}")' * (setting != "fast")
        halves = {
            "best": ([r for r in good if r.tool == "nc"], [r for r in good if r.tool != "nc"]),
            "without data": (
                [r for r in good if r.tool == "nc" and r.method == "RTN wls"],
                [r for r in good if r.tool != "nc" and not r.data],
            ),
        }
        for what, (ours, others) in halves.items():
            equal = [r for r in others if r.bits <= _bits(good) + SLACK]
            if not (ours and equal):
                continue
            mine, best = (min(part, key=lambda r: r.kl) for part in (ours, equal))
            if best.kl < mine.kl:
                digits = _digits(best.kl)
                found.append(f"{where}, {what}: {best.tool} {best.method} {best.kl:.{digits}f}, nc {mine.method} {mine.kl:.{digits}f}")
    return found


def write(rows: Iterable[Any], page: Path = PAGE) -> None:
    """Put versions, the tables and the verdicts between the marks of a page."""
    rows = list(rows)
    kept = page.read_text(encoding="utf-8")
    first, last = (kept.index(mark) for mark in MARKS)
    tables = len({(r.subject, r.format, r.setting) for r in rows if r.tool != "nc" and not r.error})
    worse = verdicts(rows)
    said = [f"Versions: {versions()}.", "", f"{tables} tables have rows of other tools with figures."]
    if worse:
        said += ["Where one of these has a smaller KL at equal bits:", "", *(f"* {line}" for line in worse)]
    else:
        said += ["In none of them does another tool have a smaller KL at equal bits, neither with data nor without."]
    text = "\n".join([MARKS[0], *said, table(rows), "", ""])
    page.write_text(kept[:first] + text + kept[last:], encoding="utf-8")


def versions() -> str:
    """Of the other tools, as they are pinned."""
    pins = {}
    for file in sorted((_ROOT / "requirements").glob("peers-lowbit-*.txt")):
        pins |= dict(re.findall(r"^([\w.-]+)==([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    return ", ".join(f"{name} {version}" for name, version in pins.items() if name not in ("accelerate", "datasets", "transformers"))


def _groups(rows: Iterable[Any]) -> list[tuple[tuple[str, str, str], list[Any]]]:
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.subject, row.format, row.setting), []).append(row)
    return sorted(groups.items(), key=lambda g: (list(BLOCKS).index(g[0][0]), list(FORMATS).index(g[0][1]), g[0][2]))


def _bits(good: list[Any]) -> float:
    """Bits per weight of our rows; of all where we have none."""
    return min((r.bits for r in good if r.tool == "nc"), default=min((r.bits for r in good), default=0.0))


def _digits(kl: float) -> int:
    return 4 if kl >= 0.001 else 5

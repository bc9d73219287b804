"""The parts of the page about the accuracy of low-bit weights: tables, and where another tool is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lowbit_formats import BLOCKS, FORMATS
from results_markdown import caption, grouped, markdown
from results_rows import Row

Rows = Mapping[str, Sequence[Row]]
FILE = "low-bit-accuracy"
#: Bits per weight may differ by so much and count as equal.
SLACK = 0.02


def beside_others(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the comparison: of one method the last that has figures, else its error."""
    kept: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row.what["measured"] != "beside other tools":
            continue
        key = tuple(row.what[name] for name in ("subject", "format", "tool", "method", "setting"))
        if row.figures or key not in kept:
            kept[key] = row
    return list(kept.values())


def about(rows: Rows) -> str:
    """Return the machine and the versions of all tools."""
    return caption(beside_others(rows[FILE]))


def tables(rows: Rows) -> str:
    """Return one table per model and format, the best row first in each half: without data, and with."""
    lines: list[str] = []
    for some in _groups(beside_others(rows[FILE])):
        what = some[0].what
        form = FORMATS[what["format"]]
        size = form.of(what["subject"])
        notes = [f"groups of {size}"] * (size != form.group) + [f'setting "{what["setting"]}"'] * (
            what["setting"] != "fast"
        )
        lines += ["", f"**{what['subject']}, {what['format']}**" + f" ({', '.join(notes)})" * bool(notes), ""]
        good = [row for row in some if row.figures]
        body = [_line(row, _bits(good)) for row in sorted(good, key=lambda row: (row.what["data"], _kl(row)))]
        if good:
            body.append(["", "fp32", "", "32", "0", "100", f"{_number(good[0], 'fp32 perplexity'):.3f}"])
        lines.append(
            markdown(["tool", "method", "data", "bits", "KL", "top-1 %", "perplexity"], body, numbers=4)
        )
        failed = [
            f"{row.what['tool']} {row.what['method']}: {row.note.removeprefix('not offered: ')}"
            for row in some
            if not row.figures
        ]
        if failed:
            lines += ["", f"No figures: {'; '.join(failed)}."]
    return "\n".join(lines).strip()


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a line for each table in which another tool has a smaller KL than our best row, at no more bits.

    Two comparisons: all rows; and without data, where ours is "RTN wls".
    """
    found = []
    for some in _groups(beside_others(rows)):
        what, good = some[0].what, [row for row in some if row.figures]
        where = f"{what['subject']}, {what['format']}" + f' (setting "{what["setting"]}")' * (
            what["setting"] != "fast"
        )
        mine = [row for row in good if row.what["tool"] == "nc"]
        others = [row for row in good if row.what["tool"] != "nc"]
        halves = {
            "best": (mine, others),
            "without data": (
                [r for r in mine if r.what["method"] == "RTN wls"],
                [r for r in others if not r.what["data"]],
            ),
        }
        for half, (ours, theirs) in halves.items():
            equal = [row for row in theirs if _number(row, "bits") <= _bits(good) + SLACK]
            if not (ours and equal):
                continue
            own, best = (min(part, key=_kl) for part in (ours, equal))
            if _kl(best) < _kl(own):
                said = (
                    f"{row.what['tool']} {row.what['method']} {_kl(row):.{_digits(_kl(best))}f}"
                    for row in (best, own)
                )
                found.append(f"{where}, {half}: {', '.join(said)}")
    return found


def worse(rows: Rows) -> str:
    """Return what `verdicts` finds as text."""
    kept = beside_others(rows[FILE])
    compared = [
        some for some in _groups(kept) if any(row.what["tool"] != "nc" and row.figures for row in some)
    ]
    said, found = f"{len(compared)} tables have rows of other tools.", verdicts(kept)
    if not found:
        return f"{said} In none of them another tool has a smaller KL at equal bits, with data or without."
    return "\n".join(
        [f"{said} Where one of these has a smaller KL at equal bits:", "", *(f"* {line}" for line in found)]
    )


def eight_bits(rows: Rows) -> str:
    """Return the change of perplexity with 8 bits."""
    found = [row for row in rows[FILE] if row.what["measured"] == "8 bits"]
    names = ("subject", "format", "method", "tokens")
    body = [
        [*(str(row.what.get(name, "–")) for name in names), f"{row.value('perplexity change'):+}"]
        for row in found
    ]
    return markdown([*names, "perplexity, % more than fp32"], body, numbers=2)


def _line(row: Row, fair: float) -> list[str]:
    bits, kl = _number(row, "bits"), _kl(row)
    tool = f"**{row.what['tool']}**" if row.what["tool"] == "nc" else row.what["tool"]
    figures = [f"{bits:.2f}" + " (more)" * (bits > fair + SLACK), f"{kl:.{_digits(kl)}f}"]
    figures += [f"{_number(row, 'top1'):.1f}", f"{_number(row, 'perplexity'):.3f}"]
    return [tool, row.what["method"], "yes" if row.what["data"] else "no", *figures]


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    def place(row: Row) -> tuple[int, int, str]:
        return (
            list(BLOCKS).index(row.what["subject"]),
            list(FORMATS).index(row.what["format"]),
            row.what["setting"],
        )

    return grouped(sorted(rows, key=place), place)


def _number(row: Row, figure: str) -> float:
    return float(row.figures[figure].value)


def _kl(row: Row) -> float:
    return _number(row, "kl")


def _bits(good: Sequence[Row]) -> float:
    """Bits per weight of our rows; of all where we have none."""
    ours = [_number(row, "bits") for row in good if row.what["tool"] == "nc"]
    return min(ours or [_number(row, "bits") for row in good], default=0.0)


def _digits(kl: float) -> int:
    return 4 if kl >= 0.001 else 5


PARTS: dict[str, Callable[[Rows], str]] = {
    "low-bit-about": about,
    "low-bit-worse": worse,
    "low-bit-tables": tables,
    "low-bit-eight": eight_bits,
}

"""The strip of a page: one cell for each operator in execution order, as wide as its time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from nc.api.op_report import OpReport
from nc.backends.profiling.profile import Profile
from nc.text.html_page import escaped

_WIDTH, _HEIGHT = 1000.0, 64
#: The narrowest cell.
_LEAST = 0.4
CONVERSION = "conversion"
_FORMS = frozenset({"int8", "bf16", "fp32"})
STYLE = """
svg.strip { height: 64px } svg.strip rect { stroke: var(--back); stroke-width: .3; cursor: pointer }
.int8 { color: var(--int8); fill: var(--int8) } .bf16 { color: var(--bf16); fill: var(--bf16) }
.fp32 { color: var(--fp32); fill: var(--fp32) } .other { color: var(--other); fill: var(--other) }
.conversion { color: var(--conversion); fill: var(--conversion) }
.low-bit { color: var(--low-bit); fill: var(--low-bit) } .legend span { margin-right: 1rem }
"""
#: A click on a cell shows it and its neighbours; another one shows all. Buttons do the same by keyboard.
SCRIPT = """
document.querySelectorAll("svg.strip").forEach(function (strip) {
  var from = 0, all = 1000;
  function show(x, width) {
    all = Math.min(1000, Math.max(5, width)); from = Math.max(0, Math.min(1000 - all, x));
    strip.setAttribute("viewBox", from + " 0 " + all + " 64");
  }
  strip.addEventListener("click", function (event) {
    var cell = event.target.closest("rect");
    if (!cell || all < 1000) { show(0, 1000); return; }
    var x = +cell.getAttribute("x"), width = +cell.getAttribute("width");
    var near = Math.max(Math.min(20 * width, 500), 1.2 * width, 10);
    show(x + width / 2 - near / 2, near);
  });
  var bar = document.createElement("p");
  [["zoom in", function () { show(from + all / 4, all / 2); }],
   ["zoom out", function () { show(from - all / 2, all * 2); }],
   ["to the left", function () { show(from - all / 2, all); }],
   ["to the right", function () { show(from + all / 2, all); }],
   ["all", function () { show(0, 1000); }]].forEach(function (each) {
    var button = document.createElement("button");
    button.type = "button"; button.textContent = each[0]; button.onclick = each[1];
    bar.appendChild(button); bar.appendChild(document.createTextNode(" "));
  });
  bar.className = "tools"; strip.after(bar);
});
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        form: its colour: "int8", "bf16", "fp32", "conversion", "low-bit" or "other".
        weight: how wide it is, next to the others.
        text: what it is.
    """

    form: str
    weight: float
    text: str


def form_of(ran: str) -> str:
    """Return the colour of what the engine executes."""
    return ran if ran in _FORMS else "low-bit" if "weight" in ran else "other"


def cells_of(ops: Sequence[OpReport], profile: Profile | None) -> tuple[list[Cell], str]:
    """Return the cells, and what their width means.

    Conversions stand in front of the operator that they are made for; those of no known operator at the end.
    """
    timed = profile is not None and any(op.share for op in ops)
    conversions = _conversions(profile) if profile is not None and timed else {}
    known, found = {op.operator for op in ops}, []
    for op in ops:
        if op.operator in conversions:
            found.append(Cell(CONVERSION, conversions[op.operator], f"conversion for {op.operator}"))
        weight = (op.share or 0.0) if timed else float(op.multiply_adds or 0)
        why = f" ({op.reason})" if op.reason else ""
        found.append(Cell(form_of(op.ran), weight, f"{op.operator}: {op.kind}, {op.ran}{why}"))
    rest = sum(share for name, share in conversions.items() if name not in known)
    if rest:
        found.append(Cell(CONVERSION, rest, "other conversions"))
    return found, "share of the time" if timed else "multiply-adds on the example inputs"


def _conversions(profile: Profile) -> Mapping[str, float]:
    """Return by operator the share of the time that conversions for it take."""
    total = sum(step.ms for step in profile.steps) or 1.0
    found: dict[str, float] = collections.defaultdict(float)
    for step in profile.steps:
        if step.role == CONVERSION and not step.operators:
            found[step.serves] += step.ms / total
    return found


def strip(ops: Sequence[OpReport], profile: Profile | None) -> str:
    """Return the strip as SVG, with a legend."""
    cells, meaning = cells_of(ops, profile)
    counts = collections.Counter(cell.form for cell in cells)
    legend = "".join(
        f"<span><b class={form} aria-hidden=true>■</b> {form}: {count}</span>"
        for form, count in counts.items()
    )
    label = f"{len(cells)} cells in execution order, width: {meaning}. The table has the same as text."
    return (
        f"<svg class=strip viewBox='0 0 {_WIDTH:g} {_HEIGHT}' preserveAspectRatio=none role=img "
        f"aria-label='{label}'>{''.join(_drawn(cells))}</svg>"
        f"<p class=legend>{legend}<span>width: {meaning}; a click zooms</span></p>"
    )


def _drawn(cells: Sequence[Cell]) -> Iterator[str]:
    total = sum(cell.weight for cell in cells) or 1.0
    widths = [max(_LEAST, _WIDTH * cell.weight / total) for cell in cells]
    scale, x = _WIDTH / max(sum(widths), 1e-9), 0.0
    for cell, width in zip(cells, widths, strict=True):
        yield (
            f"<rect class={cell.form} x={x * scale:.3f} y=0 width={width * scale:.3f} height={_HEIGHT}>"
            f"<title>{escaped(cell.text)}, {cell.weight / total:.1%}</title></rect>"
        )
        x += width

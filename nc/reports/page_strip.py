"""The strip of a page: one cell for each operator in execution order, as wide as its time."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from nc.profiling.profile import Profile
from nc.reports.op_report import OpReport
from nc.text.html_page import escaped

_WIDTH, _HEIGHT = 1000.0, 64
#: The narrowest cell.
_LEAST = 0.4
CONVERSION = "conversion"
_FORMS = frozenset({"int8", "bf16", "fp32"})
STYLE = """
.strip { overflow-x: auto; margin-bottom: .5rem } .inner { min-width: 100% }
.strip svg { height: 64px } .strip rect { stroke: var(--back); stroke-width: .3; cursor: pointer }
.stages { position: relative; height: 1.4rem; font-size: 12px }
.stages span { position: absolute; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  box-sizing: border-box; border-left: 1px solid var(--line); padding-left: 3px; min-width: 1px }
.hover { position: fixed; z-index: 1; max-width: 22rem; padding: .4rem .6rem; font-size: 13px;
  background: var(--back); border: 1px solid var(--line); border-radius: 4px; overflow-wrap: anywhere }
.int8 { color: var(--int8); fill: var(--int8) } .bf16 { color: var(--bf16); fill: var(--bf16) }
.fp32 { color: var(--fp32); fill: var(--fp32) } .other { color: var(--other); fill: var(--other) }
.conversion { color: var(--conversion); fill: var(--conversion) }
.low-bit { color: var(--low-bit); fill: var(--low-bit) } .legend span { margin-right: 1rem }
"""
#: A click on a cell makes the strip so wide that the cell has room; another one shows all. It scrolls.
#: Buttons do the same by keyboard. A card says what is below the pointer.
SCRIPT = """
document.querySelectorAll(".strip").forEach(function (strip) {
  var inner = strip.querySelector(".inner"), wide = 1, card = document.createElement("div");
  function show(times, middle) {
    wide = Math.min(200, Math.max(1, times)); inner.style.width = 100 * wide + "%";
    strip.scrollLeft = middle * strip.scrollWidth - strip.clientWidth / 2;
  }
  function middle() { return (strip.scrollLeft + strip.clientWidth / 2) / strip.scrollWidth; }
  strip.querySelectorAll("rect").forEach(function (cell) {
    var title = cell.querySelector("title");
    cell.setAttribute("data-text", title.textContent); title.remove();
  });
  card.className = "hover"; card.hidden = true; document.body.appendChild(card);
  strip.addEventListener("pointermove", function (event) {
    var cell = event.target.closest("rect");
    card.hidden = !cell; if (!cell) return;
    card.textContent = cell.getAttribute("data-text");
    card.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - card.offsetWidth - 12)) + "px";
    card.style.top = event.clientY + 16 + "px";
  });
  strip.addEventListener("pointerleave", function () { card.hidden = true; });
  strip.addEventListener("click", function (event) {
    var cell = event.target.closest("rect");
    if (!cell || wide > 1) { show(1, 0); return; }
    var x = +cell.getAttribute("x"), width = +cell.getAttribute("width");
    show(Math.max(2, 200 / width), (x + width / 2) / 1000);
  });
  var bar = document.createElement("p");
  [["zoom in", function () { show(2 * wide, middle()); }],
   ["zoom out", function () { show(wide / 2, middle()); }],
   ["all", function () { show(1, 0); }]].forEach(function (each) {
    var button = document.createElement("button");
    button.type = "button"; button.textContent = each[0]; button.onclick = each[1];
    bar.appendChild(button); bar.appendChild(document.createTextNode(" "));
  });
  bar.className = "tools"; strip.after(bar);
});
"""
#: Up to the first number that is a separate part of a name: "encoder.layer.0".
_STAGE = re.compile(r".*?(?<![^._@])\d+(?![^._@])")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        form: its colour: "int8", "bf16", "fp32", "conversion", "low-bit" or "other".
        weight: how wide it is, next to the others.
        text: what it is.
        operator: its name, or that of the operator that it is made for.
    """

    form: str
    weight: float
    text: str
    operator: str = ""

    @property
    def stage(self) -> str:
        """The block of the model that it is in."""
        found = _STAGE.match(self.operator)
        return found[0] if found else self.operator.partition(".")[0]


def form_of(ran: str) -> str:
    """Return the colour of what the engine executes."""
    return ran if ran in _FORMS else "low-bit" if "weight" in ran else "other"


def cells_of(ops: Sequence[OpReport], profile: Profile | None) -> tuple[list[Cell], str]:
    """Return the cells, and what their width means.

    Conversions are before the operator that they are made for; those of no known operator are at the end.
    """
    timed = profile is not None and any(op.share for op in ops)
    conversions = _conversions(profile) if profile is not None and timed else {}
    known, found = {op.operator for op in ops}, []
    for op in ops:
        if op.operator in conversions:
            found.append(
                Cell(CONVERSION, conversions[op.operator], f"conversion for {op.operator}", op.operator)
            )
        weight = (op.share or 0.0) if timed else float(op.multiply_adds or 0)
        why = f" ({op.reason})" if op.reason else ""
        found.append(Cell(form_of(op.ran), weight, f"{op.operator}: {op.kind}, {op.ran}{why}", op.operator))
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
    widths = _widths(cells)
    svg = (
        f"<svg viewBox='0 0 {_WIDTH:g} {_HEIGHT}' preserveAspectRatio=none role=img "
        f"aria-label='{label}'>{''.join(_drawn(cells, widths))}</svg>"
    )
    return (
        f"<div class=strip tabindex=0><div class=inner><div class=stages>{_stages(cells, widths)}</div>{svg}"
        f"</div></div><p class=legend>{legend}<span>width: {meaning}; a click zooms</span></p>"
    )


def _widths(cells: Sequence[Cell]) -> list[float]:
    """Return widths that add up to that of the strip."""
    total = sum(cell.weight for cell in cells) or 1.0
    widths = [max(_LEAST, _WIDTH * cell.weight / total) for cell in cells]
    return [width * _WIDTH / sum(widths) for width in widths]


def _stages(cells: Sequence[Cell], widths: Sequence[float]) -> str:
    """Return the names of consecutive cells of one block, above them."""
    found, x = [], 0.0
    for name, group in itertools.groupby(zip(cells, widths, strict=True), key=lambda pair: pair[0].stage):
        width = sum(each for _, each in group)
        at = f"left:{100 * x / _WIDTH:.2f}%;width:{100 * width / _WIDTH:.2f}%"
        found.append(f"<span style={at}>{escaped(name)}</span>")
        x += width
    return "".join(found)


def _drawn(cells: Sequence[Cell], widths: Sequence[float]) -> Iterator[str]:
    total, x = sum(cell.weight for cell in cells) or 1.0, 0.0
    for cell, width in zip(cells, widths, strict=True):
        yield (
            f"<rect class={cell.form} x={x:.3f} y=0 width={width:.3f} height={_HEIGHT}>"
            f"<title>{escaped(cell.text)}, {cell.weight / total:.1%}</title></rect>"
        )
        x += width

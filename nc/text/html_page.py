"""Pages that need nothing else: no request, both themes, every text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from nc.text.plain import plain

#: Colours have names, so that pictures follow the theme too.
_STYLE = """
:root { color-scheme: light dark; --text: #1f1f1f; --back: #fff; --line: #bbb; --int8: #1565c0;
  --bf16: #2e7d32; --fp32: #c75300; --other: #6a4fb3; --conversion: #b3261e; --low-bit: #00796b }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --back: #161616; --line: #555; --int8: #8ab4f8;
  --bf16: #81c995; --fp32: #fcad70; --other: #c6b3ff; --conversion: #ff8a80; --low-bit: #4fd1c5 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem }
h1, h2, li, p, summary { overflow-wrap: anywhere }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { text-align: left; padding: .15rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { white-space: nowrap } th.block { white-space: normal }
td { min-width: 3rem; max-width: 28rem; overflow-wrap: break-word } td:first-child { min-width: 11rem }
td.bar { background: linear-gradient(var(--int8), var(--int8)) no-repeat 0 100% / var(--share) 5px;
  padding-bottom: .35rem; min-width: 5rem }
pre { white-space: pre-wrap } svg { width: 100%; height: auto; display: block } svg text { fill: var(--text) }
td:first-child { white-space: pre-wrap } th button { font: inherit; font-weight: bold; background: none;
  border: 0; padding: 0; color: inherit; cursor: pointer; text-decoration: underline dotted }
th[aria-sort=ascending] button::after { content: " ▲" }
th[aria-sort=descending] button::after { content: " ▼" }
@media print { body { max-width: none } .tools { display: none } h2 { break-after: avoid }
  tr, svg { break-inside: avoid } }
"""
#: A heading sorts the table's rows, a second time the other way round, a third time as they were. Rows of a
#: folded block have their whole name while they are sorted, and the blocks' headings are not shown.
SORTING = """
document.querySelectorAll("table").forEach(function (table) {
  var body = table.tBodies[0], rows = Array.prototype.slice.call(body.rows), open = [], sorted = -1, way = 0;
  function depth(text) { return text.length - text.replace(/^ +/, "").length; }
  rows.forEach(function (row) {
    var text = row.cells[0].textContent, deep = depth(text), name = text.trim();
    while (open.length && open[open.length - 1].deep >= deep) open.pop();
    row.head = row.cells.length === 1;
    row.short = text;
    row.full = open.map(function (each) { return each.name; }).concat(name).join(".");
    if (row.head) open.push({deep: deep, name: name.replace(/ [(][0-9]+ times[)]$/, "")});
  });
  function key(row, at) { return at ? row.cells[at].textContent : row.full; }
  function compare(one, other) {
    var a = key(one, sorted), b = key(other, sorted), x = parseFloat(a), y = parseFloat(b);
    if (!a || !b) return a ? -1 : b ? 1 : 0;
    return way * (isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y);
  }
  function arrange() {
    var order = way ? rows.filter(function (row) { return !row.head; }).sort(compare) : rows;
    var all = document.createDocumentFragment();
    rows.forEach(function (row) {
      row.hidden = row.head && way !== 0;
      if (!row.head) row.cells[0].textContent = way ? row.full : row.short;
    });
    order.forEach(function (row) { all.appendChild(row); });
    body.appendChild(all);
    titles.forEach(function (title, at) {
      if (way && at === sorted) title.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      else title.removeAttribute("aria-sort");
    });
  }
  var titles = Array.prototype.slice.call(table.tHead.rows[0].cells);
  titles.forEach(function (title, at) {
    var button = document.createElement("button");
    button.type = "button"; button.textContent = title.textContent; title.textContent = "";
    button.onclick = function () {
      way = sorted === at ? (way === 1 ? -1 : way === -1 ? 0 : 1) : 1; sorted = at; arrange();
    };
    title.appendChild(button);
  });
});
"""


def escaped(text: object) -> str:
    """Return a text for a page."""
    return html.escape(plain(text))


def preformatted(text: str) -> str:
    """Return a text for an output of a notebook."""
    return f"<pre>{escaped(text)}</pre>"


def framed(page: str) -> str:
    """Return a page for an output of a notebook, whose own styles do not reach it."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 40em; border: 0"></iframe>'


def table(head: Sequence[object], rows: Iterable[Sequence[object]], bars: int | None = None) -> str:
    """Return a table in a box that scrolls; a row of one cell is a heading of those below it.

    Args:
        head: titles of the columns.
        rows: their cells.
        bars: the column whose cells are shares in per cent, which are drawn too.
    """

    def cell(at: int, value: object) -> str:
        share = escaped(value) if at == bars else ""
        return f"<td{f' class=bar style=--share:{share}' if share else ''}>{escaped(value)}</td>"

    titles = "".join(f"<th scope=col>{escaped(title)}</th>" for title in head)
    body = "".join(
        f"<tr><th class=block colspan={len(head)} scope=rowgroup>{escaped(row[0])}</th></tr>"
        if len(row) == 1 < len(head)
        else "<tr>" + "".join(cell(at, value) for at, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    head_row = f"<thead><tr>{titles}</tr></thead>"
    # to be reached by keyboard, as all that scrolls has to be
    return f"<div class=scroll tabindex=0><table>{head_row}<tbody>{body}</tbody></table></div>"


def bullets(lines: Iterable[object]) -> str:
    """Return a list; "" without lines."""
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a page.

    Args:
        title: of the page.
        body: its content, whose texts are escaped.
        style: rules beside those of all pages.
        script: what makes it more comfortable; it can be read without.
    """
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escaped(title)}</title>"
        "<meta name=generator content=nc>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{_STYLE}{style}</style></head><body><main>{body}</main>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )

"""Pages that need nothing else: no request, both themes, every text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

#: Colours have names, so that pictures follow the theme too.
_STYLE = """
:root { color-scheme: light dark; --text: #1f1f1f; --back: #fff; --line: #bbb; --int8: #1565c0;
  --bf16: #2e7d32; --fp32: #c75300; --other: #6a4fb3 }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --back: #161616; --line: #555; --int8: #8ab4f8;
  --bf16: #81c995; --fp32: #fcad70; --other: #c6b3ff } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: 13px } td, th { text-align: left;
  padding: .15rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { white-space: nowrap } th.block { white-space: normal }
td:first-child, td:nth-child(n + 5) { overflow-wrap: anywhere }
pre { white-space: pre-wrap } svg { width: 100%; height: auto; display: block } svg text { fill: var(--text) }
@media print { body { max-width: none } }
"""


def escaped(text: object) -> str:
    """Return a text for a page."""
    return html.escape(str(text))


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; a row of one cell is a heading of those below it."""
    titles = "".join(f"<th scope=col>{escaped(title)}</th>" for title in head)
    body = "".join(
        f"<tr><th class=block colspan={len(head)} scope=rowgroup>{escaped(row[0])}</th></tr>"
        if len(row) == 1 < len(head)
        else "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


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
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{_STYLE}{style}</style></head><body><main>{body}</main>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )

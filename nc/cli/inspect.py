"""`python -m nc inspect DIR`: what is in an artefact, read from its files; nothing of it is built or run."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nc.formats import TensorFormat
from nc.graph.plan import Plan
from nc.storage import folder as folders
from nc.storage import store
from nc.text.json_text import parsed
from nc.text.plain import plain
from nc.text.table import folded, format_table
from nc.weights.files.artefact import FORMAT as LOW_BIT

_KINDS = {"example": "example inputs", "expected": "example outputs"}


def show(folder: Path, console: Console, *, limited: bool, as_json: bool) -> None:
    """Print the contents of an artefact.

    Args:
        folder: of the artefact.
        console: has the width.
        limited: whether cells that make lines wider take several lines.
        as_json: plain values instead of a table.

    Raises:
        ArtefactError: it is not an artefact, or was altered.
    """
    content = folders.read(folder)
    with folders.malformed(folder / folders.MODEL):
        if content.format == LOW_BIT:
            contents, rows, lines = _low_bit(content)
        else:
            contents = _contents(folder)
            rows, lines = _table(contents)
    if as_json:
        click.echo(json.dumps(contents, indent=2, allow_nan=False))
        return
    rows = folded(rows)
    table = format_table(rows)
    facts = plain("\n".join(f"{name:16}{text}" for name, text in lines.items()))
    if not limited or max(map(len, f"{table}\n{facts}".splitlines())) <= console.width:
        click.echo(f"{table}\n\n{facts}")
        return
    console.print(_broken(*rows[0], rows=rows[1:]))
    console.print()
    console.print(_broken("", "", rows=[(name, str(text)) for name, text in lines.items()], header=False))


def _broken(*columns: str, rows: Sequence[tuple[str, ...]], header: bool = True) -> Table:
    """Return a table whose cells take several lines where it is too wide."""
    table = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def _low_bit(content: folders.FolderContent) -> tuple[dict[str, Any], list[tuple[str, ...]], dict[str, str]]:
    """Return the contents of a model with low-bit weights.

    They come as plain values, as a table of layers, and as lines about the rest.
    """
    document = content.document
    layers = [
        {
            "layer": name,
            "type": layer["kind"],
            "shape": layer["shape"],
            "weight": str(TensorFormat.from_dict(layer["form"])),
            "activations": layer["act_dtype"],
            "solver": "" if layer["result"] is None else layer["result"]["solver"],
        }
        for name, layer in document["layers"].items()
    ]
    sizes = {path.name: path.stat().st_size for path in sorted(content.directory.iterdir())}
    contents = {
        "schema": document["schema"],
        "versions": document["versions"],
        "class": document["class"],
        "needs_class": document["transformers"] is None,
        "layers": layers,
        "bytes_by_dtype": _bytes_by_dtype(content.weights.buffer),
        "files": sizes,
    }
    rows: list[tuple[str, ...]] = [("layer", "type", "N x K", "weight", "activations", "solver")]
    rows += [
        (
            x["layer"],
            x["type"],
            " x ".join(map(str, x["shape"])),
            x["weight"],
            x["activations"],
            x["solver"] or "-",
        )
        for x in layers
    ]
    count = sum(math.prod(x["shape"]) for x in layers)
    given = "give nc.load a model of it" if contents["needs_class"] else "nc.load builds it from transformers"
    lines = {
        "schema": str(contents["schema"]),
        "written by": ", ".join(f"{name} {version}" for name, version in contents["versions"].items()),
        "class": f"{contents['class']}: {given}",
        "layers": f"{len(layers)} with low-bit weights, {count / 1e6:.1f} M weights",
        "tensors": ", ".join(
            f"{kind} {size / 1e6:.2f} MB" for kind, size in contents["bytes_by_dtype"].items()
        ),
        "files": ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in sizes.items()),
    }
    return contents, rows, lines


def _table(contents: dict[str, Any]) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Return the contents of a quantized graph as a table of operators, and lines about the rest."""
    columns = ("operator", "type", "activations", "weight", "rule", "why fp32")
    rows: list[tuple[str, ...]] = [
        columns,
        *(tuple(op[column] for column in columns) for op in contents["operators"]),
    ]
    int8 = sum(op["activations"] not in ("fp32", "bf16") for op in contents["operators"])
    sizes = ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in contents["bytes_by_dtype"].items())
    error = "infinite" if contents["sqnr_vs_fp32_db"] is None else contents["sqnr_vs_fp32_db"]
    lines = {
        "schema": contents["schema"],
        "written by": ", ".join(f"{name} {version}" for name, version in contents["versions"].items()),
        "quantized on": contents["backend"],
        "CPU features": ", ".join(contents["cpu_features"]) or "no special ones",
        "inputs": "; ".join(contents["inputs"]),
        "operators": f"{int8} of {len(rows) - 1} are quantized",
        "tensors": sizes,
        "fp32 model": f"{contents['fp32_bytes'] / 1e6:.2f} MB of constants",
        "files": ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in contents["files"].items()),
        "quantized graph": f"{error} dB against fp32, on the example inputs",
    }
    return rows, lines


def _contents(folder: Path) -> dict[str, Any]:
    """Return the contents of an artefact as plain values."""
    stored = store.read(folder)
    document = stored.document
    plan = Plan.from_dict(document["plan"])
    sqnr_db = float(document["sqnr_vs_fp32_db"])
    return {
        "schema": document["schema"],
        "versions": document["versions"],
        "backend": document["backend"],
        "cpu_features": list(plan.isa),
        "inputs": [_input_text(leaf) for leaf in document["signature"]["leaves"]],
        "operators": [
            {
                "operator": d.operator,
                "type": d.kind,
                "activations": d.spec.activations,
                "weight": str(d.spec.weight or "-"),
                "rule": d.rule,
                "why fp32": d.reason,
            }
            for d in plan.decisions
        ],
        "bytes_by_dtype": _bytes_by_dtype(stored.content.weights.buffer),
        "fp32_bytes": document["float_bytes"],
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "sqnr_vs_fp32_db": None if math.isinf(sqnr_db) else round(sqnr_db, 1),  # JSON has no Infinity
    }


def _input_text(leaf: dict[str, Any]) -> str:
    if "dtype" not in leaf:
        return f"{leaf['path']} = {leaf['value']}"
    return f"{leaf['path']} {leaf['dtype']}[{', '.join(map(str, leaf['dims']))}]"


def _bytes_by_dtype(safetensors: mmap.mmap | bytearray) -> dict[str, int]:
    """Return the bytes of the tensors of each dtype, from the header of a safetensors file.

    Example inputs and outputs are counted apart.
    """
    length = int.from_bytes(safetensors[:8], "little")
    sizes: dict[str, int] = {}
    for name, entry in parsed(safetensors[8 : 8 + length]).items():
        if name != "__metadata__":
            kind = _KINDS.get(name.partition(".")[0], entry["dtype"])
            start, end = entry["data_offsets"]
            sizes[kind] = sizes.get(kind, 0) + end - start
    return dict(sorted(sizes.items()))

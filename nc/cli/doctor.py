"""`python -m nc doctor DIR`: whether this CPU can run an artefact, and which layers `load` quantizes again here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nc.backends import available_backends, cpu, get_backend
from nc.backends.reference import NAME as REFERENCE
from nc.graph.qdq import QDQGraph
from nc.graph.saturation import saturating
from nc.storage import folder as folders
from nc.storage import store
from nc.weights.files.artefact import FORMAT as LOW_BIT


def of_artefact(folder: Path) -> dict[str, Any]:
    """Return what this CPU makes of an artefact, as plain values; raises ArtefactError if the folder is not an artefact.

    Returns:
        fits: whether it can run here.
        needs, missing: CPU features, those that it needs and those of them that are missing.
        low_bit_layers, quantized_layers: how many there are.
        changes: layers whose 16-bit sums could overflow on an engine: layer, type, and by engine what load does.
    """
    content = folders.read(folder)
    facts: dict[str, Any] = {"folder": str(folder), "fits": True, "needs": [], "missing": [], "changes": []}
    if content.format == LOW_BIT:
        return {**facts, "low_bit_layers": len(content.document["layers"]), "quantized_layers": 0}
    stored = store.checked(content)
    missing = list(cpu.missing(stored.plan.isa))
    facts |= {"fits": not missing, "needs": list(stored.plan.isa), "missing": missing, "low_bit_layers": 0}
    facts["quantized_layers"] = len(stored.plan.quantized)
    return facts if missing else {**facts, "changes": _changes(stored.graph())}


def tell(facts: dict[str, Any], console: Console) -> None:
    """Print a result of `of_artefact`."""
    folder, needs = facts["folder"], ", ".join(facts["needs"])
    if facts["low_bit_layers"]:
        count = facts["low_bit_layers"]
        click.echo(
            f"{folder} fits this CPU: its {count} low-bit layers need no special CPU features. nc.report says which kernels run them."
        )
        return
    if facts["missing"]:
        click.echo(
            f"{folder} needs {needs}, and this CPU lacks {', '.join(facts['missing'])}. Quantize the "
            'model on this CPU, or load it with backend="reference" (slow, fp32).'
        )
        return
    click.echo(f"{folder} fits this CPU: it needs {needs or 'no special CPU features'}.")
    layers, total = facts["changes"], facts["quantized_layers"]
    if not layers:
        click.echo(f"load changes none of its {total} quantized layers here.")
        return
    table = Table("layer", "type", *layers[0]["engines"], box=None, pad_edge=False)
    for layer in layers:
        table.add_row(layer["layer"], layer["type"], *layer["engines"].values())
    console.print(table)
    click.echo(
        f"load quantizes {len(layers)} of {total} quantized layers again, from their int8 codes, because 16-bit sums "
        f"could overflow here{cpu.why_narrow()}. To keep more accuracy, convert the fp32 model on this CPU."
    )


def _changes(graph: QDQGraph) -> list[dict[str, Any]]:
    engines = [name for name, why in available_backends().items() if not why and name != REFERENCE]
    found = {name: saturating(graph, get_backend(name).capabilities()) for name in engines}
    changes = []
    for d in graph.plan.quantized:
        if any(d.operator in names for names in found.values()):
            change = "second input in 7 bits" if d.spec.weight is None else "weights quantized again"
            by_engine = {name: change if d.operator in found[name] else "unchanged" for name in engines}
            changes.append({"layer": d.operator, "type": d.kind, "engines": by_engine})
    return changes

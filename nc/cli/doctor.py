"""`python -m nc doctor DIR`: whether this CPU can run an artefact, and which layers `load` would quantize again here."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from nc.backends import available_backends, cpu, get_backend
from nc.backends.reference import NAME as REFERENCE
from nc.graph.qdq import QDQGraph
from nc.graph.saturation import saturating
from nc.storage import store


def tell_whether_it_runs_here(folder: Path, console: Console) -> bool:
    """Print it, and return it; raises an ArtefactError for what is no artefact."""
    stored = store.read(folder)
    needed = stored.plan.isa
    missing = cpu.missing(needed)
    if missing:
        click.echo(
            f"{folder} relies on {', '.join(needed)}, and this CPU lacks {', '.join(missing)}. Quantize the "
            'model on this CPU, or load it with backend="reference" (slow, fp32).'
        )
        return False
    click.echo(f"{folder} fits this CPU: it relies on {', '.join(needed) or 'nothing in particular'}.")
    _tell_what_changes(stored.graph(), console)
    return True


def _tell_what_changes(graph: QDQGraph, console: Console) -> None:
    """A table of the layers that some engine's 16-bit sums could saturate in."""
    engines = [name for name, why in available_backends().items() if not why and name != REFERENCE]
    found = {name: saturating(graph, get_backend(name).capabilities()) for name in engines}
    layers = [d for d in graph.plan.quantized if any(d.operator in names for names in found.values())]
    if not layers:
        click.echo(f"load would change none of its {len(graph.plan.quantized)} quantized layers here.")
        return
    table = Table("layer", "type", *engines, box=None, pad_edge=False)
    for d in layers:
        change = "second input in 7 bits" if d.spec.weight is None else "weights anew, in pairs"
        table.add_row(d.operator, d.kind, *(change if d.operator in found[name] else "as it is" for name in engines))
    console.print(table)
    click.echo(
        f"load would quantize {len(layers)} of {len(graph.plan.quantized)} quantized layers anew, from their int8 codes: products are "
        f"added in 16 bits here{cpu.why_narrow()}, and could saturate. Converting the model on this CPU, from fp32, costs less accuracy."
    )

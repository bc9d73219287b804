"""`python -m nc doctor DIR`: whether this CPU can run an artefact, and which layers `load` quantizes again here."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from nc.backends import available_backends, cpu, get_backend
from nc.backends.reference import NAME as REFERENCE
from nc.graph.qdq import QDQGraph
from nc.graph.saturation import saturating
from nc.lowbit.artefact import FORMAT as LOW_BIT
from nc.storage import folder as folders
from nc.storage import store


def tell_whether_it_runs_here(folder: Path, console: Console) -> bool:
    """Print whether this CPU can run an artefact, and return it; raises ArtefactError if the folder is not an artefact."""
    content = folders.read(folder)
    if content.format == LOW_BIT:
        layers = len(content.document["layers"])
        click.echo(
            f"{folder} fits this CPU: its {layers} low-bit layers need no special CPU features. nc.report says which kernels run them."
        )
        return True
    stored = store.checked(content)
    needed = stored.plan.isa
    missing = cpu.missing(needed)
    if missing:
        click.echo(
            f"{folder} needs {', '.join(needed)}, and this CPU lacks {', '.join(missing)}. Quantize the "
            'model on this CPU, or load it with backend="reference" (slow, fp32).'
        )
        return False
    click.echo(f"{folder} fits this CPU: it needs {', '.join(needed) or 'no special CPU features'}.")
    _tell_what_changes(stored.graph(), console)
    return True


def _tell_what_changes(graph: QDQGraph, console: Console) -> None:
    """A table of the layers whose 16-bit sums could overflow on an engine."""
    engines = [name for name, why in available_backends().items() if not why and name != REFERENCE]
    found = {name: saturating(graph, get_backend(name).capabilities()) for name in engines}
    layers = [d for d in graph.plan.quantized if any(d.operator in names for names in found.values())]
    if not layers:
        click.echo(f"load changes none of its {len(graph.plan.quantized)} quantized layers here.")
        return
    table = Table("layer", "type", *engines, box=None, pad_edge=False)
    for d in layers:
        change = "second input in 7 bits" if d.spec.weight is None else "weights quantized again"
        table.add_row(d.operator, d.kind, *(change if d.operator in found[name] else "unchanged" for name in engines))
    console.print(table)
    click.echo(
        f"load quantizes {len(layers)} of {len(graph.plan.quantized)} quantized layers again, from their int8 codes, because 16-bit sums "
        f"could overflow here{cpu.why_narrow()}. To keep more accuracy, convert the fp32 model on this CPU."
    )

"""What `python -m nc doctor` says of the C code, and of an artefact.

It says whether this CPU can run it, and which layers `load` changes here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nc.backends import available_backends, get_backend
from nc.backends.reference import NAME as REFERENCE
from nc.errors import BackendUnavailableError
from nc.graph.qdq import QDQGraph
from nc.graph.saturation import saturating
from nc.kernels import cpu
from nc.kernels.c_code import build, isas, tested
from nc.storage import folder as folders
from nc.storage import store
from nc.weights.files.artefact import FORMAT as LOW_BIT

#: Origin of a library → what the table says.
_FROM = {
    "shipped": "the wheel",
    "kept": "the cache folder",
    "compiled": "the compiler, in this process",
    "": "nowhere",
}


def of_c_code() -> list[dict[str, Any]]:
    """Return a description of each library of C code, as plain values.

    Returns:
        For each library a dictionary with:

        library: its name.
        origin: "shipped" (in the wheel), "kept" (compiled by an earlier process), "compiled" (in this
            process), or "" (no library can be loaded).
        where, compiler: as text; "" if no library can be loaded.
        instruction_sets: the ones that it has code for, besides code for any x86-64 CPU.
        remarks: why a better library, or any, is missing.
    """
    return [_of_library(name) for name in build.sources()]


def _of_library(name: str) -> dict[str, Any]:
    try:
        found = build.loaded(name)
    except BackendUnavailableError as error:
        return {
            "library": name,
            "origin": "",
            "where": "",
            "compiler": "",
            "instruction_sets": [],
            "remarks": [str(error)],
        }
    unknown = [f"{isa} takes {isas.COMPILERS.get(isa, 'another compiler')}" for isa in found.missing]
    remarks = [
        *found.passed_over,
        *([f"{found.compiler} has no code for {', '.join(unknown)}"] if unknown else []),
    ]
    if found.origin != build.ORIGINS[0] and not build.is_shipped(name):
        remarks.append(
            "the installation has no compiled libraries: it is editable, or of a wheel for any platform"
        )
    facts = {"library": name, "origin": found.origin, "where": found.where, "compiler": found.compiler}
    return {**facts, "instruction_sets": list(found.isas), "remarks": remarks}


def tested_on() -> str:
    """Return on which instruction sets the C code of this installation was tested, as a sentence."""
    if not tested.TESTED:
        return "No record says on which instruction sets the C code was tested."
    of = "The C code was" if build.all_sources() == tested.SOURCES else "The C code has changed since it was"
    sets = ", ".join(f"{name} ({', '.join(hows)})" for name, hows in tested.TESTED.items())
    return f"{of} tested on {sets}."


def tell_c_code(libraries: list[dict[str, Any]], console: Console) -> None:
    """Print a result of `of_c_code`.

    It prints a table, then each origin and each remark once, with the libraries that it is of.
    """
    table = Table("C code", "from", "instruction sets", "compiler", box=None, pad_edge=False)
    for row in libraries:
        code = ", ".join(row["instruction_sets"]) or ("any x86-64" if row["origin"] else "none")
        table.add_row(row["library"], _FROM[row["origin"]], code, row["compiler"])
    console.print(table)
    for remark in dict.fromkeys(remark for row in libraries for remark in row["remarks"]):
        names = [row["library"] for row in libraries if remark in row["remarks"]]
        of = "all" if len(names) == len(libraries) else ", ".join(names)
        click.echo(f"C code, {of}: {remark}")


def of_artefact(folder: Path) -> dict[str, Any]:
    """Return how an artefact runs on this CPU, as plain values.

    Returns:
        A dictionary with:

        fits: whether it can run here.
        needs, missing: CPU features that it needs, and the ones of them that this CPU lacks.
        low_bit_layers, quantized_layers: numbers of layers.
        changes: layers whose 16-bit sums could overflow on an engine: layer, type, and by engine what load
            does.

    Raises:
        ArtefactError: the folder is not an artefact.
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
            f"{folder} fits this CPU: its {count} low-bit layers need no special CPU features. nc.report "
            "says which kernels run them."
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
        f"load quantizes {len(layers)} of {total} quantized layers again, from their int8 codes, because "
        f"16-bit sums could overflow here{cpu.why_narrow()}. To keep more accuracy, convert the fp32 model "
        "on this CPU."
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

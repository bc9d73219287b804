"""`python -m nc doctor`: what this machine can run, and what loading an artefact would change here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from nc._version import __version__
from nc.cli.shell import FOLDER, command, console_of
from nc.process import installation
from nc.process.cores import cores, fit_threads

#: Distributions whose versions `doctor` shows, beside torch and those of the engines.
_PACKAGES = ("transformers", "torchvision", "safetensors", "numpy")


@click.command()
@click.argument("folder", metavar="[DIR]", type=FOLDER, required=False)
@click.option("--run", "runs", is_flag=True, help="Also quantize a small model, prove it and time it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@command
def doctor(folder: Path | None, runs: bool, as_json: bool) -> None:
    """Show which backends can run on this machine, and what to install for the others.

    With DIR, also show whether this CPU has the features that the artefact needs, and which layers
    `load` quantizes again because 16-bit sums could overflow here.
    """
    from nc.cli.doctor import of_artefact

    facts = _health()
    if folder is not None:
        facts["artefact"] = of_artefact(folder)
        facts["healthy"] &= facts["artefact"]["fits"]
    if runs:
        from nc.cli.trial import tried

        facts["trial"] = dataclasses.asdict(trial := tried())
        facts["healthy"] &= trial.ran == trial.asked
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _tell_health(facts)
        if runs:
            click.echo("\n" + "\n".join(trial.lines()))
    if not facts["healthy"]:
        sys.stdout.flush()
        sys.exit(1)


def _health() -> dict[str, Any]:
    """Return what doctor finds on this machine, as plain values."""
    from nc.backends import available_backends, choose_backend, why_chosen
    from nc.backends.auto_order import CONVOLUTIONS, LINEARS
    from nc.cli.doctor import of_c_code, tested_on
    from nc.errors import BackendUnavailableError

    backends = {
        name: {"can_run": not why, "remark": why or _remark(name)}
        for name, why in available_backends().items()
    }
    problems = [why for why in (installation.other_distribution(), installation.altered_files()) if why]
    facts: dict[str, Any] = {
        "machine": dict(_machine()),
        "c_code": of_c_code(),
        "tested_on": tested_on(),
        "backends": backends,
        "problems": problems,
    }
    facts |= {"auto": {}, "no_engine": ""}
    try:
        for kind in (CONVOLUTIONS, LINEARS):
            name = choose_backend("auto", kind).name
            facts["auto"][kind] = {"backend": name, "why": why_chosen("auto", name, model=kind)}
    except BackendUnavailableError as error:
        facts["no_engine"] = str(error)
    return {**facts, "healthy": not problems and not facts["no_engine"]}


def _tell_health(facts: dict[str, Any]) -> None:
    from nc.cli.doctor import tell, tell_c_code

    console = console_of()
    machine = Table("machine", "", box=None, pad_edge=False)
    for row in facts["machine"].items():
        machine.add_row(*row)
    console.print(machine)
    console.print()
    tell_c_code(facts["c_code"], console)
    click.echo(facts["tested_on"])
    console.print()
    table = Table("backend", "can run here", "why not, and what to do", box=None, pad_edge=False)
    for name, found in facts["backends"].items():
        table.add_row(name, "yes" if found["can_run"] else "no", found["remark"])
    console.print(table)
    console.print()
    for why in facts["problems"]:
        click.echo(why)
    auto = facts["auto"]
    if facts["no_engine"]:
        click.echo(f'backend="auto" finds no engine. {facts["no_engine"]}')
    elif len({choice["why"] for choice in auto.values()}) == 1:
        choice = next(iter(auto.values()))
        click.echo(f'backend="auto" begins with {choice["backend"]}. {choice["why"]}')
    else:
        for kind, choice in auto.items():
            click.echo(
                f'backend="auto" begins with {choice["backend"]} for models that consist of {kind}. '
                f"{choice['why']}"
            )
    if "artefact" in facts:
        click.echo()
        tell(facts["artefact"], console)


def _remark(name: str) -> str:
    from nc.backends import get_backend
    from nc.kernels import cpu

    backend = get_backend(name)
    if backend.remark or cpu.accumulates_wide() or not backend.capabilities().narrow_sums:
        return backend.remark
    why = (
        f"{', '.join(cpu.limits())} hides this CPU's VNNI"
        if cpu.why_narrow()
        else "this CPU has neither VNNI nor AMX"
    )
    return f"{why}: nc reduces a few weights so that 16-bit sums cannot overflow"


def _onednn() -> str:
    """Return which oneDNN plans call, and who calls it; or why there can be no plans."""
    from nc.errors import BackendUnavailableError
    from nc.kernels.onednn.providers import provider
    from nc.kernels.onednn.runner import runner

    try:
        found = provider()
    except BackendUnavailableError as error:
        return f"torch's operators: {error}"
    run_by, _ = runner(found.maker.library)
    others = f"; not {', '.join(found.passed_over)}" if found.passed_over else ""
    return f"{found}, called by {run_by.name}{others}"


def _machine() -> list[tuple[str, str]]:
    import torch

    from nc.backends import backend_names, get_backend
    from nc.kernels import cpu

    found = cores()
    fit_threads()  # as `load` does
    engines = [package for name in backend_names() for package in get_backend(name).packages]
    rows = [
        ("CPU", cpu.model_name()),
        ("features", (", ".join(cpu.machine_features()) or "none that int8 kernels use") + cpu.why_narrow()),
        ("cores", str(found)),
        ("threads", f"{torch.get_num_threads()} (torch.set_num_threads or OMP_NUM_THREADS changes it)"),
        ("Python", platform.python_version()),
        (installation.DISTRIBUTION, __version__),
        ("oneDNN", _onednn()),
    ]
    for package in ("torch", *engines, *_PACKAGES):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        rows.append((package, version))
    return rows

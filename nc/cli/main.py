"""`python -m nc quantize | inspect | report | bench | check | doctor`, also as `nc-quant`.

Results go to stdout; progress, warnings and errors go to stderr. Exit code 2 means that the command failed,
and one line says why. Exit code 1 means that `doctor` found a problem, or that
`check` lets an artefact not pass. If nobody reads stdout any more (`|
head`), a command ends as others do that a closed pipe stops.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress
from rich.table import Table

from nc._version import __version__
from nc.cli.check import check
from nc.cli.report import report
from nc.cli.shell import FILE, FOLDER, BackendOption, command, console_of, progress_bar
from nc.process import env, installation
from nc.process.cores import cores, fit_threads
from nc.process.warn import warn

#: Distributions whose versions `doctor` shows, beside torch and those of the engines.
_PACKAGES = ("transformers", "torchvision", "safetensors", "numpy")


@contextlib.contextmanager
def _step(progress: Progress, text: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a step, which is done at the end of the block; yields what tells how far it is."""
    step = progress.add_task(text, total=1)

    def say(done: int, total: int, name: str) -> None:
        progress.update(step, completed=done, total=total, description=f"{text}: {name}")

    yield say
    progress.update(step, completed=1, total=1, description=text)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=installation.DISTRIBUTION)
def main() -> None:
    """Post-training int8 quantization of PyTorch models for Intel CPUs."""


main.add_command(check)
main.add_command(report)


@main.command()
@click.argument("factory", metavar="PKG.MODULE:FACTORY|DIR")
@click.option(
    "--calib",
    type=FILE,
    help=(
        "Calibration data: .npz, one array per argument of forward; for a DIR a text file. A configuration "
        "that needs no data needs none."
    ),
)
@click.option(
    "--out", type=FOLDER, required=True, help="Folder to save to: new, empty, or an artefact to replace."
)
@click.option(
    "--config",
    type=FILE,
    help="A JSON file from to_json_file (default: what suits the model and the CPU is tried).",
)
@click.option("--backend", cls=BackendOption, default="auto", show_default=True)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Samples per batch."
)
@click.option(
    "--example",
    type=FILE,
    help=(
        "One batch to capture the model with, .npz like --calib (default: the first sample of --calib). It "
        "is saved too."
    ),
)
@click.option(
    "--verify",
    type=click.Choice(["raise", "warn", "off"]),
    default="raise",
    show_default=True,
    help="What to do if the engine disagrees with the reference.",
)
@click.option(
    "--weights",
    metavar="DTYPE",
    help="For a DIR: number format of the weights, e.g. int4, int3, nf4 (default: int4).",
)
@click.option(
    "--group-size",
    type=int,
    help="For a DIR: input channels that share a scale; -1: one scale per output channel.",
)
@click.option("--asym", is_flag=True, help="For a DIR: weights with zero points.")
@click.option("--solver", help="For a DIR: how codes are chosen, e.g. rtn or gptq.")
@click.option(
    "--transform", "transforms", multiple=True, help="For a DIR: e.g. awq; may be given several times."
)
@click.option(
    "--lm-head",
    metavar="DTYPE",
    help="For a DIR: number format of the output head (default: it stays float).",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="For a DIR: most pieces of the text to use.",
)
@click.option(
    "--length",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="For a DIR: tokens of one piece.",
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure the speed relative to fp32, for about a second.",
)
@command
def quantize(
    factory: str,
    calib: Path | None,
    out: Path,
    config: Path | None,
    backend: str,
    batch_size: int,
    example: Path | None,
    verify: str,
    measure: bool,
    weights: str | None,
    group_size: int | None,
    asym: bool,
    solver: str | None,
    transforms: tuple[str, ...],
    lm_head: str | None,
    samples: int,
    length: int,
) -> None:
    """Quantize a model and save it: the one that FACTORY returns, or a transformers model saved in DIR.

    A DIR (config.json and safetensors files) gets low-bit weights, block by block: the float model need not
    fit into memory. If the run is stopped, the same command goes on where it was.

    FACTORY is called without arguments and returns a torch.nn.Module. It may be in a module of the current
    directory. Arrays in the .npz have the names of the arguments of the model's forward (arr_0, arr_1, … are
    positional). The first axis is samples.
    """
    import nc
    from nc.api.artefact import save
    from nc.backends import choose_backend
    from nc.cli import inputs

    # what can fail cheaply comes first
    inputs.check_can_be_made(out)
    given = {
        "w_dtype": weights,
        "group_size": group_size,
        "solver": solver,
        "lm_head": lm_head,
        "transforms": list(transforms) or None,
    }
    given["w_sym"] = False if asym else None
    if Path(factory).is_dir():
        from nc.cli.pretrained import quantize_pretrained

        quantize_pretrained(
            Path(factory),
            calib,
            out,
            config,
            {k: v for k, v in given.items() if v is not None},
            samples,
            length,
        )
        return
    _check_of_factory(factory, out, given)
    arrays, examples = inputs.read_data(calib, example)
    quant_config = inputs.read_config(config) if config else nc.AutoConfig()
    choose_backend(backend)
    model = inputs.make_model(factory)

    with progress_bar() as progress:
        with _step(progress, "prepare"), inputs.whence(example or calib, examples):
            prepared = nc.prepare(
                model, quant_config, example_inputs=inputs.as_inputs(examples), backend=backend
            )
        _calibrate(prepared, arrays, batch_size, progress)
        with _step(progress, "convert") as say:
            q_model = nc.convert(prepared, verify=verify, measure=measure, progress=say)
        with inputs.writing(out):
            save(q_model, out)
    click.echo(str(q_model.report()))
    click.echo(f"saved to {out}")


def _check_of_factory(factory: str, out: Path, given: Mapping[str, object]) -> None:
    """Raise RequestError for options that a factory does not take, or a result in a folder of other files.

    Args:
        factory: as the user wrote it.
        out: the folder to save to.
        given: options for a transformers model in a folder; None for those that are not used.
    """
    from nc.cli import inputs

    if any(value is not None for value in given.values()):
        what = "--weights, --group-size and the like are for the folder of a transformers model"
        msg = f"{factory!r} is no folder: {what}. Use --config."
        raise inputs.RequestError(msg)
    if out.exists() and any(out.iterdir()) and not (out / "checksums.json").exists():
        msg = f"{out} contains other files; use a new folder for --out, or one with an artefact to replace."
        raise inputs.RequestError(msg)


def _calibrate(prepared: Any, arrays: Any, batch_size: int, progress: Progress) -> None:
    """Call a prepared model with the calibration data; without any, check that it needs none."""
    from nc.cli import inputs

    if arrays is None:
        inputs.check_needs_no_data(prepared)
        return
    for batch in progress.track(list(inputs.batches(arrays, batch_size)), description="calibrate"):
        inputs.call(prepared, batch)


@main.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@command
def inspect(folder: Path, as_json: bool) -> None:
    """Show the contents of the artefact in DIR. Needs no engine and runs nothing."""
    from nc.cli.inspect import show

    console = console_of()
    show(folder, console, limited=console.is_terminal or env.COLUMNS.is_set, as_json=as_json)


@main.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Calls of each model."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads to use (default: torch's own choice).")
@click.option("--backend", cls=BackendOption, default="auto", show_default=True)
@click.option("--cores", type=click.IntRange(min=1), help="Share so many cores among processes (see below).")
@click.option("--instances", help="Numbers of processes, as 1,2 (default: 1, 2, 4, … up to the cores).")
@click.option(
    "--lengths",
    type=FILE,
    help="Requests, one a line: a length (128) or all sizes (8x128) of the first input.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="For each way."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@command
def bench(
    folder: Path,
    rounds: int,
    threads: int | None,
    backend: str,
    cores: int | None,
    instances: str | None,
    lengths: Path | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Time the artefact in DIR on the example inputs in it.

    The second row is the quantized graph in eager PyTorch, which simulates int8 in fp32. It is NOT the fp32
    model: an artefact does not contain that. So the ratio is not the speed-up over fp32.

    With --cores, --instances or --lengths: requests per second and their times for ways to share the cores
    among processes, beside OpenVINO with its throughput hint, and the command that starts the best one.
    """
    if cores is not None or instances is not None or lengths is not None:
        if threads is not None:
            from nc.cli.inputs import RequestError

            msg = (
                "--threads does not go with --cores, --instances or --lengths: each process takes its cores."
            )
            raise RequestError(msg)
        _bench_ways(folder, backend, cores, instances, lengths, seconds, as_json)
        return
    import torch

    from nc.api.artefact import load
    from nc.api.quantized import QuantizedModel
    from nc.backends.profiling.latency import interleaved, median
    from nc.cli.inputs import RequestError

    if threads is not None:
        _warn_of_too_many(threads)
        torch.set_num_threads(threads)
    with progress_bar() as progress:
        with _step(progress, "load"):
            q_model = load(folder, backend=backend)
            if not isinstance(q_model, QuantizedModel):
                msg = (
                    f"{folder} holds a {type(q_model).__name__} with low-bit weights and no example inputs "
                    "to time. In Python: nc.report(nc.load(…), profile_inputs=…)."
                )
                raise RequestError(msg)
        example = q_model.graph.example
        names = {
            "engine": f"int8 on {q_model.backend}",
            "reference": "simulation in eager PyTorch (not the fp32 model)",
        }
        candidates = {"engine": lambda: q_model.engine.run(example)}
        if q_model.backend != "reference":
            candidates["reference"] = lambda: q_model.graph.module(*example)
        else:
            names["engine"] = names["reference"]
        with torch.no_grad():
            timer = interleaved(candidates, rounds)
            times = list(progress.track(timer, total=rounds, description="time"))
    if as_json:
        click.echo(json.dumps(_timings(median(times), names, example, rounds), indent=2))
        return
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in example)
    click.echo(f"example inputs {shapes}; {torch.get_num_threads()} threads; median of {rounds} rounds")
    for name, milliseconds in median(times).items():
        click.echo(f"{milliseconds:10.2f} ms  {names[name]}")


def _bench_ways(
    folder: Path,
    backend: str,
    count: int | None,
    instances: str | None,
    lengths: Path | None,
    seconds: float,
    as_json: bool,
) -> None:
    import dataclasses

    from nc.api.artefact import load
    from nc.api.quantized import QuantizedModel
    from nc.cli import split
    from nc.cli.inputs import RequestError

    with progress_bar() as progress, _step(progress, "load"):
        q_model = load(folder, backend=backend)
    if not isinstance(q_model, QuantizedModel):
        msg = f"{folder} holds a {type(q_model).__name__} with low-bit weights and no example inputs to time."
        raise RequestError(msg)
    allowed, usable = sorted(os.sched_getaffinity(0)), cores().usable
    if (count or 1) > usable:
        msg = f"--cores {count}: this process may use {usable}."
        raise RequestError(msg)
    own = allowed[: count or usable]
    graph = q_model.graph
    shapes = split.shapes_in(lengths, graph) if lengths else [tuple(graph.example[0].shape)]
    counts = _counts(instances, len(own))
    with progress_bar() as progress:
        measured = split.ways(folder, q_model.backend, own, counts, shapes, seconds)
        found = list(progress.track(measured, description="time"))
    best = max((way for way in found if way.engine != split.OPENVINO), key=lambda way: way.per_second)
    start = split.command(best, folder, own)
    if as_json:
        ways = [dataclasses.asdict(way) for way in found]
        click.echo(json.dumps({"cores": own, "ways": ways, "best": ways[found.index(best)], "start": start}))
        return
    table = Table("way", "requests/s", "p50, ms", "p95, ms", box=None, pad_edge=False)
    for way in found:
        table.add_row(str(way), f"{way.per_second:.1f}", f"{way.p50_ms:.2f}", f"{way.p95_ms:.2f}")
    console_of().print(table)
    if found[-1].engine != split.OPENVINO:
        click.echo("OpenVINO is not installed, so it is not compared.")
    click.echo(f"Most requests per second: {best}. Start such servers with:\n{start}")


def _counts(instances: str | None, cores: int) -> list[int]:
    """Return the numbers of processes to try."""
    from nc.cli.inputs import RequestError

    if instances is None:
        return [2**i for i in range(cores.bit_length()) if 2**i <= cores]
    try:
        return [int(number) for number in instances.split(",")]
    except ValueError as error:
        msg = f"--instances: expected numbers, as 1,2, but got {instances!r}."
        raise RequestError(msg) from error


def _warn_of_too_many(threads: int) -> None:
    usable = cores().usable
    if threads > usable:
        warn(f"{threads} threads share {usable} cores, which is slower than {usable} threads, by far.")


def _timings(
    times: dict[str, float], names: dict[str, str], example: Sequence[Any], rounds: int
) -> dict[str, Any]:
    """Return what bench prints, as plain values."""
    import torch

    return {
        "example_inputs": [list(tensor.shape) for tensor in example],
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "median_ms": {name: {"milliseconds": value, "what": names[name]} for name, value in times.items()},
    }


@main.command()
@click.argument("folder", metavar="[DIR]", type=FOLDER, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@command
def doctor(folder: Path | None, as_json: bool) -> None:
    """Show which backends can run on this machine, and what to install for the others.

    With DIR, also show whether this CPU has the features that the artefact needs, and which layers
    `load` quantizes again because 16-bit sums could overflow here.
    """
    from nc.cli.doctor import of_artefact

    facts = _health()
    if folder is not None:
        facts["artefact"] = of_artefact(folder)
        facts["healthy"] &= facts["artefact"]["fits"]
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _tell_health(facts)
    if not facts["healthy"]:
        sys.stdout.flush()
        sys.exit(1)


def _health() -> dict[str, Any]:
    """Return what doctor finds on this machine, as plain values."""
    from nc.backends import available_backends, choose_backend, why_chosen
    from nc.backends.auto_order import CONVOLUTIONS, LINEARS
    from nc.cli.doctor import of_c_code
    from nc.errors import BackendUnavailableError

    backends = {
        name: {"can_run": not why, "remark": why or _remark(name)}
        for name, why in available_backends().items()
    }
    problems = [why for why in (installation.other_distribution(), installation.altered_files()) if why]
    facts: dict[str, Any] = {
        "machine": dict(_machine()),
        "c_code": of_c_code(),
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
    from nc.backends import cpu, get_backend

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

    from nc.backends import backend_names, cpu, get_backend

    found = cores()
    fit_threads()  # as `load` does
    engines = [package for name in backend_names() for package in get_backend(name).packages]
    rows = [
        ("CPU", cpu.model_name()),
        ("features", (", ".join(cpu.features()) or "none that int8 kernels use") + cpu.why_narrow()),
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

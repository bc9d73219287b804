"""`python -m nc quantize | inspect | report | bench | check | doctor | serve`, also as `nc-quant`.

Results go to stdout; progress, warnings and errors go to stderr. Exit code 2 means that the command failed,
and one line says why. Exit code 1 means that `doctor` found a problem, or that an artefact misses a limit of
`check`; 3 that `check --inconclusive fail` could not decide; 70 a defect of nc, with a traceback; 130 Ctrl-C.
If nobody reads stdout any more (`| head`), a command ends as others do that a closed pipe stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from nc._version import __version__
from nc.cli.bench import bench
from nc.cli.check import check
from nc.cli.machine import doctor
from nc.cli.report import report
from nc.cli.serve import serve
from nc.cli.shell import FILE, FOLDER, BackendOption, command, console_of, progress_bar, step_of
from nc.process import env, installation
from nc.text.plain import plain


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=installation.DISTRIBUTION)
def main() -> None:
    """Quantize PyTorch models for x86-64 CPUs: to int8, or to weights of 2 to 8 bits."""


main.add_command(bench)
main.add_command(check)
main.add_command(doctor)
main.add_command(report)
main.add_command(serve)


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
        with step_of(progress, "prepare"), inputs.whence(example or calib, examples):
            prepared = nc.prepare(
                model, quant_config, example_inputs=inputs.as_inputs(examples), backend=backend
            )
        _calibrate(prepared, arrays, batch_size, progress)
        with step_of(progress, "convert") as say:
            told = say if progress.console.is_terminal else None  # which is a line a minute in a pipe
            q_model = nc.convert(prepared, verify=verify, measure=measure, progress=told)
        save(q_model, out)
    click.echo(str(q_model.report()))
    click.echo(plain(f"saved to {out}"))


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
        msg = f"{factory!r} is not a folder: {what}. Use --config."
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

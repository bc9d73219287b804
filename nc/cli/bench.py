"""`python -m nc bench`: times of an artefact, and of ways to share cores among processes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from nc.cli.shell import FOLDER, BackendOption, command, console_of, progress_bar, step_of
from nc.process.cores import cores
from nc.process.warn import warn


@click.command()
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
    metavar="MIX",
    help="Tokens of texts: a range (5-128) or a list (7,40,128). Or a file with requests, one a line: a "
    "length (128) or all sizes (8x128) of the first input.",
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
    lengths: str | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Time the artefact in DIR on the example inputs in it.

    The second row is the quantized graph in eager PyTorch, which simulates int8 in fp32. It is NOT the fp32
    model: an artefact does not contain that. So the ratio is not the speed-up over fp32.

    With --lengths 5-128: the time for each real token of texts of mixed lengths, in batches of 1, 8 and 32,
    and how much of what is computed only fills up.

    With --cores, --instances or a file of --lengths: requests per second and their times for ways to share
    the cores among processes, beside OpenVINO with its throughput hint, and the command that starts the best
    one.
    """
    file = Path(lengths) if lengths is not None and Path(lengths).is_file() else None
    if lengths is not None and file is None and cores is None and instances is None:
        _bench_lengths(folder, backend, lengths, rounds, threads, as_json)
        return
    if lengths is not None and file is None:
        from nc.cli.inputs import RequestError

        msg = f"--lengths {lengths!r}: with --cores or --instances, expected a file with requests."
        raise RequestError(msg)
    if cores is not None or instances is not None or file is not None:
        if threads is not None:
            from nc.cli.inputs import RequestError

            msg = (
                "--threads does not go with --cores, --instances or a file of --lengths: each process takes "
                "its cores."
            )
            raise RequestError(msg)
        _bench_ways(folder, backend, cores, instances, file, seconds, as_json)
        return
    import torch

    from nc.api.artefact import load
    from nc.cli.inputs import captured
    from nc.profiling.latency import interleaved, median

    if threads is not None:
        _warn_of_too_many(threads)
        torch.set_num_threads(threads)
    with progress_bar() as progress:
        with step_of(progress, "load"):
            q_model = captured(load(folder, backend=backend), folder)
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


def _bench_lengths(
    folder: Path, backend: str, text: str, rounds: int, threads: int | None, as_json: bool
) -> None:
    import dataclasses

    import torch

    from nc.api.artefact import load
    from nc.cli import lengths
    from nc.cli.inputs import captured

    tokens = lengths.lengths_of(text)
    if threads is not None:
        _warn_of_too_many(threads)
        torch.set_num_threads(threads)
    with progress_bar() as progress:
        with step_of(progress, "load"):
            q_model = captured(load(folder, backend=backend), folder)
        found = lengths.measured(
            q_model, tokens, rounds, lambda times: progress.track(times, total=rounds, description="time")
        )
    if as_json:
        mixes = [dataclasses.asdict(each) for each in found]
        told = {"texts": len(tokens), "tokens": sum(tokens), "rounds": rounds, "mixes": mixes}
        click.echo(json.dumps({**told, "threads": torch.get_num_threads(), "backend": q_model.backend}))
        return
    click.echo(
        f"{len(tokens)} texts of {min(tokens)} to {max(tokens)} tokens, {sum(tokens)} together; "
        f"{q_model.backend}, {torch.get_num_threads()} threads; median of {rounds} rounds"
    )
    table = Table(
        "texts in a call", "order", "calls", "padded", "µs per real token", box=None, pad_edge=False
    )
    for each in found:
        share = f"{each.padded_share:.0%}"
        table.add_row(str(each.batch), each.order, str(each.calls), share, f"{each.us_per_token:.2f}")
    console_of().print(table)


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
    from nc.cli import split
    from nc.cli.inputs import RequestError, captured

    with progress_bar() as progress, step_of(progress, "load"):
        q_model = captured(load(folder, backend=backend), folder)
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

"""Rows of results/*.jsonl: what was measured, on which machine, with which versions, and by which command.

Each line is one JSON object with the fields of `Row`. Benchmarks append to such a file with `--results FILE`;
results_page.py makes docs/results/*.md from the files. This module needs nothing but Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results"
#: Flags of /proc/cpuinfo that decide which kernels run.
ISA = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")
#: Packages whose versions each row names.
ALWAYS = ("torch",)

Value = float | int | str


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    Attributes:
        value: of the figure.
        unit: of the value: "ms", "%", "x eager" (how many times as fast as eager), …
        low: the smallest of several measurements; None where it is not known.
        high: the largest one, likewise.
    """

    value: Value
    unit: str
    low: Value | None = None
    high: Value | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of a file.

    Attributes:
        machine: CPU, and how many of its cores.
        isa: instruction sets that decide which kernels run, separated by spaces.
        versions: package → version.
        commit: of this repository; None where it is not known.
        date: ISO date.
        command: what measures the row again, from the root of the repository; None where no script does.
        what: what was measured: model, engine, batch, threads, tokens, format, …
        figures: name → figure; empty only for a row whose `note` says why there is none.
        note: what else a reader must know.
    """

    machine: str
    isa: str
    versions: dict[str, str]
    commit: str | None
    date: str
    command: str | None
    what: dict[str, Any]
    figures: dict[str, Figure]
    note: str = ""

    def value(self, figure: str) -> Value | None:
        """Return the value of a figure; None where the row has none of that name."""
        found = self.figures.get(figure)
        return None if found is None else found.value


def read(path: Path) -> list[Row]:
    """Return the rows of a file in their order.

    Raises:
        ValueError: a line is no row; says which line, and what is wrong.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_parsed(text, f"{path.name}, line {number}") for number, text in enumerate(lines, 1)]


def row_of(given: Mapping[str, Any]) -> Row:
    """Return the row of a JSON object.

    Raises:
        ValueError: a field is missing, unknown or empty.
    """
    row = Row(
        **{**given, "figures": {name: Figure(**figure) for name, figure in given.get("figures", {}).items()}}
    )
    empty = [name for name in ("machine", "isa", "versions", "what") if not getattr(row, name)]
    empty += ["figures"] if not (row.figures or row.note) else []
    empty += [f"the unit of {name}" for name, figure in row.figures.items() if not figure.unit]
    empty += ["the command"] if row.command == "" else []
    if empty:
        msg = f"empty: {', '.join(empty)}"
        raise ValueError(msg)
    datetime.date.fromisoformat(row.date)
    return row


def line(row: Row) -> str:
    """Return a row as one line of JSON, without what has its default."""
    made = dataclasses.asdict(row)
    made["figures"] = {
        name: {k: v for k, v in figure.items() if v is not None} for name, figure in made["figures"].items()
    }
    if not made["note"]:
        del made["note"]
    return json.dumps(made, ensure_ascii=False)


def median(values: Sequence[float], unit: str) -> Figure:
    """Return the median of several measurements, with the smallest and the largest."""
    return Figure(rounded(statistics.median(values)), unit, rounded(min(values)), rounded(max(values)))


def rounded(value: float) -> float:
    """Return a number with four significant digits: a measurement has no more."""
    return float(f"{value:.4g}")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option `--results FILE`."""
    parser.add_argument("--results", type=Path, metavar="FILE", help="append rows here: results/PAGE.jsonl")


def append(
    path: Path | None,
    what: Mapping[str, Any],
    figures: Mapping[str, Figure],
    packages: Iterable[str] = (),
    note: str = "",
    versions: Mapping[str, str] | None = None,
) -> None:
    """Append a row that was measured by this process, on this machine.

    Args:
        path: of the file; None: the user asked for no rows, and nothing is written.
        what: what was measured.
        figures: name → figure.
        packages: distributions whose versions matter, besides torch; what is not installed is left out.
        note: what else a reader must know.
        versions: of packages that another interpreter has.
    """
    if path is None:
        return
    row = measured(what, figures, packages, note, versions)
    with path.open("a", encoding="utf-8") as file:
        print(line(row), file=file, flush=True)


def measured(
    what: Mapping[str, Any],
    figures: Mapping[str, Figure],
    packages: Iterable[str] = (),
    note: str = "",
    versions: Mapping[str, str] | None = None,
) -> Row:
    """Return a row of this process; see `append`."""
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    here = {name: found for name in (*ALWAYS, *packages) if (found := _version(name))}
    known = {"python": platform.python_version(), **here, **(versions or {})}
    return Row(machine(), isa(), known, commit(), day, command(), dict(what), dict(figures), note)


def machine() -> str:
    """Return the name of the CPU and how many cores this process may use."""
    name = next(iter(_cpuinfo("model name")), platform.processor() or platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def isa() -> str:
    """Return the instruction sets that decide which kernels run; "scalar" where this CPU has none of them."""
    flags = set(" ".join(_cpuinfo("flags")[:1]).split())
    return " ".join(flag for flag in ISA if flag in flags) or "scalar"


def commit() -> str | None:
    """Return the commit of this checkout, with "+" where files differ from it; None outside a repository."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=9", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def command(arguments: list[str] | None = None) -> str:
    """Return the command line of this process.

    `--results` is left out. Absolute paths are of one machine, so `DIR` stands for them.
    """
    given = list(sys.argv if arguments is None else arguments)
    if "--results" in given:
        place = given.index("--results")
        del given[place : place + 2]
    words = ["DIR" if Path(word).is_absolute() else word for word in given[1:]]
    return shlex.join(["python", f"benchmarks/{Path(given[0]).name}", *words])


def _parsed(text: str, where: str) -> Row:
    try:
        return row_of(json.loads(text))
    except (TypeError, ValueError) as error:
        msg = f"{where}: {error}"
        raise ValueError(msg) from error


def _cpuinfo(field: str) -> list[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return [text.split(":", 1)[1].strip() for text in lines if text.startswith(field)]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

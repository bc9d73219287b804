"""Architectures of torchvision, timm and transformers, with random weights, go the whole way.

One JSON line each.

python benchmarks/sweep.py [--results FILE] [--shard 1/3] [--only REGEX] [--backend native] [--seconds 3000]
python benchmarks/sweep.py --list | --families
python benchmarks/results_page.py                              # the page: docs/results/architectures.md

Each architecture has a process of its own: a crash or a hang is one row. What the file of `--results` holds
already is skipped, so that a sweep can be stopped and continued; `--again REGEX` runs rows anew whose JSON
matches, and the last row of an architecture counts. Several machines share the work by `--shard`; their files
can be concatenated.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # also in the processes of single architectures

import results_rows  # noqa: E402
from sweep_models import Entry, entries  # noqa: E402
from sweep_verdict import stored  # noqa: E402

#: What builds architectures, and whose versions a row names besides torch.
PACKAGES = ("torchvision", "timm", "transformers")


def _child(entry: Entry, backend: str, gigabytes: float, seconds: int, connection: Any) -> None:
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # also fair on a loaded machine
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    from sweep_one import run

    connection.send(run(entry, backend))
    connection.close()


def one(entry: Entry, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one architecture; its process is ended at the time limit."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(entry, arguments.backend, arguments.memory, arguments.limit, sender)
    )
    began = time.perf_counter()
    process.start()
    sender.close()
    late = {"status": "failed", "error": "timeout", "reason": f"not ready after {arguments.limit} s"}
    try:
        row = receiver.recv() if receiver.poll(8 * arguments.limit) else late
    except EOFError:
        process.join()
        ended = {
            "status": "failed",
            "error": "crash",
            "reason": f"the process ended with exit code {process.exitcode}",
        }
        row = late if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else ended
    process.kill()
    process.join()
    row.setdefault("seconds", round(time.perf_counter() - began, 1))
    return row


def sweep(chosen: list[Entry], arguments: argparse.Namespace) -> None:
    """Run what is not done yet and append each row when it is there."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"not installed: {', '.join(missing)}. Their architectures would count as not built: pip install "
            "'nc-quant[bench]'"
        )
    rows = results_rows.read(arguments.results) if arguments.results.exists() else []
    last = {(row.what["source"], row.what.get("model")): row for row in rows}
    if arguments.again:
        last = {
            key: row for key, row in last.items() if not re.search(arguments.again, results_rows.line(row))
        }
    chosen = [entry for entry in chosen if (entry.source, entry.model) not in last]
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "nc", "transformers", "torchvision", "timm", "sweep_warm"]
    )
    began = time.perf_counter()
    for i, entry in enumerate(chosen):
        if time.perf_counter() - began > arguments.seconds:
            break
        row = one(entry, arguments)
        what, figures, note = stored(entry, arguments.backend, row)
        results_rows.append(arguments.results, what, figures, PACKAGES, note)
        print(
            f"{i + 1}/{len(chosen)} {entry.name}: {row['status']} {row.get('error', '')} {row['seconds']} s",
            flush=True,
        )


def _shard(text: str) -> tuple[int, int]:
    index, count = (int(part) for part in text.split("/"))
    if not 1 <= index <= count:
        msg = f"expected K/N with K from 1 to N, got {text}"
        raise argparse.ArgumentTypeError(msg)
    return index, count


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = results_rows.FOLDER / "architectures.jsonl"
    parser.add_argument(
        "--results", type=Path, default=rows, help="rows are appended here; default: %(default)s"
    )
    parser.add_argument("--backend", default="native")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N")
    parser.add_argument("--only", default="", metavar="REGEX", help="names that contain it")
    parser.add_argument("--again", default="", metavar="REGEX", help="run rows anew whose JSON contains it")
    parser.add_argument(
        "--limit",
        type=int,
        default=180,
        help="seconds of CPU time for one architecture; eight times as many of a clock",
    )
    parser.add_argument("--memory", type=float, default=8.0, help="GB for one architecture")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start nothing new after this time"
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--families", action="store_true", help="print how many of each source and family")
    arguments = parser.parse_args()
    index, count = arguments.shard
    chosen = [entry for entry in entries()[index - 1 :: count] if re.search(arguments.only, entry.name)]
    if arguments.list:
        print(*(entry.name for entry in chosen), sep="\n")
    elif arguments.families:
        for (source, family), n in sorted(collections.Counter((e.source, e.family) for e in chosen).items()):
            print(f"{source:12} {n:3} {family}")
    else:
        sweep(chosen, arguments)


if __name__ == "__main__":
    main()

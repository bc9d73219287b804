"""Architectures of torchvision, timm and transformers, with random weights, go the whole way; one JSON line each.

python benchmarks/sweep.py --out results.jsonl [--shard 1/3] [--only REGEX] [--backend native] [--seconds 3000]
python benchmarks/sweep.py --list | --families
python benchmarks/sweep.py --table results.jsonl more.jsonl    # writes docs/models.md

Each architecture has a process of its own: a crash or a hang is one row. What `--out` holds already is skipped, so that a sweep can be
stopped and continued; `--again REGEX` runs rows anew whose status or reason matches, and the last row of an architecture counts.
Several machines share the work by `--shard`; their files can be concatenated.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # also in the processes of single architectures

from sweep_models import Entry, entries  # noqa: E402


def surroundings() -> dict[str, Any]:
    """Where a row comes from."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")  # noqa: SIM115, PTH123
    flags = next((line.split(":")[1].split() for line in open("/proc/cpuinfo") if line.startswith("flags")), [])  # noqa: SIM115, PTH123
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or "unknown",
        "cpu": cpu,
        "isa": " ".join(f for f in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchvision", "timm", "transformers")},
    }


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
    process = context.Process(target=_child, args=(entry, arguments.backend, arguments.memory, arguments.limit, sender))
    began = time.perf_counter()
    process.start()
    sender.close()
    late = {"status": "failed", "error": "timeout", "reason": f"not ready after {arguments.limit} s"}
    try:
        row = receiver.recv() if receiver.poll(8 * arguments.limit) else late
    except EOFError:
        process.join()
        ended = {"status": "failed", "error": "crash", "reason": f"the process ended with exit code {process.exitcode}"}
        row = late if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else ended
    process.kill()
    process.join()
    row.setdefault("seconds", round(time.perf_counter() - began, 1))
    return row


def sweep(chosen: list[Entry], arguments: argparse.Namespace) -> None:
    """Run what is not done yet and append each row when it is there."""
    out = Path(arguments.out)
    done = {row["name"]: row for row in rows([out])} if out.exists() else {}
    if arguments.again:
        pattern = re.compile(arguments.again)
        done = {n: r for n, r in done.items() if not pattern.search(json.dumps(r))}
    chosen = [entry for entry in chosen if entry.name not in done]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "nc", "transformers", "torchvision", "timm", "sweep_warm"])
    began, where = time.perf_counter(), surroundings()
    for i, entry in enumerate(chosen):
        if time.perf_counter() - began > arguments.seconds:
            break
        head = {"name": entry.name, "source": entry.source, "family": entry.family, "model": entry.model, "backend": arguments.backend}
        row = {**head, **one(entry, arguments), **where}
        with out.open("a", encoding="utf-8") as file:
            print(json.dumps(row), file=file, flush=True)
        print(f"{i + 1}/{len(chosen)} {entry.name}: {row['status']} {row.get('error', '')} {row['seconds']} s", flush=True)


def rows(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the last row of each architecture."""
    last: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            last[row["name"]] = row
    return list(last.values())


def _shard(text: str) -> tuple[int, int]:
    index, count = (int(part) for part in text.split("/"))
    if not 1 <= index <= count:
        msg = f"expected K/N with K from 1 to N, got {text}"
        raise argparse.ArgumentTypeError(msg)
    return index, count


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="sweep.jsonl", help="JSON lines, appended")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N")
    parser.add_argument("--only", default="", metavar="REGEX", help="names that contain it")
    parser.add_argument("--again", default="", metavar="REGEX", help="run rows anew whose JSON contains it")
    parser.add_argument("--limit", type=int, default=180, help="seconds of CPU time for one architecture; eight times as many of a clock")
    parser.add_argument("--memory", type=float, default=8.0, help="GB for one architecture")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after this time")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--families", action="store_true", help="print how many of each source and family")
    parser.add_argument("--table", nargs="+", metavar="JSONL", help="write the page from these results")
    parser.add_argument("--page", default=str(HERE.parent / "docs/models.md"))
    arguments = parser.parse_args()
    index, count = arguments.shard
    chosen = [entry for entry in entries()[index - 1 :: count] if re.search(arguments.only, entry.name)]
    if arguments.list:
        print(*(entry.name for entry in chosen), sep="\n")
    elif arguments.families:
        for (source, family), n in sorted(collections.Counter((e.source, e.family) for e in chosen).items()):
            print(f"{source:12} {n:3} {family}")
    elif arguments.table:
        from sweep_page import page

        Path(arguments.page).write_text(page(rows([Path(p) for p in arguments.table]), entries()), encoding="utf-8")
    else:
        sweep(chosen, arguments)


if __name__ == "__main__":
    main()

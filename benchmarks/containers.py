"""What a container sees: latency under a quota of CPUs, memory of several processes and under random sizes.

    .venv-native/bin/python benchmarks/containers.py [--calls 400] [--workers 4] [--sizes 240]

MiniLM with static int8 weights. It needs root and cgroups, of version 1 or 2.

* Quota: single texts of 64 tokens, in three processes that take turns: on as many CPUs as the quota has
  (`taskset`), under the quota with the threads that `nc.load` takes, and under the quota with as many threads
  as the machine has CPUs, as torch does. p50 and p95 in ms.
* Memory: the proportional set size (Pss of /proc/<pid>/smaps_rollup, in which a shared page counts once) of
  processes that have answered: one alone, several that load the folder themselves, several that were forked
  from one that had loaded it.
* Random sizes: resident memory after calls with random batches and lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
LENGTH, BATCH = 64, 25


def save(folder: str) -> None:
    """Write quantized MiniLM."""
    import minilm

    import nc

    model, batches = minilm.load_model(), minilm.batches(minilm.split()[0][:32], minilm.load_tokenizer())
    given = [dict(batch) for batch in batches]
    q = nc.quantize(
        model,
        nc.StaticQuantConfig(),
        lambda m: [m(**b) for b in given],
        example_inputs=given[0],
        measure=False,
    )
    nc.save(q, folder)


def inputs(batch: int = 1, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return texts of some length."""
    ids = torch.randint(1000, 20000, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def loaded(folder: str) -> Any:
    """Return the model of a folder."""
    import nc

    return nc.load(folder, backend="native", warm=[(1, LENGTH)])


def times(folder: str) -> None:
    """Print the ms of some calls as JSON for each line that comes in."""
    model, x = loaded(folder), inputs()
    for _ in sys.stdin:
        found = []
        for _ in range(BATCH):
            begin = time.perf_counter()
            model(**x)
            found.append(1000 * (time.perf_counter() - begin))
        print(json.dumps(found), flush=True)


@contextlib.contextmanager
def group(cpus: float) -> Iterator[list[str]]:
    """Give a command that puts what follows under a quota."""
    name = f"nc-bench-{os.getpid()}"
    v1 = Path("/sys/fs/cgroup/cpu")
    folder = (v1 if v1.is_dir() else v1.parent) / name
    folder.mkdir()
    try:
        if v1.is_dir():
            (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * 100_000)))
        else:
            (folder / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000")
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        folder.rmdir()


def started(before: list[str], *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start this file."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return subprocess.Popen(
        [*before, sys.executable, "-W", "ignore", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, **variables},
    )


def asked(process: subprocess.Popen[str]) -> Any:
    """Return what a process says to a line."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def quota(folder: str, calls: int) -> None:
    """Print p50 and p95 of each way."""
    machine = os.cpu_count() or 1
    cpus = max(1, machine // 2)
    with group(cpus) as within:
        ways = {
            f"a machine with {cpus} CPUs": started(["taskset", "-c", f"0-{cpus - 1}"], "--times", folder),
            f"quota of {cpus}, threads of nc.load": started(within, "--times", folder),
            f"quota of {cpus}, {machine} threads": started(
                within, "--times", folder, OMP_NUM_THREADS=str(machine)
            ),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(calls // BATCH):
            for name, process in ways.items():
                found[name] += asked(process)
        for process in ways.values():
            process.communicate()
    for name, row in found.items():
        cuts = statistics.quantiles(row, n=20)
        print(f"{name:45} p50 {cuts[9]:7.2f} ms   p95 {cuts[18]:7.2f} ms")


def pss(process: int) -> float:
    """Return the MB of a process, of shared pages its part."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def serve_one(folder: str) -> None:
    """Load, answer, say so, and stay until the input ends."""
    loaded(folder)(**inputs())
    print(json.dumps("ready"), flush=True)
    sys.stdin.read()


def forked(folder: str, workers: int) -> None:
    """Fork processes from one that has loaded; print their memory."""
    model, x, children = loaded(folder), inputs(), []
    for _ in range(workers):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            model(**x)
            os.write(write, b"x")
            time.sleep(600)
        os.read(read, 1)
        children.append(child)
    total = sum(map(pss, [os.getpid(), *children]))
    for child in children:
        os.kill(child, 9)
    print(json.dumps(total))


def memory(folder: str, workers: int) -> None:
    """Print the memory of processes, each way."""
    begun = [started([], "--serve", folder)]
    read(begun[0])
    alone = pss(begun[0].pid)
    begun += [started([], "--serve", folder) for _ in range(workers - 1)]
    for process in begun[1:]:
        read(process)
    apart = sum(pss(process.pid) for process in begun)
    for process in begun:
        process.communicate()
    done = started([], "--forked", folder, "--workers", str(workers))
    together = read(done)
    done.communicate()
    weights = (Path(folder) / "weights.safetensors").stat().st_size / 2**20
    print(f"file of weights {weights:.0f} MB; one process {alone:.0f} MB")
    more = (apart - alone) / (workers - 1)
    print(f"{workers} processes that load: {apart:.0f} MB together, {more:.0f} for each more")
    print(f"{workers} forked after load, and their parent: {together:.0f} MB together")


def read(process: subprocess.Popen[str]) -> Any:
    """Return the next line of a process."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def sizes(folder: str, count: int) -> None:
    """Print the resident memory in the course of calls with random sizes."""
    model, chance = loaded(folder), random.Random(0)
    shown = []
    for i in range(count + 1):
        if i % (count // 6) == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            shown.append(f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f}")
        model(**inputs(chance.randint(1, 8), chance.randint(4, 128)))
    print(f"resident MB in the course of {count} calls with random sizes: {', '.join(shown)}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sizes", type=int, default=240)
    for name in ("times", "serve", "forked"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.times:
        times(options.times)
    elif options.serve:
        serve_one(options.serve)
    elif options.forked:
        forked(options.forked, options.workers)
    else:
        with tempfile.TemporaryDirectory() as place:
            folder = f"{place}/minilm"
            save(folder)
            quota(folder, options.calls)
            memory(folder, options.workers)
            sizes(folder, options.sizes)


if __name__ == "__main__":
    main()

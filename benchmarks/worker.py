"""One engine on one model in a process of its own.

`worker.py ENGINE MODEL THREADS BATCH`, then one line per command on standard input.
"""

from __future__ import annotations

import os
import resource
import sys
import time

import torch
from engines import start


def main(engine: str, model_name: str, threads: str, batch: str) -> None:
    """Answer "N" with the median latency in ms of N runs, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print from C++ must not mix with the answers
    began = time.perf_counter()
    run = start(engine, model_name, int(threads), int(batch))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"ready {time.perf_counter() - began:.2f} {peak}", file=answers, flush=True)
    for line in sys.stdin:
        times = []
        with torch.no_grad():
            for _ in range(int(line)):
                tick = time.perf_counter()
                run()
                times.append(time.perf_counter() - tick)
        print(sorted(times)[len(times) // 2] * 1e3, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One engine on one model in a process of its own, and the process that asks it.

`worker.py ENGINE MODEL THREADS BATCH`, then one line per command on standard input.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

#: Of the scripts.
HERE = Path(__file__).parent


class Worker:
    """A running worker process.

    Args:
        script: of this folder, whose process is a worker (worker.py).
        arguments: of the script.
        environment: of the process; None: that of this one.
    """

    def __init__(self, script: str, *arguments: object, environment: dict[str, str] | None = None) -> None:
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `stop` closes it
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            cwd=HERE,
            env=environment,
        )

    def ready(self) -> float | None:
        """Seconds until the engine was warm; None when it failed."""
        words = self.process.stdout.readline().split()
        return float(words[1]) if words[:1] == ["ready"] else None

    def reason(self) -> str:
        """Return the last line that the process wrote to its standard error."""
        self.said.seek(0)
        lines = self.said.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.poll()}"

    def ask(self, line: object) -> str:
        """Return the answer to a line.

        Raises:
            RuntimeError: the process ended.
        """
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            raise RuntimeError(self.reason())
        return answer

    def measure(self, runs: int) -> float:
        """Median latency in ms of `runs` calls."""
        return float(self.ask(runs))

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.said.close()


def replies(begin: Callable[[], Callable[[str], object]]) -> None:
    """Be a worker: begin, say "ready SECONDS PEAK", and answer each line of standard input until it ends.

    Args:
        begin: returns what answers a line.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print from C++ must not mix with the answers
    began = time.perf_counter()
    answer = begin()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"ready {time.perf_counter() - began:.2f} {peak}", file=answers, flush=True)
    for line in sys.stdin:
        with torch.no_grad():
            print(answer(line), file=answers, flush=True)


def main(engine: str, model_name: str, threads: str, batch: str) -> None:
    """Answer "N" with the median latency in ms of N runs, until standard input ends."""
    from engines import start

    def begin() -> Callable[[str], float]:
        run = start(engine, model_name, int(threads), int(batch))

        def latency(line: str) -> float:
            times = []
            for _ in range(int(line)):
                tick = time.perf_counter()
                run()
                times.append(time.perf_counter() - tick)
            return sorted(times)[len(times) // 2] * 1e3

        return latency

    replies(begin)


if __name__ == "__main__":
    main(*sys.argv[1:])

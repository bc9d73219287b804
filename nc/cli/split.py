"""Ways to share cores among processes: `python -m nc bench DIR --cores 4 --instances 1,2 --lengths mix.txt`.

Each instance is a process with its own cores, as a server would start it. All instances of one way run at the
same time, and each computes requests of the same mix in sequence. OpenVINO runs the same quantized graph in
one process with its throughput hint, which shares the cores by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.artefact import load
from nc.api.exports import exported
from nc.api.quantized import QuantizedModel
from nc.api.warm import inputs_of, warm_up
from nc.cli.inputs import RequestError
from nc.graph.qdq import QDQGraph
from nc.process import env
from nc.text.json_text import parsed

OPENVINO = "openvino"
Shape = tuple[int, ...]
#: Ms of each request, and the seconds that all of them took.
Measured = tuple[list[float], float]


@dataclasses.dataclass(frozen=True, slots=True)
class CoreSplit:
    """The throughput and latency of one way to share the cores.

    Attributes:
        engine: a backend, or "openvino".
        instances: number of processes.
        cores: number of cores of each process.
        per_second: requests per second that all processes answered.
        p50_ms, p95_ms: median and 95th percentile of the time of a request, in ms.
    """

    engine: str
    instances: int
    cores: int
    per_second: float
    p50_ms: float
    p95_ms: float

    def __str__(self) -> str:
        """In words."""
        if self.engine == OPENVINO:
            return f"OpenVINO, throughput hint, {self.cores} cores"
        many = "instance" if self.instances == 1 else "instances"
        return f"{self.instances} {many} on {self.engine}, cores of each: {self.cores}"


def shapes_in(path: Path, graph: QDQGraph) -> list[Shape]:
    """Return the shapes of the first input that a file lists, one request a line.

    A line is a length, the second size of one item ("128"), or all sizes ("8x128").

    Raises:
        RequestError: a line is neither, or there is none.
    """
    example = tuple(graph.example[0].shape)
    found: list[Shape] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            sizes = tuple(int(size) for size in line.split("x"))
        except ValueError:
            sizes = ()
        if len(sizes) == 1 and len(example) > 1:
            sizes = (1, sizes[0], *example[2:])
        if len(sizes) != len(example) or min(sizes, default=0) < 1:
            msg = (
                f"{path}, line {number}: expected a length, as 128, or {len(example)} sizes, as "
                f"{'x'.join(map(str, example))}, but got {line.strip()!r}."
            )
            raise RequestError(msg)
        found.append(sizes)
    if not found:
        msg = f"{path} has no line with a length."
        raise RequestError(msg)
    return found


def ways(
    folder: Path,
    backend: str,
    cores: Sequence[int],
    counts: Sequence[int],
    shapes: Sequence[Shape],
    seconds: float,
) -> Iterator[CoreSplit]:
    """Measure each number of instances, then OpenVINO where it is installed.

    Raises:
        RequestError: more instances than cores, or a process failed.
    """
    for count in counts:
        if not 1 <= count <= len(cores):
            msg = f"{count} instances on {len(cores)} cores: each needs one."
            raise RequestError(msg)
        each = len(cores) // count
        parts = [list(cores[i * each : (i + 1) * each]) for i in range(count)]
        jobs = [_job(str(folder), backend, part, shapes, seconds) for part in parts]
        yield _way(backend, each, _measured(jobs))
    if importlib.util.find_spec("openvino") is None:
        return
    with tempfile.TemporaryDirectory(prefix="nc-") as place:
        file = Path(place) / "model.xml"
        exported(load(folder, backend="reference"), file, "openvino", "bench", verify="off")
        jobs = [{**_job(str(folder), OPENVINO, list(cores), shapes, seconds), "file": str(file)}]
        yield _way(OPENVINO, len(cores), _measured(jobs))


def command(best: CoreSplit, folder: Path, cores: Sequence[int]) -> str:
    """Return a line of a shell that starts servers that share the cores in a way."""
    lines = []
    for i in range(best.instances):
        own = ",".join(str(core) for core in cores[i * best.cores : (i + 1) * best.cores])
        lines.append(
            f"OMP_NUM_THREADS={best.cores} taskset -c {own} python examples/serve/kserve_model.py {folder} "
            f"--http_port {8080 + 2 * i} --grpc_port {8081 + 2 * i} &"
        )
    return "\n".join(lines)


def _job(
    folder: str, engine: str, cores: list[int], shapes: Sequence[Shape], seconds: float
) -> dict[str, Any]:
    return {"folder": folder, "engine": engine, "cores": cores, "shapes": list(shapes), "seconds": seconds}


def _way(engine: str, cores: int, answers: Sequence[Measured]) -> CoreSplit:
    together = [ms for found, _ in answers for ms in found]
    cuts = statistics.quantiles(together, n=20) if len(together) > 1 else [together[0]] * 19
    per_second = sum(len(found) / seconds for found, seconds in answers)
    return CoreSplit(engine, len(answers), cores, per_second, cuts[9], cuts[18])


def _measured(jobs: Sequence[dict[str, Any]]) -> list[Measured]:
    """Start a process for each job, let all begin at once, and return what they measured."""
    with contextlib.ExitStack() as stack:
        started = []
        for job in jobs:
            environment = env.extended({env.OMP_NUM_THREADS.name: str(len(job["cores"]))})
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(job)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            _line(process)
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [_line(process) for process in started]


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        msg = f"a process of the measurement ended with code {process.wait()}; its message is above."
        raise RequestError(msg)
    return parsed(line, finite=False)


def _work(job: dict[str, Any]) -> None:
    """Be one process: say when it is ready, wait, compute for some seconds, and print the ms of requests."""
    os.sched_setaffinity(0, job["cores"])
    torch.set_num_threads(len(job["cores"]))
    is_openvino = job["engine"] == OPENVINO
    model = load(job["folder"], backend="reference" if is_openvino else job["engine"])
    shapes = [tuple(shape) for shape in job["shapes"]]
    run = _openvino if is_openvino else _nc
    print(json.dumps(run(model, shapes, job)), flush=True)


def _nc(model: QuantizedModel, shapes: Sequence[Shape], job: dict[str, Any]) -> Measured:
    warm_up(model, dict.fromkeys(shapes))
    calls = itertools.cycle([inputs_of(model.graph, shape) for shape in shapes])
    found = []
    _ready()
    start = time.perf_counter()
    while (begin := time.perf_counter()) < start + job["seconds"]:
        args, kwargs = next(calls)
        with torch.no_grad():
            model(*args, **kwargs)
        found.append(1e3 * (time.perf_counter() - begin))
    return found, time.perf_counter() - start


def _openvino(model: QuantizedModel, shapes: Sequence[Shape], job: dict[str, Any]) -> Measured:
    import openvino

    # bf16 would be another model
    hints = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(
        job["file"], "CPU", {**hints, "INFERENCE_NUM_THREADS": len(job["cores"])}
    )
    names = [port.get_any_name() for port in compiled.inputs]
    signature = model.graph.signature
    given = []
    for shape in shapes:
        args, kwargs = inputs_of(model.graph, shape)
        tensors = signature.bind(args, kwargs)
        given.append({name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)})
    queue, found = openvino.AsyncInferQueue(compiled), []
    queue.set_callback(lambda _, begin: found.append(1e3 * (time.perf_counter() - begin)))
    for inputs in given * 3:
        queue.start_async(inputs, time.perf_counter())
    queue.wait_all()
    found.clear()
    calls = itertools.cycle(given)
    _ready()
    start = time.perf_counter()
    while time.perf_counter() < start + job["seconds"]:
        queue.start_async(next(calls), time.perf_counter())
    queue.wait_all()
    return found, time.perf_counter() - start


def _ready() -> None:
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    _work(parsed(sys.argv[1], finite=False))

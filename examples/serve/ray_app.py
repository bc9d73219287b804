"""Serve a quantized model by Ray Serve, on one machine or many: replicas with cores of their own.

    pip install 'ray[serve]'
    python examples/serve/ray_app.py DIR [--cores 2] [--least 1] [--most 4] [--max_batch 16]

POST / takes {"instances": [...]} as KServe's version 1 does: texts, or objects with the inputs of one item.
Ray starts and ends replicas by how many requests wait. Each replica computes on cores that no other one of
the same machine uses. In a cluster DIR lies at one path on all machines.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

sys.path.insert(0, str(Path(__file__).parent))


def own_cores(count: int) -> list[int]:
    """Pin this process to cores that no other process has taken by this function, and return them.

    A lock of each core is held until the process ends.

    Raises:
        RuntimeError: so many are not left.
    """
    taken: list[tuple[int, int]] = []
    for core in sorted(os.sched_getaffinity(0)):
        handle = os.open(f"{tempfile.gettempdir()}/nc-core-{core}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken.append((core, handle))
            if len(taken) == count:
                os.sched_setaffinity(0, [core for core, _ in taken])
                torch.set_num_threads(count)
                return [core for core, _ in taken]
            continue
        os.close(handle)
    for _, handle in taken:
        os.close(handle)
    msg = f"{count} cores were asked for, and {len(taken)} are left"
    raise RuntimeError(msg)


@serve.deployment
class Served:
    """A replica."""

    def __init__(self, folder: str, cores: int, max_batch: int, window_ms: float) -> None:
        from served import opened, warm_sizes

        self.cores = own_cores(cores)
        self.served = opened(folder, warm_sizes(max_batch, (16, 32, 64, 128, 256)))
        self.compute.set_max_batch_size(max_batch)
        self.compute.set_batch_wait_timeout_s(window_ms / 1000)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.003)
    async def compute(self, requests: list[Any]) -> list[Any]:
        """Compute requests together."""
        from served import answers

        return answers(self.served, requests)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer one request; a bad one with 400 and the reason."""
        from served import TEXT, BadRequest

        try:
            body = await request.json()
            instances = body.get("instances") if isinstance(body, dict) else None
            if not isinstance(instances, list) or not instances:
                return JSONResponse({"error": 'expected {"instances": [...]} with one item or more'}, 400)
            if all(isinstance(each, str) for each in instances):
                given = {TEXT: np.array(instances, dtype=object)}
            else:
                given = {name: np.array([each[name] for each in instances]) for name in instances[0]}
            checked = self.served.checked(given)
        except (ValueError, KeyError, TypeError) as error:  # a BadRequest is a ValueError
            return JSONResponse({"error": str(error)}, 400)
        outputs = await self.compute(checked)
        if isinstance(outputs, Exception):
            return JSONResponse({"error": str(outputs)}, 400 if isinstance(outputs, BadRequest) else 500)
        rows = [{name: value[i].tolist() for name, value in outputs.items()} for i in range(len(instances))]
        return JSONResponse(
            {
                "predictions": [next(iter(row.values())) if len(row) == 1 else row for row in rows],
                "cores": self.cores,
            }
        )


def app(folder: str, cores: int, least: int, most: int, max_batch: int, window_ms: float) -> Any:
    """Return the application for `serve.run`, with replicas between two numbers."""
    return Served.options(
        ray_actor_options={"num_cpus": cores},
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": max_batch,
        },
        max_ongoing_requests=4 * max_batch,
    ).bind(str(Path(folder).resolve()), cores, max_batch, window_ms)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="of the quantized model")
    parser.add_argument("--cores", type=int, default=1, help="of each replica")
    parser.add_argument("--least", type=int, default=1, help="number of replicas")
    parser.add_argument("--most", type=int, default=1, help="number of replicas")
    parser.add_argument("--max_batch", type=int, default=16, help="requests of one call")
    parser.add_argument("--window_ms", type=float, default=3.0, help="how long a request waits for others")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    given = app(
        options.folder, options.cores, options.least, options.most, options.max_batch, options.window_ms
    )
    serve.run(given, blocking=True)


if __name__ == "__main__":
    main()

"""Serve a quantized model by Ray Serve, on one machine or many: replicas with their own cores.

    pip install 'ray[serve]'
    python examples/serve/ray_app.py DIR [--cores 2] [--least 1] [--most 4] [--most_tokens 4096]

POST / takes {"instances": [...]} as KServe's version 1 does: texts, or objects with the inputs of one item.
Ray starts and ends replicas by how many requests wait, and makes the batches, of so many tokens. Each
replica computes on cores that no other one of the same machine uses. In a cluster DIR has the same path on
all machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

sys.path.insert(0, str(Path(__file__).parent))

#: Requests of one replica that Ray aims at.
ONGOING = 16


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


def _tokens(requests: list[tuple[int, Any]]) -> int:
    """Return what a batch costs, for Ray."""
    return sum(tokens for tokens, _ in requests)


@serve.deployment
class Served:
    """A replica."""

    def __init__(self, folder: str, cores: int, most_tokens: int, window_ms: float) -> None:
        from served import opened

        self.cores, self.most_tokens = own_cores(cores), most_tokens
        self.served = opened(folder)
        self.compute.set_max_batch_size(most_tokens)
        self.compute.set_batch_wait_timeout_s(window_ms / 1000)

    @serve.batch(max_batch_size=4096, batch_wait_timeout_s=0.003, batch_size_fn=_tokens)
    async def compute(self, requests: list[tuple[int, Any]]) -> list[Any]:
        """Compute requests together; return the outputs of each, or what went wrong."""
        from batching import each_alone
        from served import joined

        async def call(chosen: list[Any]) -> list[Any]:
            flat = [row for rows in chosen for row in rows]
            answers = iter(await asyncio.to_thread(self.served.run, flat))
            return [joined([next(answers) for _ in rows]) for rows in chosen]

        return await each_alone(call, [rows for _, rows in requests])

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer one request; a bad one with 400 and the reason."""
        import web
        from served import BadRequestError

        try:
            body = await request.json()
            given = web.given_of(body.get("instances") if isinstance(body, dict) else None)
            rows = await asyncio.to_thread(self.served.rows, given)
        except ValueError as error:  # a BadRequestError, or a body that is not JSON
            return web.failure(BadRequestError(str(error)))
        # Ray refuses a request that costs more than a batch may: such a one is a batch by itself.
        tokens = min(sum(row.tokens for row in rows), self.most_tokens)
        outputs = await self.compute((tokens, rows))
        if isinstance(outputs, Exception):
            return web.failure(outputs)
        return JSONResponse({"predictions": web.predictions(outputs), "cores": self.cores})


def app(folder: str, cores: int, least: int, most: int, most_tokens: int, window_ms: float) -> Any:
    """Return the application for `serve.run`, with replicas between two numbers."""
    return Served.options(
        ray_actor_options={"num_cpus": cores},
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": ONGOING,
        },
        max_ongoing_requests=4 * ONGOING,
    ).bind(str(Path(folder).resolve()), cores, most_tokens, window_ms)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="of the quantized model")
    parser.add_argument("--cores", type=int, default=1, help="of each replica")
    parser.add_argument("--least", type=int, default=1, help="number of replicas")
    parser.add_argument("--most", type=int, default=1, help="number of replicas")
    parser.add_argument("--most_tokens", type=int, default=4096, help="of one call")
    parser.add_argument("--window_ms", type=float, default=3.0, help="how long a request waits for others")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    given = app(
        options.folder, options.cores, options.least, options.most, options.most_tokens, options.window_ms
    )
    serve.run(given, blocking=True)


if __name__ == "__main__":
    main()

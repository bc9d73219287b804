"""Servers of examples/serve/ over loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples" / "serve"


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def rows(count, length=6, seed=0):
    """Inputs of `Words`."""
    chance = np.random.default_rng(seed)
    ids = chance.integers(0, 50, (count, length), dtype=np.int64)
    return {"ids": ids, "weights": chance.random((count, length), dtype=np.float32)}


@contextlib.contextmanager
def running(script, *arguments, ready, log):
    """A server, once a URL answers 200."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        end = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(ready, timeout=5)
                break
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def kserve_of(folder, log, *arguments):
    """A server of KServe: (URL, address of gRPC, process)."""
    http, grpc = free_port(), free_port()
    options = ["--model_name", "m", "--http_port", http, "--grpc_port", grpc, *arguments]
    url = f"http://127.0.0.1:{http}"
    with running("kserve_model.py", folder, *options, ready=f"{url}/v2/models/m/ready", log=log) as process:
        yield url, f"127.0.0.1:{grpc}", process


@contextlib.contextmanager
def fastapi_of(folder, log, *arguments):
    """A server of FastAPI: (URL, process)."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--name", "m", "--port", port, *arguments]
    with running("fastapi_app.py", folder, *options, ready=f"{url}/health", log=log) as process:
        yield url, process

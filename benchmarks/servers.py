"""Latency and throughput of examples/serve under many clients, with every answer checked.

    .venv-serve/bin/python benchmarks/servers.py [--clients 1 8 64] [--seconds 20]
        [--reload 5]

MiniLM, quantized by StaticQuantConfig, served by fastapi_app.py, kserve_model.py (version 1 over REST) and
ray_app.py (two replicas with a core each). Each client sends one text after another, over a connection that
it keeps; the texts are paragraphs of Python's documentation of mixed length. Clients and server share the
machine's CPUs, so the clients' own work is part of the figures. An answer counts as wrong when its cosine to
`encode` of that text is below .99, and as lost when the connection ends without one. --reload: the fastapi
and kserve servers load their folder again (SIGHUP) after so many seconds each time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "test"))
import minilm
from suites.served import fastapi_of, free_port, kserve_of, running

LEAST_COSINE = 0.99
SERVERS = ("fastapi", "kserve", "ray")


class Load:
    """What all clients saw.

    Attributes:
        seconds: of each answered request.
        wrong: answers that are not those of the model, or another status.
        lost: requests without an answer.
    """

    def __init__(self, url: str, texts: list[str], own: np.ndarray) -> None:
        self.seconds: list[float] = []
        self.wrong = self.lost = 0
        self._url, self._texts, self._own = urllib.parse.urlsplit(url), texts, own
        self._lock = threading.Lock()

    def run(self, clients: int, seconds: float, between: Callable[[], None] | None = None) -> float:
        """Send requests for a time, and call something meanwhile.

        Returns how long it took until the last answer.
        """
        start = time.perf_counter()
        threads = [threading.Thread(target=self._client, args=(i, start + seconds)) for i in range(clients)]
        for thread in threads:
            thread.start()
        while between is not None and time.perf_counter() < start + seconds:
            between()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _client(self, seed: int, end: float) -> None:
        chance = random.Random(seed)
        connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port or 80, timeout=120)
        while time.perf_counter() < end:
            index = chance.randrange(len(self._texts))
            body = json.dumps({"instances": [self._texts[index]]})
            start = time.perf_counter()
            try:
                connection.request("POST", self._url.path, body, {"content-type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
            except (OSError, http.client.HTTPException):
                with self._lock:
                    self.lost += 1
                connection.close()
                continue
            took = time.perf_counter() - start
            right = answer.status == 200 and self._is_right(json.loads(text)["predictions"][0], index)
            with self._lock:
                self.seconds.append(took)
                self.wrong += not right
        connection.close()

    def _is_right(self, got: Any, index: int) -> bool:
        got = np.asarray(got, dtype=np.float64)
        own = self._own[index]
        return bool(got @ own > LEAST_COSINE * np.linalg.norm(got) * np.linalg.norm(own))


@contextlib.contextmanager
def ray_of(folder: Path, log: Path) -> Iterator[str]:
    """Two replicas of Ray Serve; its URL."""
    port = free_port()
    options = ["--cores", 1, "--least", 2, "--most", 2, "--port", port]
    with running("ray_app.py", folder, *options, ready=f"http://127.0.0.1:{port}/-/healthz", log=log):
        yield f"http://127.0.0.1:{port}/"


def reloaded(server: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait, then let a server load its folder again."""
    time.sleep(seconds)
    server.send_signal(signal.SIGHUP)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--reload", type=float, help="seconds between two reloads")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    asked = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    import nc
    import nc.hf

    first, second = minilm.split()
    texts = [text for text in second if len(text) < 600][:256]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "minilm"
        model = SentenceTransformer(str(minilm.model_folder()), device="cpu")
        data = [text for text in first if len(text) < 600][:64]
        q = nc.hf.quantize_sentence_transformer(model, data, folder, nc.StaticQuantConfig(), measure=False)
        own = q.encode(texts)
        print("server   clients  texts/s   p50 ms   p95 ms   p99 ms wrong lost")
        for server in asked.servers:
            with contextlib.ExitStack() as stack:
                if server == "kserve":
                    opened = stack.enter_context(kserve_of(folder, Path(place) / "log"))
                    url = f"{opened[0]}/v1/models/m:predict"
                elif server == "fastapi":
                    opened = stack.enter_context(fastapi_of(folder, Path(place) / "log"))
                    url = f"{opened[0]}/predict"
                else:
                    url = stack.enter_context(ray_of(folder, Path(place) / "log"))
                between = None
                if asked.reload and server != "ray":
                    between = functools.partial(reloaded, opened[-1], asked.reload)
                Load(url, texts, own).run(8, 5)  # connections, and replicas that are still starting
                for clients in asked.clients:
                    load = Load(url, texts, own)
                    took = load.run(clients, asked.seconds, between)
                    at = np.percentile(np.array(load.seconds) * 1e3, (50, 95, 99))
                    numbers = " ".join(f"{value:8.1f}" for value in (len(load.seconds) / took, *at))
                    print(f"{server:<8} {clients:>7} {numbers} {load.wrong:5} {load.lost:4}", flush=True)


if __name__ == "__main__":
    main()

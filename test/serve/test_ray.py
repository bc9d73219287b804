"""examples/serve/ray_app.py with real requests over loopback."""

import concurrent.futures
import importlib.util
import json
import os
import random
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from suites.served import free_port, rows, running

if importlib.util.find_spec("ray") is None:
    pytest.skip("no ray", allow_module_level=True)


@pytest.fixture(scope="module")
def server(words, tmp_path_factory):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    port = free_port()
    options = ["--cores", 1, "--least", 2, "--most", 2, "--port", port]
    log = tmp_path_factory.mktemp("log") / "log"
    url = f"http://127.0.0.1:{port}"
    with running("ray_app.py", words[0], *options, ready=f"{url}/-/healthz", log=log):
        for _ in range(300):  # the proxy answers before the replicas do
            if post(url, {"instances": instances(rows(1))})[0] == 200:
                break
        yield url


def instances(given):
    return [{name: value[i].tolist() for name, value in given.items()} for i in range(len(given["ids"]))]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else {"error": text}


def test_64_clients_get_their_own_answers_from_replicas_with_cores_of_their_own(server, words):
    chance = random.Random(0)
    asked = [rows(chance.randint(1, 3), chance.choice((3, 6, 9)), seed) for seed in range(320)]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda given: post(server, {"instances": instances(given)}), asked))
    cores = set()
    for given, (status, answer) in zip(asked, answers, strict=True):
        assert status == 200
        own = words[1](**{name: torch.from_numpy(value) for name, value in given.items()})["scores"]
        np.testing.assert_allclose(answer["predictions"], own.numpy(), rtol=1e-5, atol=1e-5)
        cores.add(tuple(answer["cores"]))
    assert len(cores) == 2
    assert all(len(each) == 1 for each in cores)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "instances"),
        ({"instances": []}, "instances"),
        ({"instances": ["a text"]}, "expected the inputs ids, weights"),
        ({"instances": [{"ids": [1.5], "weights": [1.0]}]}, "expected int64"),
        ({"instances": [{"ids": [1], "weights": [1.0]}, {"ids": [1, 2], "weights": [1.0, 1.0]}]}, "shape"),
    ],
)
def test_bad_requests_get_400_and_a_reason(server, body, says):
    status, answer = post(server, body)
    assert status == 400
    assert says in answer["error"]

"""examples/serve/fastapi_app.py with clients over loopback."""

import asyncio
import concurrent.futures
import contextlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
import torch
from suites.real_minilm import minilm
from suites.served import EXAMPLES, fastapi_of, free_port, rows

import nc

if importlib.util.find_spec("kserve") is None:
    pytest.skip("an environment without servers", allow_module_level=True)
httpx = importlib.import_module("httpx")
sys.path.insert(0, str(EXAMPLES))
fastapi_app = importlib.import_module("fastapi_app")
served = importlib.import_module("served")


@pytest.fixture(scope="module")
def server(words, tmp_path_factory):
    with fastapi_of(words[0], tmp_path_factory.mktemp("log") / "log", "--most_tokens", "24") as found:
        yield found[0]


def body(given):
    count = len(next(iter(given.values())))
    return {"instances": [{name: value[i].tolist() for name, value in given.items()} for i in range(count)]}


def expected(model, given):
    return model(**{name: torch.from_numpy(value) for name, value in given.items()})["scores"].numpy()


def together(url, bodies, clients=64, path="/predict"):
    """Answers of requests that clients send at the same time, in the order of the requests."""

    async def run():
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(client.post(path, json=each) for each in bodies))

    return asyncio.run(run())


def test_64_clients_get_their_own_answers_and_a_poisoned_request_fails_alone(server, words):
    """Only the call itself finds that ids are outside of the table."""
    chance = random.Random(0)
    asked = [rows(chance.randint(1, 3), chance.choice((2, 3, 6, 9)), seed) for seed in range(320)]
    poisoned = set(range(7, 320, 40))
    for i in poisoned:
        asked[i]["ids"][0, 0] = 10_000
    for i, answer in enumerate(together(server, map(body, asked))):
        if i in poisoned:
            assert answer.status_code >= 400
            assert "error" in answer.json()
        else:
            assert answer.status_code == 200
            found = answer.json()["predictions"]
            np.testing.assert_allclose(found, expected(words[1], asked[i]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"no json", "not JSON"),
        (b"[1]", "one item or more"),
        (b'{"instances": []}', "one item or more"),
        (b'{"instances": ["a text"]}', "expected the inputs ids, weights"),
        (b'{"instances": [{"ids": [1.5], "weights": [1]}]}', "expected int64"),
    ],
)
def test_bad_requests_get_400_and_a_reason(server, sent, says):
    answer = httpx.post(f"{server}/predict", content=sent)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def test_a_full_queue_gets_429_and_when_to_come_again(words, tmp_path):
    with fastapi_of(words[0], tmp_path / "log", "--most_waiting", 8, "--most_items", 1) as (url, _):
        answers = together(url, [body(rows(4, seed=i)) for i in range(256)])
        assert {answer.status_code for answer in answers} == {200, 429}
        for i, answer in enumerate(answers):
            if answer.status_code == 200:
                own = expected(words[1], rows(4, seed=i))
                np.testing.assert_allclose(answer.json()["predictions"], own, rtol=1e-5, atol=1e-5)
            else:
                assert int(answer.headers["retry-after"]) >= 1
                assert "items wait already" in answer.json()["error"]
        assert httpx.post(f"{url}/predict", json=body(rows(1))).status_code == 200


def test_a_request_that_takes_too_long_gets_504(words, tmp_path):
    with fastapi_of(words[0], tmp_path / "log", "--timeout", "0.000001") as (url, _):
        answer = httpx.post(f"{url}/predict", json=body(rows(1)))
        assert answer.status_code == 504
        assert "within 1e-06 s" in answer.json()["error"]


class Gate:
    """A model whose calls end when the test lets them."""

    def __init__(self):
        self.calls, self.go = [], threading.Event()

    def rows(self, given):
        return [served.Row(number, 1) for number in given["n"].tolist()]

    def run(self, rows):
        self.calls.append([row.value for row in rows])
        assert self.go.wait(60)
        return [{"n": np.array([row.value])} for row in rows]


@contextlib.contextmanager
def in_this_process(service):
    """The port of a server in a thread."""
    uvicorn = importlib.import_module("uvicorn")
    config = uvicorn.Config(
        fastapi_app.application(service, "m"), port=free_port(), lifespan="on", log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        yield config.port
    finally:
        server.should_exit = True
        thread.join(60)


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def sent(port, number):
    """A connection over which a request was sent."""
    content = json.dumps({"instances": [{"n": number}]}).encode()
    opened = socket.create_connection(("127.0.0.1", port))
    opened.sendall(
        b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    )
    return opened


def test_what_a_client_that_went_asked_for_is_not_computed():
    gate = Gate()
    service = served.Service("", lambda _: gate)
    with in_this_process(service) as port:
        opened = [sent(port, 1)]
        until(lambda: gate.calls == [[1]])
        opened.append(sent(port, 2))
        until(lambda: len(service.batches._waiting) == 1)
        opened.append(sent(port, 3))
        until(lambda: len(service.batches._waiting) == 2)
        opened[1].close()
        until(lambda: len(service.batches._waiting) == 1)
        gate.go.set()
        for each in (opened[0], opened[2]):
            assert b"200 OK" in each.recv(1000)
            each.close()
    assert gate.calls == [[1], [3]]


def test_a_new_model_comes_in_while_requests_go_on_and_none_is_lost(words, other_words, tmp_path):
    folder, old, new = tmp_path / "model", words[1], other_words
    shutil.copytree(words[0], folder)
    given, ended = rows(2), False
    answers = []

    with fastapi_of(folder, tmp_path / "log") as (url, process):

        def client():
            with httpx.Client(base_url=url, timeout=60) as opened:
                while not ended:
                    answers.append(opened.post("/predict", json=body(given)))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client) for _ in range(8)]
            time.sleep(0.5)
            nc.save(new, folder)
            os.kill(process.pid, signal.SIGHUP)
            end = time.monotonic() + 60
            while not is_of(answers[-1], new, given) and time.monotonic() < end:
                time.sleep(0.05)
            ended = True
            for each in clients:
                each.result()
        assert is_of(answers[0], old, given)
        assert is_of(answers[-1], new, given)
        assert all(is_of(answer, old, given) or is_of(answer, new, given) for answer in answers)
        # a folder that can't be loaded changes nothing
        shutil.rmtree(folder)
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert is_of(httpx.post(f"{url}/predict", json=body(given)), new, given)
        assert "was not loaded again" in (tmp_path / "log").read_text()


def is_of(answer, model, given):
    assert answer.status_code == 200
    return np.allclose(answer.json()["predictions"], expected(model, given), rtol=1e-5, atol=1e-5)


def test_sigterm_lets_requests_be_answered(words, tmp_path):
    given, done, wrong = rows(1), [], []

    def client(url):
        with httpx.Client(base_url=url, timeout=60) as opened:
            while True:
                try:
                    answer = opened.post("/predict", json=body(given))
                except httpx.ConnectError:
                    return  # it took no more connections
                except httpx.RemoteProtocolError as error:
                    if "Server disconnected" in str(error):  # an idle connection was closed
                        return
                    raise
                (done if answer.status_code == 200 else wrong).append(answer)

    with (
        fastapi_of(words[0], tmp_path / "log") as (url, process),
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        clients = [pool.submit(client, url) for _ in range(16)]
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
        for each in clients:
            each.result()
    assert wrong == []
    assert len(done) > 50


def test_texts_of_64_clients_are_what_encode_gives(sentences, tmp_path):
    texts = sorted(minilm.split()[1], key=len)[:64]
    random.Random(0).shuffle(texts)
    own = sentences[1].encode(texts)
    with fastapi_of(sentences[0], tmp_path / "log", "--most_tokens", 512) as (url, _):
        bodies = [{"model": "m", "input": text} for text in texts]
        for answer, vector in zip(together(url, bodies, path="/v1/embeddings"), own, strict=True):
            assert answer.status_code == 200
            np.testing.assert_allclose(answer.json()["data"][0]["embedding"], vector, atol=2e-3)
        openai = importlib.import_module("openai")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        found = client.embeddings.create(model="m", input=texts[:2])
        np.testing.assert_allclose([each.embedding for each in found.data], own[:2], atol=2e-3)
        with pytest.raises(openai.BadRequestError, match="one or more texts"):
            client.embeddings.create(model="m", input=[])

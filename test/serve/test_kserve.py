"""examples/serve/kserve_model.py with the clients that people use, over loopback."""

import concurrent.futures
import importlib
import importlib.util
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from suites.real_minilm import minilm
from suites.served import EXAMPLES, free_port, kserve_of, rows, running

if importlib.util.find_spec("kserve") is None:  # its messages and those of tritonclient have the same names
    pytest.skip("no kserve", allow_module_level=True)
http_client = importlib.import_module("tritonclient.http")
grpc_client = importlib.import_module("tritonclient.grpc")


@pytest.fixture(scope="module")
def server(words, tmp_path_factory):
    with kserve_of(words[0], tmp_path_factory.mktemp("log") / "log") as found:
        yield found


@pytest.fixture(scope="module")
def text_server(sentences, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with kserve_of(sentences[0], log) as found:
        yield found


def expected(words, given):
    return words[1](**{name: torch.from_numpy(value) for name, value in given.items()})["scores"].numpy()


def post(url, body):
    """(Status, parsed answer)."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def triton_inputs(client, given):
    kinds = {"int64": "INT64", "float32": "FP32", "object": "BYTES", "int32": "INT32"}
    found = []
    for name, value in given.items():
        one = client.InferInput(name, list(value.shape), kinds[str(value.dtype)])
        one.set_data_from_numpy(value)
        found.append(one)
    return found


def test_version_1_over_rest(server, words):
    given = rows(3)
    instances = [{name: value[i].tolist() for name, value in given.items()} for i in range(3)]
    status, answer = post(f"{server[0]}/v1/models/m:predict", {"instances": instances})
    assert status == 200
    np.testing.assert_allclose(answer["predictions"], expected(words, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
def test_version_2_by_tritonclient(server, words, protocol):
    client = http_client if protocol == "REST" else grpc_client
    address = server[0].removeprefix("http://") if protocol == "REST" else server[1]
    opened = client.InferenceServerClient(address)
    assert opened.is_model_ready("m")
    given = rows(5, seed=1)
    answer = opened.infer("m", triton_inputs(client, given))
    np.testing.assert_allclose(answer.as_numpy("scores"), expected(words, given), rtol=1e-5, atol=1e-5)
    opened.close()


BAD = [
    ({"ids": rows(2)["ids"]}, "expected the inputs ids, weights"),
    ({**rows(2), "more": rows(2)["ids"]}, "expected the inputs ids, weights"),
    ({**rows(2), "weights": rows(3)["weights"]}, "different numbers of rows"),
    ({**rows(2), "ids": rows(2)["weights"]}, "expected int64, but got float32"),
    ({**rows(2), "ids": rows(2)["ids"][0]}, "expected shape"),
]


@pytest.mark.parametrize(("given", "says"), BAD)
@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
def test_bad_requests_get_a_reason(server, given, says, protocol):
    client = http_client if protocol == "REST" else grpc_client
    address = server[0].removeprefix("http://") if protocol == "REST" else server[1]
    opened = client.InferenceServerClient(address)
    with pytest.raises(importlib.import_module("tritonclient.utils").InferenceServerException) as caught:
        opened.infer("m", triton_inputs(client, given))
    assert says in str(caught.value)
    assert ("400" if protocol == "REST" else "INVALID_ARGUMENT") in str(caught.value.status())
    opened.close()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "instances"),
        ({"instances": []}, "one item or more"),
        ({"instances": [{"ids": [1]}, {"weights": [1.0]}]}, "the same inputs"),
        (
            {"instances": [{"ids": [1], "weights": [1.0]}, {"ids": [1, 2], "weights": [1.0, 1.0]}]},
            "different shapes",
        ),
        ({"instances": ["a text"]}, "expected the inputs ids, weights"),
    ],
)
def test_bad_requests_of_version_1(server, body, says):
    status, answer = post(f"{server[0]}/v1/models/m:predict", body)
    assert status == 400
    assert says in answer["error"]
    assert post(f"{server[0]}/v1/models/other:predict", {"instances": ["a"]})[0] == 404


def test_ids_outside_of_the_table_spoil_no_other_request(server, words):
    """Only the call itself finds that they are; requests of one batch are tried alone then."""
    good, bad = rows(2, seed=4), rows(2, seed=5)
    bad["ids"][0, 0] = 10_000
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [good if i % 4 else bad for i in range(16)]
        bodies = [{"instances": [{n: v[i].tolist() for n, v in a.items()} for i in range(2)]} for a in asked]
        answers = list(pool.map(lambda body: post(f"{server[0]}/v1/models/m:predict", body), bodies))
    for given, (status, answer) in zip(asked, answers, strict=True):
        if given is good:
            assert status == 200
            np.testing.assert_allclose(answer["predictions"], expected(words, good), rtol=1e-5, atol=1e-5)
        else:
            assert status >= 400


def test_64_clients_at_once_get_their_own_answers(server, words):
    address = server[0].removeprefix("http://")
    chance = random.Random(0)
    asked = [rows(chance.randint(1, 3), chance.choice((3, 6, 9)), seed) for seed in range(640)]

    def client(part):
        with http_client.InferenceServerClient(address, network_timeout=120.0) as opened:
            return [opened.infer("m", triton_inputs(http_client, g)).as_numpy("scores") for g in part]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        parts = list(pool.map(client, [asked[i::64] for i in range(64)]))
    for i, answers in enumerate(parts):
        for given, scores in zip(asked[i::64], answers, strict=True):
            np.testing.assert_allclose(scores, expected(words, given), rtol=1e-5, atol=1e-5)
    metrics = urllib.request.urlopen(f"{server[0]}/metrics").read().decode()
    calls = float(re.search(r"^nc_batch_rows_count (\S+)", metrics, re.MULTILINE)[1])
    items = float(re.search(r"^nc_batch_rows_sum (\S+)", metrics, re.MULTILINE)[1])
    assert items / calls > 2  # several requests were computed together


def test_sigterm_under_load_loses_nothing_that_was_accepted(words, tmp_path):
    given = rows(1)
    body = {"instances": [{name: value[0].tolist() for name, value in given.items()}]}
    done, wrong, ended = [], [], threading.Event()

    def client(url):
        while not ended.is_set():
            try:
                status, answer = post(f"{url}/v1/models/m:predict", body)
            except (urllib.error.URLError, ConnectionError) as error:
                if isinstance(getattr(error, "reason", error), ConnectionError):
                    return  # it took no more requests
                wrong.append(error)
                return
            (done if status == 200 else wrong).append((status, answer))

    with kserve_of(words[0], tmp_path / "log") as (url, _, process):
        threads = [threading.Thread(target=client, args=(url,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) is not None
        ended.set()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert len(done) > 50
    for _, answer in done:
        np.testing.assert_allclose(answer["predictions"], expected(words, given), rtol=1e-5, atol=1e-5)


def test_texts_by_all_protocols_are_what_encode_gives(text_server, sentences):
    url, grpc, _ = text_server
    texts = [text for text in minilm.split()[1] if len(text) < 200][:5]
    own = sentences[1].encode(texts)
    _, answer = post(f"{url}/v1/models/m:predict", {"instances": texts})
    np.testing.assert_allclose(answer["predictions"], own, atol=2e-3)
    given = {"text": np.array([text.encode() for text in texts], dtype=object)}
    for client, address in ((http_client, url.removeprefix("http://")), (grpc_client, grpc)):
        opened = client.InferenceServerClient(address)
        found = opened.infer("m", triton_inputs(client, given)).as_numpy("sentence_embedding")
        np.testing.assert_allclose(found, own, atol=2e-3)
        opened.close()


def test_openai_reads_embeddings(text_server, sentences):
    openai = importlib.import_module("openai")
    client = openai.OpenAI(base_url=f"{text_server[0]}/v1", api_key="none", max_retries=0)
    texts = ["a short text", "another one that is a little longer"]
    own = sentences[1].encode(texts)
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="m", input=texts, **options)
        assert [each.index for each in answer.data] == [0, 1]
        np.testing.assert_allclose([each.embedding for each in answer.data], own, atol=2e-3)
        assert answer.usage.prompt_tokens > 8
    with pytest.raises(openai.BadRequestError, match="one or more texts"):
        client.embeddings.create(model="m", input=[])
    with pytest.raises(openai.BadRequestError, match="one or more texts"):
        client.embeddings.create(model="m", input=[[1, 2]])


def test_a_full_queue_is_an_error_of_each_protocol(words, tmp_path):
    """One request of two rows waits for each call, so all others of 64 clients find the queue full."""
    limits = ("--most_waiting", 2, "--most_items", 1)
    given, several = rows(2), 64
    body = {"instances": [{name: value[i].tolist() for name, value in given.items()} for i in range(2)]}
    with kserve_of(words[0], tmp_path / "log", *limits) as (url, grpc, _):
        with concurrent.futures.ThreadPoolExecutor(several) as pool:
            statuses = [
                status
                for status, _ in pool.map(lambda _: post(f"{url}/v1/models/m:predict", body), range(256))
            ]
        assert set(statuses) == {200, 429}

        def by_grpc(_):
            with grpc_client.InferenceServerClient(grpc) as opened:
                try:
                    opened.infer("m", triton_inputs(grpc_client, given))
                except importlib.import_module("tritonclient.utils").InferenceServerException as error:
                    return error.status()
                return "OK"

        with concurrent.futures.ThreadPoolExecutor(several) as pool:
            assert set(pool.map(by_grpc, range(256))) == {"OK", "StatusCode.RESOURCE_EXHAUSTED"}


SLOW = f"""
import sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import kserve_model, served

class Slow:
    def rows(self, given):
        return [served.Row(number, 1) for number in given["n"].tolist()]

    def run(self, rows):
        time.sleep(0.1)
        return [{{"n": row.value + served.np.zeros(1)}} for row in rows]

kept = served.Service
kserve_model.Service = lambda folder, **limits: kept(folder, lambda _: Slow(), **limits)
kserve_model.main()
"""


def test_what_clients_that_went_asked_for_is_not_computed(tmp_path):
    """Requests are answered in their order: after the answer to the last one none is left."""
    script, port = tmp_path / "slow.py", free_port()
    script.write_text(SLOW)
    content = json.dumps({"instances": [{"n": 1}]}).encode()
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
    options = ["--model_name", "m", "--http_port", port, "--grpc_port", free_port(), "--most_items", 1]
    url = f"http://127.0.0.1:{port}"
    with running(script, tmp_path, *options, ready=f"{url}/v2/models/m/ready", log=tmp_path / "log"):
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        for each in opened:
            each.sendall(head + content)
        time.sleep(0.5)  # they wait for 3 s
        for each in opened:
            each.close()
        assert post(f"{url}/v1/models/m:predict", {"instances": [{"n": 2}]}) == (200, {"predictions": [2.0]})
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert float(re.search(r"^nc_batch_rows_sum (\S+)", metrics, re.MULTILINE)[1]) < 31


def test_a_folder_that_is_no_model_ends_with_a_reason(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "kserve_model.py"),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert "ArtefactMissingError" in done.stderr

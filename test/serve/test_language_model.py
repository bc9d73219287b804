"""`python -m nc serve`: OpenAI's clients over loopback, requests that join while others are generated."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
httpx = pytest.importorskip("httpx")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
smollm2 = pytest.importorskip("smollm2")
CLIENTS, TOKENS = 16, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama of random weights in 4 bits, with a real tokenizer."""
    import nc.hf

    found, tokenizer = tmp_path_factory.mktemp("language"), smollm2.load_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.generation_config.eos_token_id = None
    model.save_pretrained(found / "float")
    low_bit = transformers.AutoModelForCausalLM.from_pretrained(
        found / "float", quantization_config=nc.hf.QuantizationConfig("int4")
    )
    low_bit.save_pretrained(found / "int4")
    tokenizer.save_pretrained(found / "int4")
    return found / "int4"


@pytest.fixture(scope="module")
def address(folder, unused_port):
    command = (sys.executable, "-m", "nc", "serve", str(folder), "--port", str(unused_port))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    base = f"http://127.0.0.1:{unused_port}"
    try:
        for _ in range(300):
            assert process.poll() is None, process.stdout.read()
            try:
                if httpx.get(f"{base}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield f"{base}/v1"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def unused_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def alone(folder, prompts):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
        found.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def test_texts_are_those_of_each_request_alone(folder, address):
    client = openai.OpenAI(base_url=address, api_key="none")
    prompts = [
        " ".join(["one", "two", "three", "four", "five"] * (1 + i % 7))[: 9 + 11 * i] for i in range(CLIENTS)
    ]

    def ask(prompt):
        given = {"model": str(folder), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        return client.completions.create(**given).choices[0].text

    with ThreadPoolExecutor(CLIENTS) as pool:
        got = list(pool.map(ask, prompts))
    assert got == alone(folder, prompts)
    assert client.models.list() is not None


def test_chat_streams(folder, address):
    client = openai.OpenAI(base_url=address, api_key="none")
    messages = [{"role": "user", "content": "Name a colour."}]
    given = {"model": str(folder), "messages": messages, "max_tokens": TOKENS}
    pieces = list(client.chat.completions.create(**given, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


def test_a_port_in_use_is_said_before_the_model_is_loaded(folder, address, unused_port):
    command = (sys.executable, "-m", "nc", "serve", str(folder), "--port", str(unused_port))
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert f"Nothing can listen on 127.0.0.1, port {unused_port}" in run.stderr
    assert "Loading" not in run.stderr

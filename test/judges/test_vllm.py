"""Files of weights of nc.hf.export in vLLM for CPUs, whose answers are compared with nc's own.

`make test-judges` runs this in an environment of its own.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import nc
from nc.errors import UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vllm", allow_module_level=True)
transformers = importlib.import_module("transformers")
smollm2 = importlib.import_module("smollm2")
nc_hf = importlib.import_module("nc.hf")

PROMPTS = ["The capital of France is", "Water boils at a temperature of"]


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Folder of SmolLM2 with its tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.load_model().save_pretrained(folder)
    smollm2.load_tokenizer().save_pretrained(folder)
    return folder


def of_vllm(folder, dtype):
    """vLLM's log probabilities of the five likeliest first tokens of each prompt, by token."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    vllm = importlib.import_module("vllm")
    model = vllm.LLM(model=str(folder), dtype=dtype, max_model_len=256, enforce_eager=True)
    done = model.generate(PROMPTS, vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=5))
    return [
        {token: found.logprob for token, found in answer.outputs[0].logprobs[0].items()} for answer in done
    ]


def check(model, floats, found):
    """vLLM's likeliest tokens are those of nc, and its probabilities as near to fp32 as nc's.

    Both round activations row by row, each in its own way, which moves single probabilities by as much as int8
    itself does. So they are compared with fp32, which both give to 2e-5 without rounding.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(floats))
    exact = transformers.AutoModelForCausalLM.from_pretrained(str(floats)).float()
    own, theirs, apart = [], [], []
    for prompt, known in zip(PROMPTS, found, strict=True):
        given = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            ours, fp32 = (m(**given).logits[0, -1].float().log_softmax(-1) for m in (model, exact))
        assert int(ours.argmax()) == max(known, key=known.get)
        own += [abs(ours[token] - fp32[token]).item() for token in known]
        theirs += [abs(value - fp32[token].item()) for token, value in known.items()]
        apart += [abs(value - ours[token].item()) for token, value in known.items()]
    assert max(apart) < 1.0
    # measured without VNNI: 1.52 times; why vLLM loses more there is not known
    assert sum(theirs) < (1.5 if torch.cpu._is_vnni_supported() else 2.0) * sum(own)


def test_w8a8_runs_and_is_as_near_to_fp32(floats, tmp_path):
    config = nc_hf.QuantizationConfig("int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(floats), quantization_config=config)
    told = nc_hf.export(model, tmp_path / "out", "compressed-tensors", target="vllm-cpu")
    assert len(told.layers) == 210
    check(model, floats, of_vllm(tmp_path / "out", "float32"))


def test_w4a16_runs_and_is_as_near_to_fp32(floats, tmp_path):
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has this kernel for AVX-512 alone")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(floats)).float()
    model = nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=32, scale_dtype="bf16"), inplace=True)
    nc_hf.export(model, tmp_path / "out", "compressed-tensors", target="vllm-cpu")
    check(model, floats, of_vllm(tmp_path / "out", "bfloat16"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"w_dtype": "int8", "group_size": 32, "act_dtype": "int8"}, "group_size=-1"),
        ({"w_dtype": "int8", "group_size": -1}, 'act_dtype="int8"'),
        ({"w_dtype": "uint8", "w_sym": False, "group_size": -1, "act_dtype": "int8"}, "symmetric"),
        ({"w_dtype": "int4", "group_size": 32, "act_dtype": "int8"}, "8 bits alone"),
    ],
)
def test_what_vllm_has_no_kernel_for_is_refused(floats, tmp_path, fields, says):
    model = transformers.AutoModelForCausalLM.from_pretrained(str(floats)).float()
    model = nc.quantize(model, nc.WeightOnlyConfig(**fields), inplace=True)
    with pytest.raises(UnsupportedError, match=says):
        nc_hf.export(model, tmp_path / "out", "compressed-tensors", target="vllm-cpu")
    assert not (tmp_path / "out").exists()

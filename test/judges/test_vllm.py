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


def _of_plugin(floats, folder, **fields):
    """A model, whose folder only nc's plug-in can compute in vLLM."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(floats)).float()
    model = nc.quantize(model, nc.WeightOnlyConfig(group_size=32, **fields), inplace=True)
    nc_hf.export(model, folder, "compressed-tensors")
    return model


@pytest.mark.parametrize("w_dtype", ["int8", "uint8", "int2"])
def test_the_plugin_computes_bits_for_which_vllm_has_no_kernel(floats, tmp_path, w_dtype):
    model = _of_plugin(floats, tmp_path / "out", w_dtype=w_dtype, w_sym=w_dtype != "uint8")
    found = of_vllm(tmp_path / "out", "float32")
    schemes = importlib.import_module("vllm.model_executor.layers.quantization.compressed_tensors.schemes")
    assert "NCLinearKernel" in schemes.CompressedTensorsWNA16._kernel_backends_being_used
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(floats))
    for prompt, known in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].float()
        ours = logits.log_softmax(-1)
        for token, value in known.items():
            assert abs(ours[token].item() - value) < 1e-3


def test_the_plugin_rounds_activations(floats, tmp_path, monkeypatch):
    """vLLM's own kernel for 4 bits leaves them as they are."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUWNA16LinearKernel")
    model = _of_plugin(floats, tmp_path / "out", w_dtype="int4", act_dtype="int8")
    found = of_vllm(tmp_path / "out", "float32")
    schemes = importlib.import_module("vllm.model_executor.layers.quantization.compressed_tensors.schemes")
    assert "NCLinearKernel" in schemes.CompressedTensorsWNA8Int._kernel_backends_being_used
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(floats))
    apart = []
    for prompt, known in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].float()
        ours = logits.log_softmax(-1)
        apart += [abs(ours[token].item() - value) for token, value in known.items()]
    assert max(apart) < 1.0


def test_what_the_plugin_does_not_compute_has_a_reason():
    linear = importlib.import_module("nc.vllm.linear")
    types, found = linear.scalar_types, linear.MPLinearLayerConfig((64, 48), (64, 48), None, None, 32, False)
    for weight_type, act_type, group, says in (
        (types.uint8b128, torch.float32, 32, None),
        (types.uint2, torch.bfloat16, -1, None),
        (types.uint3b4, torch.float32, 32, "no kernel for"),
        (types.uint8b128, torch.float16, 32, "not in torch.float16"),
        (types.uint8b128, torch.float32, 24, "groups of 24 do not divide 64"),
    ):
        found.weight_type, found.act_type, found.group_size = weight_type, act_type, group
        is_able, why = linear.NCLinearKernel.can_implement(found)
        assert is_able == (says is None)
        assert says is None or says in why


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

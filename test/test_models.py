"""Real architectures, with random weights, go the whole way: prepare, calibrate, convert, on both backends.

Bounds are in dB of quantized against fp32 output, a few dB below what was seen; a lost operator or a wrong scale costs 10 dB and more.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, call, settle, worst_db

from nc import StaticQuantConfig, available_backends, compare, convert, prepare

VOCABULARY = 200
TEXT = {"vocab_size": VOCABULARY}


@dataclasses.dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        build: the model.
        inputs: batch size → inputs; the second argument is a sequence length for models that have one.
        decibels: lower bound of quantized against fp32.
        fp32: operators that were asked to run int8 and need not on IPEX, with why.
        exhaustive: marks the test.
    """

    build: Callable[[], torch.nn.Module]
    inputs: Callable[..., Any]
    decibels: float
    fp32: dict[str, str] = dataclasses.field(default_factory=dict)
    exhaustive: bool = False


def vision(name, **options):
    def build():
        torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed: its models can't be tested")
        return settle(getattr(torchvision.models, name)(**options))

    return build


def language(name, config, **options):
    def build():
        import transformers
        from transformers.models.whisper import modeling_whisper

        owner = modeling_whisper if name == "WhisperEncoder" else transformers
        return getattr(owner, name)(getattr(transformers, config)(**options))

    return build


def image(batch, size=64):
    return torch.randn(batch, 3, size, size)


def pixels(batch, size=32):
    return {"pixel_values": image(batch, size)}


def text(batch, length=12):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - 3 :] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length)), "attention_mask": mask}


def mel(batch):
    return torch.randn(batch, 16, 40)


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}

CASES = {
    "resnet18": Case(vision("resnet18"), image, 32.0),
    "resnet50": Case(vision("resnet50"), image, 29.0, exhaustive=True),
    "mobilenet_v2": Case(vision("mobilenet_v2"), image, 33.0, exhaustive=True),
    "efficientnet_b0": Case(vision("efficientnet_b0"), image, 33.0, exhaustive=True),
    "vit_b_16": Case(vision("vit_b_16", image_size=64), image, 24.0, exhaustive=True),
    "bert": Case(language("BertModel", "BertConfig", **SMALL, **TEXT), text, 33.0),
    "distilbert": Case(
        language("DistilBertModel", "DistilBertConfig", n_layers=2, dim=32, n_heads=4, hidden_dim=64, **TEXT), text, 58.0
    ),
    "roberta": Case(language("RobertaModel", "RobertaConfig", **SMALL, **TEXT), text, 36.0),
    "vit": Case(language("ViTModel", "ViTConfig", image_size=32, patch_size=8, **SMALL), pixels, 28.0),
    "resnet": Case(
        language("ResNetModel", "ResNetConfig", depths=[1, 2], hidden_sizes=[16, 32], embedding_size=8), pixels, 24.0
    ),
    "gpt2": Case(language("GPT2Model", "GPT2Config", n_layer=2, n_embd=32, n_head=4, **TEXT), text, 33.0),
    "opt": Case(
        language(
            "OPTModel", "OPTConfig", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, ffn_dim=64,
            word_embed_proj_dim=32, **TEXT
        ), text, 33.0
    ),
    "llama": Case(language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **SMALL, **TEXT), text, 24.0),
    "t5": Case(
        language("T5EncoderModel", "T5Config", num_layers=2, d_model=32, num_heads=4, d_ff=64, d_kv=8, **TEXT), text, 20.0
    ),
    "whisper": Case(
        language(
            "WhisperEncoder", "WhisperConfig", encoder_layers=2, d_model=32, encoder_attention_heads=4, encoder_ffn_dim=64,
            num_mel_bins=16, max_source_positions=20
        ), mel, 60.0
    ),
}  # fmt: skip
PARAMETERS = [pytest.param(name, marks=pytest.mark.exhaustive if case.exhaustive else ()) for name, case in CASES.items()]


@pytest.fixture
def case(name):
    torch.manual_seed(0)  # the bounds were found with these weights and inputs
    return CASES[name]


@pytest.fixture
def model(case):
    model = case.build().eval()
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # torchvision starts some heads at zero
    return model


def others(case):
    """Inputs of another batch size, and for text of another length too."""
    return [case.inputs(3), case.inputs(2, 7)] if case.inputs is text else [case.inputs(3)]


def prepared_and_checked(model, case, backend):
    """Prepared on one sample, equal to fp32 for it and for other sizes, calibrated on more."""
    example = case.inputs(1)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=example, backend=backend)
    for inputs in (example, *others(case)):
        expected, got = call(model, inputs), call(prepared, inputs)
        assert type(got) is type(expected)
        assert_close(expected, got, 1e-4)
    call(prepared, case.inputs(8))
    return prepared, [example, *others(case)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_reference(case, model):
    prepared, examples = prepared_and_checked(model, case, "reference")
    quantized = convert(prepared)
    for inputs in examples:
        assert worst_db(call(model, inputs), call(quantized, inputs)) > case.decibels


@pytest.mark.ipex
@pytest.mark.parametrize("name", PARAMETERS)
def test_ipex(case, model):
    prepared, examples = prepared_and_checked(model, case, "ipex")
    quantized = convert(prepared, isolate="never")
    for inputs in examples:
        expected, got = call(model, inputs), call(quantized, inputs)
        assert type(got) is type(expected)
        assert worst_db(expected, got) > case.decibels
        assert worst_db(call(quantized.reference, inputs), got) >= 30
    report = quantized.report()
    assert {op.operator for op in report.not_int8} == set(case.fp32)
    assert all(op.reason for op in report.not_int8)
    assert report.ran_int8 > 0
    assert report.groups > 0


#: Minutes and gigabytes each: IPEX compiles them anew for every group of tensors that it is asked to show. "resnet" and "vit" stand in,
#: unless NC_LARGE=1 is set.
LARGE_FOR_IPEX = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "vit_b_16")


@pytest.mark.parametrize("engine", [name for name in ("ipex", "native") if not available_backends()[name]])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("bert", "resnet") else pytest.mark.exhaustive) for name in CASES])
def test_no_operator_disagrees(name, case, model, engine):
    """Tensor by tensor, at another size than the engine was warmed up with."""
    if engine == "ipex" and name in LARGE_FOR_IPEX and not os.environ.get("NC_LARGE"):
        pytest.skip("IPEX takes minutes for each; NC_LARGE=1 runs them")
    prepared = prepare(model, StaticQuantConfig(), example_inputs=case.inputs(1), backend=engine)
    call(prepared, case.inputs(8))
    found = compare(convert(prepared, isolate="never"), inputs=others(case)[-1], isolate="never")
    assert found.disagreements == (), found
    assert len(found.tensors) > len(found.unread)

"""Real architectures with random weights, and inputs for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import settle

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
        torchvision = pytest.importorskip(
            "torchvision", reason="torchvision is not installed: its models can't be tested"
        )
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

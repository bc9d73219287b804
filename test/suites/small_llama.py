"""Language models of few blocks with random weights."""

import pytest
import torch

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def random_llama(**options):
    """A model of two blocks; options are those of its configuration."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "vocab_size": 100, **options})
    return transformers.LlamaForCausalLM(config).eval()


def small_llama():
    """The same with large weights, so that rounding them shows in the logits."""
    model = random_llama(vocab_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model

"""Language models, texts, and their tokens with and without plans."""

import dataclasses
import warnings

import torch
import transformers

import nc
from nc.errors import NCWarning
from nc.numerics.metrics import worst_sqnr_db

_OF_ALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
}


_LLAMA = {**_OF_ALL, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": 0}


_GPT = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 640}


CONFIGS = {
    "Llama": _LLAMA,
    "Qwen3": {**_LLAMA, "head_dim": 16},
    "Mistral": {**_LLAMA, "sliding_window": 12},
    "Gemma2": {**_LLAMA, "head_dim": 16, "sliding_window": 12},
    "Phi": {**_LLAMA, "num_key_value_heads": 4},
    "GPTNeoX": {**_OF_ALL, "intermediate_size": 96},
    "OPT": {**_OF_ALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "GPT2": _GPT,
    "GPTJ": {**_GPT, "rotary_dim": 8},
    "Bloom": {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "Falcon": {**_OF_ALL, "new_decoder_architecture": False},
    "Mixtral": {**_LLAMA, "num_local_experts": 4, "sliding_window": None},
}


def language_model(name="Llama", act_dtype="fp32", dtype=torch.float32, **more):
    """One of random weights, in 4 bits."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**CONFIGS[name], **more})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    config = nc.WeightOnlyConfig("int4", group_size=32, act_dtype=act_dtype)
    if hasattr(model.config, "num_local_experts"):
        config = config.exclude(".*experts.*")  # a step can't hold the loop over quantized ones
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NCWarning)
        return nc.quantize(model, config)


def texts(batch=1, length=9):
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def generated(model, ids, count=20, **options):
    given = {
        "max_new_tokens": count,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **given, **options})


def same(a, b, db=90):
    """Equal texts, and logits that agree at every token."""
    assert torch.equal(a.sequences, b.sequences)
    assert worst_sqnr_db(list(a.logits), list(b.logits)) > db


def by_plan(model):
    """How many tokens plans computed so far; the list grows with each."""
    tokens, step = [], model.forward._step

    def counted(*args):
        found = step(*args)
        return dataclasses.replace(found, model=lambda *inputs: (tokens.append(1), found.model(*inputs))[1])

    model.forward._step = counted
    model.forward._steps, model.forward._found = {}, {}
    return tokens


OLD = transformers.__version__.startswith("4")

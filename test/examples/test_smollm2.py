"""The language model of the examples, from its GGUF file.

Weights, order of the rows of rotary heads, tokenizer.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import smollm2

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    return smollm2.load_model()


@pytest.fixture(scope="module")
def tokenizer():
    return smollm2.load_tokenizer()


def test_it_writes_english(model, tokenizer):
    ids = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=2, do_sample=False)[0])
    assert text == "The capital of France is Paris."


def test_it_predicts_text_and_notices_another_order_of_rows(model, tokenizer):
    text = (
        "A list is a sequence of values that can be changed. Lists are usually written as a sequence of "
        "values between square brackets, separated by commas. All the elements of a list can have different "
        "types, but usually they all have the same type."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
        weight = model.model.layers[0].self_attn.q_proj.weight
        kept = weight.clone()
        weight.copy_(smollm2.halves(kept, model.config.num_attention_heads))
        worse = model(ids, labels=ids).loss
        weight.copy_(kept)
    assert float(loss) == pytest.approx(
        2.6832, abs=1e-3
    )  # with transformers' own reader of the file; test/judges compares every logit
    assert worse > loss + 1


def test_it_has_the_sizes_of_the_file_and_one_tied_table(model):
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize(
    "text", ["Ünïcode — 1234, tabs\t and\n\nlines  ", "def f(x):\n    return x ** 2", ""]
)
def test_tokens_give_the_text_back(text, tokenizer):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_and_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id] == [2]
    assert len(tokenizer("1234").input_ids) == 4
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

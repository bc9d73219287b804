"""SmolLM2 from its GGUF file against transformers' own reader of such files."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import smollm2

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


def test_weights_logits_and_tokens_are_the_same():
    file = smollm2.model_file()
    ours, tokenizer = smollm2.load_model(), smollm2.load_tokenizer()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).eval()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    text = "Ünïcode — 1234 <|im_end|>\n\n  def f(x): return x"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert (
        transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)(text).input_ids
        == ids[0].tolist()
    )
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)

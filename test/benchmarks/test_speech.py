"""Word errors of Whisper base (benchmarks/speech.py), and its weights from a file of CTranslate2."""

import functools
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip


def by_definition(said, heard):
    """Least number of edits, by trying all last ones."""

    @functools.cache
    def edits(i, j):
        if not i or not j:
            return i + j
        return min(
            edits(i - 1, j) + 1, edits(i, j - 1) + 1, edits(i - 1, j - 1) + (said[i - 1] != heard[j - 1])
        )

    return edits(len(said), len(heard))


def test_word_errors(module):
    speech, order = module("speech"), random.Random(0)
    assert speech.words('The U.S. "hero\'s" day, at-home!') == [
        "the",
        "u",
        "s",
        "hero's",
        "day",
        "at",
        "home",
    ]
    for _ in range(50):
        said, heard = (order.choices("abc", k=order.randrange(7)) for _ in range(2))
        assert speech.errors(said, heard) == by_definition(said, heard)


def test_sentences_have_words_alone(module):
    pytest.importorskip("gensim")
    assert all(text.isascii() and not any(c.isdigit() for c in text) for text in module("speech").sentences())


def _text(value):
    data = value.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def _file(arrays, version=6):
    data = struct.pack("<I", version) + _text("WhisperSpec") + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        kind = {np.float16: 4, np.int16: 2}[array.dtype.type]
        sizes = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += _text(name) + sizes + struct.pack("<BI", kind, array.nbytes) + array.tobytes()
    return data + struct.pack("<I", 0)


def test_weights_of_ctranslate2(module):
    whisper = module("whisper_base")
    qkv, bias = (np.arange(n).reshape(sizes).astype(np.float16) for n, sizes in ((36, (9, 4)), (9, (9,))))
    kv = np.arange(24).reshape(6, 4).astype(np.float16)
    read = whisper.variables(
        _file(
            {
                "decoder/embeddings/weight": qkv,
                "decoder/alignment_heads": np.array([3], np.int16),
                "decoder/layer_2/self_attention/linear_0/weight": qkv,
                "decoder/layer_2/self_attention/linear_0/bias": bias,
                "decoder/layer_2/attention/linear_1/weight": kv,
                "decoder/layer_2/attention/layer_norm/gamma": bias,
                "encoder/layer_0/ffn/linear_1/bias": bias,
            }
        )
    )
    found = whisper.state(read)
    place = "model.decoder.layers.2"
    assert torch.equal(found[f"{place}.self_attn.k_proj.weight"], torch.arange(12.0, 24).view(3, 4))
    assert torch.equal(found[f"{place}.self_attn.v_proj.bias"], torch.arange(6.0, 9))
    assert f"{place}.self_attn.k_proj.bias" not in found  # it is zero there, and transformers has none
    assert torch.equal(found[f"{place}.encoder_attn.v_proj.weight"], torch.arange(12.0, 24).view(3, 4))
    assert torch.equal(found[f"{place}.encoder_attn_layer_norm.weight"], torch.arange(9.0))
    assert torch.equal(found["model.encoder.layers.0.fc2.bias"], torch.arange(9.0))
    assert found["proj_out.weight"] is found["model.decoder.embed_tokens.weight"]
    with pytest.raises(ValueError, match="unknown variable"):
        whisper.state({"decoder/other/weight": qkv})
    with pytest.raises(ValueError, match="version 5"):
        whisper.variables(_file({}, version=5))

"""What a server computes of requests: rows of any sizes together, each as it would be alone."""

import gc
import importlib.util
import sys
import weakref

import numpy as np
import pytest
import torch
from suites.real_minilm import minilm
from suites.served import EXAMPLES

if importlib.util.find_spec("kserve") is None:
    pytest.skip("an environment without servers", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))
import served


def rows(count, length, seed=0):
    chance = np.random.default_rng(seed)
    ids = chance.integers(0, 50, (count, length), dtype=np.int64)
    return {"ids": ids, "weights": chance.random((count, length), dtype=np.float32)}


def test_rows_of_several_lengths_get_their_own_outputs(words):
    opened = served.opened(words[0])
    requests = [rows(2, 6), rows(1, 3, 1), rows(3, 6, 2)]
    split = [opened.rows(given) for given in requests]
    answers = iter(opened.run([row for rows in split for row in rows]))
    for given, chosen in zip(requests, split, strict=True):
        found = served.joined([next(answers) for _ in chosen])["scores"]
        own = words[1](**{name: torch.from_numpy(value) for name, value in given.items()})["scores"]
        np.testing.assert_allclose(found, own.numpy(), rtol=1e-5, atol=1e-5)


def test_texts_of_any_number_and_length_are_what_encode_gives(sentences):
    folder, model = sentences
    opened = served.opened(folder)
    texts = sorted(minilm.split()[1], key=len)[::64]
    rows = opened.rows({served.TEXT: np.array(texts, dtype=object)})
    found = served.joined(opened.run(rows[1:] + rows[:1]))[served.EMBEDDING]
    np.testing.assert_allclose(found, model.encode(texts[1:] + texts[:1]), atol=2e-3)


def test_a_row_costs_its_tokens(sentences):
    opened = served.opened(sentences[0])
    texts = ["", "a text", "word " * 2000]
    rows = opened.rows({served.TEXT: np.array(texts, dtype=object)})
    most = opened.model.max_seq_length
    assert [row.tokens for row in rows] == [2, 4, most]
    tokenized = opened.model.tokenizer(texts, truncation=True, max_length=most)["input_ids"]
    assert [len(ids) for ids in tokenized] == [2, 4, most]


def test_full_collections_pass_over_libraries(words):
    """They are half a million objects; a model is not among them, so that one that is replaced is freed."""
    gc.unfreeze()
    service = served.Service(words[0])
    try:
        assert gc.get_freeze_count() > 100_000
        model = weakref.ref(service.served)
        service.reload()
        gc.collect()
        assert model() is None
    finally:
        gc.unfreeze()

"""What a server computes has sizes that are warm."""

import importlib.util
import sys

import numpy as np
import pytest
from suites.real_minilm import minilm
from suites.served import EXAMPLES

if importlib.util.find_spec("kserve") is None:
    pytest.skip("an environment without servers", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))
import served


def test_rows_are_powers_of_two_and_the_most():
    assert served.warm_sizes(1, (8,)) == [(1, 8)]
    assert served.warm_sizes(12, (8,)) == [(1, 8), (2, 8), (4, 8), (8, 8), (12, 8)]
    assert served.warm_sizes(16, (8, 9))[-2:] == [(16, 8), (16, 9)]


def test_texts_of_any_number_and_length_have_sizes_that_are_warm(sentences, monkeypatch):
    folder, model = sentences
    warm = served.warm_sizes(8, (16, 64, 256))
    opened = served.opened(folder, warm)
    encoder = next(m for m in opened.model.modules() if type(m).__name__ == "QuantizedModel")
    asked, forward = [], type(encoder).forward

    def noted(self, **given):
        asked.append(tuple(given["input_ids"].shape))
        return forward(self, **given)

    texts = sorted(minilm.split()[1], key=len)[::16]
    own = model.encode(texts)
    monkeypatch.setattr(type(encoder), "forward", noted)
    for start, count in ((0, 1), (1, 3), (4, 20), (24, 2)):
        requests = [{served.TEXT: np.array([text], dtype=object)} for text in texts[start : start + count]]
        found = [each[served.EMBEDDING][0] for each in opened.run(requests)]
        np.testing.assert_allclose(found, own[start : start + count], atol=2e-3)
    assert len(asked) > 6
    assert set(asked) <= set(warm)

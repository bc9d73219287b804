"""Texts of mixed lengths (benchmarks/ragged.py): what is measured is what the tables say."""

import json
import sys
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


def test_padding_is_the_tokens_of_padded_batches_for_each_real_one(module):
    assert module("ragged").padding([[[1], [1] * 3], [[1, 2]]]) == pytest.approx(8 / 6)
    assert module("ragged").padding([[[1, 2], [3, 4]]]) == 1.0


def test_vectors_leave_padding_out(module):
    engines = module("ragged_engines")
    ids = [[5, 6, 7], [8]]
    batch = engines.padded(ids)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    hidden = torch.arange(12.0).reshape(2, 3, 2)
    found = engines.vectors_of(hidden, ids)
    for row, own in zip(found, (hidden[0].mean(0), hidden[1, 0]), strict=True):
        np.testing.assert_allclose(row, own / own.norm(), rtol=1e-6)
    np.testing.assert_allclose(engines.vectors_of(np.eye(2) * 3, ids), np.eye(2))


def test_random_batches_are_the_same_for_all_engines(module):
    engines = module("ragged_engines")
    batches = [engines.random_ids(number) for number in range(200)]
    assert batches == [engines.random_ids(number) for number in range(200)]
    counts, lengths = {len(ids) for ids in batches}, {len(own) for ids in batches for own in ids}
    assert (min(counts), max(counts), min(lengths), max(lengths)) == (1, 32, 3, 512)
    assert all(own[0] == 101 and own[-1] == 102 for ids in batches for own in ids)


def test_texts_do_not_calibrate_and_are_the_same_each_time(module):
    texts = module("ragged_texts")
    try:
        calibration = set(texts.calibration())
    except LookupError as error:
        pytest.skip(str(error))
    for corpus in ("news", "docs", "docstrings"):
        found = texts.chosen(corpus, 50)
        assert found == texts.chosen(corpus, 50)
        assert len(set(found)) == 50
        assert not calibration & set(found)


def test_docstrings_have_mixed_lengths(module):
    lengths = sorted(map(len, module("ragged_texts").docstrings()))
    assert len(lengths) > 500
    assert lengths[len(lengths) // 10] < 80
    assert lengths[-len(lengths) // 20] > 600


def test_a_worker_answers_commands(module, tmp_path):
    """The processes of two engines, one that doubles and one that cannot be made."""
    script = tmp_path / "doubles.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {BENCHMARKS!r})\n"
        "from worker import replies\n"
        "def begin():\n"
        "    print('noise')\n"
        "    if sys.argv[1:]: raise SystemExit('no engine: ' + sys.argv[1])\n"
        "    return lambda line: 2 * int(line)\n"
        "replies(begin)\n"
    )
    worker = module("worker").Worker(script)
    try:
        assert worker.ready() is not None
        assert [worker.ask(number) for number in (1, 21)] == ["2\n", "42\n"]
        with pytest.raises(RuntimeError, match="ValueError"):
            worker.ask("x")
    finally:
        worker.stop()
    failed = module("worker").Worker(script, "bad")
    try:
        assert failed.ready() is None
        failed.process.wait()
        assert failed.reason() == "no engine: bad"
    finally:
        failed.stop()


def test_measured_compares_with_the_right_engine(module, tmp_path):
    ragged, work = module("ragged"), module("ragged_engines").Work
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    turned = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    ids = {"a": [[[1], [2]], [[3]]]}

    class Worker:
        def __init__(self, table):
            self.work = work(lambda batch: table[[own[0] - 1 for own in batch]], ids, ids)

        def ask(self, line):
            return self.work(line)

    found = ragged.measured({"fp32": Worker(vectors), "other": Worker(turned)}, "a", 3, 2)
    assert found["fp32"]["cosine"].value == pytest.approx(1.0, abs=1e-5)
    assert found["other"]["worst cosine"].value == pytest.approx(0.7071, abs=1e-4)
    assert found["other"]["cosine"].value == pytest.approx((2 + 0.5**0.5) / 3, abs=1e-5)
    assert set(found["other"]) == {"texts", "speed", "CPU", "cosine", "worst cosine"}
    random = ragged.of_random({"fp32": Worker(torch.zeros(30000, 2))}, 25, 16)
    assert random["fp32"]["p99"].value >= random["fp32"]["p50"].value > 0


def test_another_checkout_comes_first_on_the_path_of_its_engines(module, tmp_path):
    ragged = module("ragged")
    assert ragged.environment("nc-static-before", tmp_path)["PYTHONPATH"].startswith(str(tmp_path))
    assert not ragged.environment("nc-static", tmp_path)["PYTHONPATH"].startswith(str(tmp_path))
    assert json.dumps(sorted(ragged.ENGINES)).count("-before") == 2
    assert sys.path  # the process that measures imports no nc

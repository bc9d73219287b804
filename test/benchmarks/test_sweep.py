"""The sweep over architectures: what its page says of rows, and how configurations become small."""

from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
ROW = {
    "source": "timm", "family": "vgg", "status": "ok", "backend": "native", "engine": "native", "captured": True, "asked": 3, "int8": 2,
    "speed": 1.5, "sqnr_db": 31.0, "sqnr_db_other": 30.0, "reference_db": 90.0, "reference_db_other": 40.0, "other": "free",
    "commit": "abc", "cpu": "C", "isa": "avx2", "python": "3", "torch": "2", "torchvision": "0", "timm": "1", "transformers": "5",
}  # fmt: skip


def row(model, **changed):
    return {"name": f"timm:vgg:{model}", "model": model, **ROW, **changed}


@pytest.fixture
def sweep_page(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("sweep_page")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, ""),
        ({"reference_db": 19.0}, "the engine is 19 dB from its reference"),
        ({"reference_db_other": 12.0}, "at another batch size"),
        ({"reference_db": 12.0, "sqnr_db": 15.0}, ""),  # as far as verification allows
        ({"shapes_other": "[[2]] became [[3]]"}, "other shapes"),
        ({"status": "failed", "error": "CaptureError", "cause": "E: u0 in /a/b/c.py:7"}, "CaptureError: E: uN in c.py:N"),
    ],
)
def test_a_row_goes_through_only_with_confirmed_numbers(sweep_page, changed, text):
    found = sweep_page.problem(row("vgg11", **changed))
    assert (text in found) if text else not found


def test_the_page_counts_what_ran_and_lists_what_did_not(sweep_page):
    from sweep_models import Entry

    rows = [
        row("good"),
        row("bad", status="failed", error="CaptureError", cause="E: why", captured=False, typed=True),
        row("late", status="failed", error="timeout", reason="not ready"),
        row("large", status="not built", reason="900 million parameters"),
    ]
    text = sweep_page.page(rows, [Entry("timm", "vgg", r["model"]) for r in rows] + [Entry("timm", "vgg", "never")])
    assert "| all | 5 | 4 | 1 | 3 | 2 | 1 | 33.3% |" in text
    assert "* 1: CaptureError: E: why<br>bad" in text
    assert "* large (vgg): 900 million parameters" in text
    assert "* 1: timeout: not ready<br>The sweep's limit" in text
    assert "(1): never." in text


def test_configurations_become_small_and_keep_their_special_tokens_apart(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from sweep_transformers import _wanted

    config = transformers.BertConfig(pad_token_id=0, bos_token_id=30001, eos_token_id=30002)
    wanted = _wanted(config, layers_only=False)
    assert wanted["num_hidden_layers"] == 2
    assert wanted["hidden_size"] == 64
    assert 0 < wanted["bos_token_id"] != wanted["eos_token_id"] < wanted["vocab_size"] == 128
    assert "pad_token_id" not in wanted

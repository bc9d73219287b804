"""The sweep over architectures: what its page says of rows, and how configurations become small."""

from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
FOUND = {
    "status": "ok", "engine": "native", "captured": True, "asked": 3, "int8": 2, "speed": 1.5, "sqnr_db": 31.0, "sqnr_db_other": 30.0,
    "reference_db": 90.0, "reference_db_other": 40.0, "other": "free",
}  # fmt: skip


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, ""),
        ({"reference_db": 19.0}, "the engine is 19 dB from its reference"),
        ({"reference_db_other": 12.0}, "at another batch size"),
        ({"reference_db": 12.0, "sqnr_db": 15.0}, ""),  # as far as verification allows
        ({"shapes_other": "[[2]] became [[3]]"}, "other shapes"),
        (
            {"status": "failed", "error": "CaptureError", "cause": "E: u0 in /a/b/c.py:7"},
            "CaptureError: E: uN in c.py:N",
        ),
    ],
)
def test_an_architecture_goes_through_only_with_confirmed_numbers(changed, text):
    found = pytest.importorskip("sweep_verdict").problem({**FOUND, **changed})
    assert (text in found) if text else not found


def test_the_page_counts_what_ran_and_lists_what_did_not(tmp_path):
    verdict, rows, page = (
        pytest.importorskip(name) for name in ("sweep_verdict", "results_rows", "results_architectures")
    )
    from sweep_models import Entry

    ran = {
        "good": FOUND,
        "bad": {
            "status": "failed",
            "error": "CaptureError",
            "cause": "E: why",
            "captured": False,
            "typed": True,
        },
        "late": {"status": "failed", "error": "timeout", "reason": "not ready"},
        "large": {"status": "not built", "reason": "900 million parameters"},
    }
    file = tmp_path / "rows.jsonl"
    for model, found in ran.items():
        what, figures, note = verdict.stored(Entry("timm", "vgg", model), "native", found)
        rows.append(file, what, figures, note=note)
    rows.append(file, {"source": "timm", "status": "listed"}, {"listed": rows.Figure(5, "architectures")})
    stored = {page.FILE: rows.read(file)}
    assert "| all | 5 | 4 | 1 | 3 | 1 | 1 | 33.3% |" in page.summary(stored)
    assert "* 2 of 3 operators" in page.facts(stored)
    assert "* 1: CaptureError: E: why<br>bad" in page.failures(stored)
    assert "* 1: timeout: not ready<br>The sweep has a limit" in page.failures(stored)
    assert "* large (vgg): 900 million parameters" in page.not_built(stored)
    assert "| vgg | good | native |  | 2 / 3 | 31 | 30 | 1.50 |" in page.table(stored)


def test_configurations_become_small_and_keep_their_special_tokens_apart():
    transformers = pytest.importorskip("transformers")
    from sweep_transformers import _wanted

    config = transformers.BertConfig(pad_token_id=0, bos_token_id=30001, eos_token_id=30002)
    wanted = _wanted(config, layers_only=False)
    assert wanted["num_hidden_layers"] == 2
    assert wanted["hidden_size"] == 64
    assert 0 < wanted["bos_token_id"] != wanted["eos_token_id"] < wanted["vocab_size"] == 128
    assert "pad_token_id" not in wanted

"""The comparison with other tools' low-bit weights.

The figures of a row, which weights they are of, and what the page says.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
LAYERS = [f"blocks.{i}.{j}" for i in (0, 1) for j in (0, 2)]


@pytest.fixture
def lowbit(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("lowbit")


class Net(nn.Module):
    """Logits of 9 words for each token, [B, T, 9]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 128)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 128)) for _ in range(2))
        )
        self.head = nn.Linear(128, 9)
        with torch.no_grad():
            self.head.weight *= 30  # first choices that rounding can change

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


@pytest.fixture
def subject(lowbit, monkeypatch):
    monkeypatch.setitem(lowbit.BLOCKS, "tiny", "blocks")
    batches = [{"ids": torch.randint(9, (2, 5)), "labels": torch.randint(9, (2, 5))} for _ in range(3)]
    batches[1]["labels"][0, :3] = lowbit.IGNORED
    return lowbit.Subject("tiny", Net().eval(), [{"ids": b["ids"]} for b in batches], batches, None, "blocks")


def rounded(weight, bits=4, group=64):
    """Dequantized symmetric codes, and nothing of nc."""
    w = weight.detach().reshape(-1, group)
    scale = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((w / scale).round() * scale).reshape(weight.shape)


def weights_of(subject, bits=4):
    return {f"{n}.weight": rounded(subject.model.get_submodule(n).weight, bits) for n in LAYERS}


def row_of(lowbit, form="int4-g64"):
    return lowbit.Row("tiny", form, "other", "RTN", "fast")


def test_a_rows_figures_are_those_of_float64_token_by_token(lowbit, subject):
    row, weights = row_of(lowbit), weights_of(subject)
    lowbit.judge_weights(subject, lowbit.FORMATS["int4-g64"], weights, row)
    other = Net().eval()
    other.load_state_dict({**subject.model.state_dict(), **weights})
    kl, same, nll, fp32_nll = [], [], [], []
    for batch in subject.evaluation:
        for ids, labels in zip(batch["ids"], batch["labels"], strict=True):
            p, q = (model.double()(ids[None])[0].softmax(-1).tolist() for model in (subject.model, other))
            for i, label in enumerate(labels.tolist()):
                if label != lowbit.IGNORED:
                    kl.append(sum(a * math.log(a / b) for a, b in zip(p[i], q[i], strict=True)))
                    same.append(p[i].index(max(p[i])) == q[i].index(max(q[i])))
                    nll.append(-math.log(q[i][label]))
                    fp32_nll.append(-math.log(p[i][label]))
    count = len(kl)
    assert (row.error, row.levels, count) == ("", 15, 27)
    assert row.kl == pytest.approx(sum(kl) / count, rel=1e-3)
    assert row.kl > 1e-3
    assert sum(same) < count
    assert row.top1 == pytest.approx(100 * sum(same) / count)
    assert row.perplexity == pytest.approx(math.exp(sum(nll) / count), rel=1e-6)
    assert row.fp32_perplexity == pytest.approx(math.exp(sum(fp32_nll) / count), rel=1e-6)


def test_a_factor_of_the_input_belongs_to_the_weight(lowbit, subject):
    plain, scaled = row_of(lowbit), row_of(lowbit)
    weights = weights_of(subject)
    lowbit.judge_weights(subject, lowbit.FORMATS["int4-g64"], weights, plain)
    weights[f"{LAYERS[0]}.weight"] = weights[f"{LAYERS[0]}.weight"] / 4
    weights[f"{LAYERS[0]}.input_scale"] = torch.full((128,), 4.0)
    lowbit.judge_weights(subject, lowbit.FORMATS["int4-g64"], weights, scaled)
    assert (scaled.kl, scaled.perplexity) == (plain.kl, plain.perplexity)


def test_weights_that_are_missing_unchanged_or_of_more_bits_give_no_figures(lowbit, subject):
    def judged(weights):
        row = row_of(lowbit)
        lowbit.judge_weights(subject, lowbit.FORMATS["int4-g64"], weights, row)
        assert row.kl == 0
        return row.error

    weights = weights_of(subject)
    last = f"{LAYERS[-1]}.weight"
    assert "missing" in judged({k: v for k, v in weights.items() if k != last})
    first = f"{LAYERS[0]}.weight"
    assert "left as they were" in judged({**weights, first: subject.model.state_dict()[first]})
    assert "16" in judged(weights_of(subject, bits=8))


def test_another_tools_process_hands_over_what_is_judged(lowbit, subject, tmp_path, monkeypatch):
    """The process is a program that copies a file: bits, time and data are those of its metadata."""
    (tmp_path / "settings.json").write_text(json.dumps({"setting": "fast"}))
    weights = weights_of(subject, bits=3)
    told = {"data": "1", "seconds": "2.5", "scale_bits": "16", "zero_bits": "3"}
    save_file(weights, tmp_path / "made.safetensors", metadata=told)
    monkeypatch.setattr(lowbit, "FOLDER", tmp_path)
    copy = (
        f"import shutil, sys; shutil.copy({str(tmp_path / 'made.safetensors')!r}, "
        "sys.argv[sys.argv.index('--out') + 1])"
    )
    (tmp_path / "with_copy.py").write_text(copy)
    (tmp_path / "with_refusal.py").write_text("raise SystemExit('not offered: 3 bits')")
    row = lowbit.peer(subject, "int3-g64", "copy", "RTN", tmp_path, sys.executable)
    direct = row_of(lowbit)
    lowbit.judge_weights(subject, lowbit.FORMATS["int3-g64"], weights, direct)
    assert (row.error, row.data, row.seconds, row.bits) == ("", True, 2.5, 3 + 19 / 64)
    assert row.kl == direct.kl > 0
    refused = lowbit.peer(subject, "int3-g64", "refusal", "RTN", tmp_path, sys.executable)
    assert refused.error == "not offered: 3 bits"


def test_a_row_on_other_data_is_refused(lowbit):
    kept, row = row_of(lowbit), row_of(lowbit)
    kept.fp32_perplexity, row.fp32_perplexity = 12.54, 12.5401
    lowbit.compare(row, [kept])
    row.fp32_perplexity = 6.48
    with pytest.raises(SystemExit, match="other data"):
        lowbit.compare(row, [kept])
    row.setting = "long"
    lowbit.compare(row, [kept])


def rows(lowbit, **kls):
    """One row per tool; "nc" has two without data."""
    found = [
        lowbit.Row(
            "antiberty", "int4-g64", "nc", m, "fast", m == "GPTQ", 4.25, 16, kls[m[:3].lower()], 90, 2, 2
        )
        for m in ("RTN wls", "GPTQ")
    ]
    found += [
        lowbit.Row("antiberty", "int4-g64", "nncf", m, "fast", m == "GPTQ", b, 16, kl, 90, 2, 2)
        for m, b, kl in kls["others"]
    ]
    return found


@pytest.mark.parametrize(
    ("others", "worse"),
    [
        ([("RTN", 4.25, 0.03), ("GPTQ", 4.25, 0.02)], []),
        ([("RTN", 4.25, 0.019), ("GPTQ", 4.25, 0.02)], ["without data"]),
        ([("RTN", 4.25, 0.03), ("GPTQ", 4.25, 0.009)], ["best"]),
        ([("RTN", 4.25, 0.009)], ["best", "without data"]),
        ([("RTN", 4.5, 0.001), ("GPTQ", 4.5, 0.001)], []),  # more bits: marked, and not compared
    ],
)
def test_the_page_names_each_row_that_beats_ours_at_equal_bits(lowbit, tmp_path, others, worse):
    file = tmp_path / "rows.jsonl"
    for row in rows(lowbit, rtn=0.02, gpt=0.01, others=others):
        lowbit.store(file, row)
    page, stored = pytest.importorskip("results_lowbit"), pytest.importorskip("results_rows").read(file)
    found = page.verdicts(stored)
    assert [line.split(", ")[2].split(":")[0] for line in found] == worse
    text = page.tables({page.FILE: stored}) + page.worse({page.FILE: stored})
    assert all(line in text for line in found)
    assert text.count("4.50 (more)") == sum(b > 4.25 for _, b, _ in others)
    assert "nncf 3." in page.about({page.FILE: stored})


def test_a_row_comes_back_from_its_file(lowbit, tmp_path):
    file = tmp_path / "rows.jsonl"
    good, failed = rows(lowbit, rtn=0.02, gpt=0.01, others=[])[0], row_of(lowbit)
    failed.tool, failed.error = "nncf", "not offered: 3 bits"
    for row in (good, failed):
        lowbit.store(file, row)
    assert lowbit.read(file) == [good, failed]

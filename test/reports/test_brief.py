"""What `print(report)` shows: at most 25 lines, in one order, and names that a configuration takes."""

import dataclasses
import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from suites.small_llama import random_llama
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
)

import nc
from nc.backends.verdict import Verdict
from nc.calibration.costly import COSTLY, FLOOR
from nc.graph.accuracy import Accuracy
from nc.graph.plan import Applied
from nc.graph.products import UnknownProduct
from nc.graph.qdq import Finding
from nc.numerics.metrics import relative_error
from nc.reports.weight_report import WeightReport
from nc.text.fitted import LINES, REST, Section, fitted

DOCS = Path(__file__).parents[2] / "docs"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(100, 32), nn.LSTM(32, 32, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(64, 5)

    def forward(self, x):
        return self.tags(self.lstm(self.words(x))[0])


def bert():
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128}
    return BertModel(BertConfig(vocab_size=200, **sizes)), torch.randint(5, 200, (4, 12))


def mobilenet():
    return MobileNetV2ForImageClassification(MobileNetV2Config(image_size=32, num_labels=9)), pixels()


def llama():
    return random_llama(num_hidden_layers=9, vocab_size=200), torch.randint(5, 200, (2, 12))


def pixels():
    return torch.randn(4, 3, 32, 32)


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)), torch.randn(8, 16)


def norm():
    return nn.Sequential(nn.LayerNorm(16), nn.GELU()), torch.randn(8, 16)


MODELS = {
    "mlp": (mlp, nc.StaticQuantConfig()),
    "bert": (bert, nc.StaticQuantConfig()),
    "bert, auto": (bert, "auto"),
    "mobilenet, auto": (mobilenet, "auto"),
    "tagger": (lambda: (Tagger(), torch.randint(0, 100, (2, 12))), nc.DynamicQuantConfig()),
    "nothing to quantize": (norm, nc.StaticQuantConfig()),
    "all excluded": (mlp, nc.StaticQuantConfig().exclude("0", "2")),
    "gptq": (llama, nc.GPTQConfig()),
    "rtn": (llama, nc.WeightOnlyConfig("int4", group_size=32)),
    "simulated": (
        mlp,
        nc.FakeQuantConfig(weight=nc.FakeTensorSpec(dtype="int4", granularity="per_group", group_size=16)),
    ),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def made(request):
    torch.manual_seed(0)
    make, config = MODELS[request.param]
    model, x = make()
    data = [x, x.flip(0), x.roll(1, -1)]
    q_model = nc.quantize(
        model.eval(), config, lambda p: [p(each) for each in data], example_inputs=x, strict=False
    )
    return request.param, nc.report(q_model)


def test_lines_and_columns(made):
    lines = str(made[1]).splitlines()
    assert len(lines) <= LINES
    # a line that is longer is one word, or a row of a table
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines), lines
    assert lines[-1] == "All operators, kernels and checks: report(details=True)"


def test_the_order_is_the_same_for_all(made):
    heads = (
        "",
        "speed",
        "error: ",
        "size: ",
        "not int8, and why:|float, and why:",
        "most error|most time|largest loss",
        "All ",
    )
    text = str(made[1])
    found = [match.start() for head in heads if (match := re.search(rf"^(?:{head})", text, re.MULTILINE))]
    assert found == sorted(found)
    assert len(found) >= 4


def test_nothing_in_int8_is_said_first_with_the_reason(made):
    first = str(made[1]).splitlines()[0]
    expected = {
        "nothing to quantize": "nothing runs in int8: the model has no product of tensors",
        "all excluded": 'nothing runs in int8: "0", "2": fp32 was asked for',
    }
    assert ("nothing runs in int8" in first) == (made[0] in expected)
    assert expected.get(made[0], "") in first


def test_each_line_of_the_details_is_explained(made, monkeypatch):
    if isinstance(made[1], WeightReport):
        pytest.skip("its lines are sentences")
    monkeypatch.syspath_prepend(str(DOCS))
    page = importlib.import_module("make_reference")
    sys.modules.pop("make_reference")
    known = [name.strip() for names in page.DETAILS for name in names.replace("`", "").split(",")]
    algorithms = [applied.algorithm for applied in made[1].algorithms]
    for line in made[1].figures().splitlines():
        parts = ((name.partition("…")[0].strip() or name.partition("…")[2].strip(), name) for name in known)
        named = any(line.startswith(part) or ("…" in name and part in line) for part, name in parts)
        assert named or line.partition(":")[0] in algorithms or re.match(r"\d+ operators? with", line), line


def test_names_can_be_copied(made):
    text = " ".join(str(made[1]).split())
    names = {op.operator for op in getattr(made[1], "ops", getattr(made[1], "layers", ()))}
    quoted = [json.loads(name) for name in re.findall(r'"(?:[^"\\]|\\.)+"', text)]
    assert set(quoted) - {"auto", "minmax"} <= names  # range algorithms that a step may name
    assert quoted or made[0] in ("simulated", "mlp")


@pytest.mark.parametrize(("decibels", "share"), [(40, 0.01), (20, 0.1), (0, 1.0), (math.inf, 0.0)])
def test_decibels_as_a_share(decibels, share):
    assert relative_error(decibels) == pytest.approx(share)
    if math.isfinite(decibels):
        noise = torch.randn(10_000, dtype=torch.float64)
        signal = noise.flip(0) / share
        assert float(noise.norm() / signal.norm()) == pytest.approx(relative_error(decibels))


def test_profiled_operators_are_those_that_take_most():
    model, _ = mlp()
    q_model = nc.quantize(model.eval(), nc.DynamicQuantConfig(), example_inputs=torch.randn(64, 16))
    report = q_model.report(profile_inputs=torch.randn(64, 16))
    (line,) = [line for line in str(report).splitlines() if line.startswith("most time: ")]
    shares = sorted(((op.share or 0.0, op.operator) for op in report.ops), reverse=True)
    assert line.startswith(f'most time: "{shares[0][1]}" {shares[0][0]:.0%}')


def test_what_does_not_fit_is_counted():
    head = ["a", "b"]
    items = [f"- {i}" for i in range(40)]
    sections = [Section("few:", items, 5), Section("rest:", items, REST), Section("none:", [], 3)]
    lines = fitted(head, sections, "foot").splitlines()
    assert len(lines) == LINES
    assert lines[2:7] == ["few:", "- 0", "- 1", "- 2", "- … 37 more"]
    assert lines[7:9] == ["rest:", "- 0"]
    assert lines[-2] == f"- … {40 - (LINES - 1 - 7 - 2)} more"
    whole = fitted(head, [Section("all:", items[:3], 5)], "foot")
    assert whole == "a\nb\nall:\n- 0\n- 1\n- 2\nfoot"


LONG = "a reason that takes very many words to tell " * 40


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    model, x = mlp()
    return nc.quantize(
        model.eval(), nc.StaticQuantConfig(), lambda p: p(x), example_inputs=x, measure=False
    ).report()


def changed(report, **fields):
    return dataclasses.replace(report, ops=tuple(dataclasses.replace(op, **fields) for op in report.ops))


def test_no_text_breaks_the_limit(small):
    """Whatever engines, algorithms and errors say, and however long names are."""
    name = f"{'block.' * 60}layer"
    ops = [
        dataclasses.replace(op, operator=f"{name}{i}", ran="fp32", reason=f"{i} {LONG}")
        for i, op in enumerate(small.ops * 9)
    ]
    rows = (("tried", "error"), (name, LONG), (LONG,))
    worst = dataclasses.replace(
        small,
        ops=tuple(ops),
        health=tuple(Finding(COSTLY, f"{name}{i}", 0.2, LONG) for i in range(5)),
        accuracy=Accuracy(sqnr_db=3.0, data=LONG),
        algorithms=(Applied(FLOOR, (), LONG), Applied("auto", (), LONG, rows)),
        changes=(LONG,) * 9,
        model="M" * 300,
    )
    text = str(worst)
    assert len(text.splitlines()) <= LINES
    assert "nothing runs in int8" in text.replace("\n    ", " ")
    assert text.splitlines()[-1].startswith("All operators")


def test_a_reason_that_is_too_long_is_cut_and_not_left_out(small):
    text = str(changed(small, ran="fp32", reason=LONG))
    assert text.count("a reason that takes") > 2
    assert " …\n" in text


def test_an_engine_that_says_nothing_runs_nothing_in_int8(small):
    text = str(changed(small, ran="unknown", reason=""))
    assert "nothing runs in int8" in text.splitlines()[0]
    assert "the engine does not say" in text.replace("\n    ", " ")


def test_what_load_changed_and_weights_that_stay_float_are_said(small):
    unknown = UnknownProduct(operator="experts.mm", weight="experts.w", shape=(4, 1000, 1000))
    text = str(dataclasses.replace(small, changes=("0: codes are smaller",), unknown_products=(unknown,)))
    assert "\n0: codes are smaller\n" in text
    assert text.index("not int8, and why") < text.index("4.0 M weights stay fp32")


def test_a_model_that_is_slower_says_so():
    found = Verdict(
        fp32_ms=0.1, engine_ms=0.11, calls=9, threads=1, rounds=9, round_ratio=0.91, interval=(0.86, 0.95)
    )
    assert found.brief("int8") == (
        "SLOWER than fp32: int8 0.11 ms, fp32 0.10 ms (example inputs, 1 thread): 0.91 times as fast "
        "(0.86 to 0.95)"
    )

"""What a notebook shows of the last value of a cell, and Python of a value at its prompt."""

import html
import re

import pytest
import torch
from models import MLP, quantized

import nc

X = torch.randn(8, 16)
BACKEND = "reference"


@pytest.fixture(scope="module")
def shown():
    torch.manual_seed(0)
    model = MLP().eval()
    q = quantized(model, X, None, BACKEND)
    low_bit = nc.quantize(model, nc.WeightOnlyConfig("int8", group_size=-1), measure=False)
    front = nc.tune(
        model,
        X,
        lambda m: m(X),
        lambda m: 1.0,
        candidates={"dynamic": nc.DynamicQuantConfig()},
    )
    return {
        "report": q.report(),
        "low-bit report": nc.report(low_bit),
        "model": q,
        "plan": nc.describe(model, nc.StaticQuantConfig(), X, backend=BACKEND),
        "low-bit plan": nc.describe(model, nc.WeightOnlyConfig("int8", group_size=-1)),
        "front": front,
    }


def test_tables_are_shown(shown):
    for name, value in shown.items():
        found = value._repr_html_()
        text = html.unescape(html.unescape(found))
        assert "fc1" in text or name in ("model", "front"), name
        assert found.startswith(("<pre>", '<iframe srcdoc="')), name
        assert len(re.findall("<(pre|iframe)", found)) == 1, "one element, whose texts are escaped"


def test_a_page_is_apart_from_the_notebook(shown):
    """Its rules of style reach nothing outside, and no quote in it ends the attribute."""
    inside = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', shown["report"]._repr_html_())
    assert inside, "a quote is not escaped"
    assert html.unescape(inside[1]).startswith("<!doctype html>")


def test_the_prompt_shows_what_print_shows(shown):
    for name in ("report", "low-bit report", "plan", "low-bit plan", "front"):
        assert repr(shown[name]) == str(shown[name]), name
    assert repr(shown["model"]) == "QuantizedModel(backend='reference')"

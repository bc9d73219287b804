"""The model card that `nc.save(card=True)` writes."""

import re

import pytest
import torch
from torch import nn

import nc
from nc.errors import ArtefactError

LAYERS = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["int8", "int4"])
def q_model(request):
    if request.param == "int8":
        config, backend = nc.StaticQuantConfig(), "reference"
        return nc.quantize(LAYERS, config, lambda m: m(X), example_inputs=X, backend=backend)
    return nc.quantize(LAYERS, nc.WeightOnlyConfig("int4", group_size=32), measure=False)


def load(folder):
    low_bit = "nc-weights" in (folder / "model.json").read_text()
    return nc.load(folder, **({"model": LAYERS} if low_bit else {"backend": "reference"}))


def test_the_card_has_the_report_and_how_to_load(q_model, tmp_path):
    nc.save(q_model, tmp_path / "small", card=True)
    card = (tmp_path / "small" / "README.md").read_text()
    head, tags, text = card.partition("---\n\n# small")[0], re.findall(r"^- (\S+)$", card, re.MULTILINE), card
    assert head.startswith("---\nlibrary_name: nc\n")
    assert "x86-64" in tags
    assert str(nc.report(q_model)) in text
    assert "nc.load('small'" in text
    assert torch.equal(load(tmp_path / "small")(X), q_model(X))


def test_without_it_there_is_no_card(q_model, tmp_path):
    nc.save(q_model, tmp_path / "small")
    assert not (tmp_path / "small" / "README.md").exists()


def test_a_card_as_it_was_written_is_replaced_with_the_artefact(q_model, tmp_path):
    nc.save(q_model, tmp_path / "small", card=True)
    nc.save(q_model, tmp_path / "small", card=True)
    nc.save(q_model, tmp_path / "small")
    assert not (tmp_path / "small" / "README.md").exists()


@pytest.mark.parametrize(
    "edit", [lambda t: t + "My licence.\n", lambda t: t.replace("licence", "law"), lambda _: "mine"]
)
def test_an_edited_card_is_kept(q_model, tmp_path, edit):
    nc.save(q_model, tmp_path / "small", card=True)
    card = tmp_path / "small" / "README.md"
    card.write_text(edit(card.read_text()))
    mine = card.read_text()
    for again in (True, False):
        with pytest.raises(ArtefactError, match=re.escape("README.md")):
            nc.save(q_model, tmp_path / "small", card=again)
    assert card.read_text() == mine
    assert torch.equal(load(tmp_path / "small")(X), q_model(X))

"""Texts that reach terminals and pages: nothing in them steers either."""

import hashlib
import json

import pytest
import torch
from click.testing import CliRunner

import nc
from nc.cli.main import main
from nc.errors import ArtefactMissingError, InputError, NCError, NCWarning
from nc.process.warn import warn
from nc.text.html_page import escaped
from nc.text.plain import MOST, plain, said, shown
from nc.text.table import format_table

#: Letter → its escape.
HOSTILE = {"\x1b": "\\x1b", "\x9b": "\\x9b", "\r": "\\x0d", "\udc80": "\\udc80", "\u202e": "\\u202e",
           "\u2066": "\\u2066", "\u200b": "\\u200b", "\u2028": "\\u2028", "\U000e0041": "\\U000e0041"}  # fmt: skip


@pytest.mark.parametrize(("letter", "escape"), HOSTILE.items())
def test_what_steers_is_escaped_wherever_text_goes(letter, escape):
    text = f"a{letter}b"
    assert plain(text) == f"a{escape}b"
    assert escaped(text) == f"a{escape}b"
    assert f"a{escape}b" in format_table([("name",), (text,)])
    assert str(InputError(text)) == f"a{escape}b"
    assert str(ArtefactMissingError(text)) == f"a{escape}b"
    with pytest.warns(NCWarning) as caught:
        warn(text)
    assert str(caught[0].message) == f"a{escape}b"


def test_other_letters_stay_as_they_are():
    text = "größe 大きさ naïve — “quoted”\n\tnext line"
    assert plain(text) == text


def test_long_names_are_shortened_and_long_texts_are_not():
    assert len(plain("x" * 10_000)) < MOST + 50
    assert "(10000 characters)" in plain("x" * 10_000)
    assert plain("word " * 10_000) == "word " * 10_000
    assert plain("x" * MOST) == "x" * MOST


class Unreadable(BaseException):
    def __str__(self):
        raise ValueError

    __repr__ = __str__


def test_values_that_cannot_be_shown_are_named_by_their_type():
    assert said(Unreadable()) == "Unreadable"
    assert shown(Unreadable()) == "a value of type Unreadable"
    assert shown(10**6000) == "a value of type int"
    assert len(shown("x" * 1000)) < 130
    assert said(ValueError("\x1b[31m")) == r"ValueError: \x1b[31m"


class Model(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, torch.nn.Linear(4, 4))
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(x)


@pytest.mark.parametrize("name", ["a\udc80", "a\x1b[31m", "a\u202eb", "n" * 10_000])
def test_module_names_of_any_kind(name, tmp_path):
    """Reports, plans, fronts and pages can be printed and written, and hold no letter that steers."""
    model, x = Model(name).eval(), torch.randn(2, 4)
    q_model = nc.quantize(model, nc.DynamicQuantConfig(), example_inputs=x, measure=False)
    report, plan = q_model.report(), nc.describe(model, nc.DynamicQuantConfig(), x)
    report.save(tmp_path / "page.html")
    report.save(tmp_path / "report.json")
    json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    weights = nc.quantize(model, nc.RTNConfig(group_size=4), measure=False)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for text in (str(report), report.text(details=True), str(plan), str(nc.report(weights)), page):
        assert plain(text) == text
        text.encode()
    for text in (report.text(details=True), str(plan)):
        assert max(map(len, text.splitlines())) < 2 * MOST
    with pytest.raises(NCError) as caught:
        nc.prepare(
            model, nc.StaticQuantConfig().set_local(f"no{name}", nc.DynamicQuantConfig()), example_inputs=x
        )
    assert plain(caught.value) == str(caught.value)


def test_versions_that_are_null_are_a_typed_error(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    q_model = nc.quantize(model, nc.DynamicQuantConfig(), example_inputs=torch.randn(2, 4), measure=False)
    nc.save(q_model, tmp_path / "model")
    change(tmp_path / "model", versions=None)
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "model")])
    assert done.exit_code == 2
    assert "model.json: not what nc writes" in done.stderr


def change(folder, **values):
    """Change model.json, and its checksum with it."""
    raw = json.dumps({**json.loads((folder / "model.json").read_text()), **values}).encode()
    (folder / "model.json").write_bytes(raw)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["model.json"] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=2, sort_keys=True) + "\n")

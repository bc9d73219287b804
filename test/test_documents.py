"""Documents: generated pages are current, links reach something, and the text stays short."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nc
from nc.storage import layout

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
#: Generated from measurements; not there in a checkout without them.
RESULTS = DOCS / "results"
#: Parts that are read from the first to the last line; the reference and the results are looked up.
READ = (
    ROOT / "README.md",
    *(
        page
        for part in ("start", "how-to", "concepts", "contribute")
        for page in sorted((DOCS / part).glob("*.md"))
    ),
)
PAGES = (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*/*.md")))
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def words(text):
    """Number of words, in code too; bars of tables and arrows are none."""
    return sum(any(character.isalnum() for character in word) for word in text.split())


def anchors(text):
    """Names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page, content):
    """Links of a page that reach nothing."""
    for target, anchor in LINK.findall(FENCED.sub("", content)):
        if re.match(r"\w+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if RESULTS in (path, *path.parents):
            continue
        if not path.exists():
            yield target
        elif (
            anchor
            and path.suffix == ".md"
            and anchor not in anchors(content if path == page else path.read_text(encoding="utf-8"))
        ):
            yield f"{target}#{anchor}"


@pytest.fixture
def reference(monkeypatch):
    """The module that makes the reference."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("make_reference")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_reach_something(page):
    assert list(broken(page, page.read_text(encoding="utf-8"))) == []


def test_a_broken_link_is_found():
    page = DOCS / "start" / "install.md"
    content = (
        "# One title: `a`\n[a](no-page.md) [b](#no-title) [c](../how-to/deploy.md#no-title) "
        "[d](../how-to/deploy.md#without-a-compiler)"
    )
    assert list(broken(page, content)) == ["no-page.md", "#no-title", "../how-to/deploy.md#no-title"]
    assert (
        list(broken(page, "# One title: `a`\n[a](#one-title-a) [b](https://a.b/c) [c](../results/README.md)"))
        == []
    )
    assert list(broken(page, "```\n[a](no-page.md)\n```")) == []


def test_users_and_contributors_have_little_to_read():
    counts = {str(page.relative_to(ROOT)): words(page.read_text(encoding="utf-8")) for page in READ}
    assert len(counts) > 25
    migrations = {name: counts.pop(name) for name in list(counts) if "/migrate-from-" in name}
    contributors = {name: counts.pop(name) for name in list(counts) if "/contribute/" in name}
    assert sum(counts.values()) <= 13_000, counts
    assert sum(contributors.values()) <= 3_000, contributors
    assert all(count <= 1_100 for count in migrations.values()), migrations  # everybody reads one at most
    assert counts["README.md"] <= 1200


def test_every_page_can_be_reached_in_two_clicks():
    def linked(page):
        targets = (
            target
            for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
            if target.endswith(".md") and ":" not in target
        )
        return {(page.parent / target).resolve() for target in targets}

    first = linked(ROOT / "README.md")
    second = {page for near in first if near.exists() for page in linked(near)}
    pages = {page for page in DOCS.glob("*/*.md") if RESULTS not in page.parents}
    assert pages - first - second == set()
    assert {page for page in pages if page.parent.name == "how-to"} <= first


def test_the_reference_is_what_the_code_says(tmp_path):
    """In a process of its own: tests in this one register algorithms and backends."""
    environment = {
        **os.environ,
        "COLUMNS": "40",
        "PYTHONPATH": str(ROOT),
    }  # the width of a terminal changes no page
    subprocess.run(
        [sys.executable, DOCS / "make_reference.py", tmp_path], check=True, timeout=300, env=environment
    )
    assert {path.name for path in (DOCS / "reference").iterdir()} == {
        path.name for path in tmp_path.iterdir()
    }
    for path in tmp_path.iterdir():
        said = (DOCS / "reference" / path.name).read_text(encoding="utf-8")
        assert said == path.read_text(encoding="utf-8"), f"{path.name}: run `python docs/make_reference.py`"


def test_the_reference_says_something_of_each_name(reference):
    """An empty cell means that a docstring lacks an argument."""
    for name, content in reference.contents().items():
        empty = [
            line for line in content.splitlines() if line.startswith("| `") and re.search(r"\|\s+\|", line)
        ]
        assert empty == (
            [] if name != "errors.md" else [line for line in empty if line.startswith("| `NCError`")]
        ), name


def test_the_tables_of_an_artefact_list_what_is_written(tmp_path):
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU()).eval(), torch.randn(4, 32)
    nc.save(
        nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend="reference"),
        tmp_path / "graph",
    )
    config = nc.WeightOnlyConfig("int4", group_size=8, w_sym=False, float_zero=True, double_quant=True)
    nc.save(nc.quantize(model, config, measure=False), tmp_path / "weights")
    nc.save(
        nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=8, w_sym=False), measure=False),
        tmp_path / "zeros",
    )
    parts = set()
    for folder, keys in (
        ("graph", layout.GRAPH_KEYS),
        ("weights", layout.WEIGHT_KEYS),
        ("zeros", layout.WEIGHT_KEYS),
    ):
        assert {path.name for path in (tmp_path / folder).iterdir()} == set(layout.FILES)
        document = json.loads((tmp_path / folder / "model.json").read_text(encoding="utf-8"))
        assert set(document) == set(keys)
        parts |= {name.rpartition(".")[2] for name in document.get("tensors", ())}
    assert parts - {"bias"} == set(layout.WEIGHT_TENSORS)
    header = (tmp_path / "graph" / "weights.safetensors").read_bytes()
    found = set(re.findall(rb'"(constant|example|expected)\.', header))
    assert {kind.decode() for kind in found} == {name.split(".")[0] for name in layout.GRAPH_TENSORS}

"""Tables: blocks that repeat stand once, and lines fit a width without losing text."""

import random
import re

import pytest
import torch
from torch import nn

import nc
from nc.reports.report import Report
from nc.text.table import WIDTH, flowing, folded, format_table, largest, wrapped

HEAD = ("operator", "type", "why")


def block(prefix, why=""):
    return [(f"{prefix}.q", "linear", ""), (f"{prefix}.act", "gelu", why)]


def test_equal_blocks_stand_once():
    rows = [
        HEAD,
        *(row for i in range(12) for row in block(f"layer.{i}", f"in the kernel of layer.{i}.q")),
        ("head", "linear", ""),
    ]
    assert folded(rows) == [
        HEAD,
        ("layer.{0..11} (12 times)",),
        ("  q", "linear", ""),
        ("  act", "gelu", "in the kernel of layer.{0..11}.q"),
        ("head", "linear", ""),
    ]


@pytest.mark.parametrize("where", [0, 3, 5])
@pytest.mark.parametrize("change", ["type", "row", "name"])
def test_a_difference_breaks_the_block(where, change):
    blocks = [block(f"layer.{i}") for i in range(6)]
    if change == "type":
        blocks[where][0] = (f"layer.{where}.q", "conv", "")
    elif change == "row":
        del blocks[where][1]
    else:
        blocks[where][1] = (f"layer.{where}.other", "gelu", "")
    rows = [HEAD, *(row for each in blocks for row in each)]
    found = folded(rows)
    assert [(f"layer.{where}.{row[0].rpartition('.')[2]}", *row[1:]) for row in blocks[where]] == [
        r for r in found if f"layer.{where}." in r[0]
    ]
    spans = {0: ["{1..5} (5"], 3: ["{0..2} (3", "{4..5} (2"], 5: ["{0..4} (5"]}[where]
    assert [row[0] for row in found if len(row) == 1] == [f"layer.{span} times)" for span in spans]


def test_blocks_in_blocks_calls_and_single_rows():
    rows = [HEAD]
    rows += [
        (f"stage.{i}.block.{j}.{name}", "conv", "") for i in range(2) for j in range(3) for name in ("a", "b")
    ]
    rows += [(f"{i}", "linear", "") for i in range(5)]
    rows += [("cell" if i == 0 else f"cell@{i}", "lstm_cell", "") for i in range(4)]
    assert [row[0] for row in folded(rows)[1:]] == [
        "stage.{0..1} (2 times)",
        "  block.{0..2} (3 times)",
        "    a",
        "    b",
        "{0..4} (5 times)",
        "cell",
        "cell@{1..3} (3 times)",
    ]


def test_an_index_that_stands_for_something_else_is_no_repetition():
    rows = [
        HEAD,
        ("layer.0.q", "linear", "like layer.1.q"),
        ("layer.1.q", "linear", "like layer.1.q"),
        ("conv1", "c", ""),
        ("conv2", "c", ""),
    ]
    assert folded(rows) == rows


def test_numbers_that_differ_are_merged():
    rows = [("layer", "loss"), *((f"l.{i}", f"{i}e-03") for i in range(1, 4))]
    assert folded(rows, {1: largest}) == [("layer", "loss"), ("l.{1..3} (3 times)", "<=3e-03")]
    assert largest(["-", "-"]) == "-"
    assert largest(["1.0", "1.0"]) == "1.0"


@pytest.mark.parametrize("seed", range(20))
def test_folding_loses_no_row(seed):
    """Expanding the headings and spans gives the names again."""
    choose = random.Random(seed)
    kinds = [choose.choice("ab") for _ in range(12)]
    rows = [HEAD, *((f"net.{i}.{j}.fc", kinds[(3 * i + j) % 12], "") for i in range(6) for j in range(3))]
    assert expanded(folded(rows)[1:]) == [row[0] for row in rows[1:]]


def expanded(rows):
    """The names that a folded table stands for."""
    found, at = [], 0
    while at < len(rows):
        name = rows[at][0]
        if len(rows[at]) == 1:
            depth = len(name) - len(name.lstrip())
            inside = []
            while at + 1 < len(rows) and len(rows[at + 1][0]) - len(rows[at + 1][0].lstrip()) > depth:
                at += 1
                inside.append(rows[at])
            rest = expanded(inside)
            names = [f"{each}.{other}" for each in spelled(name) for other in rest]
        else:
            names = spelled(name)
        found += names
        at += 1
    return found


def spelled(name):
    name = re.sub(r" \(\d+ times\)", "", name.strip())
    match = re.search(r"\{(\d+)\.\.(\d+)\}", name)
    if match is None:
        return [name]
    return [
        name[: match.start()] + f"{i}" + name[match.end() :] for i in range(int(match[1]), int(match[2]) + 1)
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_and_keep_all_text(width):
    why = "a reason that is much too long for the column in which it should stand, and so it stands below"
    rows = [
        HEAD,
        ("encoder.layer.attention.self.query.of.some.length", "linear", why),
        ("b", "gelu", "short"),
        ("c", "gelu", why),
    ]
    text = format_table(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).count(why) == 1
    assert text.count("(1)") == 3
    assert "short" in text
    assert format_table([HEAD], width).splitlines()[0].split() == list(HEAD)
    numbers = [("name", *("loss",) * 6), ("layer." * 12, *("<=1.10e-03",) * 6)]
    assert format_table(numbers, width).count("<=1.10e-03") == 6
    long = [HEAD, ("a" * 200, "linear", ""), ("b" * 200,)]
    assert max(map(len, format_table(long, width).splitlines())) <= width
    assert format_table(rows).splitlines()[2] == f"{rows[1][0]}  linear  {why}"


def test_names_are_broken_behind_dots():
    assert wrapped("encoder.layer.{0..11}.attention", 15) == ["encoder.layer.", "{0..11}.", "attention"]
    assert wrapped("<=1.10e-03 2.5", 12) == ["<=1.10e-03", "2.5"]
    assert wrapped("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert "".join(wrapped("a" * 33, 10)) == "a" * 33
    assert flowing('x config.exclude("' + "a" * 30 + '")', 20) == [
        "x",
        '    config.exclude("' + "a" * 30 + '")',
    ]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(32), nn.Linear(64, 32)

    def forward(self, x):
        return self.norm(x + self.second(self.first(x).relu()))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "config", [nc.StaticQuantConfig(), nc.WeightOnlyConfig("int4", group_size=32, solver=nc.GPTQ())]
)
def test_plans_and_reports_of_repeated_blocks(config):
    x, model = torch.randn(4, 32), Deep().eval()
    prepared = nc.prepare(model, config, example_inputs=x)
    prepared(x)
    report = nc.report(nc.convert(prepared))
    for shown, count in (
        (prepared.plan, len(prepared.plan.decisions)),
        (report, len(getattr(report, "ops", getattr(report, "layers", ())))),
    ):
        text = str(shown) if shown is prepared.plan else shown.text(details=True)
        width = 80 if isinstance(shown, Report) else WIDTH
        assert "layers.{0..5} (6 times)\n" in text
        assert max(map(len, shown.table(width, fold=True).splitlines())) <= width
        assert shown is prepared.plan or max(map(len, text.splitlines())) <= width
        assert shown.table(width, fold=True) in text
        assert len(shown.table().splitlines()) == count + 2
        assert "layers.3.second" in shown.table()
        assert "layers.3.second" not in shown.table(fold=True)

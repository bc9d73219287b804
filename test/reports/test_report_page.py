"""The page of a report: all that the report has, nothing from elsewhere, names escaped, small."""

import dataclasses
import html.parser
import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import nc
from nc.cli.main import main
from nc.errors import ConfigError
from nc.profiling.profile import EngineCall, Profile
from nc.reports.model_explorer import node_data
from nc.reports.page_compare import differences
from nc.reports.page_strip import cells_of
from nc.tuning.front import Front, FrontPoint
from nc.tuning.trials import Result


class Page(html.parser.HTMLParser):
    """What a page consists of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.links, self.cells, self.open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag == "rect" and given["class"] != "bar":
            self.cells.append((given["class"], float(given["x"]), float(given["width"])))
        if tag not in ("meta", "rect", "br") or tag == "rect":
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag or tag in ("html", "head", "body")

    def handle_data(self, data):
        self.words.append(data)


NAME = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def q_model():
    torch.manual_seed(0)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleDict({NAME: nn.Linear(32, 64), "two": nn.Linear(64, 32)})
            self.norm = nn.LayerNorm(32)

        def forward(self, x):
            return self.norm(self.blocks["two"](self.blocks[NAME](x).relu()))

    x = torch.randn(8, 32)
    config = nc.StaticQuantConfig().exclude("blocks.two")
    return nc.quantize(Branches().eval(), config, lambda m: m(x), example_inputs=x, measure=False)


@pytest.mark.parametrize("profiled", [False, True])
def test_the_page_says_what_the_report_says(q_model, tmp_path, profiled):
    if profiled and q_model.engine.profile is None:
        pytest.skip("this engine has no profile")
    report = q_model.report(profile_inputs=torch.randn(8, 32) if profiled else None)
    report.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.links == []
    assert "img" not in page.tags
    assert "@import" not in text
    assert "url(" not in text
    words = "".join(page.words)
    for op in report.ops:
        assert op.operator in words
        assert op.reason in words
    assert ("Where the time goes" in words) == profiled
    assert ("At this limit the call takes" in words) == profiled
    assert torch.__version__ in words
    kinds = [cell[0] for cell in page.cells if cell[0] != "conversion"]
    assert kinds == [op.ran if op.ran in ("int8", "bf16", "fp32") else "other" for op in report.ops]
    ends = [(x, x + width) for _, x, width in page.cells]
    assert ends[0][0] == 0
    assert ends[-1][1] == pytest.approx(1000, abs=0.1)
    assert all(
        one[1] == pytest.approx(other[0], abs=0.01) for one, other in zip(ends, ends[1:], strict=False)
    )
    weights = [(op.share or 0.0) if profiled else (op.multiply_adds or 0) for op in report.ops]
    widest = max(range(len(weights)), key=weights.__getitem__)
    own = [cell for cell in page.cells if cell[0] != "conversion"]
    assert max(own, key=lambda cell: cell[2]) == own[widest]


def test_inputs_of_other_sizes_have_no_limit(q_model):
    """The plan's multiply-adds are those of the example inputs."""
    if q_model.engine.profile is None:
        pytest.skip("this engine has no profile")
    assert q_model.report(profile_inputs=torch.randn(8, 32)).profile.limits is not None
    other = nc.quantize(
        nn.Sequential(nn.Linear(32, 8)).eval(),
        nc.StaticQuantConfig(),
        lambda m: m(torch.randn(8, 32)),
        example_inputs=torch.randn(8, 32),
        dynamic_shapes={"input": {0: torch.export.Dim("rows")}},
        measure=False,
    )
    assert other.report(profile_inputs=torch.randn(5, 32)).profile.limits is None


def test_conversions_and_low_bit_weights_have_cells(q_model):
    ops = [dataclasses.replace(op, share=0.25) for op in q_model.report().ops[:2]]
    ops.append(dataclasses.replace(ops[0], operator="low", ran="int4 weight"))
    names = [op.operator for op in ops]
    steps = [
        EngineCall(name="x", operators=(names[0],), ms=1.0),
        EngineCall(name="aten::to", converts=True, serves=names[1], ms=2.0),
        EngineCall(name="aten::to", converts=True, ms=0.5),
        EngineCall(name="x", operators=(names[1],), ms=0.5),
    ]
    cells, meaning = cells_of(ops, Profile(steps=tuple(steps), call_ms=4.0, calls=1, threads=1))
    assert [cell.form for cell in cells] == [ops[0].ran, "conversion", ops[1].ran, "low-bit", "conversion"]
    assert [cell.weight for cell in cells] == [0.25, 0.5, 0.25, 0.25, 0.125]
    assert meaning == "share of the time"


def test_plain_values_and_other_endings(q_model, tmp_path):
    q_model.report().save(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert [op["operator"] for op in document["ops"]] == [op.operator for op in q_model.report().ops]
    with pytest.raises(ConfigError, match=r"\.html or \.json"):
        q_model.report().save(tmp_path / "report.pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.fixture
def front():
    """A front with a point whose name is markup."""
    given = {"sqnr_db": 30.0, "spread": (1.0, 1.1), "weight_bytes": 100}
    points = [
        FrontPoint(
            name=name,
            config=nc.StaticQuantConfig(),
            result=Result(metric=metric, ms=ms, fp32_ratio=4 / ms, **given),
            drop=1.0 - metric,
        )
        for name, metric, ms in (("fp32", 1.0, 4.0), (NAME, 0.875, 2.0))
    ]
    return Front(measured=tuple(points), notes=("a <note>",))


def test_the_page_shows_the_front_where_it_was_tuned(q_model, front, tmp_path):
    q_model.report().save(tmp_path / "report.html", front=front)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    words = "".join(page.words)
    assert "img" not in page.tags
    assert "What was measured when it was tuned: accuracy and latency" in words
    assert all(text in words for text in (NAME, "0.875", "a <note>"))
    assert (
        words.index("All operators") < words.index("when it was tuned") < words.index("Where this was made")
    )
    with pytest.raises(ConfigError, match="front= is for a page"):
        q_model.report().save(tmp_path / "report.json", front=front)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_command_shows_a_front(q_model, front, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nc.save(q_model, "m")
    front.save("front.json")

    def run(*words):
        return CliRunner().invoke(main, ["report", "m", "--no-profile", "--front", *words])

    assert run("front.json", "--html", "out.html").exit_code == 0
    words = "".join(Page((tmp_path / "out.html").read_text(encoding="utf-8")).words)
    assert "What was measured when it was tuned" in words
    assert NAME in words
    assert "a front is shown on a page; give --html FILE.html" in run("front.json").output
    document = json.loads((tmp_path / "front.json").read_text())
    wrong = ["[", "[]", "1", "{}", "[" * 100_000, json.dumps({**document, "points": [{}]})]
    wrong += [json.dumps({**document, "points": []}), json.dumps({**document, "rank_correlation": "x"})]
    for text in wrong:
        (tmp_path / "wrong.json").write_text(text)
        done = run("wrong.json", "--html", "no.html")
        assert done.exit_code == 2, text[:100]
        assert "it is not what front.save('wrong.json') of nc.tune writes" in done.output
    (tmp_path / "wrong.json").write_bytes(b"\xff")
    assert run("wrong.json", "--html", "no.html").exit_code == 2
    assert not (tmp_path / "no.html").exists()


def test_a_model_of_a_thousand_operators_stays_small(tmp_path):
    torch.manual_seed(0)
    layers = [layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))]
    model, x = nn.Sequential(*layers).eval(), torch.randn(4, 16)
    q = nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend="reference")
    q.report().save(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 300_000


def test_the_command(q_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nc.save(q_model, tmp_path / "m")

    def run(*words):
        return CliRunner().invoke(main, ["report", *map(str, words)])

    done = run("m", "--html", "out.html")
    assert done.exit_code == 0, done.output
    assert "Where the time goes" in (tmp_path / "out.html").read_text(encoding="utf-8")
    config = nc.DynamicQuantConfig()
    x = torch.randn(8, 32)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    nc.save(nc.quantize(layers, config, example_inputs=x, measure=False), tmp_path / "other")
    done = run("m", "other", "--html", "two.html", "--no-profile")
    assert done.exit_code == 0, done.output
    two = "".join(Page((tmp_path / "two.html").read_text(encoding="utf-8")).words)
    assert "Two artefacts compared" in two
    assert "Operators that differ" in two
    assert run("m", "m", "--html", "two.html", "--no-profile").exit_code == 0
    assert "All operators run alike." in (tmp_path / "two.html").read_text(encoding="utf-8")
    done = run("m", "other")
    assert (done.exit_code, "give --html" in done.stderr) == (2, True)
    done = run("m", "--model-explorer", "nodes.json", "--no-profile")
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "nodes.json").read_text())
    assert set(data) == {"graph"}
    assert len(data["graph"]["results"]) == len(q_model.report().ops)
    done = run("m", "--no-profile")
    assert (done.exit_code, "blocks.two" in done.output) == (0, True)
    for words, says in (
        (("m", "--html", "out.txt"), "ends in .html"),
        (("nowhere",), "nowhere"),
        (("m", "--html", "m/model.json/out.html"), "cannot be written"),
    ):
        done = run(*words)
        assert (done.exit_code, says in done.stderr) == (2, True), done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "m",
        "nodes.json",
        "other",
        "out.html",
        "two.html",
    ]


def test_node_data_has_the_names_of_the_exported_program():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), torch.randn(8, 32)
    q = nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, measure=False)
    report = q.report()
    found = node_data(q.graph.module, report.ops)["graph"]["results"]
    names = {n.name for n in torch.export.export(model, (x,)).graph.nodes if n.op == "call_function"}
    assert set(found) <= names
    assert [found[n]["value"] for n in ("linear", "linear_1")] == [8 * 32 * 64, 8 * 64 * 32]
    timed = [dataclasses.replace(op, share=0.5) for op in report.ops]
    assert node_data(q.graph.module, timed)["graph"]["results"]["linear"]["value"] == 50.0


def test_operators_that_differ(q_model):
    ops = q_model.report().ops
    changed = [dataclasses.replace(ops[0], ran="fp32", share=0.25), *ops[1:-1]]
    rows = differences(ops, changed)
    assert rows[0] == (ops[0].operator, "ran", ops[0].ran, "fp32")
    assert rows[1] == (ops[0].operator, "share", "0.0%", "25.0%")
    assert rows[2:] == [(ops[-1].operator, "exists", "yes", "no")]
    assert differences(ops, ops) == []


def test_numbers_that_json_lacks_are_null(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    config = nc.StaticQuantConfig().exclude("0")
    q = nc.quantize(model, config, lambda m: m(x), example_inputs=x, measure=False, strict=False)
    q.report().save(tmp_path / "r.json")

    def no(text):
        raise AssertionError(text)

    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"), parse_constant=no)
    assert found["sqnr_vs_fp32_db"] is None

"""Results: rows have what a reader needs, pages are what the rows give, and a table shows what it says."""

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((ROOT / "results").glob("*.jsonl"))
GOOD = {
    "machine": "CPU, 2 cores", "isa": "avx2", "versions": {"torch": "2"}, "commit": None, "date": "2026-01-31",
    "command": "python benchmarks/run.py", "what": {"model": "m"}, "figures": {"latency": {"value": 2.5, "unit": "ms"}},
}  # fmt: skip


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip


def test_the_pages_are_what_the_rows_give():
    """In a process that has no torch: pages can be made anywhere."""
    program = (
        "import sys; sys.modules.update(torch=None, nc=None); sys.path.insert(0, 'benchmarks')\n"
        "import results_page; print(*results_page.stale())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split(), "run: python benchmarks/results_page.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_have_what_a_reader_needs(module, file):
    rows = module("results_rows").read(file)
    assert rows
    for row in rows:
        words = (row.command or "").split()
        assert not words or any(
            (ROOT / word).is_file() for word in words if word.startswith("benchmarks/")
        ), row
        assert not any(Path(word).is_absolute() for word in words), row.command


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"machine": ""}, "empty: machine"),
        ({"what": {}}, "empty: what"),
        ({"figures": {}}, "empty: figures"),
        ({"command": ""}, "empty: the command"),
        ({"figures": {"latency": {"value": 1, "unit": ""}}}, "the unit of latency"),
        ({"date": "yesterday"}, "yesterday"),
        ({"where": "here"}, "where"),
        ({"figures": {"latency": {"unit": "ms"}}}, "value"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_number(module, tmp_path, changed, said):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps(GOOD), json.dumps({**GOOD, **changed})]), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{said}"):
        module("results_rows").read(file)


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_is_refused(module, tmp_path, name):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({k: v for k, v in GOOD.items() if k != name}), encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        module("results_rows").read(file)


def test_a_benchmark_appends_a_row_of_this_machine(module, tmp_path, monkeypatch):
    rows = module("results_rows")
    file = tmp_path / "rows.jsonl"
    script = str(BENCHMARKS / "run.py")
    monkeypatch.setattr(
        sys, "argv", [script, "--models", "minilm", "--results", str(file), "--data", str(tmp_path)]
    )
    for values in ([3.0, 1.0, 2.0], [5.0]):
        rows.append(file, {"model": "minilm"}, {"latency": rows.median(values, "ms")}, ["no-such-package"])
    first, second = rows.read(file)
    assert first.figures == {"latency": rows.Figure(2.0, "ms", 1.0, 3.0)}
    assert second.value("latency") == 5.0
    assert first.command == "python benchmarks/run.py --models minilm --data DIR"
    assert "torch" in first.versions
    assert "no-such-package" not in first.versions
    assert first.machine.endswith("cores")


def test_no_file_is_written_where_none_is_asked_for(module, tmp_path, monkeypatch):
    rows = module("results_rows")
    monkeypatch.chdir(tmp_path)
    rows.append(None, {"model": "minilm"}, {"latency": rows.Figure(1.0, "ms")})
    assert not list(tmp_path.iterdir())


def test_a_comparison_of_accuracy_appends_a_row_of_each_flow_that_has_figures(module, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    task, tasks, rows = module("task"), module("tasks"), module("results_rows")

    class Doubled(task.Task):
        """A task without a model of its own."""

        name, figures = "doubled", {"sum": ("units", 1)}

        def architecture(self):
            return torch.nn.Identity()

        def make(self):
            self.calibration = self.evaluation = [{"input": torch.ones(1, 4)}]

        def samples(self, fp32, got):
            return got

        def score(self, samples):
            return samples.sum().item()

    def failing(task):
        msg = "no such engine"
        raise RuntimeError(msg)

    def missing(task):
        import no_such_engine  # noqa: F401

    file = tmp_path / "rows.jsonl"
    flows = {
        "fp32": tasks.fp32,
        "failing": failing,
        "missing": missing,
        "noisy": lambda _: (lambda input: input + 0.1, "-", "3 of 4"),
    }
    tasks.compare(Doubled(), flows, file, [], rounds=2)
    exact, noisy = rows.read(file)
    assert (exact.what["flow"], exact.value("SQNR"), exact.value("sum")) == ("fp32", "inf", 4.0)
    assert (noisy.what["flow"], noisy.value("SQNR"), noisy.value("sum")) == ("noisy", 20.0, 4.4)
    assert noisy.what["int8 products"] == "3 of 4"
    assert noisy.value("difference to fp32") == "+0.4 ± 0.0"
    assert all(
        row.figures["time"].low <= row.value("time") <= row.figures["time"].high for row in (exact, noisy)
    )
    assert (exact.figures["speed"].unit, exact.value("speed")) == ("x fp32", 1.0)
    printed = capsys.readouterr().out
    assert "| failing | RuntimeError: no such engine |" in printed
    assert "| missing | skipped: No module named 'no_such_engine' |" in printed


def test_a_table_shows_the_last_row_of_a_line_its_spread_and_the_mean(module):
    rows, markdown = module("results_rows"), module("results_markdown")
    base = rows.row_of(GOOD)

    def row(model, speed, **more):
        what, figures = {"model": model, "engine": "nc", **more}, {"speed": rows.Figure(speed, "x", 1, 9)}
        return dataclasses.replace(base, what=what, figures=figures, note=f"note of {model}")

    column = markdown.Column("speed", "speed", 1, {"engine": "nc"}, mean=True, spread=True)
    table = markdown.Table({"further": None}, {"model": "model"}, [column])
    found = [row("a", 5), row("a", 2), row("b", 8), row("c", 3, further=True), row("d", 3, engine="other")]
    text = table.render(found)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[2:] == [
        "| a | 2.0 (1.0 to 9.0) |",
        "| b | 8.0 (1.0 to 9.0) |",
        "| d | – |",
        "| geometric mean | 4.0 |",
    ]
    assert text.count("* note of a") == 1
    assert "note of c" not in text
    assert text.startswith("**CPU, 2 cores** (avx2; torch 2; 2026-01-31)")


def test_rows_of_two_machines_or_versions_have_tables_of_their_own(module):
    rows, markdown = module("results_rows"), module("results_markdown")
    base = rows.row_of(GOOD)
    found = [
        base,
        dataclasses.replace(base, machine="other"),
        dataclasses.replace(base, versions={"torch": "3"}),
    ]
    columns = [markdown.Column("ms", "latency")]
    assert markdown.Table({}, {"model": "model"}, columns).render(found).count("| ms |") == 2
    assert (
        markdown.Table({}, {"model": "model"}, columns, apart=("torch",)).render(found).count("| ms |") == 3
    )


def test_a_page_names_only_parts_that_exist(module):
    page = module("results_page")
    with pytest.raises(KeyError, match="no-such-part"):
        page.page("speed", "{{no-such-part}}", {})


def test_benchmarks_do_not_import_each_other_in_a_circle():
    """Also inside functions."""
    files = {path.stem: path for path in BENCHMARKS.glob("*.py")}
    needs = {name: {found for found in _imported(path) if found in files} for name, path in files.items()}
    while ready := [name for name, wanted in needs.items() if not wanted & needs.keys()]:
        needs = {name: wanted for name, wanted in needs.items() if name not in ready}
    assert not needs


def _imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_a_row_of_speed_has_its_part_of_the_limit(module):
    """Multiply-adds at the rate of its own machine, threads and numbers; without one of them, nothing."""
    rows, limit = module("results_rows"), module("results_limit")
    base = rows.row_of(GOOD)

    def row(what, **figures):
        made = {name: rows.Figure(value, "x") for name, value in figures.items()}
        return dataclasses.replace(base, what=what, figures=made)

    kernels = [
        row({"measured": "limit", "threads": 2}, int8=500, bf16=100),
        row({"measured": "ceiling", "model": "a", "batch": 1, "threads": 2}, work=10),
        row({"measured": "ceiling", "model": "b", "batch": 16, "threads": 2}, eager=1),
    ]
    what = {"model": "a", "batch": 4, "threads": 2, "engine": "nc-native"}
    given = [
        row(what, latency=100),
        row({**what, "engine": "nc-bf16"}, latency=800),
        row({**what, "engine": "eager"}, latency=100),
        row({**what, "threads": 1}, latency=100),
        row({**what, "model": "b"}, latency=100),
        row({**what, "limit": "AVX2"}, latency=100),
        row(what, speed=1),
        dataclasses.replace(row(what, latency=100), machine="other"),
    ]
    found = limit.with_parts({"kernels": kernels, "speed": given})
    assert [each.value(limit.PART) for each in found] == ["80 %", "50 %", *[None] * 6]
    assert [dict(each.figures, **{limit.PART: 0}) for each in found] == [
        {**each.figures, limit.PART: 0} for each in given
    ]


def test_a_cell_has_other_figures_of_its_row_beside_it(module):
    rows, markdown = module("results_rows"), module("results_markdown")
    row = dataclasses.replace(rows.row_of(GOOD), figures={n: rows.Figure(n, "x") for n in "ab"})
    assert markdown.Column("x", "a", beside=("b", "c")).cell([row]) == "a (b)"
    assert markdown.Column("x", "a", beside=("c",)).cell([row]) == "a"


def test_limits_of_the_cpu_are_a_row(module, monkeypatch, tmp_path):
    peak = module("peak")
    limits = peak.hardware.Limits(multiply_adds={"int8": 2.5e12, "fp32": 4e11})
    monkeypatch.setattr(peak.hardware, "measured", lambda _: limits)
    assert peak.measured(2, tmp_path / "kernels.jsonl") == {"int8": 2500.0, "fp32": 400.0}
    (row,) = map(json.loads, (tmp_path / "kernels.jsonl").read_text().splitlines())
    assert row["what"] == {"measured": "limit", "threads": 2}
    assert row["figures"]["int8"] == {"value": 2500.0, "unit": "1e9 multiply-adds/s"}
    monkeypatch.setattr(peak.hardware, "measured", lambda _: peak.hardware.Limits(missing="no compiler"))
    with pytest.raises(SystemExit, match="no compiler"):
        peak.measured(2, None)


def test_sections_of_mixed_lengths_are_there_once_there_are_rows(module):
    rows, tables = module("results_rows"), module("results_tables")
    assert [tables.PARTS[name]({"serving": []}) for name in ("serving-mixed", "serving-random")] == ["", ""]
    what = {"measured": "mixed lengths", "model": "minilm", "threads": 2, "texts": "news", "order": "sorted"}
    figures = {
        "texts": {"value": 20, "unit": "texts/s", "low": 19, "high": 22},
        "padding": {"value": 1.25, "unit": "tokens"},
    }
    made = [
        rows.row_of({**GOOD, "what": {**what, "engine": engine}, "figures": figures})
        for engine in ("fp32", "nc-static")
    ]
    text = tables.PARTS["serving-mixed"]({"serving": made})
    assert text.startswith("## Texts of mixed lengths\n")
    assert "*minilm, texts: news, in the order sorted, threads: 2*" in text
    assert "| nc-static | 20 (19 to 22) | 1.25 |" in text


def test_the_picture_shows_what_the_rows_say(module):
    picture, rows = module("results_picture"), module("results_rows")
    drawn = picture.PICTURE.read_text(encoding="utf-8")
    bars = picture.speeds(rows.read(ROOT / "results" / "speed.jsonl"))
    assert len(bars) == 3
    for cpu, found in bars.items():
        assert cpu in drawn
        assert [bar.label for bar in found if bar.label not in drawn] == []
    errors = picture.errors(rows.read(ROOT / "results" / "accuracy.jsonl"))
    assert [f"{value:.4f}" for value in errors.values() if f"{value:.4f}" not in drawn] == []

"""The jobs of the full matrix: what each depends on, which of them a change needs, and what is kept of runs."""

import dataclasses
import datetime
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".ci"


sys.path.insert(0, str(CI))
jobs, ledger, matrix, repository = map(importlib.import_module, ("jobs", "ledger", "matrix", "repository"))
sys.path.remove(str(CI))

FILES = {
    # `api` imports `graph`, which imports `formats`; `text` is apart, and the package imports everything
    "nc/__init__.py": "from nc.api.one import f as f\nfrom nc.text.four import table as table\n",
    "nc/api/__init__.py": "",
    "nc/api/one.py": "import torch\n\n\ndef f():\n    from nc.graph.two import g\n",
    "nc/graph/__init__.py": "",
    "nc/graph/two.py": "import nc\nfrom nc.formats import three\n",
    "nc/formats/__init__.py": "",
    "nc/formats/three.py": "",
    "nc/text/__init__.py": "",
    "nc/text/four.py": "table = __file__ + 'sizes.json'\nname = 'sizes.json'\n",
    "nc/text/sizes.json": "{}",
    "nc/kernels/c_code/__init__.py": "",
    "nc/kernels/c_code/abi.py": (
        "import types\n"
        "FUNCTIONS = {'product': types.SimpleNamespace(source='rows'), 'mean': types.SimpleNamespace(source='steps')}\n"
    ),
    "nc/kernels/c_code/build.py": "",
    "nc/kernels/c_code/isas.py": "ISAS = {'avx2': ('avx2', 'fma'), 'amx': ('avx2', 'fma', 'amx_tile')}\n",
    "nc/kernels/c_code/identity.h": "",
    "nc/kernels/c_code/rows.c": '#include <stdio.h>\n#include "rows.h"\n',
    "nc/kernels/c_code/rows.h": '#  include "wide.h"\n',
    "nc/kernels/c_code/wide.h": "",
    "nc/kernels/c_code/steps.c": "",
    "nc/plans/__init__.py": "",
    "nc/plans/run.py": "from nc.kernels.c_code import abi\n\nNAME = 'product'\n",
    "nc/plans/any.py": "from nc.kernels.c_code.build import load\n",
    "test/api/test_one.py": "",
    "test/api/deep/test_deep.py": "",
    "test/graph/conftest.py": "import helper\n",
    "test/graph/deep/test_two.py": "from suites.x import X\nimport nc\n\nnc.table\n",
    "test/plans/test_plans.py": "import nc.plans.run\n",
    "test/helper.py": "",
    "test/test_all.py": "from nc.plans import any\n",
    "test/suites/x.py": "PATH = 'data'\n",
    "test/suites/unused.py": "",
    "test/suites/data/first/weights.bin": "1",
    "test/text/test_four.py": "def test(monkeypatch):\n    monkeypatch.setattr('nc.text.four.table', 1)\n",
    "test/conftest.py": "",
    "test/isas.py": "",
    "test/sanitizers.py": "TESTS = {'rows': ('plans',), 'steps': ()}\n",
    "test/mutations.py": (
        "MUTATIONS = (\n"
        "    Mutation('rows-a', 'g', 'kernels/c_code/rows.c', 'x', 'y', ('plans',)),\n"
        "    Mutation('rows-b', 'g', 'kernels/c_code/rows.c', 'z', 'y', ('plans',), ipex=True),\n"
        "    Mutation('two', 'g', 'graph/two.py', 'x', 'y', ('two',)),\n"
        ")\n"
    ),
    "requirements/native.txt": "",
    "requirements/newest.txt": "",
    "examples/ready.py": "",
    "Makefile": "",
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def change(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        comment = {".py": "# changed\n", ".c": "/* changed */\n"}.get(path.suffix, "\n")
        path.write_text((path.read_text() if path.exists() else "") + comment)


def seen(root, entries=()):
    """A ledger in which the files are as they are now."""
    return ledger.Ledger(dict(repository.Tree(root).files), dict(entries))


def needed(root, known, *jobs_found):
    """Name → need, of all jobs or of some."""
    now = repository.Tree(root)
    changed = matrix.changed(now, known)
    return {
        job.name: matrix.need(now, job, known.jobs.get(job.name), changed)
        for job in jobs_found or jobs.jobs(now)
    }


def gate(root, known, minutes=10.0):
    """Names of the jobs that the gate chooses on a machine that has everything."""
    now = repository.Tree(root)
    found = jobs.jobs(now)
    in_order = matrix.ordered(found, needed(root, known, *found), known, now.hash)
    return [job.name for job in matrix.chosen(in_order, known, minutes)]


def passed_all(root):
    """A ledger in which every job has passed with the files as they are."""
    known = seen(root)
    for name, which in needed(root, known).items():
        known = known.with_entry(name, ledger.Entry({"avx2": "2026-11-01"}, which.own, which.all, 1.0))
    return known


# --- what a job depends on


@pytest.mark.parametrize(
    ("job", "distances"),
    [
        # its room and its tests, what these import, and what those import
        ("test-newest:api", {"nc/api/one.py": 0, "test/api/test_one.py": 0}),
        ("test-newest:api", {"nc/graph/two.py": 1, "nc/formats/three.py": 2}),
        ("test-newest:api", {"requirements/newest.txt": 99, "test/conftest.py": 99, "Makefile": 99}),
        (
            "test-newest:api",
            {"nc/text/four.py": None, "nc/__init__.py": None, "requirements/native.txt": None},
        ),
        ("test-newest:api", {"test/api/deep/test_deep.py": None, "test/helper.py": None}),
        # helpers of tests, what they name, names of the package, and what pytest loads
        ("test-newest:graph", {"test/suites/x.py": 1, "test/suites/data/first/weights.bin": 2}),
        ("test-newest:graph", {"nc/text/four.py": 1, "nc/text/sizes.json": 2, "test/suites/unused.py": None}),
        ("test-newest:graph", {"test/graph/conftest.py": 0, "test/helper.py": 1, "nc/api/one.py": None}),
        ("test-newest:text", {"nc/text/sizes.json": 0}),
        # sources in C that a module loads, with their headers and what these are made of
        ("test-newest:plans", {"nc/kernels/c_code/rows.c": 1, "nc/kernels/c_code/rows.h": 2}),
        ("test-newest:plans", {"nc/kernels/c_code/wide.h": 3, "nc/kernels/c_code/identity.h": 2}),
        (
            "test-fallback:.",
            {"nc/kernels/c_code/rows.c": 2, "nc/kernels/c_code/steps.c": 2, "nc/text/four.py": 99},
        ),
        (
            "sanitize:rows",
            {"nc/kernels/c_code/rows.c": 0, "nc/kernels/c_code/wide.h": 0, "test/sanitizers.py": 1},
        ),
        ("sanitize:rows", {"test/plans/test_plans.py": 1, "nc/plans/run.py": 2}),
        ("sanitize:steps", {"nc/kernels/c_code/steps.c": 0, "nc/kernels/c_code/rows.c": None}),
        # a mutation: its file, its row, and its tests with their helpers
        (
            "mutations:two",
            {"nc/graph/two.py": 0, "test/mutations.py::two": 0, "test/graph/deep/test_two.py": 1},
        ),
        ("mutations:two", {"test/suites/x.py": 2, "test/suites/data/first/weights.bin": 3}),
        ("mutations:two", {"nc/text/four.py": None, "nc/text/sizes.json": None}),
        (
            "mutations:two",
            {"test/suites/unused.py": None, "test/mutations.py::rows-a": None, "test/mutations.py": None},
        ),
    ],
)
def test_what_a_job_depends_on_and_how_far_it_is(root, job, distances):
    now = repository.Tree(root)
    (job,) = (each for each in jobs.jobs(now) if each.name == job)
    found = job.distances(now)
    assert {name: found.get(name) for name in distances} == distances
    before = needed(root, seen(root), job)[job.name]
    for name, distance in distances.items():
        if "::" not in name:
            known = seen(root)
            change(root, name)
            after = needed(root, known, job)[job.name]
            assert (after.own != before.own, after.all != before.all) == (
                distance == 0,
                distance is not None,
            ), name
            assert after.because == ((name,) if distance is not None else ())
            (root / name).write_text(FILES[name])


def test_what_lies_beside_the_files_of_the_repository_does_not_count(root):
    before = repository.Tree(root).hash
    change(root, "nc/api/__pycache__/one.pyc", "nc/kernels/c_code/rows.so", ".venv/x.py", "build/x.py")
    change(root, "test/.hypothesis/x", ".ci/ledger.json")
    assert repository.Tree(root).hash == before
    change(root, ".ci/matrix.py")
    assert repository.Tree(root).hash != before


def test_a_file_that_is_gone_has_changed(root):
    known = passed_all(root)
    (root / "nc" / "text" / "sizes.json").unlink()
    assert needed(root, known)["test-newest:text"].because == ("nc/text/sizes.json",)
    assert needed(root, known)["test-newest:text"].level == matrix.GUARD


def test_a_new_row_of_the_mutations_changes_nothing_for_the_others(root):
    known = passed_all(root)
    path = root / "test" / "mutations.py"
    path.write_text(
        path.read_text()[:-2] + "    Mutation('new', 'g', 'api/one.py', 'x', 'y', ('one',)),\n)\n"
    )
    found = needed(root, known)
    mutations = {name: which.level for name, which in found.items() if name.startswith("mutations:")}
    nothing = matrix.NOTHING
    assert mutations == {
        "mutations:new": matrix.GUARD,
        "mutations:rows-a": nothing,
        "mutations:rows-b": nothing,
        "mutations:two": nothing,
    }


# --- which jobs a change needs


def test_a_change_of_a_c_source_takes_its_sanitizers_its_mutations_and_newest_torch(root):
    known = seen(root)
    change(root, "nc/kernels/c_code/rows.c")
    found = needed(root, known)
    levels = {
        level: {name for name, which in found.items() if which.level == level}
        for level in (matrix.GUARD, matrix.OWN)
    }
    assert levels[matrix.GUARD] == {"sanitize:rows", "mutations:rows-a", "mutations:rows-b"}
    assert levels[matrix.OWN] == {"isas:avx2", "isas:amx", "wheel", "release"}
    assert found["test-newest:plans"].level == matrix.REACHED  # they call it
    assert found["test-newest:api"].level == matrix.OWED
    assert gate(root, known)[:3] == ["sanitize:rows", *sorted(gate(root, known)[1:3])]
    change(root, "nc/plans/any.py")
    assert {"sanitize:rows", "test-newest:plans"} < set(gate(root, known, 12))


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ("nc/graph/two.py", {"mutations:two", "test-newest:graph"}),
        ("nc/text/sizes.json", {"test-newest:text"}),
        ("test/graph/deep/test_two.py", {"test-newest:graph"}),
        ("nc/kernels/c_code/wide.h", {"sanitize:rows"}),
    ],
)
def test_the_guards_of_what_changed_come_first(root, changed, first):
    known = seen(root)
    change(root, changed)
    assert set(gate(root, known)[: len(first)]) == first


def test_a_test_that_changed_must_still_notice_its_mutations(root):
    known = seen(root)
    change(root, "test/graph/deep/test_two.py")
    assert needed(root, known)["mutations:two"].level == matrix.OWN


def test_a_page_needs_no_newest_torch_first(root):
    (root / "test" / "examples").mkdir()
    (root / "test" / "examples" / "test_ready.py").touch()
    known = seen(root)
    change(root, "docs/page.md")
    found = needed(root, known)["test-newest:examples"]
    assert (found.level, found.because) == (matrix.OWN, ("docs/page.md",))


def test_what_passed_with_these_files_is_not_run_again_before_all_others(root):
    known = passed_all(root)
    assert {which.level for which in needed(root, known).values()} == {matrix.NOTHING}
    known = known.with_entry(
        "serve", dataclasses.replace(known.jobs["serve"], passed={"avx2": "2026-10-01", "amx": "2026-10-03"})
    )
    known = known.with_entry("wheel", dataclasses.replace(known.jobs["wheel"], passed={"amx": "2026-10-02"}))
    assert gate(root, known)[:2] == ["wheel", "serve"]  # the oldest first
    change(root, "nc/text/four.py")
    assert gate(root, known)[0] == "test-newest:text"
    assert needed(root, known)["mutations:two"].level == matrix.NOTHING


def test_five_changes_one_after_the_other_choose_different_jobs_and_the_same_files_the_same(root):
    known = seen(root)
    chosen = []
    for number in range(5):
        change(root, "CHANGELOG.md")  # which no job reads
        chosen.append(tuple(gate(root, known)))
        assert gate(root, known) == list(chosen[-1]), number
    assert len(set(chosen)) == 5
    assert len({name for names in chosen for name in names}) > 10


def test_of_several_changed_files_each_has_its_turn(root):
    known, first = seen(root), set()
    changed = ("nc/kernels/c_code/steps.c", "nc/graph/two.py", "nc/text/four.py", "test/api/test_one.py")
    change(root, *changed)
    guards = {"sanitize:steps", "mutations:two", "test-newest:text", "test-newest:api"}
    for _ in range(20):
        change(root, "CHANGELOG.md")
        chosen = gate(root, known)
        first.add(chosen[0])
        assert guards.issuperset({*chosen[:2]} - {"test-newest:graph"})
    assert first >= guards


def test_in_time_every_job_has_its_turn(root):
    known, ran = seen(root), set()
    for _ in range(100):
        change(root, "CHANGELOG.md")
        ran.update(gate(root, known))
    assert ran == {job.name for job in jobs.jobs(repository.Tree(root))}


def test_a_ledger_of_nothing_gives_jobs_too(root):
    assert gate(root, ledger.Ledger())
    assert {which.level for which in needed(root, ledger.Ledger()).values()} == {matrix.OWED}


def some(*names, environment="native"):
    return [jobs.Job(name, ("true",), (f"nc/{name}",), environment) for name in names]


def entries(**minutes):
    return ledger.Ledger({}, {name: ledger.Entry({}, "", "", value) for name, value in minutes.items()})


def named(found):
    return [job.name for job in found]


def test_what_does_not_fit_leaves_its_place_to_what_does():
    known = entries(a=25, b=5, c=4)
    assert named(matrix.chosen(some("a", "b", "c"), known, 10)) == ["b", "c"]
    assert named(matrix.chosen(some("a", "b", "c"), known, 31)) == ["a", "b"]
    assert matrix.chosen(some("a", "b", "c"), known, 3) == []


def test_setting_up_an_environment_counts_once(tmp_path):
    found, known = some("a", "b", "c", environment="newest"), entries(a=3, b=3, c=1)
    minutes = jobs.SETUPS["newest"]
    assert named(matrix.chosen(found, known, minutes + 5)) == ["a", "c"]
    assert matrix.set_up_lines(found, tmp_path) == [
        f"setting up .venv-newest: {minutes:.0f} minutes are counted, it is not here"
    ]
    (tmp_path / ".venv-newest").mkdir()
    (tmp_path / ".venv-newest" / ".complete").touch()
    assert named(matrix.chosen(found, known, minutes + 5)) == ["a", "c"]  # the same jobs, there or not
    assert matrix.set_up_lines(found, tmp_path)[0].endswith("it is here")


def test_a_job_needs_what_it_runs_on():
    (job,) = some("a")
    job = dataclasses.replace(
        job, flags=("amx_tile",), programs=("no-such-program",), pythons=((3, 11), (3, 12))
    )
    assert (
        jobs.Machine(frozenset({"avx2"}), (3, 13)).lacks(job)
        == "amx_tile, no-such-program, Python 3.11 or 3.12"
    )
    assert (
        jobs.Machine(frozenset({"amx_tile"}), (3, 12)).lacks(dataclasses.replace(job, programs=("sh",))) == ""
    )


def test_results_go_where_they_belong():
    told, made = [], []
    found = [*some("a", "b", "c", "f"), *some("d", environment="newest"), *some("e", environment="fallback")]
    codes = {"b": 2, "f": jobs.UNDECIDED}
    failed, undecided, late = matrix.run(
        found,
        lambda environment: made.append(environment) or environment == "newest",
        lambda job: codes.get(job.name, 0),
        lambda job, minutes: told.append((job.name, minutes >= 0)),
        lambda job: job.name != "c",
    )
    assert (failed, undecided, late) == (["b", "d"], ["f"], ["c"])
    assert told == [("a", True), ("e", True)]
    assert made == ["native", "newest", "fallback"]


# --- the ledger

ENTRY = {"passed": {"avx2": "2026-11-01"}, "own": "0" * 16, "all": "a" * 16, "minutes": 1.5}
GOOD = {"files": {"nc/x.py": "0123abcd"}, "jobs": {"a": ENTRY}}


def test_a_ledger_is_what_was_written(tmp_path):
    path = tmp_path / "ledger.json"
    assert ledger.read(path) == ledger.Ledger()
    path.write_text(json.dumps(GOOD))
    known = ledger.read(path)
    assert known.jobs["a"] == ledger.Entry({"avx2": "2026-11-01"}, "0" * 16, "a" * 16, 1.5)
    ledger.write(path, known)
    assert ledger.read(path) == known
    assert json.loads(path.read_text()) == GOOD
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.json"]


def _with(**fields):
    return json.dumps({**GOOD, "jobs": {"a": {**ENTRY, **fields}}})


DAMAGED = {
    "empty": "",
    "cut": json.dumps(GOOD)[:-3],
    "conflict": "<<<<<<< HEAD\n" + json.dumps(GOOD),
    "a list": "[]",
    "of another form": json.dumps({"wheel": ENTRY}),
    "one table": json.dumps({"files": {}}),
    "a table of another kind": json.dumps({"files": {}, "jobs": []}),
    "no hash": json.dumps({**GOOD, "files": {"x": "1"}}),
    "no object": json.dumps({**GOOD, "jobs": {"a": 1}}),
    "a field is missing": json.dumps({**GOOD, "jobs": {"a": {"passed": {}}}}),
    "an unknown field": _with(more=1),
    "no day": _with(passed={"avx2": "yesterday"}),
    "another day": _with(passed={"avx2": "2026-13-01"}),
    "a number for a day": _with(passed={"avx2": 3}),
    "passed without hashes": _with(own=""),
    "never passed with hashes": _with(passed={}),
    "minutes that are true": _with(minutes=True),
    "minutes below 0": _with(minutes=-1),
    "minutes without end": _with(minutes=float("inf")),
    "minutes that are no number": _with(minutes=float("nan")),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_ledger_is_an_error_that_says_what_to_do(tmp_path, text):
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(
        ledger.LedgerError, match=r"ledger.json is damaged: .*\. Take it from the last commit"
    ):
        ledger.read(path)


def block(tree_hash="b" * 16, **passed):
    return ledger.block(tree_hash, {name: ledger.Entry(**fields) for name, fields in passed.items()})


def test_the_lines_of_a_log_are_taken_whatever_stands_before_them():
    lines = ["begin of the log", *block(a=ENTRY), "more", *block("c" * 16)]
    found = ledger.taken("\n".join(f"2026-11-29T07:00:01Z gate | {line}" for line in lines))
    assert found == [("b" * 16, {"a": ledger.Entry(**ENTRY)}), ("c" * 16, {})]


LOGS = {
    "no line": lambda lines: ["a log"],
    "no end": lambda lines: lines[:-1],
    "no begin": lambda lines: lines[1:],
    "a line is missing": lambda lines: [lines[0], *lines[2:]],
    "a line is cut": lambda lines: [lines[0], lines[1][:-9], *lines[2:]],
    "a field is missing": lambda lines: [lines[0], lines[1].replace('"own"', '"other"'), *lines[2:]],
    "no name": lambda lines: [lines[0], lines[1].replace('"name"', '"other"'), *lines[2:]],
    "another begin": lambda lines: [lines[0], *lines],
}


@pytest.mark.parametrize("damage", LOGS.values(), ids=LOGS)
def test_a_log_that_is_not_whole_is_an_error(damage):
    with pytest.raises(ledger.LedgerError, match="Nothing was taken"):
        ledger.taken("\n".join(damage(block(a=ENTRY, b=ENTRY))))


def test_days_of_both_are_kept_and_hashes_of_the_newer_one():
    old = ledger.Entry({"avx2": "2026-11-01", "amx": "2026-11-03"}, "0" * 16, "0" * 16, 1.0)
    new = ledger.Entry({"avx2": "2026-11-05"}, "1" * 16, "1" * 16, 2.0)
    days = {"avx2": "2026-11-05", "amx": "2026-11-03"}
    assert ledger.joined(old, new) == ledger.Entry(days, "1" * 16, "1" * 16, 2.0)
    assert ledger.joined(new, old) == ledger.Entry(days, "1" * 16, "1" * 16, 2.0)
    assert ledger.joined(None, new) == new


def test_the_table_says_when_each_passed_on_what_and_what_is_overdue(root):
    known, today = passed_all(root), datetime.date(2026, 11, 10)
    for name, days in {
        "mutations:two": {"avx2": "2026-10-26"},
        "mutations:rows-a": {"avx2": "2026-10-27", "amx": "2026-11-09"},
        "serve": {},
    }.items():
        hashes = {} if days else {"own": "", "all": ""}
        known = known.with_entry(name, dataclasses.replace(known.jobs[name], passed=days, **hashes))
    known = known.with_entry("wheel", dataclasses.replace(known.jobs["wheel"], minutes=7.5))
    now = repository.Tree(root)
    lines = matrix.table(jobs.jobs(now), needed(root, known), known, today)
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert cells["mutations"] == [
        "3",
        "3",
        "0",
        "1",
        "2026-10-26",
        "amx",
        "2026-11-09,",
        "avx2",
        "2026-11-01",
    ]
    assert cells["serve"] == ["1", "0", "1", "1", "-", "-"]
    assert "mutations: two" in lines
    assert "serve: serve" in lines
    assert not any(line.startswith("wheel:") for line in lines)
    assert lines[-1] == "Longer than 7 minutes, to be divided in .ci/jobs.py: wheel 7.5"


# --- the command


@pytest.fixture
def whole(root):
    """The small tree with this command, and targets that do nothing but what a file says."""
    (root / ".ci").mkdir()
    for name in ("repository.py", "jobs.py", "ledger.py", "matrix.py"):
        shutil.copy(CI / name, root / ".ci")
    targets = {job.command[1] for job in jobs.jobs(repository.Tree(root)) if job.command[0] == "make"}
    for folder in (".venv", ".venv-native"):
        python = root / folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\n! grep -qx "$2" failing || exit 1\n! grep -qx "$2" open || exit 3\n')
        python.chmod(0o755)
    (root / "open").touch()
    environments = {job.environment for job in jobs.jobs(repository.Tree(root))}
    set_ups = " ".join("setup" if name == "ipex" else f"setup-{name}" for name in sorted(environments))
    (root / "Makefile").write_text(
        f"{set_ups}:\n\t@true\n{' '.join(sorted(targets))}:\n\t@! grep -qx $@ failing\n"
    )
    (root / "failing").touch()
    return root


def command(root, *options):
    return subprocess.run(
        [sys.executable, ".ci/matrix.py", *options], cwd=root, capture_output=True, text=True, check=False
    )


def test_what_passed_in_ci_goes_through_its_log_into_the_ledger(whole):
    assert command(whole, "--seen").returncode == 0
    change(whole, "nc/graph/two.py")
    done = command(whole, "--minutes", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mutations:two: its own files changed (nc/graph/two.py); last passed never" in done.stdout
    path = whole / ".ci" / "ledger.json"
    before = ledger.read(path)
    assert before.jobs == {}  # CI keeps nothing
    (whole / "log").write_text(done.stdout)
    assert command(whole, "--take", "log").returncode == 0
    after = ledger.read(path)
    assert after.jobs["mutations:two"].last == datetime.date.today().isoformat()
    assert needed(whole, after)["mutations:two"].level == matrix.NOTHING
    assert after.files == repository.Tree(whole).files != before.files
    change(whole, "nc/graph/two.py")  # the log is not of this tree
    done = command(whole, "--take", "log")
    assert "The log is of other files" in done.stdout
    assert ledger.read(path) == after
    (whole / "log").write_text("no block")
    done = command(whole, "--take", "log")
    assert (done.returncode, "Nothing was taken" in done.stderr) == (1, True)


def test_a_developers_run_writes_what_passed_and_notes_the_files_when_the_change_has_passed(whole):
    path = whole / ".ci" / "ledger.json"
    command(whole, "--seen")
    change(whole, "nc/graph/two.py")
    (whole / "failing").write_text("test-fallback\n")
    done = command(whole, "--record")
    assert done.returncode == 1
    assert "matrix: failed: " in done.stderr
    known = ledger.read(path)
    assert known.jobs["test-newest:graph"].last
    assert "test-fallback:graph" not in known.jobs
    assert known.files != repository.Tree(whole).files  # a job of the change is left
    (whole / "failing").write_text("")
    assert command(whole, "--record").returncode == 0
    assert ledger.read(path).files == repository.Tree(whole).files
    assert "no time for 0" in command(whole, "--record").stdout  # there is nothing left to do


def test_a_mutation_that_the_cpu_can_not_decide_neither_fails_nor_passes(whole):
    command(whole, "--seen")
    change(whole, "nc/graph/two.py")
    (whole / "open").write_text("two\n")
    done = command(whole, "--minutes", "3", "--record")
    assert done.returncode == 0, done.stderr
    assert "matrix: not decided on this machine: mutations:two" in done.stdout
    assert "mutations:two" not in ledger.read(whole / ".ci" / "ledger.json").jobs
    (whole / "open").write_text("")
    (whole / "failing").write_text("two\n")
    done = command(whole, "--minutes", "3")
    assert (done.returncode, "matrix: failed: mutations:two" in done.stderr) == (1, True)


@pytest.mark.parametrize("options", [("--minutes", "10"), ("--list",), (), ("--take", "log"), ("--seen",)])
def test_a_damaged_ledger_ends_the_command(whole, options):
    (whole / ".ci" / "ledger.json").write_text("{")
    (whole / "log").write_text("\n".join(block()))
    done = command(whole, *options)
    assert (done.returncode, "ledger.json is damaged" in done.stderr) == (1, True), done.stdout
    assert (whole / ".ci" / "ledger.json").read_text() == "{"


def test_without_a_ledger_something_runs_and_the_output_says_so(whole):
    done = command(whole, "--minutes", "10")
    assert done.returncode == 0
    assert "ledger.json has no files" in done.stdout
    assert done.stdout.count("\n--- ") > 1


@pytest.mark.parametrize(
    ("options", "why"), [(("0.1",), "no job fits"), (("10", "--deadline", "0"), "no time for any")]
)
def test_a_run_of_nothing_fails(whole, options, why):
    done = command(whole, "--minutes", *options)
    assert (done.returncode, why in done.stderr) == (1, True)


# --- this repository


@pytest.fixture(scope="module")
def here():
    return repository.Tree(ROOT)


@pytest.fixture(scope="module")
def jobs_here(here):
    return jobs.jobs(here)


def test_every_job_of_this_repository_has_files_a_target_an_environment_and_at_most_7_minutes(
    here, jobs_here
):
    assert len({job.name for job in jobs_here}) == len(jobs_here)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = ledger.read(ROOT / repository.LEDGER)
    for job in jobs_here:
        if job.target == "mutations":
            assert job.command[1:3] == ("test/mutations.py", job.name.partition(":")[2])
        else:
            assert job.command[0] == "make"
            assert f"\n{job.command[1]}: setup" in makefile, job.name
        assert here.below(job.own), job.name
        assert f"requirements/{job.environment}.txt" in here.files
        assert 0 < matrix.expected(job, known) <= jobs.LONGEST, job.name
    assert {job.environment for job in jobs_here} - {"ipex", "native"} == set(jobs.SETUPS)


def test_the_ledger_of_this_repository_can_be_read(jobs_here):
    known = ledger.read(ROOT / repository.LEDGER)
    assert known.files
    assert known.jobs.keys() & {job.name for job in jobs_here}


def test_every_test_is_in_one_job_of_each_suite(here):
    covered = [
        name
        for room in jobs.rooms(here)
        for name in here.below([f"test/{room}"])
        if Path(name).match("test_*.py")
    ]
    apart = {ROOT / "test" / name for name in jobs.APART}
    found = [path for path in (ROOT / "test").rglob("test_*.py") if apart.isdisjoint(path.parents)]
    assert sorted(covered) == sorted(path.relative_to(ROOT).as_posix() for path in found)


def test_every_mutation_source_set_and_judge_is_a_job(here, jobs_here):
    names = {job.name for job in jobs_here}
    from mutations import MUTATIONS, UNDECIDED

    assert {f"mutations:{mutation.name}" for mutation in MUTATIONS} <= names
    assert {row.name: row.environment for row in here.rows} == {
        m.name: "ipex" if m.ipex else "emulated" if m.emulated else "native" for m in MUTATIONS
    }
    assert jobs.UNDECIDED == UNDECIDED
    assert {f"sanitize:{source}" for source in here.sources} <= names
    assert {f"isas:{name}" for name in jobs.isas(here)} <= names
    judges = {path.stem.removeprefix("test_") for path in (ROOT / "test" / "judges").glob("test_*.py")}
    assert {f"judges:{name}" for name in judges} <= names
    for job in jobs_here:
        if job.target == "mutations":
            assert job.tests, job.name


def given(target, *variables):
    """The words of the last command that make shows for a target."""
    setup = {"test-exhaustive": "setup", "test-once": "setup"}.get(target, "setup-newest")
    # The suite itself runs below make, which passes on its variables and has a make below it name its folder.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(
        ["make", "-n", "--no-print-directory", "-o", setup, "-o", "setup-readers", target, *variables],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return shown.splitlines()[-1].partition("||")[0].split()


def test_make_gives_pytest_the_files_of_a_job(here):
    for room in jobs.rooms(here):
        words = given("test-newest", f"ROOM={room}")
        paths = [ROOT / word for word in words if word.startswith("test/")]
        found = {
            file.relative_to(ROOT).as_posix()
            for path in paths
            for file in (path.rglob("test_*.py") if path.is_dir() else [path])
        }
        assert found == {name for name in here.below([f"test/{room}"]) if Path(name).match("test_*.py")}, room


@pytest.mark.parametrize("target", ["test-exhaustive", "test-once", "test-newest"])
def test_make_gives_pytest_the_share_of_a_job(target):
    words = given(target, "ROOM=graph", "SHARE=2", "TURN=1")
    assert words[words.index("--share") :][:4] == ["--share", "2", "--turn", "1"]


def test_make_gives_a_judge_its_file():
    assert given("test-readers", "JUDGES=test/judges/test_readers.py")[-1] == "test/judges/test_readers.py"
    assert len([word for word in given("test-readers") if word.startswith("test/")]) == 2


#: Touched → jobs whose own files, or files near to them, it is.
TOUCHED = {
    "nc/kernels/c_code/rows.c": (
        {"sanitize:rows", "mutations:codes-init", "test-newest:kernels", "isas:avx2"},
        {"test-newest:backends/native", "test-fallback:backends/native:0", "test-once:backends/native"},
    ),
    "nc/kernels/c_code/bf16.h": ({"sanitize:rows", "isas:amx", "wheel"}, {"test-newest:backends/native"}),
    "nc/tuning/front.py": ({"test-newest:tuning"}, {"test-once:cli"}),
    "nc/hf/export.py": ({"test-newest:hf"}, {"judges:readers", "judges:vllm"}),
    "test/suites/real_minilm.py": (set(), {"test-newest:hf"}),
    "test/data/schema1/static/model.json": (set(), {"test-newest:api"}),
    "examples/minilm.py": ({"test-once:examples"}, {"test-newest:hf"}),
}


@pytest.fixture(scope="module")
def distances_here(here, jobs_here):
    return {job.name: job.distances(here) for job in jobs_here}


@pytest.mark.parametrize("name", TOUCHED)
def test_what_is_touched_lists_its_jobs(here, distances_here, name):
    assert name in here.files
    own, near = TOUCHED[name]
    found = {job: distances.get(name, jobs.FAR) for job, distances in distances_here.items()}
    assert {job: found[job] for job in own} == dict.fromkeys(own, 0)
    assert not [job for job in near if not 0 < found[job] <= jobs.NEAR]
    assert "test-newest:formats" not in {job for job, distance in found.items() if distance <= jobs.NEAR}


def test_the_gate_ends_with_pytest_and_runs_the_matrix_before():
    lines = (CI / "run").read_text(encoding="utf-8").splitlines()
    commands = [line.partition("#")[0].split() for line in lines if line.startswith(("make ", "python3 "))]
    assert [words[1] for words in commands] == ["lint", "test-native", "test-onnx", ".ci/matrix.py", "test"]

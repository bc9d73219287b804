"""The jobs of the full matrix that are run.

By the files that changed and by the ledger, never by the commit.
"""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded():
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


matrix = loaded()
JOBS = [matrix.Job(name, ("true",), (f"nc/{name}",), "native") for name in ("a", "b", "c", "d")]
NOW = {"a": ("1", "1"), "b": ("2", "2"), "c": ("3", "3"), "d": ("4", "4")}


def entry(passed, own, everything, minutes=10.0):
    return matrix.Entry(passed, own, everything, minutes)


#: Of each need one.
LEDGER = {
    "b": entry("2026-11-03", "2", "2"),
    "c": entry("2026-11-02", "3", "old"),
    "d": entry("2026-11-01", "old", "old"),
}


def names(jobs):
    return [job.name for job in jobs]


def test_the_greatest_need_comes_first():
    assert names(matrix.ordered(JOBS, LEDGER, NOW)) == ["a", "d", "c", "b"]


def test_of_equal_needs_the_oldest_comes_first_and_with_nothing_stale_too():
    ledger = {
        name: entry(f"2026-11-0{day}", *NOW[name]) for name, day in (("a", 4), ("b", 2), ("c", 3), ("d", 2))
    }
    assert {matrix.need(ledger[name], NOW[name]) for name in NOW} == {3}
    assert names(matrix.ordered(JOBS, ledger, NOW)) == ["b", "d", "c", "a"]
    assert names(matrix.chosen(matrix.ordered(JOBS, ledger, NOW), ledger, 20)) == ["b", "d"]


def test_what_does_not_fit_leaves_its_place_to_what_does():
    ledger = {**LEDGER, "d": dataclasses.replace(LEDGER["d"], minutes=25.0)}
    in_order = matrix.ordered(JOBS, ledger, NOW)
    assert names(matrix.chosen(in_order, ledger, 20)) == ["a", "c"]
    assert names(matrix.chosen(in_order, ledger, 35)) == ["a", "d"]
    assert matrix.chosen(in_order, ledger, 5) == []


def test_results_go_where_they_belong():
    told = []
    failed, late = matrix.run(
        JOBS,
        lambda job: job.name == "b",
        lambda job, minutes: told.append((job.name, minutes >= 0)),
        lambda job: job.name != "d",
    )
    assert (failed, late, told) == (["b"], ["d"], [("a", True), ("c", True)])


def test_a_ledger_is_what_was_written(tmp_path):
    path = tmp_path / "ledger.json"
    assert matrix.read(path) == {}
    matrix.write(path, LEDGER)
    assert matrix.read(path) == LEDGER
    assert len(path.read_text().splitlines()) == len(LEDGER) + 2


@pytest.fixture
def tree(tmp_path):
    """`api` imports `graph`, which imports `formats`; `text` is apart, and the package imports everything."""
    for name, text in {
        "nc/__init__.py": "from nc.api import one\nfrom nc.text import four\n",
        "nc/api/__init__.py": "",
        "nc/api/one.py": "import torch\n\n\ndef f():\n    from nc.graph.two import g\n",
        "nc/graph/__init__.py": "",
        "nc/graph/two.py": "import nc\nfrom nc.formats import three\n",
        "nc/formats/__init__.py": "",
        "nc/formats/three.py": "",
        "nc/text/four.py": "",
        "test/api/test_one.py": "",
        "test/api/deep/test_deep.py": "",
        "test/graph/deep/test_two.py": "",
        "test/test_all.py": "",
        "test/suites/x.py": "",
        "test/conftest.py": "",
        "requirements/native.txt": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def hashes(tree, *own):
    for cached in (matrix._imports, matrix._content):
        cached.cache_clear()
    return matrix.hashes(tree, matrix.Job("job", ("true",), own, "native"))


@pytest.mark.parametrize(
    ("changed", "own", "everything"),
    [
        ("nc/api/one.py", True, True),
        ("test/api/test_one.py", True, True),
        ("nc/graph/two.py", False, True),
        ("nc/formats/three.py", False, True),
        ("requirements/native.txt", False, True),
        ("test/conftest.py", False, True),
        ("test/suites/x.py", False, True),
        ("nc/text/four.py", False, False),
        ("nc/__init__.py", False, False),
        ("test/graph/deep/test_two.py", False, False),
        ("test/api/deep/test_deep.py", False, False),
        ("requirements/newest.txt", False, False),
        ("nc/api/__pycache__/one.pyc", False, False),
    ],
)
def test_a_job_depends_on_its_rooms_and_on_what_they_import(tree, changed, own, everything):
    before = hashes(tree, "nc/api", "test/api")
    path = tree / changed
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "# changed\n")
    after = hashes(tree, "nc/api", "test/api")
    assert (before[0] != after[0], before[1] != after[1]) == (own, everything)


def test_folders_of_tests_are_jobs(tree):
    assert matrix.rooms(tree / "test") == [".", "api", "api/deep", "graph"]


def test_every_job_of_this_repository_has_files_a_target_and_an_environment():
    jobs = matrix.jobs(ROOT)
    assert len({job.name for job in jobs}) == len(jobs)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in jobs:
        assert job.command[0] == "make"
        assert f"\n{job.command[1]}: setup" in makefile, job.name
        assert matrix.files(ROOT, job.own), job.name
        assert (ROOT / "requirements" / f"{job.requirements}.txt").exists()


def test_instruction_sets_that_the_cpu_lacks_are_no_jobs():
    def isas(flags):
        return [job.name for job in matrix.jobs(ROOT, flags) if job.name.startswith("isas:")]

    assert isas(frozenset({"avx2", "fma", "f16c"})) == ["isas:avx2"]
    assert len(isas(None)) == 6


def test_every_test_is_in_one_job_of_each_suite():
    rooms = matrix.rooms(ROOT / "test")
    covered = [
        path for room in rooms for path in matrix.files(ROOT, [f"test/{room}"]) if path.match("test_*.py")
    ]
    apart = {ROOT / "test" / name for name in matrix.APART}
    assert sorted(covered) == sorted(
        path for path in (ROOT / "test").rglob("test_*.py") if apart.isdisjoint(path.parents)
    )


def test_make_gives_pytest_the_files_of_a_job():
    for room in matrix.rooms(ROOT / "test"):
        shown = subprocess.run(
            ["make", "-n", "-o", "setup-newest", "test-newest", f"ROOM={room}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        words = shown[shown.index("--turn 0") :].partition("||")[0].split()[2:]
        given = {
            path
            for word in words
            for path in (
                sorted((ROOT / word).rglob("test_*.py")) if (ROOT / word).is_dir() else [ROOT / word]
            )
        }
        assert given == {path for path in matrix.files(ROOT, [f"test/{room}"]) if path.match("test_*.py")}, (
            room
        )


def test_the_ledger_of_this_repository_can_be_read():
    known = {job.name for job in matrix.jobs(ROOT)}
    assert set(matrix.read(matrix.LEDGER)) <= known

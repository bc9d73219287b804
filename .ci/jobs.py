"""The jobs of the full matrix: what runs each, on what it depends, and what it needs of a machine."""

from __future__ import annotations

import dataclasses
import os
import runpy
import shutil
import sys
from pathlib import Path, PurePosixPath

from repository import C_CODE, DIVIDED, MUTATIONS, Tree, names

#: Exit code of a job whose verdict depends on instruction sets that the CPU lacks, see test/mutations.py.
UNDECIDED = 3
#: Minutes that a job may take.
LONGEST = 7.0
#: Distance of what decides about every job of an environment.
FAR = 99
#: Over so many files a job is near to what changed.
NEAR = 2
#: What every job depends on.
COMMON = ("pyproject.toml", "Makefile", "requirements/common.txt", "test/conftest.py", "test/models.py")
#: Minutes of a job that the ledger does not know, by its target.
MINUTES = {
    "mutations": 1.5,
    "sanitize": 3.0,
    "isas": 3.0,
    "judges": 3.5,
    "wheel": 4.0,
    "release": 5.0,
    "serve": 4.0,
    "site": 6.0,
    "site-pages": 0.5,
}
UNKNOWN = 2.0
#: Environment → minutes that it takes to set up where nothing is kept; the gate itself needs the others.
SETUPS = {
    **{"newest": 4.0, "judges": 5.0, "readers": 5.0, "vllm": 5.0},
    **{"fallback": 1.0, "wheel": 1.0, "serve": 2.0, "browser": 1.0, "site": 2.0},
    "emulated": 2.0,
}
#: Folders of tests → what they test, where that is not the room of nc with the same name.
OF_ROOMS = {
    ".": ("requirements/newer.py",),
    "benchmarks": ("benchmarks", "results"),
    "ci": (".ci",),
    "serve": ("examples/serve",),
    "examples": ("examples", "docs", "README.md"),
}
#: Folders of tests that run or read all of nc, whatever they import.
OF_ALL = (".", "examples")
#: Folders of test/ that are jobs of their own kind, or hold no tests.
APART = ("browser", "judges", "suites", "data")
#: Suite → its environment.
SUITES = {
    "test-exhaustive-native": "native",
    "test-exhaustive": "ipex",
    "test-once": "ipex",
    "test-newest": "newest",
    "test-fallback": "fallback",
}
#: (suite, folder of tests) → how many jobs share its tests; 1 for all others.
SHARES = {
    **{
        (suite, "backends/native"): 2
        for suite in ("test-exhaustive-native", "test-exhaustive", "test-fallback")
    },
    **{
        (suite, room): 2
        for suite in ("test-exhaustive-native", "test-exhaustive")
        for room in ("api", "graph")
    },
}
#: Tests of judges that have an environment of their own.
JUDGES = {"test_readers": "readers", "test_evaluators": "readers", "test_vllm": "vllm"}
#: Shows the site in a browser.
SITE_TEST = "test/browser/test_site_in_browser.py"
#: Targets whose jobs the gate runs first where their own files changed.
GUARDS = ("sanitize", "mutations", "test-newest")


@dataclasses.dataclass(frozen=True)
class Job:
    """One command of the matrix.

    Attributes:
        name: in the ledger: a target, ":" and a part of it.
        command: what runs it.
        own: files and folders that it is about.
        environment: which `make setup-…` makes, or `make setup` for "ipex".
        tests: files and folders that it begins with too, which are not what it is about.
        also: files and folders that it may read, whatever its tests import.
        inside: of what its files read, only what is below this folder counts; "" for all.
        flags: features that the CPU must have.
        programs: that must be installed.
        pythons: versions that its environment exists for; () for all.
    """

    name: str
    command: tuple[str, ...]
    own: tuple[str, ...]
    environment: str
    tests: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    inside: str = ""
    flags: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    pythons: tuple[tuple[int, int], ...] = ()

    @property
    def target(self) -> str:
        """What groups it with others."""
        return self.name.partition(":")[0]

    @property
    def requirements(self) -> tuple[str, ...]:
        """Files that say what its environment holds."""
        name = f"requirements/{self.environment}"
        return (f"{name}.txt", f"{name}-nodeps.txt")

    def distances(self, tree: Tree) -> dict[str, int]:
        """Return the files that it depends on → how far each is: 0 for its own, `FAR` for its environment."""
        near = dict.fromkeys(tree.below(self.tests), 1) | dict.fromkeys(tree.below(self.own), 0)
        far = dict.fromkeys(tree.below((*COMMON, *self.requirements, *self.also)), FAR)
        return far | tree.distances(near, self.inside)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What jobs need of a machine.

    Attributes:
        flags: features of the CPU, as /proc/cpuinfo names them.
        python: version of the interpreter that environments are made with.
    """

    flags: frozenset[str]
    python: tuple[int, int]

    def lacks(self, job: Job) -> str:
        """Return what it lacks for a job, or ""."""
        missing = [flag for flag in job.flags if flag not in self.flags]
        missing += [program for program in job.programs if shutil.which(program) is None]
        if job.pythons and self.python not in job.pythons:
            missing.append("Python " + " or ".join(f"{major}.{minor}" for major, minor in job.pythons))
        return ", ".join(missing)


def this_machine() -> Machine:
    """Return what this machine has."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return Machine(frozenset(flags), sys.version_info[:2])


def isas(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Return instruction set → features of the CPU that it needs, the best one last."""
    path = tree.root / C_CODE / "isas.py"
    return dict(runpy.run_path(str(path))["ISAS"]) if path.exists() else {}


def best_isa(tree: Tree, flags: frozenset[str]) -> str:
    """Return the best instruction set of a CPU, or "none"."""
    return ["none", *(name for name, needed in isas(tree).items() if flags.issuperset(needed))][-1]


def rooms(tree: Tree) -> list[str]:
    """Return the folders of tests that are jobs of their own, relative to test/.

    "." for the files in test/ itself.
    """
    found = set()
    for name in tree.files:
        path = PurePosixPath(name)
        if path.parts[0] == "test" and path.name.startswith("test_") and path.suffix == ".py":
            first, *others = (*path.parts[1:-1], "")
            divided = first in DIVIDED and others[:1] not in ([], [""])
            found.add(f"{first}/{others[0]}" if divided else first or ".")
    return sorted(found.difference(APART))


def jobs(tree: Tree) -> list[Job]:
    """Return all jobs, in the order of their targets."""
    return [*_kernels(tree), *_suites(tree), *_others(tree), *_mutations(tree)]


def _kernels(tree: Tree) -> list[Job]:
    """Return those of instruction sets and of sanitizers."""
    marked = tuple(
        name
        for name in tree.files
        if name.startswith("test/")
        and name.endswith(".py")
        and "::" not in name
        and "mark.isas" in tree.text(name)
    )
    script = "test/isas.py"
    # one that emulates what the CPU lacks runs on every machine
    emulates = script in tree.files and "NC_EMULATE" in tree.text(script)
    found = [
        Job(
            f"isas:{name}",
            ("make", "test-isas", f"ISAS={name}"),
            (C_CODE, script, "test/kernels"),
            "native",
            tests=marked,
            flags=() if emulates else needed,
        )
        for name, needed in isas(tree).items()
    ]
    table = tree.root / "test" / "sanitizers.py"
    tests = dict(runpy.run_path(str(table))["TESTS"]) if table.exists() else {}
    for source, files in tests.items():
        own = f"{C_CODE}/{source}.c"
        headers = [name for name in tree.distances({own: 0}, C_CODE) if name.endswith(".h")]
        begins = (
            *("test/sanitizers.py", "test/c_fuzz.py", "test/c_threads.c"),
            *(path for file in files for path in tests_named(tree, file)),
        )
        command = ("make", "sanitize", f"SOURCES={source}")
        found.append(
            Job(f"sanitize:{source}", command, (own, *headers), "native", tests=begins, programs=("gcc",))
        )
    return found


def _suites(tree: Tree) -> list[Job]:
    found = []
    for suite, environment in SUITES.items():
        for room in rooms(tree):
            own = (*OF_ROOMS.get(room, (f"nc/{room}",)), f"test/{room}")
            share = SHARES.get((suite, room), 1)
            for turn in range(share):
                name, more = f"{suite}:{room}", ()
                if share > 1:
                    name, more = f"{name}:{turn}", (f"SHARE={share}", f"TURN={turn}")
                command = ("make", suite, f"ROOM={room}", *more)
                found.append(Job(name, command, own, environment, also=("nc",) * (room in OF_ALL)))
    return found


def _others(tree: Tree) -> list[Job]:
    """Return those of other projects: what they read, serve, show and install."""
    packaging = ("setup.py", C_CODE, "requirements/wheel.txt", "test/process/test_wheel.py")
    found = [Job("wheel", ("make", "wheel-check"), packaging, "wheel", also=("nc",))]
    release = (*packaging, ".ci/release", "README.md", "LICENSE")
    found.append(Job("release", ("make", "release-check"), release, "wheel", also=("nc",)))
    for name in sorted(tree.below(("test/judges",))):
        file = PurePosixPath(name).stem
        if file.startswith("test_"):
            environment = JUDGES.get(file, "judges")
            found.append(
                Job(
                    f"judges:{file.removeprefix('test_')}",
                    (
                        "make",
                        f"test-{environment}" if file in JUDGES else "test-judges-own",
                        f"JUDGES={name}",
                    ),
                    (name,),
                    environment,
                    pythons=((3, 11), (3, 12)),
                )
            )
    found.append(Job("serve", ("make", "test-serve"), ("examples/serve", "test/serve"), "serve"))
    shown = Job("browser", ("make", "test-browser"), ("nc/text", "test/browser"), "browser")
    found.append(dataclasses.replace(shown, programs=("chromium", "chromedriver", "npm")))
    if SITE_TEST in tree.files:
        own = ("docs/conf.py", "docs/make_site.py", "docs/templates", "docs/tutorials", SITE_TEST)
        pages = ("docs", "README.md", "CHANGELOG.md", "examples", "results", "nc")
        site = Job("site", ("make", "test-site"), own, "site", also=pages)
        found.append(dataclasses.replace(site, programs=("chromium", "chromedriver")))
        found.append(Job("site-pages", ("make", "site-pages"), (*own, *pages[:-1]), "site"))
    return found


def _mutations(tree: Tree) -> list[Job]:
    """Return one for each row: it depends on its file, on itself, and on its tests with their helpers."""
    found = []
    for row in tree.rows:
        folder = ".venv" if row.environment == "ipex" else f".venv-{row.environment}"
        # not by make, which hides exit codes; the whole suite would take longer than a job may
        command = (f"{folder}/bin/python", MUTATIONS, row.name, "--targeted")
        tests = tuple(path for name in row.tests for path in tests_named(tree, name))
        own = (os.path.normpath(f"nc/{row.file}"), row.key)
        found.append(Job(f"mutations:{row.name}", command, own, row.environment, tests=tests, inside="test/"))
    return found


def tests_named(tree: Tree, name: str) -> list[str]:
    """Return the test files of a name, wherever they are."""
    return sorted(
        path for path in tree.files if path.startswith("test/") and path.endswith(f"/test_{name}.py")
    )


def is_own(job: Job, name: str) -> bool:
    """Whether a file, which may be gone, is of those that a job is about."""
    return names(job.own, name)

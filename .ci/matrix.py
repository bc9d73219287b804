"""Run the jobs of the full matrix whose files have changed, the most needed first.

Needs Python alone, and no history of git.

    python3 .ci/matrix.py [--minutes 40] [--deadline 60] [--all] [--record] [--list]

A job is a command and the files that decide its result: those that it is about (`own`), and all that it
reaches. `ledger.json` has for each job the hashes of these files when it last passed, the date, and the
minutes that it takes. `make test-everything` records what passed; CI does not. So the jobs that are chosen
depend on the files of the tree and on the ledger, on nothing else.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import functools
import hashlib
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / ".ci" / "ledger.json"
#: What every job depends on, besides its own files.
COMMON = (
    "pyproject.toml",
    "Makefile",
    "requirements/common.txt",
    "test/conftest.py",
    "test/models.py",
    "test/nets.py",
    "test/suites",
)
#: Folders of tests → what they test, where that is not the room of nc with the same name.
OF_ROOMS = {
    ".": ("nc", "requirements/newer.py"),
    "benchmarks": ("benchmarks",),
    "ci": (".ci/matrix.py",),
    "serve": ("examples/serve", "nc/hf"),
    "examples": ("examples", "docs", "README.md", "nc"),
}
#: Minutes of a job that the ledger does not know.
UNKNOWN = 10.0
#: Folders of tests that are one job for each of their folders, and one for the files in them; all others are
#: one job.
DIVIDED = ("backends", "algorithms", "api")


@dataclasses.dataclass(frozen=True)
class Job:
    """One command of the matrix.

    Attributes:
        name: in the ledger.
        command: what runs it.
        own: files and folders that it is about.
        requirements: its environment.
    """

    name: str
    command: tuple[str, ...]
    own: tuple[str, ...]
    requirements: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the ledger has of a job.

    When it last passed ("": never), hashes of its own and of all its files then, and its minutes.
    """

    passed: str = ""
    own: str = ""
    all: str = ""
    minutes: float = UNKNOWN


#: Why a job is needed, the greatest need first.
NEEDS = ("it never passed", "its own files changed", "files that it reaches changed", "nothing changed")


#: Folders of test/ that are jobs of their own kind, or hold no tests.
APART = ("browser", "judges", "suites", "data")


def rooms(test: Path) -> list[str]:
    """Return the folders of tests that are jobs of their own, relative to test/.

    "." for the files in test/ itself.
    """

    def has_tests(folder: Path, deep: bool) -> bool:
        return any(folder.rglob("test_*.py") if deep else folder.glob("test_*.py"))

    found = ["."] if has_tests(test, deep=False) else []
    for folder in sorted(path for path in test.iterdir() if path.is_dir() and path.name not in APART):
        if folder.name in DIVIDED:
            found += [folder.name] if has_tests(folder, deep=False) else []
            parts = sorted(path for path in folder.iterdir() if path.is_dir() and has_tests(path, deep=True))
            found += [f"{folder.name}/{path.name}" for path in parts]
        elif has_tests(folder, deep=True):
            found.append(folder.name)
    return found


def features() -> frozenset[str]:
    """Return the features of this CPU, as /proc/cpuinfo names them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def jobs(root: Path, flags: frozenset[str] | None = None) -> list[Job]:
    """Return all jobs of the matrix, in the order in which equal needs are served.

    Args:
        root: of the repository.
        flags: features of a CPU, which leave out the instruction sets that it lacks; None: of a CPU that has
            them all.
    """
    table = runpy.run_path(str(root / "nc" / "kernels" / "c_code" / "isas.py"))["ISAS"]
    isas = [name for name, needed in table.items() if flags is None or flags.issuperset(needed)]
    kernels = (
        "nc/kernels",
        "nc/backends/native",
        "nc/backends/low_bit",
        "test/kernels",
        "test/backends/native",
        "test/backends/low_bit",
    )
    packaging = ("setup.py", "nc/kernels/c_code", "nc/process", "test/process", "requirements/wheel.txt")
    outside = (
        *("nc/hf", "nc/interchange", "nc/numerics", "nc/torchao", "test/judges"),
        *(f"requirements/{name}.txt" for name in ("readers", "readers-nodeps", "vllm", "vllm-nodeps")),
    )
    served = ("examples/serve", "nc/api", "nc/hf", "nc/process", "test/serve")
    sanitized = (*kernels, "test/sanitizers.py", "test/c_fuzz.py", "test/c_threads.c")
    broken = ("test/mutations.py", "nc")
    found = [
        Job(f"isas:{name}", ("make", "test-isas", f"ISAS={name}"), (*kernels, "test/isas.py"), "native")
        for name in isas
    ]
    found.append(Job("wheel", ("make", "wheel-check"), packaging, "native"))
    found += [
        Job(f"sanitize:{i}", ("make", "sanitize", "SHARE=4", f"TURN={i}"), sanitized, "native")
        for i in range(4)
    ]
    for target, requirements in (
        ("test-exhaustive-native", "native"),
        ("test-exhaustive", "ipex"),
        ("test-once", "ipex"),
        ("test-newest", "newest"),
        ("test-fallback", "fallback"),
    ):
        for room in rooms(root / "test"):
            own = OF_ROOMS.get(room, (f"nc/{room}",))
            found.append(
                Job(
                    f"{target}:{room}", ("make", target, f"ROOM={room}"), (*own, f"test/{room}"), requirements
                )
            )
    found.append(Job("judges", ("make", "test-judges"), outside, "judges"))
    found.append(Job("serve", ("make", "test-serve"), served, "serve"))
    found.append(Job("browser", ("make", "test-browser"), ("nc/api", "nc/text", "test/browser"), "browser"))
    found += [
        Job(f"mutations:{i}", ("make", "mutations", "SHARE=20", f"TURN={i}"), broken, "native")
        for i in range(20)
    ]
    return found


def files(root: Path, below: Iterable[str]) -> list[Path]:
    """Return the files in folders, and the files named; what is not there is left out.

    `test/.` and divided folders mean the files in them alone.
    """
    found = set()
    for name in below:
        path = root / name
        if path.is_dir():
            alone = name == "test/." or (
                name.startswith(("test/", "nc/")) and name.partition("/")[2] in DIVIDED
            )
            found |= {
                file
                for file in (path.glob("*") if alone else path.rglob("*"))
                if file.is_file() and _counts(file, root)
            }
        elif path.is_file():
            found.add(path)
    return sorted(found)


def _counts(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    return file.suffix not in (".pyc", ".so") and not any(
        part == "__pycache__" or part.startswith(".") for part in parts
    )


def reached(root: Path, below: Sequence[str]) -> list[Path]:
    """Return the files in folders, and the modules of nc that these import, directly or not.

    A package does not count as imported because one of its modules is: `nc` itself imports everything.
    """
    found = set(files(root, below))
    waiting = [file for file in found if file.suffix == ".py" and file.is_relative_to(root / "nc")]
    while waiting:
        for module in _imports(waiting.pop()):
            path = root.joinpath(*module.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if module != "nc" and file.is_file() and file not in found:
                    found.add(file)
                    waiting.append(file)
    return sorted(found)


@functools.cache
def _imports(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.split(".")[0] == "nc"]


def hash_of(root: Path, paths: Iterable[Path]) -> str:
    """Return 16 digits that depend on the names and the contents of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(_content(path))
    return digest.hexdigest()[:16]


@functools.cache
def _content(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def hashes(root: Path, job: Job) -> tuple[str, str]:
    """Return the hash of a job's own files, and that of all that it depends on."""
    environment = (*COMMON, f"requirements/{job.requirements}.txt")
    return hash_of(root, files(root, job.own)), hash_of(
        root, {*reached(root, job.own), *files(root, environment)}
    )


def need(entry: Entry, now: tuple[str, str]) -> int:
    """Return the place of a job's need in `NEEDS`."""
    if not entry.passed:
        return 0
    own, everything = now
    return 1 if entry.own != own else 2 if entry.all != everything else 3


def ordered(
    found: Sequence[Job], ledger: Mapping[str, Entry], now: Mapping[str, tuple[str, str]]
) -> list[Job]:
    """Return the jobs, the greatest need first; of equal needs the one that has not passed for longest."""
    place = {job.name: i for i, job in enumerate(found)}

    def key(job: Job) -> tuple[int, str, int]:
        entry = ledger.get(job.name, Entry())
        return need(entry, now[job.name]), entry.passed, place[job.name]

    return sorted(found, key=key)


def chosen(in_order: Sequence[Job], ledger: Mapping[str, Entry], minutes: float) -> list[Job]:
    """Return the jobs that fit into some minutes, taken in order.

    One that does not fit leaves its place to the next ones.
    """
    left, found = minutes, []
    for job in in_order:
        takes = ledger.get(job.name, Entry()).minutes
        if takes <= left:
            left -= takes
            found.append(job)
    return found


def read(path: Path) -> dict[str, Entry]:
    """Return the ledger; an empty one where there is no file."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Entry(**entry) for name, entry in stored.items()}


def write(path: Path, ledger: Mapping[str, Entry]) -> None:
    """Write the ledger, one job a line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(dataclasses.asdict(entry))}"
        for name, entry in sorted(ledger.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def run(
    selected: Sequence[Job],
    start: Callable[[Job], int],
    passed: Callable[[Job, float], None],
    more_time: Callable[[Job], bool] = lambda job: True,
) -> tuple[list[str], list[str]]:
    """Run jobs, one after the other.

    Args:
        selected: in this order.
        start: runs one, and returns its exit code.
        passed: is told of each that passed, and of its minutes.
        more_time: whether there is time for one.

    Returns:
        Names of those that failed, and of those for which there was no time.
    """
    failed, late = [], []
    for job in selected:
        if not more_time(job):
            late.append(job.name)
            continue
        begin = time.monotonic()
        if start(job):
            failed.append(job.name)
        else:
            passed(job, (time.monotonic() - begin) / 60)
    return failed, late


def _start(job: Job) -> int:
    print(f"--- {job.name}: {' '.join(job.command)}", flush=True)
    return subprocess.run(job.command, cwd=ROOT, check=False).returncode


def main() -> None:
    """Choose, run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="run what fits into them by the ledger; without it, all that has changed",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=float("inf"),
        metavar="M",
        help="start nothing that ends later than so many minutes",
    )
    parser.add_argument("--all", action="store_true", help="run what has not changed, too")
    parser.add_argument("--record", action="store_true", help="write what passed into the ledger")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    begin, ledger, found = time.monotonic(), read(LEDGER), jobs(ROOT, features())
    now = {job.name: hashes(ROOT, job) for job in found}
    in_order = ordered(found, ledger, now)
    needs = {job.name: need(ledger.get(job.name, Entry()), now[job.name]) for job in found}
    if options.minutes is not None:
        selected = chosen(in_order, ledger, options.minutes)
    else:
        selected = [job for job in in_order if options.all or needs[job.name] < len(NEEDS) - 1]
    for job in selected:
        entry = ledger.get(job.name, Entry())
        print(
            f"{job.name}: {NEEDS[needs[job.name]]}; last passed {entry.passed or 'never'}; "
            f"{entry.minutes:.0f} minutes"
        )
    stale = [job.name for job in in_order if needs[job.name] < len(NEEDS) - 1]
    if options.list:
        print(f"{len(selected)} of {len(found)} jobs; {len(stale)} have changed since they passed")
        return

    known = {job.name for job in jobs(ROOT)}

    def passed(job: Job, minutes: float) -> None:
        if options.record:
            own, everything = now[job.name]
            ledger[job.name] = Entry(datetime.date.today().isoformat(), own, everything, round(minutes, 1))
            write(LEDGER, {name: entry for name, entry in ledger.items() if name in known})

    def more_time(job: Job) -> bool:
        return (time.monotonic() - begin) / 60 + ledger.get(job.name, Entry()).minutes <= options.deadline

    failed, late = run(selected, _start, passed, more_time)
    ran = [job.name for job in selected if job.name not in late]
    left = [name for name in stale if name not in ran]
    print(f"matrix: ran {', '.join(ran) or 'nothing'}")
    print(f"matrix: left for another time: {', '.join(left) or 'nothing'}")
    if failed:
        sys.exit(f"matrix: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

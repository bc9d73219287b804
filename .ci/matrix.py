"""Run the jobs of the full matrix that a change needs most, and say what is known of all others.

Needs Python alone, and no history of git.

    python3 .ci/matrix.py [--minutes 10] [--deadline 12] [--all] [--record] [--list]
    python3 .ci/matrix.py --take LOG     # takes what passed in CI into the ledger
    python3 .ci/matrix.py --seen         # notes the files: what differs from them later is the change

A job is a command and the files that decide its result: those that it is about (its own), and all that it
reaches. `ledger.json` has the files before the change, and for each job when and on which instruction sets it
last passed, and with which files. Jobs are chosen in this order:

1. sanitizers, mutations and tests with the newest torch whose own files changed, in turns;
2. other jobs whose own files changed, and those whose tests changed;
3. jobs that are near to a changed file: they reach it directly, or over one other file;
4. jobs that have not passed with these files;
5. jobs that have, beginning with the one that passed longest ago.

A hash of all files decides among equals. So the choice depends on the files and on the ledger: not on git,
not on the date, and not on what is installed, except that a job is left out and named where the CPU or a
program for it is missing. Without a ledger nothing is known of any job, and the hash decides.

CI can't commit: a run prints lines that `--take` reads from a saved log, in any later clone. If the log is of
the same files, these are noted too. `--record` notes them when every job whose own files changed has passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jobs import (
    FAR,
    GUARDS,
    LONGEST,
    MINUTES,
    NEAR,
    SETUPS,
    UNDECIDED,
    UNKNOWN,
    Job,
    best_isa,
    is_own,
    jobs,
    this_machine,
)
from ledger import Entry, Ledger, LedgerError, block, joined, read, taken, write
from repository import LEDGER, Tree, names

ROOT = Path(__file__).resolve().parents[1]
#: Days after which a job that has not passed is overdue.
DAYS = 14

_CODE = ("nc/", "test/")
#: Why a job is needed, the greatest need first.
GUARD, OWN, REACHED, OWED, NOTHING = range(5)
NEEDS = (
    "its own files changed",
    "its own files or tests changed",
    "files near to it changed",
    "it has not passed with these files",
    "nothing changed since it passed",
)


@dataclasses.dataclass(frozen=True)
class Need:
    """What one job is to a tree.

    Attributes:
        level: one of the five, the greatest need first.
        distance: of the nearest file that changed.
        because: the changed files at that distance.
        own, all: hashes of its own files and of all that it depends on.
    """

    level: int
    distance: int
    because: tuple[str, ...]
    own: str
    all: str


def changed(tree: Tree, ledger: Ledger) -> frozenset[str]:
    """Return the files that are not as the ledger has them, also those that are gone.

    Of a ledger without files nothing can be told: none changed.
    """
    if not ledger.files:
        return frozenset()
    both = tree.files.keys() | ledger.files.keys()
    return frozenset(name for name in both if tree.files.get(name) != ledger.files.get(name))


def need(tree: Tree, job: Job, entry: Entry | None, change: frozenset[str]) -> Need:
    """Return what a job is to a tree."""
    distances = job.distances(tree)
    own = tree.hash_of(name for name, distance in distances.items() if distance == 0)
    everything = tree.hash_of(distances)
    touched = {name: distances[name] for name in change & distances.keys()}
    touched |= {name: 0 for name in change - distances.keys() if is_own(job, name)}
    distance = min(touched.values(), default=FAR)
    because = tuple(sorted(name for name, far in touched.items() if far == distance))
    if entry is not None and entry.all == everything:
        level = NOTHING
    elif distance == 0 and job.target in GUARDS and any(name.startswith(_CODE) for name in because):
        level = GUARD
    elif distance == 0 or any(names(job.tests, name) for name in because):
        level = OWN
    else:
        level = REACHED if distance <= NEAR else OWED
    return Need(level, distance, because, own, everything)


def ordered(found: Sequence[Job], needs: Mapping[str, Need], ledger: Ledger, tree_hash: str) -> list[Job]:
    """Return the jobs, the greatest need first; the hash of the tree decides among equals.

    Of those that a change is about, each changed file in its turn has one job of each target before any file
    has a second one. All others come target by target, so that an environment that takes long to set up is
    used for several of them. Last come those for which nothing changed, beginning with what passed longest
    ago.
    """

    def turn(name: str) -> str:
        return hashlib.sha256(f"{tree_hash} {name}".encode()).hexdigest()

    place: dict[str, int] = {}
    count: dict[tuple[object, ...], int] = {}
    file = {job.name: min(map(turn, needs[job.name].because), default="") for job in found}
    for job in sorted(found, key=lambda job: turn(job.name)):
        group = needs[job.name].level, job.target, file[job.name]
        place[job.name] = count[group] = count.get(group, -1) + 1

    def key(job: Job) -> tuple[object, ...]:
        which, first = needs[job.name], place[job.name]
        if which.level in (GUARD, OWN):
            kind = f"{GUARDS.index(job.target)}" if which.level == GUARD else turn(job.target)
            return which.level, first, file[job.name], kind
        if which.level == NOTHING:
            return which.level, ledger.jobs[job.name].last, turn(job.name)
        return which.level, which.distance * (which.level == REACHED), turn(job.target), turn(job.name)

    return sorted(found, key=key)


def expected(job: Job, ledger: Ledger) -> float:
    """Return the minutes that a job takes, without setting up its environment."""
    entry = ledger.jobs.get(job.name)
    return entry.minutes if entry else MINUTES.get(job.target, UNKNOWN)


def chosen(in_order: Sequence[Job], ledger: Ledger, minutes: float) -> list[Job]:
    """Return the jobs that fit into some minutes, taken in order.

    The first job of an environment counts the minutes that this takes to set up, there or not: the same tree
    gives the same jobs everywhere. One that does not fit leaves its place to the next ones.
    """
    left, found = minutes, list[Job]()
    for job in in_order:
        is_set_up = any(job.environment == other.environment for other in found)
        takes = expected(job, ledger) + (0 if is_set_up else SETUPS.get(job.environment, 0))
        if takes <= left:
            left -= takes
            found.append(job)
    return found


def run(
    selected: Sequence[Job],
    set_up: Callable[[str], int],
    start: Callable[[Job], int],
    passed: Callable[[Job, float], None],
    more_time: Callable[[Job], bool] = lambda job: True,
) -> tuple[list[str], list[str], list[str]]:
    """Run jobs, one after the other.

    Args:
        selected: in this order.
        set_up: makes an environment, and returns its exit code.
        start: runs a job, and returns its exit code.
        passed: is told of each that passed, and of its minutes.
        more_time: whether there is time for one.

    Returns:
        Names of those that failed, of those that this machine can't decide, and of those for which there was
        no time.
    """
    failed, undecided, late = [], [], []
    codes: dict[str, int] = {}
    for job in selected:
        if not more_time(job):
            late.append(job.name)
            continue
        if job.environment not in codes:
            codes[job.environment] = set_up(job.environment)
        begin = time.monotonic()
        code = 1 if codes[job.environment] else start(job)
        if code:
            (undecided if code == UNDECIDED else failed).append(job.name)
        else:
            passed(job, (time.monotonic() - begin) / 60)
    return failed, undecided, late


# --- what is printed


def line_of(job: Job, which: Need, ledger: Ledger) -> str:
    """Return a line on a job: why it is needed, when it passed, and its minutes."""
    entry = ledger.jobs.get(job.name)
    files = ", ".join(which.because[:3]) + ", …" * (len(which.because) > 3)
    why = NEEDS[which.level] + f" ({files})" * (which.level <= REACHED)
    last = (entry and entry.last) or "never"
    return f"{job.name}: {why}; last passed {last}; {expected(job, ledger):.1f} minutes"


def is_overdue(entry: Entry | None, today: datetime.date) -> bool:
    """Whether a job never passed, or longer ago than `DAYS`."""
    last = entry.last if entry else ""
    return not last or (today - datetime.date.fromisoformat(last)).days > DAYS


def table(found: Sequence[Job], needs: Mapping[str, Need], ledger: Ledger, today: datetime.date) -> list[str]:
    """Return the lines of a table of all jobs by their targets, and the names of those that are overdue."""
    rows = [
        ("target", "jobs", "pass as they are", "never passed", "overdue", "oldest pass", "newest pass on")
    ]
    late = []
    for target in dict.fromkeys(job.target for job in found):
        group = [job for job in found if job.target == target]
        entries = [ledger.jobs.get(job.name) for job in group]
        days = [entry.last for entry in entries if entry and entry.last]
        on: dict[str, str] = {}
        for entry in entries:
            for isa, day in entry.passed.items() if entry else ():
                on[isa] = max(on.get(isa, ""), day)
        overdue = [job for job, entry in zip(group, entries, strict=True) if is_overdue(entry, today)]
        whole = sum(needs[job.name].level == NOTHING for job in group)
        rows.append(
            (
                *(target, f"{len(group)}", f"{whole}", f"{len(group) - len(days)}", f"{len(overdue)}"),
                *(
                    min(days, default="-"),
                    ", ".join(f"{isa} {day}" for isa, day in sorted(on.items())) or "-",
                ),
            )
        )
        parts = [job.name.partition(":")[2] or job.name for job in overdue]
        is_all = len(overdue) == len(group) > 1
        late += [f"{target}: " + ("all" if is_all else ", ".join(parts))] * bool(overdue)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [f"Overdue: they never passed, or more than {DAYS} days ago."] * bool(late)
    lines += [
        part
        for text in late
        for part in textwrap.wrap(text, 118, subsequent_indent="    ", break_on_hyphens=False)
    ]
    long = [
        f"{job.name} {ledger.jobs[job.name].minutes:.1f}"
        for job in found
        if job.name in ledger.jobs and ledger.jobs[job.name].minutes > LONGEST
    ]
    return lines + [
        f"Longer than {LONGEST:.0f} minutes, to be divided in .ci/jobs.py: {', '.join(long)}"
    ] * bool(long)


def set_up_lines(selected: Sequence[Job], root: Path) -> list[str]:
    """Return what setting up environments takes."""
    found = [name for name in dict.fromkeys(job.environment for job in selected) if name in SETUPS]
    return [
        f"setting up .venv-{name}: {SETUPS[name]:.0f} minutes are counted"
        + (", it is here" if (root / f".venv-{name}" / ".complete").exists() else ", it is not here")
        for name in found
    ]


# --- the command


def take(log: Path, tree: Tree, path: Path, known: set[str]) -> None:
    """Take what passed by a log into the ledger.

    If the log is of this tree, its files are noted too: CI has chosen by the change that led to it.

    Raises:
        LedgerError: see `ledger.read` and `ledger.taken`.
    """
    before = read(path)
    after = before
    for tree_hash, passed in taken(log.read_text(encoding="utf-8", errors="replace")):
        for name, entry in passed.items():
            if name in known:
                after = after.with_entry(name, joined(after.jobs.get(name), entry))
            print(f"{name}: " + ("taken" if name in known else "there is no such job any more"))
        if tree_hash == tree.hash:
            after = dataclasses.replace(after, files=dict(tree.files))
        else:
            print("The log is of other files than these: the files of the ledger stay as they are.")
    write(path, _of(known, after))


def _of(known: set[str], ledger: Ledger) -> Ledger:
    return dataclasses.replace(ledger, jobs={n: entry for n, entry in ledger.jobs.items() if n in known})


def _set_up(environment: str) -> int:
    target = "setup" if environment == "ipex" else f"setup-{environment}"
    begin = time.monotonic()
    code = subprocess.run(["make", target], cwd=ROOT, check=False).returncode
    minutes = (time.monotonic() - begin) / 60
    print(f"--- make {target}: {minutes:.1f} minutes, {SETUPS.get(environment, 0):.0f} counted", flush=True)
    return code


def _start(job: Job) -> int:
    print(f"--- {job.name}: {' '.join(job.command)}", flush=True)
    return subprocess.run(job.command, cwd=ROOT, check=False).returncode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="run what fits into them by the ledger; without it, all that has not passed with these files",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=float("inf"),
        metavar="M",
        help="start nothing that ends later than so many minutes",
    )
    parser.add_argument("--all", action="store_true", help="run what has passed with these files, too")
    parser.add_argument("--record", action="store_true", help="write what passed into the ledger")
    parser.add_argument("--list", action="store_true", help="run nothing, and print what would run")
    parser.add_argument("--take", type=Path, metavar="LOG", help="run nothing, and take what passed by a log")
    parser.add_argument(
        "--seen", action="store_true", help="run nothing, and note the files: later ones are the change"
    )
    return parser.parse_args()


def main() -> None:
    """Choose, run and report."""
    options, begin = _options(), time.monotonic()
    tree, path = Tree(ROOT), ROOT / LEDGER
    every = jobs(tree)
    known = {job.name for job in every}
    if options.take:
        take(options.take, tree, path, known)
        return
    ledger = read(path)
    if options.seen:
        write(path, _of(known, dataclasses.replace(ledger, files=dict(tree.files))))
        return
    if not ledger.files:
        print(f"{LEDGER} has no files: what changed is not known, and no job has passed with these files")
    machine, change = this_machine(), changed(tree, ledger)
    needs = {job.name: need(tree, job, ledger.jobs.get(job.name), change) for job in every}
    lacking = {job.name: why for job in every if (why := machine.lacks(job))}
    in_order = ordered([job for job in every if job.name not in lacking], needs, ledger, tree.hash)
    if options.minutes is None:
        selected = [job for job in in_order if options.all or needs[job.name].level < NOTHING]
    else:
        selected = chosen(in_order, ledger, options.minutes)
        if not selected:
            sys.exit(f"matrix: no job fits into {options.minutes:g} minutes")
    print(f"matrix: {len(change)} files changed since {LEDGER} was written")
    print(*(line_of(job, needs[job.name], ledger) for job in selected), sep="\n")
    for line in set_up_lines(selected, ROOT):
        print(line)
    if options.list:
        _tell_left(selected, in_order, needs, lacking)
        return

    isa, today = best_isa(tree, machine.flags), datetime.date.today()
    done: dict[str, Entry] = {}

    def passed(job: Job, minutes: float) -> None:
        nonlocal ledger
        if minutes > max(LONGEST, 2 * expected(job, ledger)):
            print(f"matrix: {job.name} took {minutes:.1f} minutes, {expected(job, ledger):.1f} were expected")
        which = needs[job.name]
        done[job.name] = Entry({isa: today.isoformat()}, which.own, which.all, round(minutes, 1))
        ledger = ledger.with_entry(job.name, joined(ledger.jobs.get(job.name), done[job.name]))
        if options.record:
            write(path, _of(known, ledger))

    def more_time(job: Job) -> bool:
        return (time.monotonic() - begin) / 60 + expected(job, ledger) <= options.deadline

    try:
        failed, undecided, late = run(selected, _set_up, _start, passed, more_time)
    finally:
        needs = {
            name: dataclasses.replace(which, level=NOTHING) if name in done else which
            for name, which in needs.items()
        }
        _tell_left([job for job in selected if job.name in done], in_order, needs, lacking)
        print(*table(every, needs, ledger, today), sep="\n")
        print(*block(tree.hash, done), sep="\n", flush=True)
    if options.record and not any(which.level <= OWN for which in needs.values()):
        write(path, _of(known, dataclasses.replace(ledger, files=dict(tree.files))))
    print(f"matrix: ran {len(selected) - len(late)} jobs, {len(done)} passed; no time for {len(late)}")
    if undecided:
        print(f"matrix: not decided on this machine: {', '.join(undecided)}")
    if failed:
        sys.exit(f"matrix: failed: {', '.join(failed)}")
    if selected and len(late) == len(selected):
        sys.exit("matrix: there was no time for any job")


def _tell_left(
    selected: Sequence[Job], in_order: Sequence[Job], needs: Mapping[str, Need], lacking: Mapping[str, str]
) -> None:
    """Print which jobs are left: by name those that the change is about, or that are near to it."""
    ran = {job.name for job in selected}
    left = [job for job in in_order if job.name not in ran and needs[job.name].level < NOTHING]
    for text, levels in (
        ("own files or tests changed", (GUARD, OWN)),
        ("files near to them changed", (REACHED,)),
    ):
        groups: dict[str, list[str]] = {}
        for job in left:
            if needs[job.name].level in levels:
                groups.setdefault(job.target, []).append(job.name.partition(":")[2] or job.name)
        named = "; ".join(f"{target}: {', '.join(parts)}" for target, parts in groups.items())
        lines = textwrap.wrap(named or "none", 116, break_on_hyphens=False)
        print(f"matrix: left, though {text}:", *lines, sep="\n    ")
    owed = sum(needs[job.name].level == OWED for job in left)
    print(f"matrix: left are {owed} more that have not passed with these files")
    for why in sorted(set(lacking.values())):
        print(f"matrix: this machine lacks {why}: " + ", ".join(n for n, w in lacking.items() if w == why))


if __name__ == "__main__":
    try:
        main()
    except LedgerError as error:
        sys.exit(f"matrix: {error}")

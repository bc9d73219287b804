"""What is known of earlier runs: the file .ci/ledger.json, and the lines of a log that go into it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LedgerError(Exception):
    """A ledger, or the log of a run, can't be read; says where it is wrong and what to do."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the ledger has of a job.

    Attributes:
        passed: instruction set of the CPU → the day on which it last passed there.
        own: hash of its own files when it last passed; "" for never.
        all: hash of all that it depends on, then.
        minutes: that it took, or is expected to take.
    """

    passed: Mapping[str, str]
    own: str
    all: str
    minutes: float

    @property
    def last(self) -> str:
        """The last day on which it passed; "" for never."""
        return max(self.passed.values(), default="")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All entries, and the files that were there before the change.

    Attributes:
        files: name → hash, as `Tree.files`; what differs is the change. Empty where nothing is known.
        jobs: name → entry.
    """

    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    jobs: Mapping[str, Entry] = dataclasses.field(default_factory=dict)

    def with_entry(self, name: str, entry: Entry) -> Ledger:
        """Return a ledger in which a job has another entry."""
        return dataclasses.replace(self, jobs={**self.jobs, name: entry})


def read(path: Path) -> Ledger:
    """Return the ledger; an empty one where there is no file.

    Raises:
        LedgerError: the file is damaged.
    """
    if not path.exists():
        return Ledger()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
        _check(isinstance(stored, dict) and stored.keys() == {"files", "jobs"}, 'it needs "files" and "jobs"')
        for each in stored.values():
            _check(isinstance(each, dict), "both must be objects")
        for name, digest in stored["files"].items():
            _check(_is_hash(digest, 8), f"files: {name}: {digest!r} is not a hash")
        return Ledger(
            stored["files"], {name: _entry(name, fields) for name, fields in stored["jobs"].items()}
        )
    except (ValueError, RecursionError, LedgerError) as error:
        msg = (
            f"{path} is damaged: {error}. Take it from the last commit, or delete it: then nothing is known "
            "of any job, and each of them is run again."
        )
        raise LedgerError(msg) from error


def write(path: Path, ledger: Ledger) -> None:
    """Replace the ledger at once: one file or job a line, sorted."""

    def lines(table: Mapping[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(table.items()))

    entries = {name: dataclasses.asdict(entry) for name, entry in ledger.jobs.items()}
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(
        f'{{"files": {{\n{lines(ledger.files)}\n}},\n"jobs": {{\n{lines(entries)}\n}}}}\n', encoding="utf-8"
    )
    beside.replace(path)


def block(tree_hash: str, passed: Mapping[str, Entry]) -> list[str]:
    """Return the lines of a log from which `taken` reads what passed."""
    return [
        f"matrix-ledger begin {tree_hash} {len(passed)}: python3 .ci/matrix.py --take LOG takes these lines",
        *(
            "matrix-ledger " + json.dumps({"name": name, **dataclasses.asdict(entry)})
            for name, entry in sorted(passed.items())
        ),
        "matrix-ledger end",
    ]


def taken(text: str) -> list[tuple[str, dict[str, Entry]]]:
    """Return what passed by a log, whose lines may begin with anything: [(hash of the tree, name → entry)].

    Raises:
        LedgerError: the log has no block of lines for the ledger, or a damaged one.
    """
    found: list[tuple[str, dict[str, Entry]]] = []
    count, is_open = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        if "matrix-ledger " not in line:
            continue
        content = line.partition("matrix-ledger ")[2].strip()
        begin = re.match(r"begin ([0-9a-f]{16}) (\d+):", content)
        try:
            if begin:
                _check(not is_open, "the block before it has no end")
                found.append((begin[1], {}))
                count, is_open = int(begin[2]), True
            elif content == "end":
                _check(is_open, "it ends a block that has not begun")
                _check(
                    len(found[-1][1]) == count, f"{len(found[-1][1])} of {count} lines of the block are here"
                )
                is_open = False
            else:
                _check(is_open, "it is not in a block")
                fields = json.loads(content, parse_constant=_refused)
                _check(isinstance(fields, dict) and isinstance(fields.get("name"), str), "it has no name")
                name = fields.pop("name")
                found[-1][1][name] = _entry(name, fields)
        except (ValueError, RecursionError, LedgerError) as error:
            msg = f"line {number} of the log: {error}. Nothing was taken: save the whole log."
            raise LedgerError(msg) from error
    if is_open or not found:
        msg = (
            "the log ends inside of its lines for the ledger"
            if is_open
            else "the log has no lines for the ledger"
        )
        msg += ": a run of .ci/matrix.py prints them last. Nothing was taken."
        raise LedgerError(msg)
    return found


def joined(old: Entry | None, new: Entry) -> Entry:
    """Return an entry with the days of both, and the hashes and minutes of the newer one."""
    if old is None:
        return new
    days = {isa: max(old.passed.get(isa, ""), day) for isa, day in new.passed.items()}
    return dataclasses.replace(old if old.last > new.last else new, passed={**old.passed, **days})


def _entry(name: str, fields: Any) -> Entry:
    expected = {field.name for field in dataclasses.fields(Entry)}
    _check(
        isinstance(fields, dict) and fields.keys() == expected,
        f"{name}: it needs {', '.join(sorted(expected))}",
    )
    passed, minutes = fields["passed"], fields["minutes"]
    _check(isinstance(passed, dict), f"{name}: passed must be an object")
    for day in passed.values():
        _check(isinstance(day, str) and _is_day(day), f"{name}: {day!r} is not a day")
    for key in ("own", "all"):
        wanted = 16 if passed else 0
        _check(_is_hash(fields[key], wanted), f"{name}: {key} must have {wanted} hexadecimal digits")
    is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
    _check(is_number and math.isfinite(minutes) and 0 <= minutes < 1e4, f"{name}: {minutes!r} are no minutes")
    return Entry(passed, fields["own"], fields["all"], float(minutes))


def _is_hash(text: Any, digits: int) -> bool:
    return isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _refused(text: str) -> None:
    msg = f"{text} is not a number of JSON"
    raise ValueError(msg)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise LedgerError(otherwise)

"""How many CPUs this process may use: those of its affinity, and the quota of its cgroup.

torch, OpenMP and OpenVINO know the affinity only. With more threads than its quota a container stops for the
rest of each period (Linux: Documentation/scheduler/sched-bwc.rst), so that single calls take many times as
long.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from nc.process.env import MKL_NUM_THREADS, OMP_NUM_THREADS
from nc.process.warn import warn

_ROOT = Path("/")


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """What this process may use.

    Attributes:
        machine: CPUs of the machine.
        affinity: CPUs that this process may run on.
        quota: CPUs' worth of time that its cgroup gives, the least of the group and those around it; None:
            no limit.
    """

    machine: int
    affinity: int
    quota: float | None

    def __str__(self) -> str:
        """In words."""
        limit = "" if self.quota is None else f", with a quota of {self.quota:g}"
        return f"{self.machine} in the machine, {self.affinity} for this process{limit}"

    @property
    def usable(self) -> int:
        """How many threads can compute at once; a part of a CPU does not count, but for the first."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


def cores() -> Cores:
    """Return what this process may use at this moment."""
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), quota())


def quota(root: Path = _ROOT) -> float | None:
    """Return how many CPUs' worth of time the cgroups of this process give; None: no limit.

    Args:
        root: where /proc and the cgroups are mounted.
    """
    found = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def fit_threads() -> None:
    """Let torch compute on as many threads as this process may use, unless the user chose a number.

    A number is chosen by OMP_NUM_THREADS or MKL_NUM_THREADS, or by `torch.set_num_threads` if it differs from
    torch's defaults: all CPUs, or one thread for each core. A change gives a warning.
    """
    import torch  # here: the command's help comes without

    threads, found = torch.get_num_threads(), cores()
    if threads <= found.usable or OMP_NUM_THREADS.is_set or MKL_NUM_THREADS.is_set:
        return
    if threads not in {found.machine, found.affinity, *map(_with_own_core, (None, os.sched_getaffinity(0)))}:
        return
    why = (
        f"runs on {found.affinity} CPUs"
        if found.quota is None or found.affinity <= found.quota
        else f"has a quota of {found.quota:g} CPUs"
    )
    torch.set_num_threads(found.usable)
    warn(
        f"This process {why}, and torch was about to compute on {threads} threads: "
        f"torch.set_num_threads({found.usable}). Call it afterwards for another number, or set "
        "OMP_NUM_THREADS."
    )


def _with_own_core(allowed: set[int] | None) -> int:
    """Return the number of physical cores of some CPUs, or of all; 0 where the system does not tell."""
    siblings = set()
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        if allowed is None or int(file.parts[-3].removeprefix("cpu")) in allowed:
            siblings.add(file.read_text(encoding="ascii"))
    return len(siblings)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that limit this process, from the innermost to the outermost.

    Mount points and their part of the hierarchy are those of proc(5), /proc/self/mountinfo; a container may
    see its own group as the root.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    paths = _paths(groups)
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _, options = (right.split(" ") + ["", ""])[:3]
        fields = left.split(" ")
        if kind not in paths or len(fields) < 5 or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        part, point, path = fields[3], fields[4], paths[kind]
        if part != "/" and (path == part or path.startswith(f"{part}/")):
            path = path[len(part) :]
        top = root / point.lstrip("/")
        inner = top / path.strip("/")
        if not inner.is_dir():  # the path is one of the host
            inner = top
        yield from (inner, *(folder for folder in inner.parents if folder.is_relative_to(top)))


def _paths(groups: Sequence[str]) -> dict[str, str]:
    """Return the path of the group that limits this process, by the type of its file system."""
    paths = {}
    for line in groups:
        controllers, _, path = line.partition(":")[2].partition(":")
        if path and (not controllers or "cpu" in controllers.split(",")):
            paths["cgroup" if controllers else "cgroup2"] = path
    return paths


def _limit(folder: Path) -> float | None:
    """Return the quota of one cgroup, version 2 or 1, in CPUs."""
    try:
        if (folder / "cpu.max").is_file():
            given, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            given = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return None if given in ("max", "-1") else int(given) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None

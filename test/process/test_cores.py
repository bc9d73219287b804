"""CPUs of a container: cgroups as Linux shows them, and a real one."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nc.errors import NCWarning
from nc.process import cores as module
from nc.process.cores import Cores, cores, fit_threads, quota


def system(root, groups, mounts, **limits):
    """A root with the files of /proc/self, and files of cgroups ("__" stands for "/")."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(groups) + "\n")
    (root / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_", "cpu.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
#: As Docker mounts it without a namespace of cgroups: the container's group is the root of the mount.
V1_OF_DOCKER = "32 31 0:29 /docker/a1 /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("groups", "mounts", "limits", "expected"),
    [
        (["0::/"], [V2], {"cpu_max": "200000 100000"}, 2.0),
        (["0::/"], [V2], {"cpu_max": "max 100000"}, None),
        (["0::/"], [V2], {}, None),
        # the innermost group has no limit, one around it has
        (["0::/a/b"], [V2], {"a__cpu_max": "150000 100000", "a__b__cpu_max": "max 100000"}, 1.5),
        (["0::/a/b"], [V2], {"a__cpu_max": "300000 100000", "a__b__cpu_max": "50000 100000"}, 0.5),
        # a path of the host, which the container does not see
        (["0::/../../kubepods/x"], [V2], {"cpu_max": "400000 100000"}, 4.0),
        (
            ["4:memory:/m", "3:cpu,cpuacct:/a", "0::/"],
            [V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "), V1],
            {"cpu,cpuacct__a__cpu_cfs_quota_us": "250000", "cpu,cpuacct__a__cpu_cfs_period_us": "100000"},
            2.5,
        ),
        (
            ["3:cpu,cpuacct:/a"],
            [V1],
            {"cpu,cpuacct__a__cpu_cfs_quota_us": "-1", "cpu,cpuacct__a__cpu_cfs_period_us": "100000"},
            None,
        ),
        (
            ["3:cpu,cpuacct:/docker/a1"],
            [V1_OF_DOCKER],
            {"cpu,cpuacct__cpu_cfs_quota_us": "100000", "cpu,cpuacct__cpu_cfs_period_us": "100000"},
            1.0,
        ),
        (["0::/"], [V2], {"cpu_max": "nonsense"}, None),
        (["0::/"], [V2], {"cpu_max": "100000 0"}, None),
        ([], [], {}, None),
    ],
)
def test_the_quota_is_the_least_of_the_groups_around(tmp_path, groups, mounts, limits, expected):
    assert quota(system(tmp_path, groups, mounts, **limits)) == expected


def test_a_system_without_cgroups_has_no_quota(tmp_path):
    assert quota(tmp_path) is None


@pytest.mark.parametrize(
    ("found", "usable"),
    [
        (Cores(64, 64, 2.0), 2),
        (Cores(64, 2, 8.0), 2),
        (Cores(64, 64, 2.7), 2),
        (Cores(64, 64, 0.5), 1),
        (Cores(4, 4, None), 4),
    ],
)
def test_threads_that_can_compute_at_once(found, usable):
    assert found.usable == usable


@pytest.fixture
def machine(monkeypatch):
    """Set what the machine has, and torch's threads, which come back."""
    threads = torch.get_num_threads()

    def set_to(found, torch_threads, **variables):
        monkeypatch.setattr(module, "cores", lambda: found)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        torch.set_num_threads(torch_threads)

    yield set_to
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("found", "given", "expected"),
    [(Cores(8, 8, 2.0), 8, 2), (Cores(8, 8, 0.5), 8, 1), (Cores(8, 3, None), 8, 3), (Cores(8, 3, 6.0), 8, 3)],
)
def test_torch_gets_no_more_threads_than_the_container_has(machine, found, given, expected):
    machine(found, given)
    with pytest.warns(NCWarning, match=rf"set_num_threads\({expected}\)"):
        fit_threads()
    assert torch.get_num_threads() == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("found", "given", "variables"),
    [
        (Cores(8, 8, 2.0), 4, {}),  # torch.set_num_threads(4)
        (Cores(8, 8, 2.0), 8, {"OMP_NUM_THREADS": "8"}),
        (Cores(8, 8, 2.0), 8, {"MKL_NUM_THREADS": "8"}),
        (Cores(8, 8, 2.0), 1, {}),
        (Cores(8, 8, None), 8, {}),
    ],
)
def test_a_number_that_somebody_chose_stays(machine, monkeypatch, found, given, variables):
    monkeypatch.setattr(module, "_with_own_core", lambda _: 0)
    machine(found, given, **variables)
    fit_threads()
    assert torch.get_num_threads() == given


@contextlib.contextmanager
def real_group(cpus):
    """A command before which a process has a quota of the kernel's."""
    name = f"nc-test-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/cpu") / name, Path("/sys/fs/cgroup") / name
    folder = v1 if v1.parent.is_dir() else v2
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            if folder == v1:
                (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * 100_000)))
            else:
                (folder / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000")
        except OSError as error:
            pytest.skip(f"cgroups have no quota here: {error}")
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        folder.rmdir()


LOADED = """
import sys, torch, nc
model, x = torch.nn.Linear(8, 8).eval(), torch.randn(4, 8)
nc.save(nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend="reference"), sys.argv[1])
before = torch.get_num_threads()
nc.load(sys.argv[1], backend="reference")
print(before, torch.get_num_threads())
"""


def test_load_and_doctor_know_a_real_quota(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with real_group(1.5) as within:
        ran = subprocess.run(
            [*within, sys.executable, "-c", LOADED, str(tmp_path / "m")],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert ran.returncode == 0, ran.stderr
        before, after = map(int, ran.stdout.split())
        assert (before > 1, after) == (True, 1)
        assert "has a quota of 1.5 CPUs" in ran.stderr
        told = subprocess.run(
            [*within, sys.executable, "-m", "nc", "doctor", "--json"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
    assert "with a quota of 1.5" in told.stdout


def test_this_process_may_use_what_it_runs_on():
    found = cores()
    assert 1 <= found.usable <= found.affinity <= found.machine

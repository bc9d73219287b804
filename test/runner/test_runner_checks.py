"""What a plan may do is known before its first call: bytes of each tensor, and folders that were changed."""

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from suites.runner_package import RUNNER

from nc.backends.native.only_c import FUNCTIONS
from nc.kernels.c_code import abi

pytestmark = pytest.mark.needs_plans
HERE = Path(__file__).parent


@pytest.mark.exhaustive
def test_the_wheel_is_small_and_runs_alone(exported, tmp_path):
    for name in (
        "runner",
        "nc/kernels/c_code",
        "nc/kernels/tuning.py",
        "nc/text",
        "nc/_version.py",
        "LICENSE",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (RUNNER.parent / name).is_dir() else shutil.copy
        copy(RUNNER.parent / name, tmp_path / name)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path]
    subprocess.run(command, cwd=tmp_path / "runner", check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 5e6
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    *_, folder = exported("bert", "dynamic")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "nc_run", folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert "input_ids, attention_mask -> " in done.stdout, done.stderr


def program(name, *words):
    done = subprocess.run(
        [sys.executable, HERE / name, *map(str, words)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-500:]} {done.stderr[-1500:]}"
    return done.stdout


def test_what_is_exported_can_be_loaded(nc_run):
    from nc_run import uses

    sources = runpy.run_path(str(RUNNER / "contents.py"))["SOURCES"]
    assert set(uses.USES) == FUNCTIONS
    assert {abi.FUNCTIONS[name].source for name in FUNCTIONS} | {"runner"} == set(sources)


@pytest.mark.parametrize("cases", [8, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_bytes_of_tensors_are_those_that_functions_use(package, cases):
    assert program("check_uses.py", package, cases).endswith("checked\n")


@pytest.mark.parametrize(
    ("name", "kind"), [("mlp", "static"), ("recurrent", "dynamic"), ("bert", "dynamic"), ("bert", "static")]
)
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_changed_folders_give_outputs_or_typed_errors(package, exported, name, kind, count):
    *_, folder = exported(name, kind)
    found = program("fuzz.py", package, folder, count)
    assert "ArtefactCorruptError" in found
    assert "outputs" in found

"""What a plan may do is known before its first call: bytes of each tensor, and folders that were changed."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from suites.runner_package import RUNNER

from nc.backends.native.only_c import FUNCTIONS
from nc.kernels.c_code import abi

pytestmark = pytest.mark.needs_plans
HERE = Path(__file__).parent


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

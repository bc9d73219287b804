"""A wheel has the compiled C code of every instruction set, or none of it.

Where it is installed, no compiler is needed.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nc.kernels.c_code import build, isas

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"
#: Runs where the wheel is installed, and prints what was taken from where.
USER = """
import json, pathlib, shutil, sys
import torch
import nc
from nc.kernels.c_code import build, isas

assert not build._compiler(), "there is a compiler"
x = torch.randn(4, 64)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
q = nc.quantize(model, nc.StaticQuantConfig(), lambda p: p(x), example_inputs=x, backend="native")
low_bit = nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=32), backend="native")
origins = {name: build.loaded(name).origin for name in build.sources()}
kernels = [layer.kernel for layer in nc.report(low_bit).layers]
finite = bool(q(x).isfinite().all() and low_bit(x).isfinite().all())
run_by = q.report().details["kernels"]
print(json.dumps({"package": nc.__file__, "origins": origins, "run by": run_by, "low bit": kernels, "finite": finite}))
"""

pytestmark = pytest.mark.skipif(not build._compiler(), reason="there is no C compiler")


@pytest.fixture(scope="module")
def build_wheel(tmp_path_factory):
    """Builds the wheel with variables of the environment.

    Gives what pip said, and the folder with the wheel.
    """
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "nc", source / "nc", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def made(**variables):
        target = tmp_path_factory.mktemp("wheel")
        shutil.rmtree(source / "build", ignore_errors=True)
        command = [sys.executable, *WHEEL, str(target), str(source)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, env=environment, timeout=500, capture_output=True, text=True, check=False
        ), target

    return made


@pytest.fixture(scope="module")
def wheel(build_wheel):
    """The wheel of this machine's compiler."""
    done, folder = build_wheel()
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture
def clean(tmp_path):
    """A Python that has torch and no nc, and gives the program that it runs a PATH on which there is no compiler."""
    (shared,) = Path(sys.prefix).glob("lib/python3*/site-packages/shared.pth")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "clean")], check=True)
    shutil.copy(shared, next((tmp_path / "clean").glob("lib/python3*/site-packages")))
    return tmp_path / "clean" / "bin" / "python"


def compiled_in(path):
    return [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]


@pytest.mark.exhaustive
def test_a_wheel_serves_every_python_and_its_libraries_have_every_instruction_set(wheel, tmp_path):
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert sorted(compiled_in(wheel)) == [f"nc/kernels/c_code/{name}.so" for name in build.sources()]
    zipfile.ZipFile(wheel).extractall(tmp_path)
    libraries = {
        path.stem: ctypes.CDLL(str(path)) for path in (tmp_path / "nc" / "kernels" / "c_code").glob("*.so")
    }
    assert {name: isas.missing(library) for name, library in libraries.items()} == dict.fromkeys(
        libraries, ()
    )
    assert {isa for library in libraries.values() for isa in isas.compiled(library)} == set(isas.ISAS)


@pytest.mark.exhaustive
@pytest.mark.needs_plans
def test_an_audited_wheel_is_used_where_there_is_no_compiler(wheel, clean, tmp_path):
    """`make wheel-check` has auditwheel."""
    pytest.importorskip("auditwheel", reason="auditwheel is in requirements/wheel.txt")
    tools = str(Path(sys.executable).parent)
    repair = [sys.executable, "-m", "auditwheel", "repair", "-w", str(tmp_path / "audited"), str(wheel)]
    subprocess.run(repair, check=True, env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
    (audited,) = (tmp_path / "audited").glob("*.whl")
    assert re.search(r"-py3-none-manylinux[\w.]+_x86_64\.whl$", audited.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(clean)]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(audited)], check=True)
    environment = {
        "PATH": str(clean.parent),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [str(clean), "-c", USER], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["package"]).is_relative_to(clean.parents[1])
    assert found["origins"] == dict.fromkeys(build.sources(), "shipped")
    assert "called by C" in found["run by"]
    assert all("c fp32" in kernel for kernel in found["low bit"])
    assert found["finite"]
    assert not list((tmp_path / "cache").rglob("*.so")), "something was compiled"


def test_without_a_compiler_the_wheel_is_for_all_platforms(build_wheel):
    done, folder = build_wheel(NC_WHEEL="source")
    assert done.returncode == 0, done.stderr
    path = next(folder.glob("*.whl"))
    assert path.name.endswith("-py3-none-any.whl")
    assert not compiled_in(path)
    assert {"nc/kernels/c_code/runner.c", "nc/kernels/c_code/openmp.h"} < set(
        zipfile.ZipFile(path).namelist()
    )


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (
            "cc -DNC_OLD_COMPILER -O0",
            "has no code for all instruction sets of attention.c: avx_vnni takes gcc 11 or clang 12",
        ),
        ("/nonexistent", "attention.c can't be compiled: "),
        ("false", "attention.c can't be compiled: "),
    ],
)
def test_a_build_fails_where_the_compiler_can_not_build_everything(build_wheel, compiler, why):
    done, folder = build_wheel(CC=compiler)
    assert done.returncode
    assert why in done.stderr
    assert "NC_WHEEL=source for a wheel whose C code is compiled at first use" in done.stderr
    assert not list(folder.glob("*.whl"))


def test_a_library_of_another_system_is_compiled_here(tmp_path, monkeypatch):
    for name in ("runner.c", "identity.h"):
        shutil.copy(Path(build.__file__).parent / name, tmp_path)
    (tmp_path / "runner.so").write_bytes(b"not for this system")
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = build.loaded("runner")
    assert found.library.nc_run
    assert found.passed_over == ("runner.so of the package: it is not a 64-bit library",)
    assert len(list((tmp_path / "cache" / "nc").glob("runner-*.so"))) == 1
    (tmp_path / "more.h").write_text("/* what a source may include */")
    assert build.load("runner").nc_run
    assert len(list((tmp_path / "cache" / "nc").glob("runner-*.so"))) == 2

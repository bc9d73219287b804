"""A wheel has the compiled C code where there was a compiler when it was built, and works without one everywhere."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nc.kernels.c_code import build

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"
RUNNER = """
from nc.kernels.c_code.build import load
from nc.kernels.onednn.providers import provider
from nc.kernels.onednn.runner import runner
import nc
print(nc.__file__, load("runner")._name, runner(provider().maker.library)[0].name, sep="\\n")
"""

pytestmark = pytest.mark.skipif(not build._compiler(), reason="there is no C compiler")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel with variables of the environment; gives its path."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "nc", source / "nc", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)

    def made(**variables):
        target = tmp_path_factory.mktemp("wheel")
        shutil.rmtree(source / "build", ignore_errors=True)
        subprocess.run([sys.executable, *WHEEL, str(target), str(source)], check=True, env={**os.environ, **variables}, timeout=300)
        return next(target.glob("*.whl"))

    return made


def compiled_in(path):
    return [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]


@pytest.mark.exhaustive
@pytest.mark.needs_plans
def test_a_wheel_has_the_compiled_code_and_serves_every_python(wheel, tmp_path):
    path = wheel()
    assert re.search(r"-py3-none-(many)?linux_(\d+_\d+_)?x86_64\.whl$", path.name)
    assert sorted(compiled_in(path)) == sorted(f"nc/kernels/c_code/{source.stem}.so" for source in Path(build.__file__).parent.glob("*.c"))
    zipfile.ZipFile(path).extractall(tmp_path / "site")
    variables = {"PYTHONPATH": str(tmp_path / "site"), "CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], capture_output=True, text=True, check=True, cwd=tmp_path, env={**os.environ, **variables}
    )
    package, library, name = done.stdout.splitlines()
    assert Path(package).parent == tmp_path / "site" / "nc"
    assert Path(library) == tmp_path / "site" / "nc" / "kernels" / "c_code" / "runner.so"
    assert name == "C"


def test_without_a_compiler_the_wheel_is_for_all_platforms(wheel):
    path = wheel(CC="/nonexistent")
    assert path.name.endswith("-py3-none-any.whl")
    assert not compiled_in(path)
    assert {"nc/kernels/c_code/runner.c", "nc/kernels/c_code/openmp.h"} < set(zipfile.ZipFile(path).namelist())


def test_a_library_of_another_system_is_compiled_here(tmp_path, monkeypatch):
    for name in ("runner.c", "identity.h"):
        shutil.copy(Path(build.__file__).parent / name, tmp_path)
    (tmp_path / "runner.so").write_bytes(b"not for this system")
    monkeypatch.setattr(build, "_HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = build.loaded("runner")
    assert found.library.nc_run
    assert found.passed_over == ("runner.so of the package: it is no library for 64 bits",)
    assert len(list((tmp_path / "cache" / "nc").glob("runner-*.so"))) == 1
    (tmp_path / "more.h").write_text("/* what a source may include */")
    assert build.load("runner").nc_run
    assert len(list((tmp_path / "cache" / "nc").glob("runner-*.so"))) == 2

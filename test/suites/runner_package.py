"""The package nc_run as its wheel has it, but with the libraries that nc has compiled."""

import runpy
import shutil
import sys
from pathlib import Path

from nc.kernels.c_code import build

RUNNER = Path(__file__).parents[2] / "runner"


def assembled(folder: Path) -> Path:
    """Put nc_run into a folder, which can be on Python's path."""
    contents = runpy.run_path(str(RUNNER / "contents.py"))
    package = folder / "nc_run"
    shutil.copytree(RUNNER / "nc_run", package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in contents["MODULES"]:
        shutil.copy(path, package)
    (package / "lib").mkdir()
    for name in contents["SOURCES"]:
        library = build.loaded(name).where.rpartition(" as ")[2]
        shutil.copy(library, package / "lib" / f"{name}.so")
    return folder


def use(folder: Path) -> None:
    """Let this process import nc_run from there."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

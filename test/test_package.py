"""`export_pt2`: a program compiled ahead of time, compared with the quantized graph it was made from."""

import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, quantized, worst_db
from torch import nn

from nc import (
    BackendUnavailableError,
    DynamicQuantConfig,
    NCWarning,
    StateError,
    StaticQuantConfig,
    UnsupportedError,
    VerificationError,
    available_backends,
    export_pt2,
)
from nc.backends import get_backend
from nc.backends.native import package
from nc.backends.native.compiled import check_compiler

try:
    check_compiler("a test")
    WHY = available_backends()["native"]
except BackendUnavailableError as error:
    WHY = str(error)
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "it can run")

CASES = {
    "linears": (MLP, StaticQuantConfig(), (4, 16)),
    "signed": (MLP, StaticQuantConfig(act_dtype="int8", act_sym=True, w_granularity="per_tensor"), (4, 16)),
    "convolutions": (ResidualCNN, StaticQuantConfig(), (2, 3, 8, 8)),
    "attention": (Attention, StaticQuantConfig(), (2, 5, 32)),
    "some in fp32": (MLP, StaticQuantConfig().exclude("fc2"), (4, 16)),
    "some in bf16": (MLP, StaticQuantConfig().set_local("fc2", StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")), (4, 16)),
}


def run(path, *inputs):
    return torch._inductor.aoti_load_package(str(path))(*inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error::nc.NCWarning")  # all that was asked for is int8 there, by Inductor's count
def test_the_program_computes_the_quantized_graph(tmp_path, case):
    make, config, shape = CASES[case]
    why = get_backend("native").capabilities().why_no_bf16
    if "bf16" in case and why:
        pytest.skip(why)
    x = torch.randn(shape)
    q = quantized(make().eval(), x, config, "native")
    export_pt2(q, tmp_path / "new" / "m.pt2")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["m.pt2"]
    assert worst_db([q.reference(x)], [run(tmp_path / "new" / "m.pt2", x)]) > 35


@pytest.mark.slow
@pytest.mark.parametrize("case", ["linears", "convolutions"])
def test_sizes_stay_free_where_that_was_asked(tmp_path, case):
    make, config, shape = CASES[case]
    q = quantized(make().eval(), torch.randn(1, *shape[1:]), config, "native")
    export_pt2(q, tmp_path / "m.pt2", free_sizes=True)
    for batch in (1, 2, 5):
        x = torch.randn(batch, *shape[1:])
        assert worst_db([q.reference(x)], [run(tmp_path / "m.pt2", x)]) > 35


@pytest.mark.slow
def test_outputs_come_flat_and_a_file_that_was_there_is_replaced(tmp_path):
    model = Function(lambda self, x: {"y": self.a(x), "none": None, "both": (self.b(x), 3)}, a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    x = torch.randn(2, 8)
    q = quantized(model.eval(), x, None, "reference")
    (tmp_path / "m.pt2").write_bytes(b"old")
    export_pt2(q, tmp_path / "m.pt2")
    y, b = run(tmp_path / "m.pt2", x)
    assert worst_db([q(x)["y"], q(x)["both"][0]], [y, b]) > 35


def changed(monkeypatch, change):
    """A quantized model whose program is compiled after `change(module, node)` of every node."""
    real = package._speak_torch

    def with_change(module):
        real(module)
        for node in module.graph.nodes:
            change(module, node)
        module.recompile()

    monkeypatch.setattr(package, "_speak_torch", with_change)
    return quantized(MLP().eval(), torch.randn(4, 16), None, "native")


@pytest.mark.slow
def test_a_program_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    def negate_scales(module, node):
        if "quantized_decomposed.dequantize_per_channel" in str(node.target):
            setattr(module, node.args[1].target, -getattr(module, node.args[1].target))

    q = changed(monkeypatch, negate_scales)
    with pytest.raises(VerificationError, match="AOTInductor's program computes something else"):
        export_pt2(q, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_inductor_leaves_in_fp32_is_said(tmp_path, monkeypatch):
    """The same arithmetic in other operators is nothing that it knows."""
    names = ("quantized_decomposed.quantize_per_tensor.default", "quantized_decomposed.dequantize_per_tensor.default")
    plain = dict(zip(names, (plain_quantize, plain_dequantize), strict=True))
    q = changed(monkeypatch, lambda module, node: setattr(node, "target", plain.get(str(node.target), node.target)))
    with pytest.warns(NCWarning, match="compiled 0 of 2 int8 linears and convolutions into int8 kernels"):
        export_pt2(q, tmp_path / "m.pt2")


def plain_quantize(x, scale, zero_point, low, high, dtype):
    return torch.clamp(torch.round(x / scale) + zero_point, low, high).to(dtype)


def plain_dequantize(q, scale, zero_point, *_):
    return (q.float() - zero_point) * scale


def test_dynamic_quantization_is_refused(tmp_path):
    q = quantized(MLP().eval(), torch.randn(4, 16), DynamicQuantConfig(), "native")
    with pytest.raises(UnsupportedError, match="takes static quantization; .* as of fc1, fc2"):
        export_pt2(q, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_and_for_what_is_no_quantized_model(tmp_path, monkeypatch):
    q = quantized(MLP().eval(), torch.randn(4, 16), None, "native")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailableError, match=r"export_pt2\(\) needs a C\+\+ compiler, and 'no-such-compiler' is not found"):
        export_pt2(q, tmp_path / "m.pt2")
    with pytest.raises(StateError, match=r"export_pt2\(\) takes what convert"):
        export_pt2(MLP(), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())

"""`export_pt2`: a program compiled ahead of time, compared with the quantized graph it was made from."""

import collections
import re
import zipfile

import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, quantized, worst_db
from torch import nn

from nc import (
    ArtefactError,
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
from nc.backends.native import fuse, passes
from nc.graph.catalogue import kind_of_node
from nc.process.cxx import check_compiler

try:
    check_compiler("a test")
    WHY = available_backends()["native"]
except BackendUnavailableError as error:
    WHY = str(error)
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "it can run")

LINEAR, CONVOLUTION, SUM = (
    "qlinear_pointwise_tensor",
    "qconv_pointwise_tensor",
    "qconv2d_pointwise_binary_tensor",
)


def row():
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3, padding=1))


def volume():
    return nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 3, padding=1))


NO_PRODUCTS = StaticQuantConfig().set_local("matmul", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))

#: Model, configuration, input shape, and the int8 kernels that the program calls.
CASES = {
    "linears": (MLP, StaticQuantConfig(), (4, 16), {LINEAR: 2}),
    "signed": (
        MLP,
        StaticQuantConfig(act_dtype="int8", act_sym=True, w_granularity="per_tensor"),
        (4, 16),
        {LINEAR: 2},
    ),
    "convolutions": (ResidualCNN, StaticQuantConfig(), (2, 3, 8, 8), {LINEAR: 1, CONVOLUTION: 2, SUM: 1}),
    "rows": (row, StaticQuantConfig(), (2, 3, 20), {CONVOLUTION: 2}),
    "volumes": (volume, StaticQuantConfig(), (2, 3, 6, 6, 6), {CONVOLUTION: 2}),
    "attention": (Attention, NO_PRODUCTS, (2, 5, 32), {LINEAR: 2}),  # query, key and value are one
    "some in fp32": (MLP, StaticQuantConfig().exclude("fc2"), (4, 16), {LINEAR: 1}),
    "some in bf16": (
        MLP,
        StaticQuantConfig().set_local("fc2", StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")),
        (4, 16),
        {LINEAR: 1},
    ),
}


def calls(path):
    """int8 kernels that a program's own source calls, and how often."""
    with zipfile.ZipFile(path) as file:
        sources = [file.read(name).decode() for name in file.namelist() if name.endswith(".wrapper.cpp")]
    assert len(sources) == 1
    return dict(collections.Counter(re.findall(r"aoti_torch_cpu__(q\w+)\(", sources[0])))


def run(path, *inputs):
    return torch._inductor.aoti_load_package(str(path))(*inputs)


@pytest.mark.exhaustive
def test_products_of_activations_are_computed_in_fp32_with_a_warning(tmp_path):
    x = torch.randn(2, 5, 32)
    q = quantized(Attention().eval(), x, None, "native")
    with pytest.warns(
        NCWarning,
        match="The program computes 2 of 6 quantized operators in fp32, between codes: matmul, matmul_1",
    ):
        export_pt2(q, tmp_path / "m.pt2")
    assert worst_db([q.reference(x)], [run(tmp_path / "m.pt2", x)]) > 35


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "convolutions" else pytest.mark.exhaustive) for case in CASES],
)
def test_the_program_computes_the_quantized_graph(tmp_path, case):
    make, config, shape, kernels = CASES[case]
    why = get_backend("native").capabilities().why_no_bf16
    if "bf16" in case and why:
        pytest.skip(why)
    if case == "volumes" and torch.__version__.startswith("2.8."):
        pytest.skip("Inductor of torch 2.8 has no int8 convolution over volumes")
    x = torch.randn(shape)
    q = quantized(make().eval(), x, config, "native")
    export_pt2(q, tmp_path / "new" / "m.pt2")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["m.pt2"]
    assert worst_db([q.reference(x)], [run(tmp_path / "new" / "m.pt2", x)]) > 35
    assert calls(tmp_path / "new" / "m.pt2") == kernels


@pytest.mark.parametrize("case", ["linears", pytest.param("convolutions", marks=pytest.mark.exhaustive)])
def test_sizes_stay_free_where_that_was_asked(tmp_path, case):
    make, config, shape, kernels = CASES[case]
    q = quantized(make().eval(), torch.randn(1, *shape[1:]), config, "native")
    export_pt2(q, tmp_path / "m.pt2", free_sizes=True)
    assert calls(tmp_path / "m.pt2") == kernels
    for batch in (1, 2, 5):
        x = torch.randn(batch, *shape[1:])
        assert worst_db([q.reference(x)], [run(tmp_path / "m.pt2", x)]) > 35


def test_outputs_come_flat_and_a_file_that_was_there_is_replaced(tmp_path):
    model = Function(
        lambda self, x: {"y": self.a(x), "none": None, "both": (self.b(x), 3)},
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 4),
    )
    x = torch.randn(2, 8)
    q = quantized(model.eval(), x, None, "reference")
    (tmp_path / "m.pt2").write_bytes(b"old")
    with pytest.raises(ArtefactError, match=r"m\.pt2' exists, and is not an earlier result"):
        export_pt2(q, tmp_path / "m.pt2")
    (tmp_path / "m.pt2").unlink()
    for _ in range(2):
        export_pt2(q, tmp_path / "m.pt2")
    y, b = run(tmp_path / "m.pt2", x)
    assert worst_db([q(x)["y"], q(x)["both"][0]], [y, b]) > 35


@pytest.mark.exhaustive
def test_a_program_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    real = passes.fuse

    def negated(module, **options):
        real(module, **options)
        for name, value in list(module.named_buffers(remove_duplicate=False)):
            if name.endswith("_scales"):
                setattr(module, name, -value)

    q = quantized(MLP().eval(), torch.randn(4, 16), None, "native")
    monkeypatch.setattr(passes, "fuse", negated)  # not in the engine that runs here
    with pytest.raises(
        VerificationError,
        match="AOTInductor's program computes something else.*first operator that differs is 'fc1'",
    ):
        export_pt2(q, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_a_program_in_which_an_operator_would_be_fp32_is_refused_with_the_list(tmp_path, monkeypatch):
    why = fuse.why_not_int8
    monkeypatch.setattr(
        fuse, "why_not_int8", lambda node: "no kernel" if kind_of_node(node) == "conv2d" else why(node)
    )
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    q = quantized(nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8), None, "native")
    with pytest.raises(
        UnsupportedError,
        match=r"no int8 kernel for 2 of 3 quantized operators: 0, 2\. .* config\.exclude\(name\)",
    ):
        export_pt2(q, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_dynamic_quantization_is_refused(tmp_path):
    q = quantized(MLP().eval(), torch.randn(4, 16), DynamicQuantConfig(), "native")
    with pytest.raises(UnsupportedError, match="takes static quantization; .* as of fc1, fc2"):
        export_pt2(q, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_and_for_what_is_no_quantized_model(tmp_path, monkeypatch):
    q = quantized(MLP().eval(), torch.randn(4, 16), None, "native")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        BackendUnavailableError,
        match=r"export_pt2\(\) needs a C\+\+ compiler, and 'no-such-compiler' is not found",
    ):
        export_pt2(q, tmp_path / "m.pt2")
    with pytest.raises(StateError, match=r"export_pt2\(\) expects the result of convert"):
        export_pt2(MLP(), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())

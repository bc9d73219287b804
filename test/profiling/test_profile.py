"""Which kernels ran, and for how long: the stream of oneDNN, the shares, and the process that measures."""

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from models import MLP, WHY_NO_PLANS, Attention, Function, ResidualCNN, quantized
from suites.reports import said
from torch.nn import functional as F

import nc
from nc import BackendError, InputError, UnsupportedError, available_backends
from nc.backends import profile_process as process
from nc.backends.base import EngineModel
from nc.backends.native.plans import code_products
from nc.backends.reference import ReferenceBackend
from nc.profiling import onednn_verbose, scaling
from nc.profiling.onednn_verbose import ExecutedPrimitive, Partition, parse
from nc.profiling.profile import EngineCall, Profile

ROOT = Path(__file__).parents[2]
IMAGE, ROWS = torch.zeros(2, 3, 16, 16), torch.zeros(4, 16)

native = pytest.mark.skipif(
    bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
)
BACKENDS = [pytest.param("native", marks=native), pytest.param("ipex", marks=pytest.mark.ipex)]

# ---- the stream ----

_INFO = """\
onednn_verbose,v1,info,oneDNN v3.7.1 (commit 8d263e693366ef8db40acc569cc7d8edf644556d)
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors,exec_time
onednn_verbose,v1,primitive,create:cache_hit,cpu,matmul,gemm:jit,undef,src:u8:a:blocked:ab::f0 wei:s8::blocked:ab::f0,,,4x16:16x8,0.01
"""
_MATMUL = (
    "cpu,matmul,brg_matmul:avx512_core_vnni,undef,src:u8:a:blocked:ab::f0 wei:s8::blocked:ab::f0 "
    "bia:f32:a:blocked:ab::f0_mask2 dst:f32:a:blocked:ab::f0,attr-scratchpad:user "
    "attr-scales:src0:0:f32+wei:2:f32 attr-zero-points:src0:0:s32,,4x16:16x8,7.73999"
)
_REORDER = (
    "cpu,reorder,jit:uni,undef,src:u8::blocked:abcd::f0 "
    "dst:u8::blocked:acdb::f0,attr-scratchpad:user,,4x3x32x32,7.5"
)
_GRAPH = (
    "graph,exec,cpu,100046,quantized_matmul_post_ops,aten::dequantize;aten::dequantize;aten::linear,,in0_u8:0:strided:variable:4x16:16s1 "
    "in1_s8:2:strided:constant:16x16:16s1 "
    "out0_f32:5:strided:variable:4x16:16s1,fpm:strict,matmul_t,dnnl_backend,7.9"
)
MATMUL = ExecutedPrimitive("matmul", "brg_matmul:avx512_core_vnni", ("u8", "s8"), "f32", 7.73999)


@pytest.mark.parametrize(
    "prefix",
    [
        "onednn_verbose,v1,primitive,exec,",
        "onednn_verbose,primitive,exec,",
        "onednn_verbose,exec,",
        "dnnl_verbose,exec,",
    ],
)
def test_a_line_says_kernel_types_and_time(prefix):
    assert parse([*_INFO.splitlines(), prefix + _MATMUL]) == [MATMUL]
    assert str(MATMUL) == "matmul brg_matmul:avx512_core_vnni (u8, s8 -> f32)"


def test_times_of_beginning_are_read():
    (kernel,) = parse(["onednn_verbose,v1,1795313783206.552002,primitive,exec," + _MATMUL])
    assert kernel == dataclasses.replace(MATMUL, start=1795313783206.552002)


def test_types_in_the_short_form():
    (kernel,) = parse(
        ["onednn_verbose,v1,primitive,exec,cpu,gemm_api,,undef,src_s8 wei_s8 dst_s32,,,m4n8k16,0.5"]
    )
    assert (kernel.reads, kernel.writes, kernel.computes_on_codes) == (("s8", "s8"), "s32", True)


def test_a_reorder_of_codes_is_no_arithmetic():
    reorder, matmul = parse([f"onednn_verbose,v1,primitive,exec,{text}" for text in (_REORDER, _MATMUL)])
    assert (reorder.computes_on_codes, matmul.computes_on_codes) == (False, True)


def test_a_partition_takes_the_primitives_that_began_after_it_did():
    lines = [
        f"onednn_verbose,v1,{start},{text}"
        for start, text in ((1.0, f"primitive,exec,{_REORDER}"), (2.5, f"primitive,exec,{_MATMUL}"))
    ]
    found = parse([*lines, f"onednn_verbose,v1,2.25,{_GRAPH}", f"onednn_verbose,v1,9.5,{_GRAPH}"])
    assert [type(entry) for entry in found] == [ExecutedPrimitive, Partition, Partition]
    assert [[k.primitive for k in partition.kernels] for partition in found[1:]] == [["matmul"], []]


def convolve():
    """Large enough for torch to ask oneDNN."""
    F.conv2d(torch.zeros(4, 3, 32, 32), torch.zeros(16, 3, 3, 3))


def test_marks_stand_in_order_with_what_onednn_prints():
    with onednn_verbose.captured() as lines:
        onednn_verbose.mark(7)
        convolve()
        onednn_verbose.mark(8)
    found = parse(lines)
    assert [entry for entry in found if isinstance(entry, int)] == [7, 8]
    assert "convolution" in [k.primitive for k in found[1 : found.index(8)]]


def test_the_standard_output_comes_back(capfd):
    with onednn_verbose.captured() as lines:
        os.write(1, b"inside")
    os.write(1, b"after")
    assert (lines, capfd.readouterr().out) == (["inside"], "after")


# ---- the shares ----

_CONV = ExecutedPrimitive("convolution", "jit_uni_int8:avx2", ("u8", "s8"), "f32", 1.0)
_MOVE = ExecutedPrimitive("reorder", "jit:uni", ("u8",), "u8", 1.0)
PROFILE = Profile(
    steps=(
        EngineCall(name="aten::quantize_per_tensor", converts=True, ms=1.0),
        EngineCall(
            name="ipex::LlgaFusionGroup",
            operators=("conv", "relu"),
            kernels=(_MOVE, _CONV, _CONV, _MOVE),
            ms=4.0,
        ),
        EngineCall(name="aten::layer_norm", operators=("norm",), ms=2.0),
        EngineCall(name="aten::mul", operators=("norm",), ms=1.0),
        EngineCall(name="aten::view", ms=2.0),
    ),
    call_ms=12.5,
    calls=10,
    threads=2,
)


def test_operators_in_one_kernel_point_at_the_first():
    assert PROFILE.kernels() == {
        "conv": ("2 x convolution jit_uni_int8:avx2 (u8, s8 -> f32) + 2 reorders", 0.4),
        "relu": ("in the kernel of conv", None),
        "norm": ("torch aten::layer_norm + torch aten::mul", 0.3),
    }


def test_parts_of_the_time():
    assert PROFILE.parts() == {"int8": 0.4, "conversion": 0.1, "fp32": 0.3, "other": 0.2}
    assert PROFILE.summary() == (
        "profile: 12.50 ms per call, the fastest of 10, 2 threads; 40% int8 kernels, 10% conversions, 30% "
        "float operators, 20% other"
    )


def test_a_profile_survives_json():
    assert Profile.from_dict(json.loads(json.dumps(dataclasses.asdict(PROFILE)))) == PROFILE


# ---- the process that measures ----


@pytest.fixture
def leaves_nothing(tmp_path, monkeypatch, capfd):
    """A block inside leaves the working and the temporary directory empty, of this process and its children, and prints nothing."""

    @contextlib.contextmanager
    def block():
        folders = [tmp_path / "work", tmp_path / "temporary"]
        for folder in folders:
            folder.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(folders[0])
            patch.setattr(tempfile, "tempdir", str(folders[1]))
            patch.setenv("TMPDIR", str(folders[1]))
            capfd.readouterr()
            yield
        assert [[*folder.iterdir()] for folder in folders] == [[], []]
        assert capfd.readouterr() == ("", "")

    return block


def test_the_stream_goes_nowhere_else(leaves_nothing):
    with leaves_nothing(), onednn_verbose.captured() as lines:
        convolve()
    assert lines


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", [ResidualCNN, pytest.param(MLP, marks=pytest.mark.exhaustive)])
def test_every_int8_operator_has_a_kernel_that_reads_codes(backend, model, leaves_nothing):
    x = torch.randn_like(IMAGE if model is ResidualCNN else ROWS)
    q = quantized(model(), x, backend=backend)
    with leaves_nothing():
        report = q.report(profile_inputs=x)
    kernels = {
        name: k
        for step in report.profile.steps
        for name in step.operators
        for k in step.kernels
        if k.computes_on_codes
    }
    weighted = [op for op in report.ops if op.kind in ("conv2d", "linear")]
    assert len(weighted) == (4 if model is ResidualCNN else 2)
    for op in weighted:
        kernel = kernels[op.operator]
        assert (op.ran, kernel.reads) == ("int8", ("u8", "s8"))
        ours = () if code_products.why_unavailable() else ("c:code_product",)
        assert any(name in kernel.implementation for name in ("jit", "brg", "gemm", *ours)), kernel
        assert str(kernel) in op.kernel
        assert op.share > 0
    assert sum(report.profile.parts().values()) == pytest.approx(1)
    assert 0 < sum(op.share or 0 for op in report.ops) < 1  # the first quantize is no operator's
    assert report.profile.parts()["conversion"] > 0
    relu = next(op for op in report.ops if op.kind == "relu")
    assert (relu.kernel, relu.share) == (f"in the kernel of {weighted[0].operator}", None)
    lines = report.text(details=True).splitlines()
    head, *rows = lines[next(i for i, line in enumerate(lines) if line.startswith("operator ")) :]
    assert head.split() == ["operator", "type", "asked", "ran", "share", "kernel", "why"]
    assert rows
    assert f"{report.profile.summary()} {scaling.summary(report.profile.predictions)}".strip() in said(report)


@pytest.mark.ipex
def test_a_group_of_several_int8_operators_counts_once():
    x = torch.randn(2, 5, 32)
    report = quantized(Attention(), x, backend="ipex").report(profile_inputs=(x,))
    ops = {op.operator: op for op in report.ops}
    assert (ops["matmul_1"].kernel, ops["matmul_1"].share) == ("in the kernel of matmul", None)
    assert "softmax" in ops["matmul"].kernel
    assert 0 < sum(op.share or 0 for op in report.ops) <= 1


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("reference", marks=pytest.mark.exhaustive),
        pytest.param("native", marks=native),
        pytest.param("ipex", marks=[pytest.mark.ipex, pytest.mark.exhaustive]),
    ],
)
def test_other_inputs_than_the_examples(backend):
    model = Function(
        lambda self, x, scale: self.fc2(self.fc1(x) * scale),
        fc1=torch.nn.Linear(16, 8),
        fc2=torch.nn.Linear(8, 4),
    )
    example = {"x": torch.randn(4, 16), "scale": torch.randn(4, 1)}
    q = quantized(model, example, backend=backend)
    other = {"scale": torch.randn(7, 1), "x": torch.randn(7, 16)}
    report = q.report(profile_inputs=other)
    assert {op.operator: op.kernel != "" for op in report.ops} == {op.operator: True for op in report.ops}
    assert report.profile.threads == torch.get_num_threads()
    json.dumps(report.to_dict())
    plain = q.report()
    assert (plain.profile, {op.share for op in plain.ops}) == (None, {None})
    planned = "matmul" if code_products.why_unavailable() else "function"
    assert {op.kernel.partition(" ")[0] for op in plain.ops} == {
        planned if backend == "native" and not WHY_NO_PLANS else ""
    }
    assert "share" not in str(plain)


@native
@pytest.mark.parametrize(
    "redirect",
    [*(pytest.param(r, marks=pytest.mark.exhaustive) for r in ("<&-", ">&-", ">/dev/null")), ">&- 2>&- <&-"],
)
def test_a_process_without_standard_streams(redirect, tmp_path):
    code = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "test")]!r}
import torch
from models import MLP, quantized
x = torch.randn(4, 16)
report = quantized(MLP(), x, backend="native").report(profile_inputs=x)
open("out", "w").write(report.ops[0].kernel)
"""
    (tmp_path / "script.py").write_text(code)
    subprocess.run(
        ["sh", "-c", f"{sys.executable} script.py {redirect}"], cwd=tmp_path, timeout=200, check=True
    )
    assert "(u8, s8 -> u8)" in (tmp_path / "out").read_text()


@pytest.fixture(scope="module")
def simulated():
    torch.manual_seed(0)
    return quantized(MLP(), torch.randn(4, 16))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("x", "to be a tensor, a tuple, a list or a dict, but got a str"),
        (torch.zeros(4, 3), "expected size 16"),
    ],
)
def test_inputs_that_do_not_fit(inputs, message, simulated):
    with pytest.raises(InputError, match=message):
        simulated.report(profile_inputs=inputs)


def test_a_backend_without_a_profile_says_so(monkeypatch):
    class Plain(ReferenceBackend):
        name = "plain"

        def lower(self, graph, **options):
            engine = super().lower(graph)
            return EngineModel(run=engine.run, report=engine.report)

    monkeypatch.setitem(nc.backends._REGISTERED, "plain", Plain())
    q = quantized(MLP(), ROWS, backend="plain")
    assert q.report().ops
    with pytest.raises(UnsupportedError, match="Backend 'plain' cannot profile this model"):
        q.report(profile_inputs=ROWS)


BORROWED = """
from nc.backends.reference import ReferenceBackend

class Borrowed(ReferenceBackend):
    name = "borrowed"
"""


def test_a_registered_backend_is_profiled_where_it_can_be_imported(monkeypatch, tmp_path):
    (tmp_path / "lending.py").write_text(BORROWED)
    monkeypatch.syspath_prepend(str(tmp_path))
    maker = importlib.import_module("lending").Borrowed

    class Local(maker):
        pass

    monkeypatch.setitem(nc.backends._REGISTERED, "borrowed", maker())
    q = quantized(MLP(), ROWS, backend="borrowed")
    assert [op.kernel for op in q.report(profile_inputs=ROWS).ops] == [
        "torch aten::linear",
        "torch aten::relu",
        "torch aten::linear",
    ]
    monkeypatch.setitem(nc.backends._REGISTERED, "borrowed", Local())
    with pytest.raises(UnsupportedError, match=r"its class .*Local is defined in a script or function"):
        q.report(profile_inputs=ROWS)


@pytest.mark.parametrize(
    ("code", "text"),
    [(-11, "crashed .signal 11."), (1, "failed: RuntimeError: no"), (0, "failed: it ended without a result")],
)
def test_a_child_that_ends_badly(code, text, monkeypatch, simulated, leaves_nothing):
    done = subprocess.CompletedProcess(
        [], code, stdout="", stderr="Traceback\nRuntimeError: no\n" if code == 1 else ""
    )
    monkeypatch.setattr(process, "run_module", lambda *_, **__: done)
    with leaves_nothing(), pytest.raises(BackendError, match=text):
        simulated.report(profile_inputs=ROWS)


def test_a_child_that_does_not_end(simulated, leaves_nothing):
    with leaves_nothing(), pytest.raises(BackendError, match="did not end within 0 s"):
        process.profile_in_child(simulated.graph, ReferenceBackend(), [ROWS], time_limit_s=0.01)


def test_the_child_says_what_is_wrong(simulated, leaves_nothing):
    with (
        leaves_nothing(),
        pytest.raises(BackendError, match="in a separate process failed: .*shapes cannot be multiplied"),
    ):
        process.profile_in_child(simulated.graph, ReferenceBackend(), [torch.zeros(4, 3)])

"""The OpenVINO backend: the common suite on OpenVINO's CPU plugin."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, quantized, worst_db
from suites.backend_suite import MODELS, BackendSuite
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import nc
from nc import (
    ArtefactError,
    BackendError,
    BackendUnavailableError,
    ConfigError,
    DynamicQuantConfig,
    StaticQuantConfig,
    UnsupportedError,
    VerificationError,
    available_backends,
    describe,
    export_openvino,
    prepare,
)
from nc.backends import AUTO, get_backend
from nc.backends.openvino import program
from nc.backends.passes import Pass
from nc.capture.capture import capture
from nc.graph.saturation import narrow
from nc.kernels import cpu
from nc.ops import quant_linear
from nc.planning.rules import fit, resolve

pytestmark = pytest.mark.skipif(
    bool(available_backends()["openvino"]), reason=available_backends()["openvino"] or "it can run"
)


class TestOpenVINO(BackendSuite):
    backend = "openvino"
    without_kernel = (
        ()
        if cpu.accumulates_wide()
        else ("matmul", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    )

    @pytest.mark.parametrize("name", MODELS)
    def test_what_was_asked_runs_in_int8(self, converted, name):
        _, q = converted(name)
        report = q.report()
        assert {op.operator for op in report.not_int8} == set()
        assert report.sqnr_db >= self.agreement


@pytest.fixture
def residual():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    return quantized(ResidualCNN(), x, None, "openvino"), x


def test_the_report_names_layers_and_kernels(residual):
    q, _ = residual
    found = {op.operator: op for op in q.report().ops}
    runs = {run.operator: run for run in q.engine.report().ops}
    assert {runs[name].ran for name in ("stem", "conv1", "conv2", "add", "fc")} == {"int8"}
    assert all("I8" in runs[name].primitive.upper() for name in ("stem", "conv1", "conv2", "fc"))
    assert found["add"].ran == "int8"
    assert q.report().details["threads"] == torch.get_num_threads()


def test_what_does_not_run_in_int8_says_what_it_is():
    """A graph for the reference, whose matmul is affine: OpenVINO takes symmetric codes only."""
    x = torch.randn(2, 6, 32)
    graph, _ = narrow(
        quantized(Attention(), x, None, "reference").graph, get_backend("openvino").capabilities()
    )
    runs = {run.operator: run for run in get_backend("openvino").lower(graph).report().ops}
    assert runs["query"].ran == "int8"
    assert runs["matmul"].ran == "fp32"
    assert runs["matmul"].reason.startswith(
        ("OpenVINO computes it by a layer", "OpenVINO's runtime model names no separate layer")
    )


def test_products_of_two_activations_need_vnni(monkeypatch):
    """Without it OpenVINO computes them in fp32."""
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    plan = describe(Attention().eval(), StaticQuantConfig(), torch.randn(2, 6, 32), backend="openvino")
    planned = {decision.operator for decision in plan.quantized}
    assert "query" in planned
    assert not {"matmul", "matmul_1"} & planned


@pytest.mark.skipif(not cpu.accumulates_wide(), reason="needs VNNI or AMX")
def test_products_of_two_activations_are_symmetric_and_int8():
    x = torch.randn(2, 6, 32)
    q = quantized(Attention(), x, None, "openvino")
    assert {op.operator: op.ran for op in q.report().ops if op.kind == "matmul"} == {
        "matmul": "int8",
        "matmul_1": "int8",
    }
    specs = {
        d.operator: str(d.spec.activation) for d in q.graph.plan.decisions if d.kind in ("matmul", "linear")
    }
    assert specs["matmul"] == specs["matmul_1"] == "int8 sym"
    assert specs["query"] == "uint8 affine"


@pytest.mark.skipif(not cpu.accumulates_wide(), reason="needs VNNI or AMX")
def test_affine_products_are_refused_where_a_rule_asks_for_them_and_stay_fp32_from_another_plan():
    x = torch.randn(2, 6, 32)
    graph = capture(Attention().eval(), x)
    capabilities = get_backend("openvino").capabilities()
    affine = StaticQuantConfig(act_dtype="uint8", act_sym=False)
    with pytest.raises(
        UnsupportedError, match=r"act_dtype='uint8' \(rule: .*'matmul'.*\) has no kernel .* legal there: int8"
    ):
        resolve(StaticQuantConfig().set_local("matmul", affine), graph, capabilities)
    with pytest.raises(
        UnsupportedError, match=r"act_sym=False \(rule: .*'matmul'.*\) has no kernel .* legal there: True"
    ):
        resolve(
            StaticQuantConfig().set_local("matmul", StaticQuantConfig(act_dtype="int8", act_sym=False)),
            graph,
            capabilities,
        )
    assert resolve(affine, graph, capabilities)[
        "matmul"
    ].spec.activation.symmetric  # a rule for all says nothing of this kernel
    plan = resolve(StaticQuantConfig(), graph, get_backend("reference").capabilities())
    assert (plan["matmul"].spec.precision, fit(plan, capabilities)["matmul"].spec.precision) == (
        "int8",
        "fp32",
    )
    other = resolve(
        StaticQuantConfig(act_dtype="uint8", act_sym=True), graph, get_backend("native").capabilities()
    )
    assert (other["matmul"].spec.precision, fit(other, capabilities)["matmul"].spec.precision) == (
        "int8",
        "fp32",
    )


@pytest.mark.parametrize("value", ["contiguous", "transposed"])
def test_outputs_stay_and_inputs_are_read_where_they_lie(residual, value):
    q, x = residual
    if value == "transposed":
        x = x.transpose(2, 3)
    first = q(x)
    kept = first.clone()
    for _ in range(3):
        q(torch.randn(2, 3, 8, 8))
    assert torch.equal(first, kept)
    assert torch.equal(q(x), kept)


def test_outputs_that_are_no_tensors():
    x = torch.randn(2, 8)
    q = quantized(
        Function(lambda self, x: (self.fc(x), x.shape[0] * 2, None, "name"), fc=nn.Linear(8, 4)),
        x,
        None,
        "openvino",
    )
    for batch in (2, 5):
        y, size, nothing, text = q(torch.randn(batch, 8))
        assert (y.shape, size, nothing, text) == ((batch, 4), 2 * batch, None, "name")


@pytest.mark.parametrize(
    "outputs",
    [
        lambda self, x, y: (y, y),
        lambda self, x, y: (y, y.clone(), y.detach(), y.view(-1), F.dropout(y, training=False)),
        lambda self, x, y: (y > 0, y > 0, (y > 0).clone(), y.argmax(-1), y.argmax(-1).clone()),
        lambda self, x, y: (x, y, x, x.clone()),
        lambda self, x, y: (self.table, y, self.table, self.table.clone(), self.table.clone()),
        lambda self, x, y: {"a": y, "b": None, "c": [y, y.shape[0]]},
        lambda self, x, y: (self.b(y), self.b(y), y, y),
        lambda self, x, y: y.chunk(2, -1) * 2,
        lambda self, x, y: (x, x),
    ],
)
def test_values_that_are_returned_more_than_once(outputs):
    """OpenVINO's frontend fails where two outputs are the same value, and for it a copy is that value."""
    model = Function(lambda self, x: outputs(self, x, self.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    model.register_buffer("table", torch.randn(3))
    q = quantized(model, torch.randn(4, 8), None, "openvino")
    for rows in (4, 7):
        x = torch.randn(rows, 8)
        expected, got = (tree_flatten(f(x))[0] for f in (q.reference, q))
        assert [type(value) for value in got] == [type(value) for value in expected]
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


def test_a_squeeze_removes_no_free_size():
    """OpenVINO removes a free size, and then writes past the end of its result."""
    model = Function(
        lambda self, x: (
            self.a(x).squeeze(0),
            self.a(x)[:, None].squeeze(),
            self.a(x)[None, :, None].squeeze((0, 1, 2)),
        ),
        a=nn.Linear(8, 8),
    )
    q = quantized(model, torch.randn(4, 8), None, "openvino")
    for rows in (4, 7):
        x = torch.randn(rows, 8)
        for one, other in zip(q.reference(x), q(x), strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda y: y.amax((2, 3), keepdim=True),
        lambda y: y.amin((2, 3))[:, :, None, None],
        lambda y: y.max(3, keepdim=True).values,
        lambda y: -y.min(2).values[..., None],
        lambda y: (y.relu().amax((2, 3), keepdim=True) * 2 - 0.3).relu().sigmoid(),
        lambda y: F.silu(y.amax(-1, keepdim=True)),
        lambda y: y / y.max(),
        lambda y: y.amax(1, keepdim=True).expand(-1, 16, -1, -1),
        lambda y: y - y[0, 0, 0, 0].amax(),
    ],
)
def test_the_largest_and_the_smallest_value_are_quantized(reduce):
    """OpenVINO's kernel for these gives 0 to 20 dB where it is fused with the quantization behind it."""
    torch.manual_seed(0)
    model = Function(
        lambda self, x: self.b(reduce(self.a(x))), a=nn.Conv2d(3, 16, 3, padding=1), b=nn.Conv2d(16, 8, 1)
    )
    q = quantized(model, torch.randn(2, 3, 16, 16), None, "openvino")
    assert q.report().ran_int8 == 2
    for shape in ((2, 3, 16, 16), (3, 3, 24, 20)):
        x = torch.randn(shape)
        assert worst_db([q.reference(x)], [q(x)]) > 60


def test_a_pool_that_openvino_divides_otherwise_is_refused():
    """Its frontend gives 25 dB where the last window leaves the padded input; other pools are right."""

    def net(**options):
        return Function(
            lambda self, x: self.b(F.avg_pool2d(self.a(x), 3, 2, **options)),
            a=nn.Conv2d(3, 8, 1),
            b=nn.Conv2d(8, 4, 1),
        )

    x = torch.randn(2, 3, 20, 20)
    with pytest.raises(BackendError, match="an average pool with ceil_mode"):
        quantized(net(padding=1, ceil_mode=True), x, None, "openvino")
    for options in (
        {"padding": 1},
        {"ceil_mode": True},
        {"padding": 1, "ceil_mode": True, "count_include_pad": False},
    ):
        q = quantized(net(**options), x, None, "openvino")
        assert worst_db([q.reference(x)], [q(x)]) > 40


@pytest.mark.parametrize("window", [8, (8, 6)])
def test_a_pool_with_a_window_beyond_its_input(window):
    """OpenVINO refuses it; EfficientNet of transformers has one.

    Where a larger input has several windows, the graph computes them.
    """
    model = Function(lambda self, x: F.avg_pool2d(self.a(x), window, ceil_mode=True), a=nn.Conv2d(3, 8, 1))
    x, larger = torch.randn(2, 3, 7, 6), torch.randn(2, 3, 9, 6)
    q = quantized(model, x, None, "openvino")
    assert worst_db([q.reference(x)], [q(x)]) > 100
    with pytest.warns(
        nc.NCWarning, match="OpenVINO is not used .*: it gives outputs of other shapes\. The quantized graph"
    ):
        found = q(larger)
    assert torch.equal(found, q.reference(larger))
    unchecked = quantized(model, x, None, "openvino", verify_sizes=False)
    assert torch.isinf(unchecked(larger)).all()  # no finite number is wrong


def test_vectors_of_no_element_that_are_joined():
    """As the caches that transformers return begin.

    OpenVINO takes no vector beside tensors of more dimensions.
    """
    model = Function(
        lambda self, x: (torch.cat([torch.tensor([]), self.a(x)], -2), torch.cat([torch.tensor([])])),
        a=nn.Linear(8, 8),
    )
    x = torch.randn(2, 4, 8)
    q = quantized(model, x, None, "openvino")
    assert worst_db([q.reference(x)[0]], [q(x)[0]]) > 100
    assert q(x)[1].shape == (0,)


def test_mixtures_of_experts_say_what_to_do():
    transformers = pytest.importorskip("transformers", "5")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 96,
    }
    config = transformers.MixtralConfig(
        **sizes, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, use_cache=False
    )
    ids = torch.randint(0, 96, (2, 7))
    with pytest.raises(
        BackendError, match=r"model\.set_experts_implementation\('batched_mm'\) before prepare"
    ):
        quantized(transformers.MixtralForCausalLM(config).eval(), {"input_ids": ids}, None, "openvino")
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    q = quantized(model, {"input_ids": ids}, None, "openvino")
    assert worst_db([q.reference(input_ids=ids).logits], [q(input_ids=ids).logits]) > 40


@pytest.mark.parametrize("scale", [1e-6, 1e-8, 1e-10])
def test_sums_of_tiny_values(scale):
    """As untrained networks have them.

    OpenVINO loses a zero point whose product with its scale is below 1e-6.
    """
    layers = {name: nn.Conv2d(3 if name == "a" else 24, 24, 1, bias=False) for name in "abc"}
    model = Function(lambda self, x: self.c(self.a(x) + self.b(self.a(x))), **layers)
    x = scale * torch.randn(1, 3, 16, 16)
    if (
        "amx_int8" in cpu.machine_features() and scale < 1e-6
    ):  # there it loses the zero points of convolutions too, which is noticed
        with pytest.raises(VerificationError):
            quantized(model, x, None, "openvino")
        return
    q = quantized(model, x, None, "openvino")
    assert q.report().ran_int8 >= 3
    assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_zeros_are_put_around_codes(dtype):
    model = Function(
        lambda self, x: self.b(F.pad(F.silu(self.a(x)), (0, 1, 0, 1))),
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(8, 8, 3, stride=2),
    )
    x = torch.randn(2, 3, 9, 9)
    q = quantized(model, x, StaticQuantConfig(act_dtype=dtype), "openvino")
    assert q.report().ran_int8 == 2
    assert worst_db([q.reference(x)], [q(x)]) > 40


def test_a_model_with_ranges_of_each_call_runs():
    x = torch.randn(4, 16)
    graph = quantized(MLP(), x, DynamicQuantConfig(), "reference").graph
    engine = get_backend("openvino").lower(graph)
    assert worst_db(graph.module(x), engine.run([x])) > 40
    assert [run.ran for run in engine.report().ops if run.operator == "fc1"] == ["fp32"]


def test_a_linear_of_one_vector():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1)).eval()
    q = nc.quantize(
        model,
        StaticQuantConfig(),
        lambda m: [m(torch.randn(4)) for _ in range(4)],
        example_inputs=torch.randn(4),
        backend="openvino",
    )
    assert {op.operator for op in q.report().ops if op.ran == "int8"} == {"0", "2"}
    x = torch.randn(4)
    torch.testing.assert_close(q(x), q.reference(x))


def test_inputs_and_outputs_in_bf16():
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval().bfloat16(),
        torch.randn(3, 4).bfloat16(),
    )
    with pytest.warns(nc.NCWarning, match="Nothing is quantized"):
        prepared = nc.prepare(model, StaticQuantConfig(), example_inputs=x, backend="openvino", strict=False)
    prepared(x)
    q = nc.convert(prepared, measure=False)
    assert q(x[:2]).dtype is torch.bfloat16
    torch.testing.assert_close(q(x[:2]), model(x[:2]))


@pytest.mark.parametrize("dtype", ["int4", "int8", "nf4"])
def test_low_bit_weights(dtype):
    x = torch.randn(4, 64)
    layer = nc.quantize(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval(),
        nc.WeightOnlyConfig(dtype, group_size=16),
    )
    prepared = nc.prepare(layer, StaticQuantConfig(), example_inputs=x, backend="reference")
    prepared(x)
    graph = nc.convert(prepared).graph
    engine = get_backend("openvino").lower(graph)
    assert any(node.target is quant_linear for node in graph.module.graph.nodes)
    is_small = engine.report().weight_bytes < 64 * 32 * 2  # in fp32 it would be four times as much
    assert is_small == (dtype != "nf4")
    assert worst_db(graph.module(x), engine.run([x])) > 60


def test_activations_in_blocks_of_int8_are_refused():
    x = torch.randn(4, 64)
    config = nc.WeightOnlyConfig("int4", group_size=32, act_dtype="int8_block32")
    layer = nc.quantize(nn.Sequential(nn.Linear(64, 32)).eval(), config, backend="reference")
    prepared = nc.prepare(layer, StaticQuantConfig(), example_inputs=x, backend="reference")
    prepared(x)
    with pytest.raises(nc.UnsupportedError, match='act_dtype=.int8_block32.: use act_dtype="int8"'):
        get_backend("openvino").lower(nc.convert(prepared).graph)


def test_wrong_numbers_are_noticed_and_named(monkeypatch):
    real = program._spell_weights

    def wrong(module):
        real(module)
        name = next(name for name, _ in module.named_buffers() if "scales" in name)
        setattr(module, name, getattr(module, name) * 3)

    passes = tuple(Pass("weights", wrong) if each.name == "weights" else each for each in program._PASSES)
    monkeypatch.setattr(program, "_PASSES", passes)
    with pytest.raises(
        VerificationError,
        match="OpenVINO computes something else than the quantized graph.*operator that differs is 'fc1'",
    ):
        quantized(MLP(), torch.randn(4, 16), None, "openvino")


def test_an_operator_without_a_translation_is_named():
    x = torch.randn(4, 8)
    with pytest.raises(BackendError, match=r"OpenVINO's conversion of the quantized graph failed: .*igamma"):
        quantized(
            Function(lambda self, x: torch.igamma(self.fc(x).abs(), x.abs()), fc=nn.Linear(8, 8)),
            x,
            None,
            "openvino",
        )


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(
        BackendUnavailableError, match=r"openvino is not installed: pip install 'nc-quant\[openvino\]'"
    ):
        prepare(MLP(), StaticQuantConfig(), example_inputs=torch.randn(4, 16), backend="openvino")


def test_auto_does_not_take_it():
    assert "openvino" not in AUTO


def test_a_call_after_a_fork_is_an_error_and_no_hang(residual, tmp_path):
    q, x = residual
    q.save(tmp_path / "m")
    code = (
        "import os, sys, torch, nc\n"
        "q = nc.load(sys.argv[1], backend='openvino'); x = torch.randn(2, 3, 8, 8); q(x)\n"
        "if not os.fork():\n"
        "    try: q(x)\n"
        "    except nc.BackendError as error: print('child:', error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait(); print('parent:', tuple(q(x).shape))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "child: OpenVINO was started before this process was forked" in done.stdout
    assert "parent: (2, 5)" in done.stdout


@pytest.mark.filterwarnings("ignore")  # of the trace
@pytest.mark.parametrize("transform", [torch.jit.trace, torch.export.export])
def test_a_trace_is_refused_where_it_would_record_constants(residual, transform):
    q, x = residual
    with pytest.raises(UnsupportedError, match=r"nc\.export_openvino\(\)"):
        transform(q, (x,))


def test_torch_compile_leaves_the_engine_alone(residual):
    q, x = residual
    compiled = torch.compile(q, backend="eager")
    for batch in (x, x[:1]):
        torch.testing.assert_close(compiled(batch), q(batch))


def test_exported_files_run_without_torch_and_nc(residual, tmp_path):
    q, _ = residual
    export_openvino(q, tmp_path / "new" / "m.xml")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["m.bin", "m.xml"]
    x = torch.randn(3, 3, 8, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    code = (
        "import sys, numpy, openvino\n"
        "model = openvino.Core().compile_model(sys.argv[1], 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})\n"
        "numpy.save(sys.argv[3], model({'x': numpy.load(sys.argv[2])})['output_0'])\n"
        "assert not {'torch', 'nc'} & set(sys.modules)\n"
    )
    files = [str(tmp_path / name) for name in ("new/m.xml", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", code, *files], timeout=120, check=True)
    y = torch.from_numpy(np.load(tmp_path / "y.npy"))
    assert worst_db([q(x)], [y]) > 60
    assert worst_db([q.reference(x)], [y]) > 30  # a code at a tie may be another one


def test_export_writes_both_files_or_none(residual, tmp_path, monkeypatch):
    q, _ = residual
    with pytest.raises(ConfigError, match=r"ends in '\.xml'"):
        export_openvino(q, tmp_path / "m.onnx")
    real = shutil.copyfile

    def fails(source, target):
        if ".bin" in target.name and target.parent == tmp_path:
            msg = "the disk is full"
            raise OSError(msg)
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises(OSError, match="the disk is full"):
        export_openvino(q, tmp_path / "m.xml")
    assert list(tmp_path.iterdir()) == []


def test_export_replaces_no_directory_and_no_link(residual, tmp_path):
    q, _ = residual
    (tmp_path / "a.bin").write_bytes(b"old")
    (tmp_path / "a.xml").mkdir()
    (tmp_path / "b.xml").symlink_to(tmp_path / "v1.xml")
    for name, why in (("a", "is a directory"), ("b", "is a link")):
        with pytest.raises(ArtefactError, match=why):
            export_openvino(q, tmp_path / f"{name}.xml")
    assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.xml", "b.xml"]


@pytest.mark.skipif("avx512_bf16" not in cpu.machine_features(), reason="needs AVX512-BF16")
def test_bf16():
    x = torch.randn(2, 8)
    config = StaticQuantConfig().set_local("b", StaticQuantConfig(w_dtype="bf16", act_dtype="bf16"))
    model = Function(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(8, 64), b=nn.Linear(64, 8))
    q = quantized(model, x, config, "openvino")
    assert {op.operator: op.ran for op in q.report().ops if op.operator in "ab"} == {"a": "int8", "b": "bf16"}
    assert worst_db([q.reference(x)], [q(x)]) > 30


@pytest.mark.parametrize(
    "make",
    [
        lambda self, x: x[:, 0] * self.v,
        lambda self, x: x[:, 0] / self.v + 1,
        lambda self, x: x[:, 0] + self.v,
        lambda self, x: x.reshape(x.shape[0] * x.shape[1], -1) * self.v * 2,
        lambda self, x: x.mean(1) * self.v,
        lambda self, x: F.relu(x[:, 0] * self.v),
        lambda self, x: F.relu6(x[:, 0] - self.v),
        lambda self, x: (x[:, 0] * self.v).clamp(-0.5, 1.0),
    ],
)
def test_a_number_for_each_channel_in_front_of_a_quantization(make):
    """OpenVINO makes ranges of channels of it, and its kernel takes wrong ones where it does not know the sizes."""
    torch.manual_seed(0)
    model = Function(
        lambda self, x: self.fc(make(self, x)), fc=nn.Linear(8, 8), v=nn.Parameter(torch.randn(8).exp())
    )
    q = quantized(model, torch.randn(6, 5, 8), None, "openvino")
    assert q.report().ran_int8 == 1
    x = torch.randn(3, 5, 8)
    assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Identity])
def test_a_batch_norm_in_front_of_a_quantization(activation):
    """As in networks whose blocks begin with it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    q = quantized(
        nn.Sequential(norm, activation(), nn.Conv2d(8, 8, 3)).eval(),
        torch.randn(2, 8, 9, 9),
        None,
        "openvino",
    )
    assert q.report().ran_int8 == 1
    x = torch.randn(3, 8, 7, 7)
    assert worst_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 16, 3, groups=8),
        nn.Conv1d(9, 9, 3, groups=3),
        nn.Conv3d(6, 12, 3, groups=6),
        nn.Conv2d(15, 30, 3, groups=5),
    ],
)
def test_groups_with_an_odd_number_of_inputs(conv):
    """The kernel of CPUs without VNNI adds products of two positions in 16 bits."""
    torch.manual_seed(0)
    conv = type(conv)(conv.in_channels, conv.out_channels, 3, groups=conv.groups)
    x = torch.randn(2, conv.in_channels, *[8] * (conv.weight.dim() - 2))
    q = quantized(nn.Sequential(conv).eval(), x, None, "openvino")
    for batch in (x, x.abs()):
        assert worst_db([q.reference(batch)], [q(batch)]) > 60


def windows(x):
    return x.unflatten(3, (2, -1)).unflatten(2, (2, -1)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2)


@pytest.mark.parametrize(
    ("cut", "last"), [(nn.PixelShuffle(2), nn.Conv2d(3, 3, 1)), (windows, nn.Linear(12, 5))]
)
@pytest.mark.sample(4)
def test_codes_that_are_cut_into_more_dimensions(cut, last):
    """The end of super-resolution networks, and windows of attention."""
    torch.manual_seed(0)
    model = Function(
        lambda self, x: self.last(cut(self.conv(x))), conv=nn.Conv2d(3, 12, 3, padding=1), last=last
    )
    x = torch.randn(1, 3, 12, 12)
    q = quantized(model.eval(), x, None, "openvino")
    assert q.report().ran_int8 == 2
    assert worst_db([q.reference(x)], [q(x)]) > 60


def test_products_of_symmetric_codes_stay_fp32_on_a_cpu_without_vnni(monkeypatch, tmp_path):
    """A model that was prepared for another backend.

    OpenVINO's int8 kernel would add pairs of products in 16 bits.
    """
    model = Function(
        lambda self, x: self.a(x) @ self.b(x).transpose(-1, -2), a=nn.Linear(32, 32), b=nn.Linear(32, 32)
    ).eval()
    config = nc.StaticQuantConfig()
    config.set_local("matmul", nc.StaticQuantConfig(act_dtype="int8", act_sym=True))
    x = torch.randn(2, 32, 32)
    q = quantized(model, x, config)
    nc.save(q, tmp_path / "model")
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    loaded = nc.load(tmp_path / "model", backend="openvino")
    ran = {op.operator: op.ran for op in loaded.report().ops}
    assert (ran["matmul"], ran["a"]) == ("fp32", "int8")
    assert worst_db(loaded.graph.module(x)[0], loaded(x)) > 60

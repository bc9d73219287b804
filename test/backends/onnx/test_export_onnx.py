"""`export_onnx`: the file itself, what ONNX Runtime computes from it, and what is left where it fails.

The tests of the placement that it needs are in test_qdq.py.
"""

import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import nets
import numpy as np
import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, call, prepared_for, quantized, worst_db
from torch import nn

import nc
from nc import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    StateError,
    UnsupportedError,
    VerificationError,
    export_onnx,
)
from nc.backends.onnx import program, sums
from nc.backends.onnx.runtime import EXACT
from nc.backends.passes import Pass
from nc.backends.verify import required_db
from nc.graph import saturation
from nc.graph.fx_utils import call_function, run_with
from nc.graph.views import Quantize
from nc.numerics.int16_pairs import largest_pair
from nc.ops import quantize_per_tensor

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason="needs nc-quant[onnx]"
)


def converted(model, x, config=None, placement="inputs", backend="reference"):
    return nc.convert(prepared_for(model, x, config, placement=placement, backend=backend), measure=False)


def net(name):
    model, shape, _ = nets.NETS[name]
    return model, torch.randn(*shape)


def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    ids = torch.randint(0, 50, (2, 7))
    return BertModel(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def as_it_is(path, inputs):
    """Outputs without any optimization: each operator as the file has it."""
    from nc.backends.onnx.runtime import run

    return run(path, inputs, optimize=False)[0]


def weights(model):
    """Codes of constant weights by the name of the node that reads them."""
    constants = {c.name: c for c in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for node in model.graph.node:
        source = made.get(node.input[1]) if node.op_type in ("Conv", "ConvTranspose", "MatMul") else None
        if source is not None and source.op_type == "DequantizeLinear" and source.input[0] in constants:
            found[node.name] = constants[source.input[0]]
    return found


MODELS = {
    "residual": lambda: (ResidualCNN(), torch.randn(2, 3, 8, 8)),
    "linears": lambda: (MLP(), torch.randn(4, 16)),
    "depthwise": lambda: net("depthwise"),
    "conv1d": lambda: net("conv1d"),
    "transposed": lambda: net("conv_transpose2d"),
    "attention": lambda: (Attention(), torch.randn(2, 6, 32)),
    "squeeze_excite": lambda: net("squeeze_excite"),
    "joined": lambda: net("cat"),
    "bert": bert,
}
#: How many quantized operators do not run in int8 where outputs are codes.
ALL_BUT = {"transposed": 2}


def far_from_ties(graph):
    """Inputs like the example whose codes have one right value.

    Near to a tie the file and the graph may round either way.
    """
    inputs, distances = graph.example, []

    def note(node, value, env):
        if node.target is quantize_per_tensor:
            codes = Quantize.of(node)
            place = env[codes.input].double() / codes.numbers[0]
            distances.append(((place - place.floor()) - 0.5).abs().min().item())
        return value

    for _ in range(20):
        distances.clear()
        run_with(graph.module, inputs, note)
        if min(distances, default=1) > 1e-5:
            return inputs
        inputs = [torch.randn_like(x) for x in inputs]
    pytest.fail("all inputs are near to a tie")


@needs_packages
@pytest.mark.parametrize("name", MODELS)
def test_the_file_computes_what_the_graph_does(name, tmp_path):
    import onnx

    model, x = MODELS[name]()
    q = converted(model, x)
    report = export_onnx(q, tmp_path / "m.onnx")
    file = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert [(o.domain, o.version) for o in file.opset_import if not o.domain] == [("", 21)]
    codes = weights(file)
    asked = [d.operator for d in q.graph.plan.quantized if d.spec.weight is not None]
    assert {node.partition(":")[0] for node in codes} == set(asked)
    assert {c.data_type for c in codes.values()} == {onnx.TensorProto.INT8}
    inputs = far_from_ties(q.graph) if name == "residual" else q.graph.example
    assert worst_db(q.graph.module(*inputs), as_it_is(tmp_path / "m.onnx", inputs)) > 110
    assert report.sqnr_db >= required_db(q.graph)
    assert [op.operator for op in report.operators] == [d.operator for d in q.graph.plan.quantized]


@needs_packages
@pytest.mark.parametrize("name", MODELS)
def test_codes_as_outputs_run_in_int8(name, tmp_path):
    model, x = MODELS[name]()
    q = converted(model, x, placement="outputs")
    report = export_onnx(q, tmp_path / "m.onnx")
    assert len(report.operators) - report.int8 == ALL_BUT.get(name, 0), str(report)
    assert report.sqnr_db >= required_db(q.graph)
    assert (
        worst_db(q.graph.module(*q.graph.example), as_it_is(tmp_path / "m.onnx", q.graph.example)) > 40
    )  # int32 biases


@needs_packages
def test_the_report_says_what_runs_and_why_not(tmp_path):
    model, x = MODELS["residual"]()
    report = export_onnx(converted(model, x), tmp_path / "m.onnx")
    ran = {op.operator: (op.int8, op.kernel) for op in report.operators}
    assert ran == {
        "stem": (True, "QLinearConv"),
        "conv1": (True, "QLinearConv"),
        "conv2": (False, "FusedConv"),
        "add": (False, ""),
        "fc": (True, "MatMulIntegerToFloat"),
    }
    first, second, third = str(report).splitlines()
    assert first.startswith("3 of 5 quantized operators run in int8 on ONNX Runtime 1.")
    assert first.endswith(": 2 QLinearConv, 1 MatMulIntegerToFloat.")
    assert second == (
        'Not in int8, as not all inputs and outputs are codes, which prepare(placement="outputs") makes them: '
        "conv2 (FusedConv), add (no separate kernel)."
    )
    here = f"ONNX Runtime's own choice of kernels gives {report.saturated_db:.1f} dB on this CPU."
    assert third == f"Can saturate on CPUs without VNNI: {', '.join(report.saturating)}. {here}"


@needs_packages
def test_biases_of_convolutions_are_int32_where_outputs_are_codes(tmp_path):
    import onnx
    from onnx import numpy_helper

    model, x = MODELS["residual"]()
    q = converted(model, x, placement="outputs")
    export_onnx(q, tmp_path / "m.onnx")
    file = onnx.load(tmp_path / "m.onnx")
    value = {c.name: numpy_helper.to_array(c) for c in file.graph.initializer}
    made = {name: node for node in file.graph.node for name in node.output}
    convolutions = [node for node in file.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 3
    constants = dict(q.graph.module.named_buffers())
    for node, name in zip(convolutions, ("conv2d_bias", "conv2d_1_bias", "conv2d_2_bias"), strict=True):
        scales = [value[made[source].input[1]] for source in node.input[:2]]
        codes, scale = (value[part] for part in made[node.input[2]].input)
        assert codes.dtype == np.int32
        assert np.array_equal(scale, scales[0] * scales[1])
        bias = constants[name].double().numpy()
        assert np.abs(codes * scale.astype(np.float64) - bias).max() <= 0.51 * scale.max()


@needs_packages
def test_a_bias_that_does_not_fit_int32_stays_fp32(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        model[0].weight[1] = 1e-12
        model[0].bias[1] = 3.0
    q = converted(model, torch.randn(2, 3, 5, 5), placement="outputs")
    export_onnx(q, tmp_path / "m.onnx", verify="off")
    assert worst_db(q.graph.module(*q.graph.example), as_it_is(tmp_path / "m.onnx", q.graph.example)) > 40


@needs_packages
def test_free_sizes_names_and_no_need_of_torch_and_nc(tmp_path):
    model, x = MODELS["bert"]()
    q = converted(model, x)
    export_onnx(q, tmp_path / "new" / "m.onnx")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.onnx"]
    ids = torch.randint(0, 50, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    np.savez(tmp_path / "x.npz", input_ids=ids.numpy(), attention_mask=mask.numpy())
    code = (
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "numpy.save(sys.argv[3], session.run(['last_hidden_state'], dict(numpy.load(sys.argv[2])))[0])\n"
        "assert not {'torch', 'nc'} & set(sys.modules)\n"
    )
    files = [str(tmp_path / name) for name in ("new/m.onnx", "x.npz", "y.npy")]
    subprocess.run([sys.executable, "-c", code, *files], timeout=120, check=True)
    expected = call(q, {"input_ids": ids, "attention_mask": mask}).last_hidden_state
    assert worst_db([expected], [torch.from_numpy(np.load(tmp_path / "y.npy"))]) > 30


@needs_packages
@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 16)])
@pytest.mark.parametrize("fixed", [False, True])
def test_linears_are_products_in_int8_whatever_their_rank(shape, fixed, tmp_path):
    x = torch.randn(*shape)
    prepared = nc.prepare(
        MLP().eval(),
        nc.StaticQuantConfig(),
        example_inputs=x,
        backend="reference",
        dynamic_shapes={"x": {}} if fixed else None,
    )
    prepared(x)
    report = export_onnx(nc.convert(prepared), tmp_path / "m.onnx")
    assert [op.kernel for op in report.operators] == ["MatMulIntegerToFloat"] * 2


@needs_packages
def test_codes_of_fewer_bits_than_their_type():
    from nc.backends.onnx.convert import convert

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    codes = call_function(graph, quantize_per_tensor, (x, 0.1, 20, 3, 60, torch.uint8))
    graph.output((codes,))
    module = torch.fx.GraphModule({}, graph)
    value = torch.linspace(-9, 9, 181)
    model = convert(program.program(module, (value,)), (value,)).model
    assert np.array_equal(model(value)[0].numpy(), module(value)[0].numpy())


@needs_packages
@pytest.mark.parametrize("act_dtype", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("int4", "UINT4"), ("int2", "UINT4"), ("int8", "UINT8"), ("nf4", None)]
)
def test_low_bit_weights_keep_their_codes(dtype, kind, act_dtype, tmp_path):
    import onnx

    config = nc.WeightOnlyConfig(dtype, group_size=16, act_dtype=act_dtype)
    layer = nc.quantize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), config)
    q = converted(layer, torch.randn(4, 64))
    export_onnx(q, tmp_path / "m.onnx")
    found = {c.data_type for c in weights(onnx.load(tmp_path / "m.onnx")).values()}
    assert found == ({getattr(onnx.TensorProto, kind)} if kind else set())
    assert worst_db(q.graph.module(*q.graph.example), as_it_is(tmp_path / "m.onnx", q.graph.example)) > 110


@needs_packages
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
def test_ranges_of_each_call(granularity, tmp_path):
    config = nc.DynamicQuantConfig(act_granularity=granularity)
    q = converted(MLP(), torch.randn(4, 16), config)
    report = export_onnx(q, tmp_path / "m.onnx")
    assert {op.reason for op in report.operators} == {"as ranges of each call are computed in fp32"}
    assert worst_db(q.graph.module(*q.graph.example), as_it_is(tmp_path / "m.onnx", q.graph.example)) > 110


@needs_packages
def test_outputs_that_are_no_tensors_are_left_out(tmp_path):
    import onnx

    x = torch.randn(2, 8)
    q = converted(Function(lambda self, x: (self.fc(x), x.shape[0] * 2, None, x + 1), fc=nn.Linear(8, 4)), x)
    export_onnx(q, tmp_path / "m.onnx")
    file = onnx.load(tmp_path / "m.onnx")
    assert [value.name for value in (*file.graph.input, *file.graph.output)] == ["x", "output_0", "output_1"]
    assert worst_db(q(x), as_it_is(tmp_path / "m.onnx", [x])) > 110


@needs_packages
def test_the_file_tells_nothing_of_this_machine(tmp_path):
    model, x = MODELS["residual"]()
    export_onnx(converted(model, x), tmp_path / "m.onnx")
    content = (tmp_path / "m.onnx").read_bytes()
    assert b".py" not in content
    assert str(Path.home()).encode() not in content


@needs_packages
def test_many_constants_go_into_a_second_file(tmp_path, monkeypatch):
    from torch.onnx._internal.exporter import _onnx_program

    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 1000)
    x = torch.randn(2, 64)
    q = converted(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), x)
    export_onnx(q, tmp_path / "m.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert worst_db([q(x)], as_it_is(tmp_path / "m.onnx", [x])) > 110


@needs_packages
def test_an_operator_without_a_translation_is_named(tmp_path):
    q = converted(
        Function(lambda self, x: torch.igamma(self.fc(x).abs(), x.abs()), fc=nn.Linear(8, 8)),
        torch.randn(4, 8),
    )
    with pytest.raises(BackendError, match=r"conversion of the quantized graph to ONNX failed: .*igamma"):
        export_onnx(q, tmp_path / "new" / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@needs_packages
@pytest.mark.parametrize("verify", ["raise", "warn", "off"])
def test_wrong_numbers_are_noticed_and_named(verify, tmp_path, monkeypatch):
    real = program._spell_linears

    def wrong(module):
        real(module)
        name = next(name for name, _ in module.named_buffers() if name.startswith("fc1") and "scale" in name)
        setattr(module, name, getattr(module, name) * 3)

    passes = tuple(Pass("linears", wrong) if each.name == "linears" else each for each in program._PASSES)
    monkeypatch.setattr(program, "_PASSES", passes)
    q = converted(MLP(), torch.randn(4, 16))
    message = "ONNX Runtime computes something else than the quantized graph.*operator that differs is 'fc1'"
    if verify == "raise":
        with pytest.raises(VerificationError, match=message):
            export_onnx(q, tmp_path / "m.onnx")
        assert list(tmp_path.iterdir()) == []
    elif verify == "warn":
        with pytest.warns(nc.NCWarning, match=message):
            export_onnx(q, tmp_path / "m.onnx", verify="warn")
        assert (tmp_path / "m.onnx").exists()
    else:
        assert export_onnx(q, tmp_path / "m.onnx", verify="off").sqnr_db is None
        assert (tmp_path / "m.onnx").exists()


@needs_packages
def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    import shutil

    model, x = MODELS["linears"]()
    q = converted(model, x)
    export_onnx(q, tmp_path / "m.onnx")
    before = (tmp_path / "m.onnx").read_bytes()

    def full(source, target):
        Path(target).write_text("half")
        msg = "the disk is full"
        raise OSError(msg)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="the disk is full"):
        export_onnx(q, tmp_path / "m.onnx")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.onnx", before)]


@needs_packages
def test_an_artefact_of_any_backend_is_exported(tmp_path):
    model, x = MODELS["residual"]()
    q = converted(
        model,
        x,
        placement="outputs",
        backend="native" if not nc.available_backends()["native"] else "reference",
    )
    q.save(tmp_path / "q")
    loaded = nc.load(tmp_path / "q")
    report = export_onnx(loaded, tmp_path / "m.onnx")
    assert report.int8 == len(report.operators) == 5


@needs_packages
def test_inputs_in_bf16_are_refused(tmp_path):
    x = torch.randn(2, 8).bfloat16()
    q = quantized(Function(lambda self, x: self.fc(x.float()), fc=nn.Linear(8, 4)), x)
    with pytest.raises(UnsupportedError, match="no inputs in bf16, as 'x' is"):
        export_onnx(q, tmp_path / "m.onnx")


# --- CPUs without VNNI ---


def a_pair_saturates(codes, groups):
    """By trying the ends of all pairs.

    Rows of the matrix as ONNX Runtime makes it, positions of the kernel outside, channels inside.
    """
    rows = codes.flatten(2).transpose(1, 2).flatten(1).tolist()
    if codes.shape[1] == 1 and len(rows) == groups and codes.dim() > 2:
        return False  # depthwise: 32 bits
    sums = [
        first * a + second * b
        for row in rows
        for a, b in zip(row[::2], [*row[1::2], 0], strict=False)
        for first in (0, 255)
        for second in (0, 255)
    ]
    return not -(2**15) <= min(sums) <= max(sums) < 2**15


@pytest.mark.parametrize("largest", [60, 64, 65, 70])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((4, 6, 1), 1),
        ((4, 5, 1), 1),
        ((2, 4, 3, 3), 1),
        ((2, 3, 2, 2), 1),
        ((4, 3, 3), 2),
        ((4, 1, 3, 3), 4),
        ((8, 1, 3, 3), 4),
    ],
)
def test_what_can_saturate_by_brute_force(shape, groups, largest):
    seen = set()
    for seed in range(30):
        codes = torch.randint(
            -largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8
        )
        if seed % 2:  # two neighbours of a row of the matrix: of one pair or of two
            rows = torch.zeros(shape[0], codes[0].numel(), dtype=torch.int8)
            at = seed // 2 % (rows.shape[1] - 1)
            rows[0, at : at + 2] = largest
            codes = rows.unflatten(1, (-1, shape[1])).transpose(1, 2).reshape(shape)
        expected = a_pair_saturates(codes, groups)
        seen.add(expected)
        given = codes.flatten(1) if len(shape) == 3 and shape[-1] == 1 else codes  # a linear
        assert sums._fit(given, 0, groups, (2**15 - 1) // 255) is not expected
    assert seen == ({False} if largest <= 64 or shape[:2] == (groups, 1) else {False, True})


def same_sign(model):
    """Weights of one sign and size: all pairs are far above the limit."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = (0.9 + 0.1 * torch.rand(parameter.shape)) / parameter[0].numel()
    return model.eval()


def test_pairs_of_a_convolution_go_over_the_positions_of_its_kernel():
    conv = nn.Conv2d(3, 2, (1, 2), bias=False).eval()
    with torch.no_grad():  # third channel of the first position beside the first one of the second: no pair of neighbouring channels
        conv.weight.zero_()[:, 2, 0, 0] = 1.0
        conv.weight[:, 0, 0, 1] = 1.0
    q = converted(conv, torch.rand(2, 3, 4, 4), nc.StaticQuantConfig(post=()))
    assert len(sums.saturating(q.graph)) == 1
    assert saturation.saturating(q.graph, sums.WITHOUT_VNNI) == ()


@needs_packages
@pytest.mark.parametrize("verify", ["raise", "off"])
def test_operators_that_can_saturate_are_named_and_can_be_reduced(verify, tmp_path):
    x = torch.rand(8, 16)
    q = converted(same_sign(MLP()), x)
    here = r"( On this CPU they do: .* dB only\.)?"
    with pytest.warns(
        nc.NCWarning,
        match=rf'can saturate there.*: fc1, fc2\.{here} Set the session option "{EXACT}".*without_vnni',
    ):
        report = export_onnx(q, tmp_path / "a.onnx", verify=verify)
    assert report.saturating == ("fc1", "fc2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        reduced = export_onnx(q, tmp_path / "b.onnx", verify=verify, without_vnni=True)
    assert reduced.saturating == ()
    import onnx
    from onnx import numpy_helper

    codes = [
        torch.from_numpy(numpy_helper.to_array(c).copy())
        for c in weights(onnx.load(tmp_path / "b.onnx")).values()
    ]
    assert [bool(largest_pair(c.T) <= 128) for c in codes] == [True, True]
    assert worst_db(q.graph.module(x), as_it_is(tmp_path / "b.onnx", [x])) > 30


@needs_packages
def test_the_file_is_checked_by_exact_kernels_and_what_the_others_do_here_is_said(tmp_path, monkeypatch):
    write = importlib.import_module("nc.backends.onnx.write")  # the package has a function of this name

    def saturated(path, inputs, *, exact):
        outputs, kernels = run(path, inputs, exact=True)
        return outputs if exact else [0.9 * y for y in outputs], kernels

    run = write.run
    monkeypatch.setattr(write, "run", saturated)
    x = torch.rand(8, 16)
    monkeypatch.setattr(write, "required_db", lambda graph: 25.0)
    with pytest.warns(
        nc.NCWarning, match=r"On this CPU they do: .* to (20|19)\.\d dB only\. Set the session option"
    ):
        report = export_onnx(converted(same_sign(MLP()), x), tmp_path / "m.onnx")
    assert report.sqnr_db > 40
    assert 19 < report.saturated_db < 21
    assert f"own choice of kernels gives {report.saturated_db:.1f} dB on this CPU." in str(report)
    assert export_onnx(converted(MLP(), x), tmp_path / "b.onnx", without_vnni=True).saturated_db is None


@needs_packages
def test_weights_with_a_scale_per_channel_have_zero_points_in_the_file(tmp_path):
    """Without them ONNX Runtime fails on weights in fp32 convolutions, with the session option for CPUs without VNNI."""
    import onnx

    model, x = MODELS["residual"]()
    export_onnx(converted(model, x), tmp_path / "m.onnx")
    file = onnx.load(tmp_path / "m.onnx")
    shapes = {c.name: list(c.dims) for c in file.graph.initializer}
    channels = [n for n in file.graph.node if n.op_type == "DequantizeLinear" and shapes.get(n.input[1])]
    assert len(channels) == 4
    assert all(shapes[n.input[2]] == shapes[n.input[1]] for n in channels)


@needs_packages
def test_a_directory_is_not_replaced(tmp_path):
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(nc.ArtefactError, match="is a directory"):
        export_onnx(converted(MLP(), torch.randn(4, 16)), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@needs_packages
@pytest.mark.parametrize("kind", ["static", "dynamic", "lstm"])
def test_a_weight_that_is_used_twice(kind, tmp_path):
    """ONNX Runtime refuses such files where it is to run kernels that can't saturate."""
    if kind == "lstm":
        model, x = (
            Function(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(8, 8, batch_first=True)),
            torch.randn(2, 5, 8),
        )
    else:
        model, x = (
            Function(lambda self, x: self.fc(self.fc(x).relu()), fc=nn.Linear(16, 16)),
            torch.randn(4, 16),
        )
    q = converted(model.eval(), x, None if kind == "static" else nc.DynamicQuantConfig())
    report = nc.export_onnx(q, tmp_path / "m.onnx")
    assert report.sqnr_db > 40
    assert worst_db(q.reference(x), as_it_is(tmp_path / "m.onnx", [x])) > 40


@needs_packages
def test_what_runs_in_fp32_does_not_saturate(tmp_path):
    model, x = MODELS["residual"]()
    report = export_onnx(converted(same_sign(model), x), tmp_path / "m.onnx")
    fp32 = {op.operator for op in report.operators if not op.int8}
    assert fp32 == {"conv2", "add"}
    assert set(report.saturating) == {"stem", "conv1", "fc"}


@needs_packages
def test_the_session_option_of_the_advice_exists(tmp_path):
    import onnxruntime

    x = torch.rand(8, 16)
    q = converted(same_sign(MLP()), x)
    export_onnx(q, tmp_path / "m.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(EXACT, "1")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
    assert worst_db(q.graph.module(x), [torch.from_numpy(session.run(None, {"x": x.numpy()})[0])]) > 40


@needs_packages
def test_it_is_a_format_of_export_model(tmp_path):
    q = converted(MLP(), torch.randn(4, 16))
    export_onnx(q, tmp_path / "a.onnx")
    nc.export_model(q, tmp_path / "b.onnx", "onnx", verify="off")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    with pytest.raises(StateError, match=r"export_model\(\) expects the result of convert"):
        nc.export_model(MLP(), tmp_path / "c.onnx", "onnx")


def test_what_is_no_quantized_model_and_other_names(tmp_path):
    with pytest.raises(StateError, match=r"export_onnx\(\) expects the result of convert"):
        export_onnx(MLP(), tmp_path / "m.onnx")
    q = quantized(MLP(), torch.randn(4, 16))
    with pytest.raises(ConfigError, match=r"ends in '\.onnx'"):
        export_onnx(q, tmp_path / "m.pt2")
    with pytest.raises(ConfigError, match="verify to be one of"):
        export_onnx(q, tmp_path / "m.onnx", verify="no")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", [("onnxruntime",), PACKAGES])
def test_without_the_packages(missing, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name in missing else name in PACKAGES or real(name, *rest),
    )
    q = quantized(MLP(), torch.randn(4, 16))
    with pytest.raises(
        BackendUnavailableError, match=r"export_onnx\(\) needs .*onnxruntime: pip install 'nc-quant\[onnx\]'"
    ) as error:
        export_onnx(q, tmp_path / "m.onnx")
    assert ('verify="off"' in str(error.value)) == (missing == ("onnxruntime",))
    assert list(tmp_path.iterdir()) == []


@needs_packages
def test_sizes_that_decide_about_the_path_are_fixed(tmp_path):
    import onnx

    model = Function(
        lambda self, x: self.layer(x * 2 if x.shape[2] % 2 else x), layer=nn.Conv2d(3, 4, 3)
    ).eval()
    q = converted(model, torch.randn(2, 3, 9, 9))
    with pytest.warns(nc.NCWarning, match=r"asks for sizes in Python.*\(x.shape\[2\] % 2\) != 0"):
        export_onnx(q, tmp_path / "model.onnx")
    (given,) = onnx.load(tmp_path / "model.onnx").graph.input
    batch, *sizes = given.type.tensor_type.shape.dim
    assert batch.dim_param
    assert [d.dim_value or d.dim_param for d in sizes][:2] == [3, 9]

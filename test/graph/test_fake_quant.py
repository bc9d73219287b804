"""Any format at any role, simulated.

From configuration to report, on the reference backend, against float64 brute force.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from suites.reports import said
from torch import nn
from torch.nn import functional as F

import nc
from nc import (
    BackendError,
    ConfigError,
    DynamicQuantConfig,
    FakeQuantConfig,
    FakeTensorSpec,
    StateError,
    StaticQuantConfig,
    UnknownFieldError,
    UnsupportedError,
    available_backends,
    convert,
    describe,
    load,
    prepare,
    quantize,
)
from nc.formats import DTYPES, FakeSpec
from nc.formats.tensor_format import ROUND_METHODS
from nc.formats.tensor_format import SCALE_ROUNDINGS as SCALE_TYPES
from nc.graph.fake_quant import constant_codes
from nc.numerics import fake_quant
from nc.ops import fake_quantize, fake_quantize_dynamic

ENGINES = [name for name in ("native", "ipex") if not available_backends()[name]]
X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64).sin()
#: ml_dtypes' types of our formats; integers have none of their own here.
ML = {
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
#: Formats that are a list of values: test_formats.py compares the lists with their sources.
TABLES = {name: DTYPES[name].values for name in ("nf4", "af4", "af4_32")} | {
    "mxint8": [k / 64 for k in range(-127, 128)]
}


def spec(dtype=None, **fields):
    return FakeTensorSpec(dtype=dtype, **fields)


def group(dtype, size, **fields):
    return spec(dtype, granularity="per_group", group_size=size, **fields)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).eval()


def q_model(config, model=None, x=X):
    model = model or mlp()
    return quantize(model, config, lambda m: m(x), example_inputs=x, backend="reference")


# ---- brute force ----


def finite_values(dtype):
    """Every finite value of a format, ascending, from ml_dtypes."""
    if dtype in TABLES:
        return sorted(TABLES[dtype])
    bits = DTYPES[dtype].bits
    values = np.arange(2**bits, dtype=np.uint8).view(ML[dtype]).astype(np.float64)
    return sorted({float(v) + 0.0 for v in values if np.isfinite(v)})


def scale_of(amax, width, scale_type, largest):
    """A scale as a Python float; `width` is what it has to cover, in units of the format."""
    if amax == 0:
        return 1.0
    raw = float(np.float32(amax / width))
    match scale_type:
        case "fp16":
            return max(float(np.float16(raw)), 2.0**-24)
        case "bf16":
            return float(np.float32(raw).astype(ml_dtypes.bfloat16))
        case "e4m3":
            return max(float(np.float32(min(raw, 448.0)).astype(ml_dtypes.float8_e4m3fn)), 2.0**-9)
        case "power_of_two":
            exponent = -200
            while 2.0**exponent < raw:
                exponent += 1
            return 2.0**exponent
        case "e8m0":
            floor, emax = -200, 0
            while 2.0 ** (floor + 1) <= amax:
                floor += 1
            while 2.0 ** (emax + 1) <= largest:
                emax += 1
            return 2.0 ** (floor - emax)
    return raw


def nearest(value, low, high, how, even_first):
    """One of two neighbours of a value."""
    if how == "floor":
        return low if value < high else high
    if value - low != high - value:
        return low if value - low < high - value else high
    if how == "half_away":
        return low if value < 0 else high
    return low if even_first else high


def brute_block(block, dtype, symmetric, how, scale_type):
    """What the elements of one block become, one by one."""
    form, values = DTYPES[dtype], [float(v) for v in block]
    low, high = min(0.0, *values), max(0.0, *values)
    amax = max(-low, high)
    if form.kind == "float":
        table = finite_values(dtype)
        scale = scale_of(amax, table[-1], scale_type, table[-1])
        result = []
        for v in values:
            x = min(max(float(np.float32(v) / np.float32(scale)), table[0]), table[-1])
            i = max(0, next(i for i, t in enumerate(table) if t >= x) - 1)
            even = DTYPES[dtype].values.index(table[i]) % 2 == 0
            result.append(nearest(x, table[i], table[i + 1], how, even) * scale)
        return result
    half = 2 ** (form.bits - 1)
    if symmetric:
        scale, zero = scale_of(amax, half - 1, scale_type, half - 1), half if form.quant_min == 0 else 0
    else:
        scale = scale_of(high - low, 2**form.bits - 1, scale_type, 0)
        zero = min(max(form.quant_min - round(low / scale), form.quant_min), form.quant_max)
    result = []
    for v in values:
        x = float(np.float32(v) / np.float32(scale))
        below = math.floor(x)
        code = nearest(x, below, below + 1, how, below % 2 == 0)
        result.append((min(max(code + zero, form.quant_min), form.quant_max) - zero) * scale)
    return result


def brute(x, blocks, dtype, symmetric=True, how="half_even", scale_type="fp32"):
    """The same for a tensor whose blocks have the sizes `blocks`; float64."""
    x = x.detach().double().numpy()
    result = np.empty_like(x)
    starts = [range(0, size, part) for size, part in zip(x.shape, blocks, strict=True)]
    for start in itertools.product(*starts):
        where = tuple(slice(s, s + part) for s, part in zip(start, blocks, strict=True))
        part = x[where]
        result[where] = np.reshape(brute_block(part.flatten(), dtype, symmetric, how, scale_type), part.shape)
    return torch.from_numpy(result)


def assert_same(ours, theirs):
    """Codes are the same; a value is one fp32 product."""
    assert torch.allclose(ours.double(), theirs, rtol=1e-6, atol=1e-12)


# ---- numerics ----


@pytest.mark.parametrize("how", ["half_even", "half_away", "floor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_format_and_rounding_against_brute_force(dtype, how):
    x = torch.randn(4, 32)
    x[0] = torch.linspace(-1, 1, 32)
    symmetric = True if DTYPES[dtype].kind == "float" else bool(len(how) % 2)
    found = fake_quantize_dynamic(x, dtype, "per_group 16", symmetric, how, "fp32", False, 0)
    assert_same(found, brute(x, (1, 16), dtype, symmetric, how))


@pytest.mark.parametrize(
    ("dtype", "scale_type", "symmetric"),
    [
        *itertools.product(["int4", "uint8", "fp4_e2m1", "fp8_e4m3"], SCALE_TYPES, [True]),
        *itertools.product(["int4", "uint8"], [s for s in SCALE_TYPES if s != "e8m0"], [False]),
    ],
)
def test_each_scale_type_against_brute_force(dtype, scale_type, symmetric):
    x = torch.randn(6, 32) * torch.logspace(-1, 2, 6)[:, None]
    found = fake_quantize_dynamic(x, dtype, "per_token", symmetric, "half_even", scale_type, False, 0)
    assert_same(found, brute(x, (1, 32), dtype, symmetric, "half_even", scale_type))


@pytest.mark.parametrize("how", ["half_even", "half_away", "floor"])
def test_exact_ties(how):
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 7.0])
    expected = {
        "half_even": [-2, -2, 0, 0, 2, 2, 0, 7],
        "half_away": [-3, -2, -1, 1, 2, 3, 0, 7],
        "floor": [-3, -2, -1, 0, 1, 2, 0, 7],
    }
    found = fake_quantize(x, torch.tensor(1.0), None, "int4", how, 0)
    assert found.tolist() == expected[how]


def test_ties_of_a_floating_point_format():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 100.0])
    one = torch.tensor(1.0)
    assert fake_quantize(x, one, None, "fp4_e2m1", "half_even", 0).tolist() == [0, 1, 1, 2, 2, 4, 4, 0, -4, 6]
    assert fake_quantize(x, one, None, "fp4_e2m1", "half_away", 0).tolist() == [
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        -0.5,
        -6,
        6,
    ]
    assert fake_quantize(x, one, None, "fp4_e2m1", "floor", 0).tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        -0.5,
        -6,
        6,
    ]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_elements_are_torchs_casts(dtype):
    target = DTYPES[dtype].storage
    x = torch.randn(4096) * torch.logspace(-6, 5, 4096)
    expected = x.clamp(-DTYPES[dtype].largest, DTYPES[dtype].largest).to(target).float()
    assert torch.equal(fake_quantize(x, torch.tensor(1.0), None, dtype, "half_even", 0), expected)


@pytest.mark.parametrize("dtype", ML)
def test_elements_are_those_of_ml_dtypes(dtype):
    largest = finite_values(dtype)[-1]
    x = torch.cat([torch.randn(2048) * largest / 3, torch.tensor(finite_values(dtype)).float()])
    expected = x.clamp(-largest, largest).numpy().astype(ML[dtype]).astype(np.float32)
    assert np.array_equal(fake_quantize(x, torch.tensor(1.0), None, dtype, "half_even", 0).numpy(), expected)


@pytest.mark.parametrize("dtype", ["int4", "fp4_e2m1"])
def test_stochastic_rounding_is_unbiased_and_repeatable(dtype):
    x = torch.linspace(-5.9, 5.9, 37).repeat(4000, 1)
    found, again, other = (
        fake_quantize(x, torch.tensor(1.0), None, dtype, "stochastic", seed) for seed in (1, 1, 2)
    )
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    table = torch.arange(-8.0, 8.0) if dtype == "int4" else torch.tensor(finite_values(dtype)).float()
    above = torch.bucketize(x[0], table).clamp(1)
    step = table[above] - table[above - 1]
    assert bool(((found == table[above]) | (found == table[above - 1])).all())
    assert bool(((found.mean(0) - x[0]).abs() < 5 * step / 2 / math.sqrt(4000)).all())  # five standard errors


def test_scales_relative_to_a_tensor_scale_are_those_of_nvfp4():
    x = torch.randn(8, 64) * torch.logspace(-4, 0, 8)[:, None]
    found = fake_quantize_dynamic(x, "fp4_e2m1", "per_group 16", True, "half_even", "e4m3", True, 0)
    outer = np.float32(np.float32(x.abs().max() / 6) / np.float32(448))
    for row, start in itertools.product(range(8), range(0, 64, 16)):
        block = x[row, start : start + 16].numpy()
        inner = (
            np.float32(np.float32(np.abs(block).max() / np.float32(6)) / outer)
            .astype(ml_dtypes.float8_e4m3fn)
            .astype(np.float32)
        )
        scale = inner * outer
        values = np.clip(block / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
        assert np.allclose(found[row, start : start + 16].numpy(), values, rtol=1e-6)


def test_all_zero_and_constant_blocks_empty_tensors_and_nan():
    for scale_type, dtype in itertools.product(SCALE_TYPES, ["int4", "uint4", "fp4_e2m1"]):
        zeros = fake_quantize_dynamic(
            torch.zeros(2, 8), dtype, "per_token", True, "half_even", scale_type, False, 0
        )
        assert torch.equal(zeros, torch.zeros(2, 8))
    constant = torch.full((1, 8), 3.0)
    assert torch.allclose(
        fake_quantize_dynamic(constant, "uint4", "per_token", False, "half_even", "fp32", False, 0), constant
    )
    assert fake_quantize_dynamic(
        torch.zeros(0, 8), "int4", "per_token", True, "half_even", "fp32", False, 0
    ).shape == (0, 8)
    x = torch.tensor([1.0, math.nan, -1.0])
    found = fake_quantize_dynamic(x, "fp8_e4m3", "per_tensor", True, "half_even", "fp32", False, 0)
    assert torch.equal(found.isnan(), x.isnan())
    assert found[0] == 1.0


# ---- constants ----


@pytest.mark.parametrize(
    ("fields", "shape", "blocks"),
    [
        ({}, (8, 12), (8, 12)),
        ({"granularity": "per_channel", "axis": 1}, (8, 12), (8, 1)),
        ({"granularity": "per_group", "group_size": 4, "axis": 0}, (8, 12), (4, 1)),
        ({"granularity": "per_block", "block_size": (4, 6)}, (8, 12), (4, 6)),
        ({"granularity": "per_group", "group_size": 3, "axis": 1}, (4, 6, 3, 3), (1, 3, 1, 1)),
    ],
)
@pytest.mark.parametrize(("dtype", "symmetric"), [("int4", True), ("uint4", False), ("nf4", True)])
def test_granularities_of_constants(fields, shape, blocks, dtype, symmetric):
    weight = torch.randn(shape)
    resolved = spec(dtype, symmetric=symmetric, **fields).resolved("weight", "linear")
    codes, scale, zero_point = constant_codes(weight, resolved)
    assert codes.dtype == DTYPES[dtype].storage
    expected = tuple(s // b for s, b in zip(shape, blocks, strict=True))
    assert scale.shape == (() if blocks == shape else expected)
    values = fake_quant.values_of(codes, scale, zero_point, DTYPES[dtype], blocks)
    assert_same(values, brute(weight, blocks, dtype, symmetric))


def test_the_range_of_least_error_of_a_constant():
    weight = torch.randn(4, 64)
    errors = []
    for observer in ("minmax", "mse"):
        resolved = group("int3", 16, observer=observer).resolved("weight", "linear")
        codes, scale, zero_point = constant_codes(weight, resolved)
        values = fake_quant.values_of(codes, scale, zero_point, DTYPES["int3"], (1, 16))
        errors.append((values - weight).abs().pow(2.4).reshape(4, 4, 16).sum(-1))
    assert bool((errors[1] <= errors[0]).all())
    assert float(errors[1].sum()) < 0.95 * float(errors[0].sum())


@pytest.mark.parametrize(
    ("scale_type", "least"), [("fp16", 2.0**-24), ("e4m3", 2.0**-9), ("fp32", None), ("bf16", None)]
)
def test_a_scale_too_small_for_its_type_is_the_least_of_it(scale_type, least):
    weight = torch.linspace(-1e-7, 1e-7, 32).reshape(1, 32)
    codes, scale, zero_point = constant_codes(
        weight, group("int4", 32, scale_type=scale_type).resolved("weight", "linear")
    )
    assert float(scale) == least if least else float(scale) == pytest.approx(1e-7 / 7, rel=0.01)
    values = fake_quant.values_of(codes, scale, zero_point, DTYPES["int4"], (1, 32))
    assert float((values - weight).abs().max()) <= float(scale) / 2 * 1.0001


# ---- weights of linears: as for the graph ----


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (3, 16), (2, 8), (8, 32)])
def test_outputs_are_those_of_weights_rounded_group_by_group(bits, size):
    model = mlp()
    q = q_model(FakeQuantConfig(weight=group(f"int{bits}", size)), model)
    first, second = (brute(m.weight, (1, size), f"int{bits}") for m in (model[0], model[2]))
    hidden = (X.double() @ first.T + model[0].bias.double()).relu()
    expected = hidden @ second.T + model[2].bias.double()
    assert torch.allclose(q(X).double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(q(X), model(X), rtol=1e-5, atol=1e-6)


def test_the_graph_holds_codes_and_a_scale_per_group():
    q = q_model(FakeQuantConfig(weight=group("int4", 32)))
    constants = dict(q.graph.module.named_buffers())
    codes, scale = (
        next(b for name, b in constants.items() if name.startswith("0") and name.endswith(end))
        for end in ("int4", "scale")
    )
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8, (96, 64), (96, 2))
    assert (int(codes.min()), int(codes.max())) == (-7, 7)
    assert "fake_quantize" not in str(q.graph.module.graph)


def test_weights_need_no_calibration_and_rounding_less_costs_less():
    prepared = prepare(
        mlp(), FakeQuantConfig(weight=group("int4", 32)), example_inputs=X, backend="reference"
    )
    assert not prepared.observers
    noise = [
        q_model(FakeQuantConfig(weight=group(f"int{bits}", 32))).graph.sqnr_vs_fp32_db
        for bits in (2, 4, 6, 8)
    ]
    assert noise == sorted(noise)
    assert noise[-1] - noise[0] > 25


# ---- every role ----


class Roles(nn.Module):
    """One operator of a kind, so that its output is the model's."""

    def __init__(self, kind):
        super().__init__()
        self.op = {
            "linear": lambda: nn.Linear(16, 8),
            "conv1d": lambda: nn.Conv1d(4, 6, 3),
            "conv2d": lambda: nn.Conv2d(4, 6, 3, padding=1),
            "conv_transpose1d": lambda: nn.ConvTranspose1d(4, 6, 3),
        }[kind]()

    def forward(self, x):
        return self.op(x)


INPUTS = {"linear": (5, 16), "conv1d": (2, 4, 9), "conv2d": (2, 4, 6, 6), "conv_transpose1d": (2, 4, 7)}
FUNCTIONS = {
    "linear": F.linear,
    "conv1d": F.conv1d,
    "conv2d": lambda *a: F.conv2d(*a, padding=1),
    "conv_transpose1d": F.conv_transpose1d,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_every_role_of_every_kind(kind, dynamic):
    model, x = Roles(kind).eval(), torch.randn(INPUTS[kind])
    channel = 1 if kind.startswith("conv") else -1
    config = FakeQuantConfig(
        weight=spec("int4", granularity="per_channel"),
        input=spec("uint8", symmetric=False, dynamic=dynamic),
        output=spec("fp8_e4m3", dynamic=dynamic, granularity="per_channel", scale_type="power_of_two"),
        bias=spec("int8", round_method="half_away"),
    )
    q = q_model(config, model, x)
    outputs = 1 if "transpose" in kind else 0
    weight_blocks = tuple(1 if d == outputs else s for d, s in enumerate(model.op.weight.shape))
    weight = brute(model.op.weight, weight_blocks, "int4")
    bias = brute(model.op.bias, model.op.bias.shape, "int8", how="half_away")
    middle = FUNCTIONS[kind](brute(x, x.shape, "uint8", symmetric=False), weight, bias)
    if not dynamic:  # ranges of outputs are those of the fp32 model
        scales = {
            c: brute_scale(FUNCTIONS[kind](x, model.op.weight, model.op.bias).select(channel, c))
            for c in range(middle.shape[channel])
        }
        expected = torch.stack([fixed(middle.select(channel, c), scales[c]) for c in scales], channel)
    else:
        blocks = tuple(1 if d == channel % middle.dim() else s for d, s in enumerate(middle.shape))
        expected = brute(middle.float(), blocks, "fp8_e4m3", scale_type="power_of_two")
    # a value near a tie may go to either side, because the engine computes in fp32
    close = torch.isclose(q(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert float(close.double().mean()) > 0.97
    assert torch.allclose(q(x).double(), expected, rtol=0.13, atol=1e-2)
    assert set(q.graph.plan["op"].spec.fake.roles) == {"weight", "input", "output", "bias"}


def brute_scale(values):
    return scale_of(float(values.detach().abs().max()), 448.0, "power_of_two", 448.0)


def fixed(values, scale):
    return (
        torch.from_numpy(
            np.clip(values.numpy() / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        )
        * scale
    )


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 32), nn.Linear(32, 4)

    def forward(self, ids):
        return self.head(self.table(ids))


IDS = torch.arange(12).reshape(2, 6)


def test_embeddings_have_a_weight_and_an_output_and_no_input():
    model = Text().eval()
    config = FakeQuantConfig(
        weight=group("int4", 8),
        input="int8",
        output=spec("fp8_e5m2", dynamic=True),
        white_list=[nn.Embedding],
    )
    q = q_model(config, model, IDS)
    assert set(q.graph.plan["table"].spec.fake.roles) == {"weight", "output"}
    assert q.graph.plan["head"].reason == "not on the white list"
    rows = brute(model.table.weight, (1, 8), "int4")[IDS]
    expected = (
        brute(rows.float(), rows.shape, "fp8_e5m2") @ model.head.weight.double().T + model.head.bias.double()
    )
    assert torch.allclose(q(IDS).double(), expected, rtol=1e-5, atol=1e-5)


class Others(nn.Module):
    """Kinds that are quantizable, but not simulated."""

    def __init__(self):
        super().__init__()
        self.fc, self.lstm = nn.Linear(16, 16), nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        y = self.fc(x) + x
        return self.lstm(y @ y.transpose(1, 2) @ y)[0]


def test_other_kinds_stay_fp32_and_say_so():
    x = torch.randn(2, 3, 16)
    q = q_model(FakeQuantConfig(weight="int4", input="int8", output="int8", bias="int8"), Others().eval(), x)
    assert [d.operator for d in q.graph.plan.quantized] == ["fc"]
    assert {d.kind: d.reason for d in q.graph.plan.decisions if d.kind != "linear"} == {
        kind: f"backend 'reference' has no fake-quantization kernel for {kind}"
        for kind in ("add", "matmul", "lstm")
    }


def test_an_embedding_stays_a_look_up_under_other_strategies():
    plan = describe(Text().eval(), StaticQuantConfig(), IDS, backend="reference")
    assert plan["table"].reason == "a table look-up: no arithmetic to quantize"


@pytest.mark.parametrize("observer", ["minmax", "moving_average", "percentile", "mse", "kl"])
def test_every_observer_gives_a_range_of_inputs(observer):
    model, x = nn.Linear(64, 8).eval(), torch.randn(64, 64)
    x[0, 0] = 60.0  # an outlier
    percentile = 99.0 if observer == "percentile" else None
    fake = spec("int4", observer=observer, percentile=percentile)
    q = q_model(FakeQuantConfig(input=fake), model, x)
    (scale,) = [b for name, b in q.graph.module.named_buffers() if name.endswith("input_scale")]
    whole = 60.0 / 7
    assert (
        float(scale) == pytest.approx(whole, rel=1e-6)
        if observer in ("minmax", "moving_average")
        else float(scale) < whole / 2
    )
    assert_same(
        fake_quantize(x, scale, None, "int4", "half_even", 0),
        torch.clamp(torch.round(x / scale), -8, 7).double() * scale,
    )


def test_mse_of_a_floating_point_format_is_the_best_of_its_candidates():
    x = torch.randn(256, 64)
    x[0, 0] = 40.0
    q = q_model(FakeQuantConfig(input=spec("fp4_e2m1", observer="mse")), nn.Linear(64, 8).eval(), x)
    (scale,) = [float(b) for name, b in q.graph.module.named_buffers() if name.endswith("input_scale")]

    def error(s):
        return float((fake_quantize(x, torch.tensor(s), None, "fp4_e2m1", "half_even", 0) - x).square().sum())

    best = min(error(40.0 * (1 - i / 100) / 6) for i in range(80))
    assert error(scale) < 1.02 * best  # the histogram knows values to one bin
    assert error(scale) < 0.8 * error(40.0 / 6)


def test_groups_and_tokens_of_activations():
    x = torch.randn(6, 64)
    model = nn.Linear(64, 8, bias=False).eval()
    found = q_model(FakeQuantConfig(input=group("int4", 16)), model, x)(x)
    parts = [
        brute(x[:, s : s + 16], (6, 16), "int4") for s in range(0, 64, 16)
    ]  # one range per group of channels
    assert torch.allclose(found.double(), torch.cat(parts, 1) @ model.weight.double().T, rtol=1e-5, atol=1e-5)
    mx = spec("fp8_e4m3", granularity="per_group", group_size=32, dynamic=True, scale_type="e8m0")
    found = q_model(FakeQuantConfig(input=mx), model, x)(x)
    expected = brute(x, (1, 32), "fp8_e4m3", scale_type="e8m0") @ model.weight.double().T
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    tokens = spec("int8", granularity="per_token", dynamic=True)
    found = q_model(FakeQuantConfig(input=tokens), model, x)(x)
    assert torch.allclose(
        found.double(), brute(x, (1, 64), "int8") @ model.weight.double().T, rtol=1e-5, atol=1e-5
    )


def test_static_roles_need_calibration():
    prepared = prepare(mlp(), FakeQuantConfig(input="int8"), example_inputs=X, backend="reference")
    assert len(prepared.observers) == 2
    with pytest.raises(StateError, match="Nothing was calibrated"):
        convert(prepared)


def test_statistics_of_channels_are_saved_and_merged(tmp_path):
    config = FakeQuantConfig(input=spec("int8", granularity="per_channel"))
    whole, first, second = (prepare(mlp(), config, example_inputs=X, backend="reference") for _ in range(3))
    whole(X), whole(3 * X)
    first(X), second(3 * X)
    second.statistics.save(tmp_path / "s")
    first.statistics.merge(tmp_path / "s")
    assert torch.equal(convert(first)(X), convert(whole)(X))


def test_an_operator_that_never_ran_stays_fp32():
    model, x = mlp(), X
    prepared = prepare(model, FakeQuantConfig(input="int8"), example_inputs=x, backend="reference")
    prepared(x)
    key = next(iter(prepared.observers))
    prepared.observers[key].seen = type(prepared.observers[key].seen)()
    q = convert(prepared)
    assert [d.operator for d in q.graph.plan.quantized] == ["2"]
    assert q.graph.plan["0"].reason == "never executed during calibration"


# ---- rules, plans, reports, artefacts ----


def test_the_plan_and_the_report_say_what_was_asked_per_role():
    config = FakeQuantConfig(
        weight=group("int4", 32), input=spec("uint8", symmetric=False), output="fp8_e4m3"
    )
    plan = describe(mlp(), config, X, backend="reference")
    assert [d.spec.mode for d in plan.quantized] == ["fake_quant"] * 2
    assert "int4 sym per_group 32" in plan.table()
    assert "uint8 affine → fp8_e4m3" in plan.table()
    q = q_model(config)
    report = nc.report(q)
    asked = "simulated: weight int4 sym per_group 32, input uint8 affine, output fp8_e4m3"
    assert [(op.asked, op.ran) for op in report.ops if op.kind == "linear"] == [(asked, "fp32")] * 2
    assert f"2 operators with {asked}" in report.summary()


def test_fields_of_a_spec_defer_to_the_level_above():
    config = (
        FakeQuantConfig(
            weight=group("int4", 32, round_method="floor"), input=spec("int8", dynamic=True), bias="int8"
        )
        .set_local(nn.Linear, FakeQuantConfig(weight=spec(scale_type="fp16"), bias="fp32"))
        .set_local(
            "2",
            FakeQuantConfig(
                weight=spec("int3", group_size=16), bias=spec(round_method="half_away"), input="fp32"
            ),
        )
    )
    with pytest.raises(ConfigError, match=r"Operator '2' .*bias: no rule gives its dtype"):
        describe(mlp(), config, X, backend="reference")
    plan = describe(
        mlp(),
        config.set_local("2", FakeQuantConfig(weight=spec("int3", group_size=16), input="fp32")),
        X,
        backend="reference",
    )
    first, second = plan["0"].spec.fake, plan["2"].spec.fake
    assert str(first) == "weight int4 sym per_group 32 fp16 scales floor, input int8 sym dynamic"
    assert str(second) == "weight int3 sym per_group 16 fp16 scales floor"
    assert FakeSpec.from_dict(first.to_dict()) == first


def test_exclude_and_static_and_dynamic_operators_in_one_model():
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    ).eval()
    config = (
        StaticQuantConfig()
        .set_local("0", FakeQuantConfig(weight=group("int4", 16)))
        .set_local("4", DynamicQuantConfig())
    )
    q = q_model(config, model)
    assert {d.operator: d.spec.mode for d in q.graph.plan.quantized} == {
        "0": "fake_quant",
        "2": "static",
        "4": "dynamic",
    }
    assert "1 operators with simulated: weight int4 sym per_group 16" in nc.report(q).summary()
    plan = describe(model, FakeQuantConfig(weight="int4").exclude("2", "4"), X, backend="reference")
    assert [d.operator for d in plan.quantized] == ["0"]
    assert plan["2"].reason == "fp32 was asked for"


def test_two_readers_of_one_weight_share_its_codes():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            return self.fc(self.fc(x))

    q = q_model(FakeQuantConfig(weight="int4", input=spec("int8", dynamic=True)), Twice().eval())
    assert sum("weight_int4" in name for name, _ in q.graph.module.named_buffers()) == 1


def test_an_artefact_gives_the_same_numbers_and_the_same_bytes(tmp_path):
    config = FakeQuantConfig(
        weight=group("nf4", 32),
        input=spec("uint8", symmetric=False),
        output=group("fp4_e2m1", 2, dynamic=True, scale_type="e8m0"),
        bias="int8",
    )
    q = q_model(config)
    q.save(tmp_path / "a")
    again = load(tmp_path / "a", backend="reference")
    assert torch.equal(again(X), q(X))
    assert again.graph.plan == q.graph.plan
    again.save(tmp_path / "b")
    for file in ("model.json", "weights.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_configuration_comes_back_from_plain_values():
    config = FakeQuantConfig(weight=group("int3", 8), input="fp8_e4m3", output="fp32").set_local(
        "2", FakeQuantConfig(weight=spec("int4", granularity="per_block", block_size=[4, 4]))
    )
    assert FakeQuantConfig.from_json(config.to_json()) == config
    assert FakeQuantConfig.from_dict({"weight": {"dtype": "int4", "symmetric": False}}) == FakeQuantConfig(
        weight=spec("int4", symmetric=False)
    )
    mixed = StaticQuantConfig(white_list=["0"]) + FakeQuantConfig(weight="int4", white_list=["2"])
    assert nc.ComposedConfig.from_json(mixed.to_json()) == mixed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": "int9"}, "int9"),
        ({"weight": 4}, "Expected weight to be a FakeTensorSpec"),
        ({"weight": {"dtyp": "int4"}}, "did you mean 'dtype'"),
        ({"weigth": "int4"}, "did you mean 'weight'"),
    ],
)
def test_values_without_a_meaning_are_refused(fields, message):
    with pytest.raises((ConfigError, UnknownFieldError), match=message):
        FakeQuantConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "int9"},
        {"granularity": "per_row"},
        {"round_method": "up"},
        {"scale_type": "fp64"},
        {"group_size": 0},
        {"axis": 1.0},
        {"block_size": (0, 2)},
        {"symmetric": "yes"},
    ],
)
def test_fields_without_a_meaning_are_refused(fields):
    with pytest.raises(ConfigError):
        spec(**fields)


@pytest.mark.parametrize(
    ("role", "fake", "message"),
    [
        ("weight", spec(symmetric=True), "no rule gives its dtype"),
        ("weight", spec("int4", granularity="per_group"), "needs group_size"),
        ("weight", spec("int4", granularity="per_block"), "needs block_size"),
        ("weight", spec("fp8_e4m3", symmetric=False), "has no zero point"),
        ("weight", spec("int4", symmetric=False, scale_type="e8m0"), "no zero point"),
        ("weight", spec("int4", tensor_scale=True), "tensor_scale=True is for"),
        ("weight", spec("int4", dynamic=True), "constant"),
        ("weight", spec("int4", granularity="per_token"), "per_token"),
        ("weight", spec("int4", observer="kl"), "observer='kl' is for activations"),
        ("input", spec("int4", granularity="per_token"), "use dynamic=True"),
        ("input", spec("int4", granularity="per_block", block_size=(1, 4)), "use dynamic=True"),
        ("input", spec("int4", dynamic=True, observer="mse"), "needs calibration"),
        ("input", spec("int4", granularity="per_channel", observer="mse"), "one range"),
        ("output", spec("int4", observer="percentile"), "needs percentile"),
        ("output", spec("fp8_e4m3", observer="kl"), "evenly spaced"),
        ("output", spec("int4", observer="auto"), "auto"),
        ("weight", group("int4", 48), r"does not fit its shape \(96, 64\)\. Blocks of 48 .* 32 and 64"),
        ("input", group("int4", 48, dynamic=True), "Blocks of 48"),
        ("input", spec("int4", granularity="per_channel", axis=5), "no axis 5"),
    ],
)
def test_contradictions_are_refused(role, fake, message):
    with pytest.raises(ConfigError, match=rf"Operator '0' \(linear, rule: global\): {role}.*{message}"):
        describe(mlp(), FakeQuantConfig(**{role: fake}), X, backend="reference")


def test_sizes_that_differ_between_calls_are_not_those_of_the_example():
    """They are captured with another batch than the user's."""
    with pytest.raises(ConfigError, match=r"does not fit its shape \(any, 64\)\. Blocks of 48"):
        describe(mlp(), FakeQuantConfig(input=group("int4", 48, dynamic=True)), X, backend="reference")
    blocks = FakeQuantConfig(input=spec("int4", granularity="per_block", block_size=(4, 4), dynamic=True))
    q = quantize(mlp(), blocks, example_inputs=X.repeat(4, 1), backend="reference")
    assert q(X.repeat(8, 1)).shape[0] == 40
    with pytest.raises(ConfigError, match="Blocks of 4 do not cover axis 0 of 5 elements"):
        q(X)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"observer": "entropy"}, "observer of input .*'minmax'"),
        ({"block_size": 4}, "block_size"),
        ({"percentile": 300}, "percentile"),
        ({"percentile": "99"}, "percentile"),
    ],
)
def test_values_that_do_not_exist_are_refused_at_once(fields, message):
    with pytest.raises(ConfigError, match=message):
        FakeQuantConfig(input=spec("int8", **fields))
    with pytest.raises(ConfigError, match=message):
        FakeQuantConfig(input={"dtype": "int8", **fields})


@pytest.mark.parametrize("method", ROUND_METHODS)
def test_stored_operators_are_checked(method, tmp_path):
    q = q_model(FakeQuantConfig(input=spec("int8", round_method=method)))
    q.save(tmp_path)
    path = tmp_path / "model.json"
    assert f'"{method}"' in path.read_text()
    from nc.storage.arguments import check

    node = next(n for n in q.graph.module.graph.nodes if n.target is fake_quantize)
    check(fake_quantize, node.args, {})
    with pytest.raises(ValueError, match="round_method"):
        check(fake_quantize, (*node.args[:4], "up", 0), {})
    with pytest.raises(ValueError, match="int9"):
        check(fake_quantize, (*node.args[:3], "int9", method, 0), {})


@pytest.mark.parametrize(
    "backend", [*ENGINES, *(["openvino"] if not available_backends()["openvino"] else [])]
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_engine_without_a_simulation_says_so(backend, strict):
    config = FakeQuantConfig(weight="int4")
    message = (
        rf"Operator '0' \(linear, rule: global\): backend '{backend}' simulates no number formats.*reference"
    )
    for step in (describe, prepare, quantize):
        with pytest.raises(nc.UnsupportedError, match=message):
            step(mlp(), config, example_inputs=X, backend=backend, strict=strict)
    with pytest.raises(nc.UnsupportedError, match=message):
        nc.convert(prepare(mlp(), config, example_inputs=X), backend=backend)
    with pytest.raises(nc.UnsupportedError, match=r"'0'.*embedding.*simulates no"):
        table = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16)).eval()
        describe(
            table, FakeQuantConfig(weight="int4", white_list=[nn.Embedding]), torch.arange(4), backend=backend
        )
    model, off = nn.Sequential(nn.Linear(64, 64)).eval(), FakeQuantConfig(weight="fp32")
    float_model = quantize(model, off, example_inputs=X, backend=backend, measure=False)
    assert (float_model(X) - model(X)).abs().max() < 1e-5, "nothing is to be simulated"


def simulated_configs():
    yield nc.MXQuantConfig()
    yield FakeQuantConfig(weight=group("int4", 32), input="int8")
    yield nc.StaticQuantConfig().set_local("2", FakeQuantConfig(weight="fp8_e4m3"))
    yield nc.DynamicQuantConfig(white_list=["0"]) + FakeQuantConfig(weight="int4", white_list=["2"])
    yield FakeQuantConfig(weight="int4").set_local("0", nc.StaticQuantConfig())


@pytest.mark.parametrize("config", list(simulated_configs()), ids=str)
def test_auto_simulates(config, tmp_path):
    """In one step, in three, from a dictionary, from a plan; and the report says who computes, and why."""
    model = mlp()
    auto, named = (
        quantize(mlp(), config, lambda p: p(X), example_inputs=X, **options)
        for options in ({}, {"backend": "reference"})
    )
    assert auto.backend == "reference"
    assert torch.equal(auto(X), named(X))
    assert not torch.equal(auto(X), model(X))
    assert 'auto" takes the reference, because the configuration simulates number formats' in said(
        auto.report()
    )
    assert "simulated: " in said(auto.report())
    assert not named.chosen
    prepared = prepare(mlp(), config.to_dict(), example_inputs=X)
    prepared(X)
    assert torch.equal(nc.convert(prepared, backend="auto")(X), named(X))
    assert describe(mlp(), config, X).backend == "reference"
    auto.save(tmp_path)
    expected = named(X)
    assert (load(tmp_path)(X) - expected).abs().max() < 0.01 * expected.abs().max()
    for engine in ENGINES:
        with pytest.raises(nc.UnsupportedError, match="simulates no number formats"):
            quantize(mlp(), config, lambda p: p(X), example_inputs=X, backend=engine)


def test_a_configuration_that_simulates_nothing_runs_on_an_engine():
    for config in (
        nc.StaticQuantConfig().set_local(
            "0", FakeQuantConfig(weight="fp32", input="fp32", output="fp32", bias="fp32")
        ),
    ):
        assert describe(mlp(), config, X).backend != "reference"


@pytest.mark.parametrize("backend", ENGINES)
def test_an_engine_that_loads_such_an_artefact_computes_the_same_or_says_what_it_lacks(backend, tmp_path):
    q = q_model(
        FakeQuantConfig(weight=group("int4", 32), input="int8", output=spec("fp8_e4m3", dynamic=True))
    )
    q.save(tmp_path)
    try:
        loaded = load(tmp_path, backend=backend)
    except (BackendError, UnsupportedError) as error:
        assert "quantize" in str(error)
    else:
        assert torch.allclose(loaded(X), q(X), rtol=1e-5, atol=1e-6)
        assert {op.ran for op in nc.report(loaded).ops if op.kind == "linear"} == {"fp32"}

"""The C kernels for every low-bit format and group.

Each instruction set against float64, what is not finite, plans, reports, memory.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from suites.low_bit import form, layer_with, ran, weight
from suites.low_bit_blocks import INTEGERS, check, values_of
from suites.low_bit_c import rounded
from torch import nn
from torch.profiler import ProfilerActivity, profile

import nc
from nc.formats import PRESETS, DoubleQuant, TensorFormat, low_bit
from nc.formats.dtypes import DTYPES
from nc.kernels import cpu
from nc.kernels.c_code import limit
from nc.kernels.c_code.abi import LOW_BIT_BLOCKS_WEIGHT
from nc.kernels.c_code.isas import NUMBERS
from nc.kernels.low_bit import compiled_blocks
from nc.kernels.low_bit.blocks import BLOCKS
from nc.kernels.low_bit.compiled_blocks import (
    C_BLOCKS,
    C_BLOCKS_BF16,
    C_BLOCKS_INT8,
    C_BLOCKS_INT8_BLOCK32,
    FLOATS,
    KERNELS,
    coding,
)
from nc.nn import QuantLinear
from nc.numerics.group_ranges import choose
from nc.numerics.groups import encode
from nc.numerics.packed_weight import pack

pytestmark = [
    pytest.mark.isas,
    pytest.mark.skipif(
        C_BLOCKS.why_not(form(), (48, 128), "fp32") is not None, reason="needs AVX2 and a C compiler"
    ),
]
#: Instruction sets → their numbers.
HERE = {name: NUMBERS[name] for name in compiled_blocks.usable()}
TESTED = list(HERE)[:1] if limit.limit() else list(HERE)  # see suites.low_bit_c
TWO_LEVELS = {
    **{name: TensorFormat.from_dict(preset.to_dict()) for name, preset in PRESETS.items()},
    "double": low_bit(dtype="nf4", group_size=16, double_quant=DoubleQuant(8, 4, "fp16")),
    "double with minima": low_bit(
        dtype="int4", group_size=16, symmetric=False, float_zero=True, double_quant=DoubleQuant(6, 8, "fp16")
    ),
    "double with zero points": low_bit(
        dtype="int5", group_size=32, symmetric=False, double_quant=DoubleQuant(8, -1, "fp32")
    ),
}


def described(packed, name):
    """A field of the structure that describes a weight to the C code."""
    (found,) = (i for i, field in enumerate(LOW_BIT_BLOCKS_WEIGHT.fields) if field.name == name)
    return compiled_blocks.pack(packed)[4][1 + found]


@st.composite
def cases(draw):
    """(form, outputs, inputs, rows, name of an instruction set, how activations are multiplied, with a bias)."""
    name = draw(st.sampled_from([*INTEGERS, *FLOATS]))
    kind = draw(st.sampled_from(["symmetric", "zero point", "minimum"])) if name in INTEGERS else "symmetric"
    group = draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 100, -1]))
    inputs = draw(st.integers(1, 300)) if group == -1 else group * draw(st.integers(1, max(1, 300 // group)))
    scale_dtype = draw(
        st.sampled_from(
            ["fp32", "fp16", "bf16", "e8m0", "e4m3"] if kind != "minimum" else ["fp32", "fp16", "bf16"]
        )
    )
    rows = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 20, 33]))
    how = draw(st.sampled_from(["fp32", "bf16", "int8", "int8_block32"]))
    isa = draw(st.sampled_from(sorted(HERE)))
    return (
        form(name, group, kind, scale_dtype),
        draw(st.integers(1, 50)),
        inputs,
        rows,
        isa,
        how,
        draw(st.booleans()),
    )


@settings(max_examples=300)
@given(case=cases())
@example(case=(form("fp8_e4m3", -1), 33, 1000, 40, sorted(HERE)[0], "fp32", True))
@example(case=(form("int4", 16, "zero point"), 17, 160, 16, sorted(HERE)[0], "bf16", False))
def test_every_format_and_group_is_exact_up_to_fp32_sums(case):
    of, outputs, inputs, rows, isa, how, with_bias = case
    packed = weight(of, outputs, inputs)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs) if with_bias else None
    x = x.bfloat16() if how == "bf16" else x
    block = {"int8": -1, "int8_block32": 32}.get(how, 0)
    result = compiled_blocks.linear(x, compiled_blocks.pack(packed, HERE[isa]), packed, bias, block)
    assert result.shape == (rows, outputs)
    check(packed, x, result, bias, rounded(x, block) if block and rows else None, isa)


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("name", TWO_LEVELS)
def test_scales_of_two_levels(name, best):
    of = TWO_LEVELS[name]
    values = torch.distributions.StudentT(4.0).sample((37, 192)) * 0.02
    found = choose(values, of, "wls", None)
    packed = pack(encode(values, found, of), found, of)
    layout, bias = compiled_blocks.pack(packed, HERE[best]), torch.randn(37)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 192)
        check(packed, x, compiled_blocks.linear(x, layout, packed, bias), bias)


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(
    ("name", "group", "inputs"),
    [("fp8_e4m3", -1, 1115), ("nf4", 16, 1120), ("int4", 24, 1104), ("mxint8", 160, 1120)],
)
@pytest.mark.parametrize("how", ["fp32", "bf16"])
def test_many_rows_and_inputs(name, group, inputs, best, how):
    """More than a block, than a tile of rows, and than the rows that are summed at once.

    Most products of AMX are of three parts.
    """
    packed = weight(form(name, group), 49, inputs)
    layout, bias = compiled_blocks.pack(packed, HERE[best]), torch.randn(49)
    for rows in (23, 135, 600):
        x = torch.randn(rows, inputs) * torch.logspace(-2, 2, rows).unsqueeze(1)
        x = x.bfloat16() if how == "bf16" else x
        check(packed, x, compiled_blocks.linear(x, layout, packed, bias), bias, best=best)


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(("name", "scale_dtype"), [("fp8_e4m3", "e8m0"), ("int8", "bf16"), ("nf4", "fp32")])
def test_each_part_of_a_number_counts(name, scale_dtype, best):
    """With four inputs, a part that is left out is larger than what fp32 sums lose.

    Weights are one, two and three numbers of bf16.
    """
    packed = weight(form(name, 4, scale_dtype=scale_dtype), 33, 4)
    x = torch.randn(40, 4)
    check(packed, x, compiled_blocks.linear(x, compiled_blocks.pack(packed, HERE[best]), packed))


def test_every_format_has_a_coding():
    assert {name for name, dtype in DTYPES.items() if dtype.kind == "float"} == set(FLOATS)
    kinds = {name: coding(DTYPES[name]).kind for name in FLOATS}
    table, integer, e4m3, e5m2 = (
        compiled_blocks.TABLE,
        compiled_blocks.INTEGER,
        compiled_blocks.E4M3,
        compiled_blocks.E5M2,
    )
    assert {name for name, kind in kinds.items() if kind == table} == {"nf4", "af4", "af4_32", "fp4_e2m1"}
    assert {name for name, kind in kinds.items() if kind == integer} == {"mxint8", "fp6_e2m3"}
    assert (kinds["fp8_e4m3"], kinds["fp8_e5m2"], kinds["fp6_e3m2"]) == (e4m3, e5m2, e5m2)
    for name in FLOATS:
        found = coding(DTYPES[name])
        values = torch.tensor(DTYPES[name].values)
        assert torch.equal((found.read * found.unit).nan_to_num(), values.nan_to_num())
    with pytest.raises(nc.BackendError, match="neither 16, nor multiples"):
        coding(nc.formats.DType("odd", 5, "float", 0, 31, torch.uint8, tuple(math.exp(i) for i in range(32))))


@pytest.mark.parametrize(
    ("name", "group", "scale_dtype", "parts"),
    [
        ("fp8_e4m3", 32, "e8m0", 1),
        ("fp8_e4m3", -1, "fp32", 1),  # the scale of a row is multiplied in the end
        ("fp4_e2m1", 16, "e4m3", 1),
        ("int8", 32, "bf16", 2),
        ("int8", 32, "fp32", 3),
        ("nf4", 32, "e8m0", 3),
    ],
)
def test_amx_multiplies_as_many_parts_as_weights_have(name, group, scale_dtype, parts):
    packed = weight(form(name, group, scale_dtype=scale_dtype))
    assert described(packed, "parts") == parts
    packed.scale[0, 0] = 2.0**-120 if scale_dtype != "e4m3" else 0
    assert described(packed, "parts") == (0 if group != -1 and scale_dtype != "e4m3" else parts)


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [2, 24])
@pytest.mark.parametrize(("name", "group"), [("fp8_e4m3", 32), ("nf4", 16), ("int4", 20), ("int8", 16)])
def test_what_is_not_finite_in_activations_is_passed_on(name, group, rows, value, best):
    packed = weight(form(name, group), 24, 160)
    x = torch.randn(rows, 160)
    x[1, 77] = value
    result, expected = (
        compiled_blocks.linear(x, compiled_blocks.pack(packed, HERE[best]), packed),
        QuantLinear(packed)(x),
    )
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(
        result[1].nan_to_num(0, 1, -1)[~result[1].isfinite()],
        expected[1].nan_to_num(0, 1, -1)[~result[1].isfinite()],
    )
    others = torch.arange(rows) != 1
    check(packed, x[others], result[others])


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(
    ("name", "code"), [("fp8_e4m3", 0x7F), ("fp8_e4m3", 0xFF), ("fp8_e5m2", 0x7C), ("fp8_e5m2", 0xFE)]
)
@pytest.mark.parametrize("group", [16, -1])
def test_what_is_not_finite_in_weights_is_passed_on(name, code, group, best):
    packed = weight(form(name, group), 24, 96)
    packed.codes[3, 50] = code
    layout = compiled_blocks.pack(packed, HERE[best])
    for rows in (1, 20):
        x = torch.randn(rows, 96)
        result, expected = compiled_blocks.linear(x, layout, packed), QuantLinear(packed)(x)
        assert not expected[:, 3].isfinite().any()
        assert torch.equal(result.nan_to_num(0)[:, 3], expected.nan_to_num(0)[:, 3])
        assert result[:, [n for n in range(24) if n != 3]].isfinite().all()


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("size", [1e-44, 1e-35, 1e-12, 1e5, 1e33])
@pytest.mark.parametrize(("name", "group"), [("fp8_e4m3", -1), ("nf4", 16)])
def test_tiny_and_huge_values(name, group, size, best):
    packed = weight(form(name, group), 24, 128)
    for rows in (3, 20):
        x = torch.randn(rows, 128).clamp(-1, 1) * size
        x[:, 5] *= 1e-3
        check(packed, x, compiled_blocks.linear(x, compiled_blocks.pack(packed, HERE[best]), packed))
    small = weight(form(name, group), 24, 128)
    small.scale.mul_(2.0**-100)  # parts of these are below what AMX takes as 0
    x = torch.randn(20, 128) * 2.0**100
    result = compiled_blocks.linear(x, compiled_blocks.pack(small, HERE[best]), small)
    weights, terms = values_of(small)
    assert (
        (result.double() - x.double() @ weights.T).abs() <= 132 * 2**-24 * (x.double().abs() @ terms.T)
    ).all()


@pytest.mark.parametrize(
    ("act", "kernel"), [("fp32", C_BLOCKS), ("int8", C_BLOCKS_INT8), ("int8_block32", C_BLOCKS_INT8_BLOCK32)]
)
def test_any_strides_shapes_and_dtypes(act, kernel):
    packed = weight(form("fp8_e4m3", 16), 24, 112)
    layer = layer_with([kernel], packed, act, torch.randn(24))
    x = torch.randn(5, 3, 224)[..., ::2]
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))
    assert layer(x[:0]).shape == (0, 3, 24)
    half = layer(x.half())
    assert half.dtype == torch.float16
    assert torch.equal(half, layer(x.half().float()).half())
    values = {
        "fp32": x.double().reshape(15, 112),
        "int8": rounded(x.reshape(15, 112), -1),
        "int8_block32": rounded(x.reshape(15, 112), 32),
    }
    check(packed, x, layer(x).reshape(15, 24), layer.bias, values[act])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize(
    ("act", "kernel"), [("int8", C_BLOCKS_INT8), ("int8_block32", C_BLOCKS_INT8_BLOCK32)]
)
def test_values_that_have_no_scale(act, kernel, value):
    packed = weight(form("nf4", 16), 24, 112)
    x = torch.randn(3, 112)
    x[1] = value if value == 0 else x[1]
    x[1, 77] = value
    result, expected = layer_with([kernel], packed, act)(x), QuantLinear(packed, None, act)(x)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.allclose(result[::2], expected[::2], rtol=1e-4, atol=1e-4)
    assert value != 0 or (result[1] == 0).all()


@pytest.mark.parametrize(
    ("act", "kernel"), [("fp32", C_BLOCKS), ("bf16", C_BLOCKS_BF16), ("int8", C_BLOCKS_INT8)]
)
def test_the_number_of_threads_changes_no_bit(act, kernel):
    packed = weight(form("nf4", 48), 1000, 480)
    before = torch.get_num_threads()
    try:
        for rows in (1, 3, 40):
            x = torch.randn(rows, 480)
            torch.set_num_threads(1)
            alone = layer_with([kernel], packed, act)(x)
            for threads in (2, 5):
                torch.set_num_threads(threads)
                assert torch.equal(layer_with([kernel], packed, act)(x), alone)
    finally:
        torch.set_num_threads(before)
    values = {"fp32": x.double(), "bf16": x.bfloat16().double(), "int8": rounded(x, -1)}[act]
    check(packed, x.bfloat16() if act == "bf16" else x, alone, values=values)


def test_no_whole_weight_is_dequantized():
    packed = weight(form("fp8_e4m3", -1), 512, 512)
    layer = layer_with([C_BLOCKS], packed)
    for rows in (1, 4, 40):
        x = torch.randn(rows, 512)
        layer(x)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            layer(x)
        assert max(event.self_cpu_memory_usage for event in found.events()) <= 4 * 512 * rows


@pytest.mark.parametrize(
    ("options", "act", "kernel"),
    [
        ({"w_dtype": "fp8_e4m3", "group_size": -1}, "fp32", "c blocks"),
        ({"w_dtype": "fp8_e5m2", "group_size": 32}, "int8", "c blocks int8"),
        ({"w_dtype": "int4", "group_size": 16}, "fp32", "c blocks"),
        ({"w_dtype": "int4", "group_size": 16}, "int8_block32", "c blocks int8 block32"),
        ({"w_dtype": "nf4", "group_size": 16}, "bf16", "c blocks bf16 (M <= 1024), blocks"),
        ({"w_dtype": "int6", "group_size": 48, "w_sym": False}, "fp32", "c blocks"),
    ],
)
def test_the_workflow_uses_it_and_the_report_says_so(options, act, kernel):
    model = nn.Sequential(nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 33)).eval()
    q = nc.quantize(model, nc.WeightOnlyConfig(act_dtype=act, **options), backend="native")
    report = nc.report(q)
    assert all(layer.kernel.startswith(kernel) for layer in report.layers), [
        layer.kernel for layer in report.layers
    ]
    refused = dict(report.layers[0].refused)
    preferred = f"c {act}".replace("_", " ")
    why = f"it takes groups of multiples of 32, not {options['group_size']}"
    assert refused.get(preferred) == (why if options["w_dtype"].startswith("int") else None)
    x = torch.randn(3, 192)
    assert "nc::quant_linear" not in ran(lambda: q(x))
    expected = nc.quantize(model, nc.WeightOnlyConfig(act_dtype=act, **options), backend="reference")(x)
    assert torch.allclose(q(x), expected, rtol=1e-4, atol=1e-4 if act != "bf16" else 0.02)


@pytest.mark.usefixtures("without_c")
def test_without_a_compiler_blocks_compute_and_the_report_says_why():
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    q = nc.quantize(model, nc.WeightOnlyConfig("fp8_e4m3", group_size=-1), backend="native")
    assert [layer.kernel for layer in nc.report(q).layers] == [BLOCKS.name]
    assert (
        "kernel c blocks is not used for 1 layers: its C code can't be loaded: there is no C compiler"
        in nc.report(q).text(details=True)
    )


def test_they_are_those_of_native():
    assert {kernel.name for kernel in KERNELS} == {
        "c blocks",
        "c blocks int8",
        "c blocks int8 block32",
        "c blocks bf16",
    }
    rows = nc.backends.get_backend("native").low_bit_kernels()
    assert [row for row in rows if row in KERNELS] == list(KERNELS)


def test_the_best_instruction_set_is_chosen(monkeypatch):
    for best, without in (
        ("amx", ()),
        ("avx512", ("amx_tile",)),
        ("avx2", ("amx_tile", "avx512bw")),
        (None, ("fma",)),
    ):
        monkeypatch.setattr(
            cpu, "code_lacks", lambda needed, without=without: tuple(n for n in needed if n in without)
        )
        monkeypatch.setattr(
            "nc.kernels.low_bit.compiled.usable",
            lambda without=without: () if "amx_tile" in without else ("amx",),
        )
        assert compiled_blocks.usable()[:1] == ((best,) if best else ())
        if best:
            assert described(weight(form("nf4", 16)), "isa") == compiled_blocks.isa() == NUMBERS[best]
        else:
            assert "of which this CPU has none" in compiled_blocks.why_unavailable()

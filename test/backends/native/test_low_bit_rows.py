"""Low-bit linears by the product of dynamic ones: against integers, the kernels of few bits, and reasons."""

import dataclasses

import pytest
import torch
from models import Function, worst_db
from suites.low_bit import form, weight
from suites.low_bit_c import rounded
from torch.nn import functional as F

import nc
from nc.backends import available_backends
from nc.backends.low_bit.engine import set_backend
from nc.backends.native import low_bit_rows
from nc.backends.native.plans import row_linears as row_format
from nc.kernels.c_code import abi
from nc.kernels.low_bit import compiled
from nc.nn import QuantLinear
from nc.numerics.int16_pairs import limit_pairs
from nc.numerics.packed_weight import pack

_WHY = (
    available_backends()["native"]
    or row_format.why_unavailable(row_format.CODES)
    or compiled.why_unavailable()
)
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]

MANY = low_bit_rows.LEAST_ROWS


def fitting(packed):
    """The same weight with pairs that fit 16 bits, which AVX2 needs."""
    middle = packed.form.middle
    codes = limit_pairs(packed.unpacked().float() - middle) + middle
    return pack(codes.to(torch.uint8), packed.params, packed.form)


def layer_of(inputs=64, outputs=48, name="int8", group=-1, kind="symmetric", act="int8", *, bias=True):
    packed = weight(form(name, group, kind), outputs, inputs)
    packed = fitting(packed) if name == "int8" and kind == "symmetric" and group == -1 else packed
    layer = QuantLinear(packed, torch.randn(outputs) if bias else None, act)
    return set_backend(layer, "native").eval()


def captured(model, *inputs, **options):
    given = inputs if len(inputs) > 1 else inputs[0]
    return nc.quantize(
        model.eval(), nc.DynamicQuantConfig(), example_inputs=given, backend="native", **options
    )


def called(q, *inputs):
    """Names of the functions in C that a call makes, in order."""
    kernels = [kernel for step in q.engine.steps(list(inputs)) for kernel in step.kernels]
    return [k.implementation.removeprefix("c:").split()[0] for k in kernels]


def linears(q):
    return [op for op in q.report().ops if op.kind == "quant_linear"]


def exact(layer, x):
    """The result in float64: integers, both scales and the bias."""
    packed = layer.packed
    codes = packed.unpacked().double() - packed.form.middle
    steps = rounded(x, -1)
    y = steps @ codes.T * packed.params.scale[:, 0].double()
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["int5", "int7", "int8"])
@pytest.mark.parametrize("sizes", [(16, 64, 48), (128, 768, 96), (40, 100, 33), (33, 7, 3), (64, 300, 17)])
def test_the_numbers_are_those_of_integers_and_of_the_kernel_of_few_bits(sizes, name, bias):
    rows, inputs, outputs = sizes
    layer = layer_of(inputs, outputs, name, bias=bias)
    q = captured(layer, torch.randn(rows, inputs))
    assert linears(q)[0].kernel.startswith("function c:row_product")
    spread = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    for x in (spread, torch.full((rows, inputs), 3.0), -torch.rand(rows, inputs), torch.zeros(rows, inputs)):
        expected, got = exact(layer, x), q(x)
        most = 3e-7 * (rounded(x, -1).abs() @ layer.weight.double().abs().T + expected.abs())
        assert ((got.double() - expected).abs() <= most).all()
        if not bias and inputs <= 512:  # the same steps of rounding
            assert torch.equal(got, layer(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_what_is_no_number_gives_what_the_kernel_of_few_bits_gives(bad):
    layer, x = layer_of(bias=False), torch.randn(MANY, 64)
    q = captured(layer, x)
    x[3, 7] = bad
    assert called(q, x) == ["round_rows", "row_product"]
    assert q(x)[3].isnan().all()
    assert torch.equal(q(x), layer(x)) or torch.allclose(q(x), layer(x), rtol=0, atol=0, equal_nan=True)


def test_linears_that_read_the_same_tensor_are_one():
    model = Function(
        lambda m, x: m.q(x) * m.k(x) + m.v(x).view(3, 9, 8),
        q=layer_of(64, 8), k=layer_of(64, 8, bias=False), v=layer_of(64, 8),
    )  # fmt: skip
    x = torch.randn(3, 9, 64)
    q = captured(model, x)
    assert [name for name in called(q, x) if "row" in name] == ["round_rows", "row_product"]
    assert worst_db([model(x)], [q(x)]) > 100
    assert [op.ran for op in linears(q)] == ["int8 weight"] * 3
    assert all(op.refused == () for op in linears(q))


def test_an_activation_and_a_sum_go_with_the_product():
    model = Function(lambda m, x: m.b(F.gelu(m.a(x))) + x, a=layer_of(64, 96), b=layer_of(96, 64))
    x = torch.randn(2, 20, 64)
    q = captured(model, x)
    names = called(q, x)
    assert len(names) <= 4
    assert all(name.startswith(("round_rows", "row_")) for name in names)
    assert worst_db([model(x)], [q(x)]) > 60  # a code may be the next one


def test_layers_that_share_a_weight_share_its_codes():
    layer = layer_of(64, 64)
    q = captured(Function(lambda m, x: m.a(F.relu(m.a(x))), a=layer), torch.randn(MANY, 64))
    names = {str(node.target) for node in q.graph.module.graph.nodes if node.op == "get_attr"}
    assert names  # the graph itself stays as it is
    assert q.report().weight_bytes < 1.5 * 64 * 64 + 3000


def test_other_numbers_of_rows_have_the_same_product():
    layer = layer_of(bias=False)
    q = captured(layer, torch.randn(MANY, 64))
    for rows in (1, 3, 200):
        x = torch.randn(rows, 64)
        assert called(q, x) == ["round_rows", "row_product"]
        assert torch.equal(q(x), layer(x))
    assert q(torch.randn(0, 64)).shape == (0, 48)


def test_a_batch_of_one_counts_as_it_is():
    """It is traced as more."""
    q = captured(layer_of(), torch.randn(1, MANY - 1, 64))
    assert linears(q)[0].refused == (
        ("c:row_product", f"the example has {MANY - 1} rows, and it pays from {MANY} on"),
    )


REFUSED = {
    "it would read int4 codes as 8 bits, which gains no time": {"name": "int4"},
    "its weight has zero points": {"kind": "zero point"},
    "its weight has groups of 32 inputs": {"group": 32},
    "its weight is fp8_e4m3, no integer": {"name": "fp8_e4m3"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_others_keep_their_kernels_and_have_a_reason(why):
    layer, x = layer_of(**REFUSED[why]), torch.randn(MANY, 64)
    q = captured(layer, x)
    (op,) = linears(q)
    assert ("c:row_product", why) in op.refused
    assert op.kernel in ("c int8", "c blocks int8")
    assert f"kernel c:row_product is not used for 1 layers: {why}" in q.report().summary()
    assert torch.equal(q(x), layer(x))


def test_other_activations_are_none_of_its_business():
    for act in ("fp32", "int8_block32"):
        q = captured(layer_of(act=act), torch.randn(MANY, 64))
        assert "c:row_product" not in dict(linears(q)[0].refused)


def test_weights_in_bf16_models_keep_their_kernels():
    layer, x = layer_of(), torch.randn(MANY, 64).bfloat16()
    prepared = nc.prepare(layer, nc.DynamicQuantConfig(), example_inputs=x, backend="native")
    q = nc.convert(prepared, verify="off", measure=False)  # the reference multiplies in bf16
    assert ("c:row_product", "its input is torch.bfloat16, not fp32") in linears(q)[0].refused
    assert torch.equal(q(x), layer(x))


def test_avx2_takes_no_weight_whose_pairs_overflow(monkeypatch):
    monkeypatch.setattr(row_format, "why_not_weight", lambda codes: "its weight is too large")
    q = captured(layer_of(), torch.randn(MANY, 64))
    assert ("c:row_product", "its weight is too large") in linears(q)[0].refused


def test_more_inputs_than_sums_hold_keep_their_kernels(monkeypatch):
    monkeypatch.setattr(abi, "CONSTANTS", dataclasses.replace(abi.CONSTANTS, most_inputs=63))
    q = captured(layer_of(), torch.randn(MANY, 64))
    assert ("c:row_product", "it has 64 inputs, and its C code takes 1 to 63") in linears(q)[0].refused


def test_weights_count_once():
    q = captured(layer_of(512, 512), torch.randn(MANY, 512))
    q(torch.randn(1, 512))
    assert 512 * 512 <= q.report().weight_bytes < 1.2 * 512 * 512

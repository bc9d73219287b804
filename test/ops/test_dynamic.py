"""Dynamic quantization.

Its numbers against float64 and against torch's own kernels, and that it needs no calibration.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import FP32, Attention, call
from torch import nn
from torch.nn import functional as F

import nc
from nc import (
    DynamicQuantConfig,
    StaticQuantConfig,
    UnsupportedError,
    available_backends,
    convert,
    load,
    prepare,
    quantize,
)
from nc.graph.views import DynamicQDQ
from nc.numerics.metrics import sqnr_db
from nc.ops import quantize_dequantize_dynamic

ENGINES = [
    name for name, why in available_backends().items() if name in ("ipex", "native", "reference") and not why
]


class Net(nn.Module):
    """Two linears that read one tensor, one without a bias, behind inputs of any rank."""

    def __init__(self, width=48):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(width, 40), nn.Linear(width, 40, bias=False), nn.Linear(40, 8)

    def forward(self, x):
        return self.out(F.gelu(self.q(x)) * self.k(x))


def converted(model, example, config=None, **options):
    return convert(prepare(model.eval(), config or DynamicQuantConfig(), example_inputs=example, **options))


# ---- numbers ----


def test_ranges_of_columns_are_those_of_rows_of_the_transposed():
    x = torch.randn(2, 3, 5, 7)
    options = True, -127, 127, True, torch.int8
    columns = quantize_dequantize_dynamic(x, *options, -2)
    assert torch.equal(columns, quantize_dequantize_dynamic(x.mT.contiguous(), *options).mT)


def test_a_left_side_is_rounded_beside_the_ranges_of_the_rows_of_the_right_one():
    p, v = torch.rand(2, 4, 6), torch.randn(2, 6, 5) * torch.tensor([1e-3, 1, 2, 3, 0, 10])[:, None]
    found = quantize_dequantize_dynamic(p, True, 0, 255, False, torch.uint8, -1, v)
    scales = v.double().abs().amax(-1) / 127
    scales[:, 4] = scales[:, 0]  # a row of zeros widens no range
    weighed = p.double() * scales[:, None]
    step = weighed.amax(-1, keepdim=True) / 255
    expected = torch.round(weighed / step) * step / scales[:, None]
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    bad = v.clone()
    bad[0, 1, 2] = torch.nan
    found = quantize_dequantize_dynamic(p, True, 0, 255, False, torch.uint8, -1, bad)
    assert found[0].isnan().all()
    assert torch.equal(found[1], quantize_dequantize_dynamic(p, True, 0, 255, False, torch.uint8, -1, v)[1])


def test_matmuls_that_a_rule_names_have_codes_on_both_sides():
    config = DynamicQuantConfig().set_local("matmul", DynamicQuantConfig())
    x = torch.randn(2, 6, 16)
    model = Attention(16, 2).eval()
    q = converted(model, x, config, backend="reference")
    nodes = [n for n in q.graph.module.graph.nodes if n.target is quantize_dequantize_dynamic]
    assert sorted(DynamicQDQ.of(n).dim for n in nodes) == [-2, *[-1] * (len(nodes) - 1)]
    (beside,) = [DynamicQDQ.of(n).right for n in nodes if DynamicQDQ.of(n).right is not None]
    assert any(DynamicQDQ.of(n).input is beside for n in nodes)
    assert 30 < sqnr_db(model(x), q(x)) < 60


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(0, 255), (-128, 127)]),
)
def test_values_are_those_of_float64(rows, per_token, symmetric, codes):
    x = torch.tensor(rows)
    got = (
        quantize_dequantize_dynamic(
            x, per_token, *codes, symmetric, torch.uint8 if codes[0] == 0 else torch.int8
        )
        .double()
        .numpy()
    )
    for i, row in enumerate(np.array(rows, dtype=np.float32).astype(np.float64)):
        seen = row if per_token else np.array(rows, dtype=np.float32).astype(np.float64)
        low, high = min(seen.min(), 0.0), max(seen.max(), 0.0)
        step = max(-low, high) / 127 if symmetric else (high - low) / 255
        if max(-low, high) < 2.0**-100:
            assert (got[i] == 0).all()
        else:
            # half a step, and as much again where the zero point had to be rounded
            assert np.abs(got[i] - row).max() <= step * (0.5 if symmetric else 1.0) + 1e-6 * np.abs(row).max()


def test_a_row_of_zeros_and_no_rows():
    x = torch.stack([torch.zeros(4), torch.ones(4)])
    assert torch.equal(quantize_dequantize_dynamic(x, True, 0, 255, False, torch.uint8)[0], torch.zeros(4))
    empty = torch.zeros(0, 4)
    assert quantize_dequantize_dynamic(empty, False, 0, 255, False, torch.uint8).shape == empty.shape


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("shape", [(5, 48), (2, 7, 48), (2, 3, 5, 48)])
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_engines_compute_the_reference(backend, shape, granularity, symmetric):
    model, x = Net(), torch.randn(shape) * torch.logspace(-2, 2, shape[-2])[:, None]
    q = converted(
        model, x, DynamicQuantConfig(act_granularity=granularity, act_sym=symmetric), backend=backend
    )
    assert sqnr_db(q.reference(x), q(x)) > 60  # a value between two codes can go either way
    assert sqnr_db(model(x), q(x)) > 30
    more = torch.randn(3, *shape[1:])
    assert sqnr_db(q.reference(more), q(more)) > 60
    if backend != "reference":
        assert [op.ran for op in q.report().ops if op.kind == "linear"] == ["int8"] * 3
        assert q.report().sqnr_db > 60


def test_per_token_serves_rows_of_different_size_where_per_tensor_can_not():
    model, x = nn.Sequential(nn.Linear(48, 48)), torch.randn(6, 48) * torch.logspace(-4, 2, 6)[:, None]
    errors = {}
    for granularity in ("per_token", "per_tensor"):
        q = converted(model, x, DynamicQuantConfig(act_granularity=granularity), backend="reference")
        smallest = slice(0, 1)  # the row of magnitude 1e-4
        bias = model[0].bias
        errors[granularity] = sqnr_db(model(x)[smallest] - bias, q(x)[smallest] - bias)
    assert errors["per_token"] > 35
    assert errors["per_tensor"] < 5


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_codes_of_either_sign_are_the_same_numbers(dtype):
    model, x = Net(), torch.randn(5, 48)
    expected = converted(model, x, backend="reference")(x)
    torch.testing.assert_close(
        converted(model, x, DynamicQuantConfig(act_dtype=dtype), backend="reference")(x), expected
    )


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True, "num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str
)
@pytest.mark.sample(4)
def test_recurrent_layers(backend, cls, options):
    """The engine runs torch's own kernel: an independent implementation of what the reference computes."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = cls(24, 32, **options)

        def forward(self, x):
            return self.rnn(x)

    model, x = Recurrent(), torch.randn(5, 3, 24)
    q = converted(model, x, backend=backend)
    expected, got, reference = model(x), q(x), q.reference(x)
    assert sqnr_db(expected[0], got[0]) > 25
    assert sqnr_db(reference[0], got[0]) > 80
    last, last_reference = (t[1][0] if cls is nn.LSTM else t[1] for t in (got, reference))
    assert last.shape == (expected[1][0] if cls is nn.LSTM else expected[1]).shape
    assert sqnr_db(last_reference, last) > 80
    if backend != "reference":
        assert [(op.operator, op.ran) for op in q.report().ops] == [("rnn", "int8")]
        assert q.report().weight_bytes < 0.45 * q.report().float_bytes


def test_recurrent_layers_without_a_kernel_say_why():
    projected = nn.Sequential(nn.LSTM(8, 16, proj_size=4))
    per_tensor = DynamicQuantConfig(act_granularity="per_tensor")
    plan = nc.describe(projected.eval(), per_tensor, torch.randn(3, 2, 8), backend="native")
    assert plan["0"].reason == "backend 'native' has no per_tensor kernel with projections (proj_size)"
    static = nc.describe(
        nn.Sequential(nn.GRU(8, 16)).eval(), StaticQuantConfig(), torch.randn(3, 2, 8), backend="reference"
    )
    assert static["0"].reason == (
        "backend 'reference' has no int8 kernel for gru, but one with ranges found at each call: add "
        "+ nc.DynamicQuantConfig()"
    )
    both = nc.describe(
        nn.Sequential(nn.GRU(8, 16)).eval(), StaticQuantConfig() + DynamicQuantConfig(), torch.randn(3, 2, 8)
    )
    assert both["0"].spec.mode == "dynamic"
    with pytest.raises(UnsupportedError, match="act_sym=True"):
        nc.describe(
            nn.Sequential(nn.GRU(8, 16)).eval(),
            DynamicQuantConfig(act_sym=True),
            torch.randn(3, 2, 8),
            backend="reference",
        )


# ---- use ----


@pytest.mark.parametrize("backend", ENGINES)
def test_no_calibration_is_needed(backend):
    model, x = Net().eval(), torch.randn(4, 48)
    q = quantize(model, DynamicQuantConfig(), example_inputs=x, backend=backend)
    assert q.report().asked_int8 == 3
    assert q.graph.health == ()
    prepared = prepare(model, DynamicQuantConfig(), example_inputs=x, backend=backend)
    assert torch.equal(prepared(x), model(x))  # calling it does no harm


def test_linears_of_one_input_share_its_codes():
    q = converted(Net(), torch.randn(4, 48), backend="reference")
    assert sum(n.target is quantize_dequantize_dynamic for n in q.graph.module.graph.nodes) == 2


@pytest.mark.parametrize("backend", ENGINES)
def test_dynamic_and_static_operators_of_one_model(backend):
    model, x = Attention().eval(), torch.randn(2, 6, 32)
    for outer, inner in (
        (StaticQuantConfig(), DynamicQuantConfig()),
        (DynamicQuantConfig(), StaticQuantConfig()),
    ):
        prepared = prepare(model, outer.set_local(nn.Linear, inner), example_inputs=x, backend=backend)
        call(prepared, x)
        q = convert(prepared, **({} if backend == "reference" else {"isolate": "never"}))
        linears = [d for d in q.graph.plan.quantized if d.kind == "linear"]
        assert linears
        assert all(d.spec.activation.dynamic == isinstance(inner, DynamicQuantConfig) for d in linears)
        assert sqnr_db(model(x), q(x)) > 20
        if backend != "reference":
            ran = {op.operator: op.ran for op in q.report().ops}
            assert all(ran[d.operator] == "int8" for d in linears)


@pytest.mark.parametrize("backend", ENGINES)
def test_saved_and_loaded(backend, tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.LSTM(24, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x):
            return self.fc(self.rnn(x)[0])

    x = torch.randn(2, 5, 24)
    q = converted(Both(), x, backend=backend)
    q.save(tmp_path / "m")
    again = load(tmp_path / "m", backend=backend)
    assert torch.equal(again(x), q(x))
    assert again.graph.plan == q.graph.plan


def test_fallback_and_weights_per_tensor():
    x = torch.randn(4, 48)
    q = converted(
        Net(), x, DynamicQuantConfig(w_granularity="per_tensor").set_local("out", FP32), backend="reference"
    )
    assert [d.operator for d in q.graph.plan.quantized] == ["q", "k"]
    assert not any("per_channel" in n.name for n in q.graph.module.graph.nodes)


def test_attention_of_torch_is_reached():
    """nn.MultiheadAttention calls F.linear with weights of its own."""

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model, x = Attend().eval(), torch.randn(2, 5, 16)
    q = converted(model, x, backend="reference")
    assert len([d for d in q.graph.plan.quantized if d.kind == "linear"]) >= 2
    assert sqnr_db(model(x), q(x)) > 30


@pytest.mark.ipex
@pytest.mark.skipif("ipex" not in ENGINES, reason="needs IPEX")
def test_as_accurate_as_torchs_own_dynamic_quantization():
    model, x = Net().eval(), torch.randn(64, 48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    ours = converted(model, x, backend="ipex")
    assert sqnr_db(model(x), ours(x)) > sqnr_db(model(x), theirs(x))


class Overwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        h = self.first(x)
        a = self.a(h)
        h[:, :4] = 5.0
        return a, self.b(h)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
def test_a_tensor_that_changes_between_two_readers(backend, granularity):
    model, x = Overwritten().eval(), torch.randn(8, 16)
    q = quantize(model, DynamicQuantConfig(act_granularity=granularity), example_inputs=x, backend=backend)
    for expected, got in zip(model(x), q(x), strict=True):
        assert sqnr_db(expected.detach(), got) > 30


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
def test_single_rows_and_none_at_all(backend, symmetric, granularity):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)).eval()
    config, row = DynamicQuantConfig(act_granularity=granularity, act_sym=symmetric), torch.randn(16)
    q = quantize(model, config, example_inputs=row, backend=backend)
    assert q(row).shape == (4,)
    assert sqnr_db(q.reference(row), q(row)) > 60
    q = quantize(model, config, example_inputs=torch.randn(5, 16), backend=backend)
    assert q(torch.randn(0, 16)).shape == (0, 4)

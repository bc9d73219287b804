"""Rows that are normed and rounded where they are made: against float64, the reference, and separate steps."""

import pytest
import torch
from c_fuzz import unpacked_rows
from models import Function, quantized, worst_db
from row_functions import called, dynamic, product, rounded, weight_for
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig
from nc.backends import available_backends
from nc.backends.native.operators import row_chain
from nc.backends.native.plans import row_linears as row_format
from nc.errors import BackendError
from nc.kernels import cpu
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import call_once
from nc.kernels.c_code.isas import NUMBERS
from nc.numerics import affine

_WHY = available_backends()["native"] or row_format.why_unavailable(row_format.CODES)
pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run"),
]


class Block(nn.Module):
    """A feed-forward block: the norm in front of it or behind the sum."""

    def __init__(self, width=48, *, front=True, norm=nn.LayerNorm):
        super().__init__()
        self.front, self.norm = front, norm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x) if self.front else x)))
        return x + y if self.front else self.norm(x + y)


def names(q, x):
    return [name for name in called(q, x) if "row" in name]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("front", [True, False])
@pytest.mark.parametrize("act_sym", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 900])
def test_blocks_round_where_rows_are_made(rows, act_sym, front, norm):
    x = torch.randn(rows, 48)
    model = nn.Sequential(*(Block(front=front, norm=norm) for _ in range(2)))
    q = dynamic(model, x, act_sym=act_sym)
    between = ["row_chain", "row_chain", "row_chain"]
    expected = ["norm_rows", *between, "row_product"] if front else ["round_rows", *between, "row_product"]
    assert names(q, x) == expected
    assert worst_db([q.reference(x)], [q(x)]) > 45  # a row's codes flip at half a code
    report = [op for op in q.report().ops if op.kind == "linear"]
    assert [op.ran for op in report] == ["int8"] * 4
    assert [op.kernel.split()[1] for op in report] == ["c:row_chain"] * 3 + ["c:row_product"]
    linears = {op.operator for op in report}
    roles = {step.role for step in q.engine.steps((x,)) if linears & set(step.operators)}
    assert roles == {"int8"}  # what follows a product in its kernel does not make it one of floats


@pytest.mark.parametrize("rows", [5, 200])
def test_what_else_reads_a_row_gets_it(rows):
    """The sum in front of the norm, and what the norm gives."""
    model = Function(
        lambda m, x: (m.b(s := m.norm(t := m.a(x) + x)), s * 2, t * 3),
        a=nn.Linear(40, 40), norm=nn.LayerNorm(40), b=nn.Linear(40, 8),
    )  # fmt: skip
    x = torch.randn(2, rows, 40)
    q = dynamic(model, x)
    assert names(q, x) == ["round_rows", "row_chain", "row_product"]
    for got, wanted in zip(q(x), q.reference(x), strict=True):
        assert got.shape == wanted.shape
        assert worst_db([wanted], [got]) > 45
    assert worst_db([q.reference(x)[2]], [q(x)[2]]) > 100  # nothing is rounded in front of it but once


def test_rows_of_another_norm_stay_apart():
    """More than the last dimension, more elements than C takes, an input in bf16."""
    for shape, size in (((3, 6, 8), (6, 8)), ((2, 8200), (8200,))):
        model = nn.Sequential(
            nn.LayerNorm(size), nn.Flatten(1), nn.Linear(shape[-1] * (6 if len(size) > 1 else 1), 8)
        )
        q = dynamic(model, x := torch.randn(shape))
        assert names(q, x) == ["round_rows", "row_product"]
        assert worst_db([q.reference(x)], [q(x)]) > 45


def test_a_norm_without_weights():
    model = nn.Sequential(nn.LayerNorm(40, elementwise_affine=False), nn.Linear(40, 8))
    q = dynamic(model, x := torch.randn(6, 40))
    assert names(q, x) == ["norm_rows", "row_product"]
    assert worst_db([q.reference(x)], [q(x)]) > 45


def test_one_range_for_the_whole_tensor_is_found_later():
    """It is known when all rows are made."""
    q = dynamic(
        nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 8)),
        x := torch.randn(6, 40),
        act_granularity="per_tensor",
    )
    assert names(q, x) == ["round_rows", "row_product"]


def test_values_that_change_in_place_are_read_in_order():
    model = Function(
        lambda m, x: m.b(m.norm(m.a(x).add_(1.0))),
        a=nn.Linear(40, 40),
        norm=nn.LayerNorm(40),
        b=nn.Linear(40, 8),
    )
    q = dynamic(model, x := torch.randn(6, 40))
    assert worst_db([q.reference(x)], [q(x)]) > 45


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_what_is_no_number_gives_none(bad):
    q = dynamic(nn.Sequential(Block(), Block()), torch.randn(3, 48))
    x = torch.randn(3, 48)
    x[1, 7] = bad
    assert q(x)[1].isnan().all()
    assert q(x)[::2].isfinite().all()


def test_another_number_of_rows_and_of_threads():
    q = dynamic(nn.Sequential(Block(), Block(front=False)), torch.randn(3, 48))
    x, before = torch.randn(1500, 48), torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results += [q(x), torch.cat([q(part) for part in x.split(57)])]
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], each) for each in results[1:])


@pytest.mark.skipif(
    bool(row_format.why_unavailable(row_format.BF16) or cpu.machine_lacks([cpu.BF16])),
    reason="no product in bf16",
)
@pytest.mark.parametrize("rows", [5, 300])
def test_rows_in_bf16(rows):
    x = torch.randn(rows, 48)
    config = StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")
    q = quantized(nn.Sequential(Block(), Block(front=False)).eval(), x, config, "native")
    assert names(q, x) == [
        "norm_rows",
        "row_chain",
        "bf16_rows",
        "row_chain",
        "row_product",
    ] or "row_chain" in names(q, x)
    assert worst_db([q.reference(x)], [q(x)]) > 45
    assert {op.ran for op in q.report().ops if op.kind == "linear"} == {"bf16"}


def test_torch_computes_none():
    ones = torch.ones(2, 3)
    with pytest.raises(BackendError, match="plans have"):
        row_chain.norm_rows()(ones, "layer", None, None, 0.0, True, False, False)


# --- the functions, for each instruction set


def normed(x, weight, bias, epsilon, *, centred):
    """A norm in float64."""
    x = x.double()
    left = x - x.mean(1, keepdim=True) if centred else x
    return left / (left.square().mean(1, keepdim=True) + epsilon).sqrt() * weight.double() + bias.double()


def is_rounded(memory, x, *, symmetric):
    """Whether memory has the codes of these rows, with the scales and zero points of affine."""
    rows, width = x.shape
    codes, scale, zero_point = unpacked_rows(memory, rows, width)
    ends = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    wanted = affine.choose_qparams(*ends, quant_min=0, quant_max=255, symmetric=symmetric)
    expected = ((x / scale).round() + zero_point).clamp(0, 255)
    same = [
        torch.equal(*pair)
        for pair in ((scale, wanted[0]), (zero_point, wanted[1]), (codes.float(), expected))
    ]
    return all(same)


SIZES = [(1, 1, 1), (7, 40, 33), (16, 64, 16), (150, 30, 70), (1100, 129, 8), (33, 8, 100)]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("keeps", [False, True])
def test_norms_against_float64(on_isa, norm, keeps, symmetric):
    for rows, _, width in SIZES:
        x, weight, bias = torch.randn(rows, width) * 3 + 5, torch.randn(width), torch.randn(width)
        memory = torch.zeros(row_format.CODES.held(rows, width), dtype=torch.uint8)
        y = torch.zeros(rows, width)
        fields = {"rows": rows, "inputs": width, "stride": width, "threads": 2, "norm": abi.NORM.number(norm),
                  "epsilon": 1e-5, "symmetric": symmetric, "bf16": False, "isa": NUMBERS[on_isa.isa]}  # fmt: skip
        call_once(on_isa.norm, fields, [memory, y if keeps else torch.empty(0), x, weight, bias])
        expected = normed(x, weight, bias, 1e-5, centred=norm == "layer")
        if keeps:
            assert torch.allclose(y.double(), expected, rtol=1e-5, atol=2e-5 if width > 1 else 1e-3)
            assert is_rounded(memory, y, symmetric=symmetric)
        else:
            codes, scale, zero_point = unpacked_rows(memory, rows, width)
            back = (codes.double() - zero_point) * scale
            assert ((back - expected).abs() <= 0.5 * scale + 1e-3).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_chain_gives_what_its_steps_give(on_isa, norm, keeps, symmetric):
    for number, (rows, inputs, outputs) in enumerate(SIZES):
        x, weight = torch.randn(rows, inputs), weight_for(on_isa.isa, outputs, inputs)
        factors, other = (torch.rand(outputs) * 0.01, torch.randn(outputs)), torch.randn(rows, outputs)
        of_norm = torch.randn(outputs), torch.randn(outputs)
        given, adds = rounded(on_isa, x), number % 2
        how = {"name": "gelu_erf", "alpha": 0.0, "beta": 0.0}
        expected = product(on_isa, given, rows, weight, *factors, **how, other=other if adds else None)
        packed, sums = row_format.pack(row_format.CODES, weight)
        filled = [F.pad(values, (0, len(sums) - outputs)) for values in factors]
        memory = torch.zeros(row_format.CODES.held(rows, outputs), dtype=torch.uint8)
        y, result, nothing = torch.zeros(rows, outputs), torch.zeros(rows, outputs), torch.empty(0)
        fields = {"rows": rows, "inputs": inputs, "outputs": outputs, "threads": 2, "isa": NUMBERS[on_isa.isa],
                  "bf16": False, "activation": abi.ACTIVATION.number("gelu_erf"), "alpha": 0.0, "beta": 0.0,
                  "norm": abi.NORM.number(norm), "epsilon": 1e-5, "symmetric": symmetric, "keeps": keeps}  # fmt: skip
        tensors = [memory, y, result if norm != "none" else nothing, given, packed, sums, *filled]
        call_once(on_isa.chain, fields, [*tensors, other if adds else nothing, *of_norm])
        if keeps:
            assert torch.equal(y, expected)
        if norm == "none":
            assert is_rounded(memory, expected, symmetric=symmetric)
            continue
        in_float64 = normed(expected, *of_norm, 1e-5, centred=norm == "layer")
        assert torch.allclose(result.double(), in_float64, rtol=1e-4, atol=1e-4)
        assert is_rounded(memory, result, symmetric=symmetric)

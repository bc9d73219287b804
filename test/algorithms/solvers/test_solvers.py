"""Solvers of low-bit weights, against float64 re-implementations of the papers and exhaustive search."""

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nc
from nc import ConfigError
from nc.algorithms.solvers import GPTQ, HQQ, RTN, SOLVERS, AutoRound, BlockProblem, Problem, solve_best
from nc.algorithms.solvers.autoround import _Rounding
from nc.algorithms.solvers.gptq import column_order
from nc.errors import CalibrationError, InputError, UnsupportedError
from nc.formats.tensor_format import DoubleQuant, low_bit
from nc.modules.statistics import InputStatistics, weighted_loss
from nc.numerics.error_feedback import factor
from nc.numerics.group_ranges import RULES


def correlated(tokens, channels, rank=None):
    """Inputs whose channels depend on each other and differ in size."""
    rank = rank or channels
    return torch.randn(tokens, rank) @ torch.randn(rank, channels) * torch.rand(channels).mul(2).exp()


def statistics(x, float_x=None):
    found = InputStatistics.empty(x.shape[-1], hessian=True, cross=float_x is not None)
    found.add(x, float_x)
    return found


def problem(weight, x=None, dtype="int4", group=16, rule="minmax", float_x=None, **form):
    inputs = None if x is None else statistics(x, float_x)
    return Problem(
        name="layer",
        weight=weight,
        form=low_bit(dtype=dtype, group_size=group, **form),
        rule=rule,
        inputs=inputs,
    )


def two_sided_loss(weight, rounded, x, float_x):
    """Mean square of what the layer gives now minus what the float model's layer gives."""
    return float((x.double() @ rounded.double().T - float_x.double() @ weight.double().T).square().mean())


class Grid:
    """Symmetric or asymmetric min-max codes of a group, in float64 but for the fp32 scale."""

    def __init__(self, weight, bits, symmetric):
        self.top = 2**bits - 1
        low, high = weight.min(1).values.clamp(max=0), weight.max(1).values.clamp(min=0)
        if symmetric:
            self.scale = (torch.maximum(-low, high).float() / (2 ** (bits - 1) - 1)).double()
            self.zero = torch.full_like(self.scale, 2 ** (bits - 1))
        else:
            self.scale = ((high - low).float() / self.top).double()
            self.zero = (-low / self.scale).round()

    def code(self, w):
        return ((w / self.scale).round() + self.zero).clamp(0, self.top)

    def value(self, code):
        return (code - self.zero) * self.scale


def obq(weight, hessian, bits, group, symmetric, order, static):
    """Codes by the update of Optimal Brain Quantization.

    One column of the inverse Hessian at a time is eliminated.
    """
    weight, inverse = weight.double().clone(), hessian.inverse()
    original = weight.clone()
    codes = torch.empty_like(weight)
    grids = {}
    for step, k in enumerate(order):
        g = k // group
        if g not in grids:
            rows = original if static else weight
            grids[g] = Grid(rows[:, g * group : (g + 1) * group], bits, symmetric)
        codes[:, k] = grids[g].code(weight[:, k])
        error = (weight[:, k] - grids[g].value(codes[:, k])) / inverse[k, k]
        later = list(order[step + 1 :])
        weight[:, later] -= error[:, None] * inverse[k, later]
        inverse = inverse - inverse[:, k : k + 1] * inverse[k : k + 1] / inverse[k, k]
    return codes


def damped(x, damp=0.01):
    hessian = statistics(x).hessian
    return hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)


def by_hand(hessian, group, order):
    """The order of the columns, written out."""
    size = hessian.diagonal().tolist()
    if order == "none":
        return list(range(len(size)))
    if order == "static":
        return sorted(range(len(size)), key=lambda k: -size[k])
    groups = [sorted(range(s, s + group), key=lambda k: -size[k]) for s in range(0, len(size), group)]
    return [k for g in sorted(groups, key=lambda g: -size[g[0]]) for k in g]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("order", "static"),
    [("none", False), ("none", True), ("static", True), ("groups", False), ("groups", True)],
)
@pytest.mark.parametrize(("group", "block"), [(12, 128), (12, 16), (24, 7), (48, 16), (12, 1)])
def test_gptq_gives_the_codes_of_the_paper(order, static, group, block, symmetric):
    weight, x = torch.randn(20, 48), correlated(200, 48)
    hessian = damped(x)
    expected = obq(weight, hessian, 3, group, symmetric, by_hand(hessian, group, order), static)
    solver = GPTQ(order=order, static_groups=static, block=block)
    packed = solver.solve(problem(weight, x, "int3" if symmetric else "uint3", group, symmetric=symmetric))
    assert torch.equal(packed.unpacked().double(), expected)


def test_a_group_whose_columns_come_in_order_holds_all_its_columns_together():
    perm = column_order(torch.rand(64), 16, "groups")
    assert sorted(perm.tolist()) == list(range(64))
    assert all(len({int(k) // 16 for k in perm[start : start + 16]}) == 1 for start in range(0, 64, 16))


def test_the_factor_is_that_of_the_hessian_and_the_inverse_has_the_papers():
    hessian = statistics(correlated(100, 32)).hessian
    perm = torch.randperm(32)
    whole = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(32, dtype=torch.float64))[perm][:, perm]
    before = (hessian * 7).clone()
    found = factor(before, 0.01, perm, 7)
    assert torch.equal(before, hessian * 7)
    assert torch.equal(found.upper, found.upper.triu())
    assert torch.allclose(found.upper @ found.upper.T, whole, rtol=1e-12)
    assert torch.allclose(
        found.upper.inverse(), torch.linalg.cholesky(whole.inverse(), upper=True), rtol=1e-8, atol=1e-10
    )
    expected = found.upper / found.upper.diagonal()
    for block, group in ((4, 4), (9, 4), (2, 8), (64, 32)):
        feed, size = found.feed(block, group), max(block // group, 1) * group
        assert [len(piece) for piece in feed.pieces] == [size] * (32 // size) + (
            [32 % size] if 32 % size else []
        )
        for start in range(0, 32, size):
            rows, columns = slice(start, min(start + size, 32)), slice(start, 32)
            assert torch.allclose(feed.part(rows, columns).double(), expected[rows, columns], rtol=1e-6)
    assert found.first == pytest.approx(float(whole[0, 0]))
    right = torch.randn(32, 3, dtype=torch.float64)
    assert torch.allclose(whole @ found.solve(right), right, rtol=1e-8, atol=1e-8)


def gptaq(weight, hessian, cross, bits, group, alpha):
    """Static symmetric scales, columns as they stand, by the formulas of arXiv 2504.02692 with the factor U of the inverse."""
    weight = weight.double().clone()
    grids = [Grid(weight[:, s : s + group], bits, True) for s in range(0, weight.shape[1], group)]
    u = torch.linalg.cholesky(hessian.inverse(), upper=True)
    p = alpha * (cross @ u.T).triu(1) @ u
    codes = torch.empty_like(weight)
    for k in range(weight.shape[1]):
        w = weight[:, k].clone()
        codes[:, k] = grids[k // group].code(w)
        error = (w - grids[k // group].value(codes[:, k])) / u[k, k]
        weight[:, k:] += -error[:, None] * u[k, k:] + w[:, None] * p[k, k:]
    return codes


@pytest.mark.parametrize("block", [128, 10])
def test_gptaq_gives_the_codes_of_the_paper(block):
    weight, x = torch.randn(20, 40), correlated(300, 40)
    float_x = x + 0.2 * x.roll(1, 1)
    found = statistics(x, float_x)
    expected = gptaq(weight, damped(x), found.cross / found.tokens, 3, 10, 0.25)
    solver = GPTQ(order="none", static_groups=True, two_sided="gptaq", block=block)
    packed = solver.solve(problem(weight, x, "int3", 10, float_x=float_x))
    assert torch.equal(packed.unpacked().double(), expected)


def qronos(weight, x, float_x, bits):
    """One scale per row, columns as they stand, each step of arXiv 2505.11695 as the least squares problem that it is."""
    x, target = x.double(), float_x.double() @ weight.double().T
    best = torch.linalg.lstsq(x, target).solution.T
    grid = Grid(best, bits, True)
    current, codes = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    for k in range(weight.shape[1]):
        others = [j for j in range(weight.shape[1]) if j != k]
        rest = target - x[:, others] @ current[:, others].T
        codes[:, k] = grid.code(x[:, k] @ rest / x[:, k].square().sum())
        current[:, k] = grid.value(codes[:, k])
        if k + 1 < weight.shape[1]:
            rest = target - x[:, : k + 1] @ current[:, : k + 1].T
            current[:, k + 1 :] = torch.linalg.lstsq(x[:, k + 1 :], rest).solution.T
    return codes


def test_qronos_gives_the_codes_of_the_paper():
    weight, x = torch.randn(20, 24), torch.randn(300, 24) @ (torch.eye(24) + 0.1 * torch.randn(24, 24))
    float_x = x + 0.2 * x.roll(1, 1)
    packed = GPTQ(order="none", two_sided="qronos", damp=0.0).solve(
        problem(weight, x, "int3", -1, float_x=float_x)
    )
    assert torch.equal(packed.unpacked().double(), qronos(weight, x, float_x, 3))


@pytest.mark.parametrize("bits", [2, 3])
def test_two_sided_solvers_lower_the_two_sided_loss(bits):
    weight, x = torch.randn(256, 64), correlated(500, 64)
    float_x = x + 0.3 * x.roll(1, 1)  # what x tells of the difference can be corrected
    loss = {}
    for kind in (None, "gptaq", "qronos"):
        asked = problem(weight, x, f"int{bits}", 16, "wls", float_x)
        loss[kind] = two_sided_loss(weight, GPTQ(two_sided=kind).solve(asked).dequantize(), x, float_x)
    assert loss["gptaq"] < loss[None]
    assert loss["qronos"] < loss[None]


@pytest.mark.parametrize("kind", ["gptaq", "qronos"])
def test_two_sided_solvers_are_judged_by_what_they_make_small(kind):
    weight, x = torch.randn(64, 32), correlated(300, 32)
    float_x = x + 0.5 * x.roll(1, 1)
    asked = problem(weight, x, "int4", 16, "wls", float_x)
    solver = GPTQ(two_sided=kind, alpha=1.0)
    packed, result = solve_best(asked, solver)
    assert result.solver == "gptq"
    nearest = RTN().solve(asked)
    one_sided = [weighted_loss(weight, p.dequantize(), asked.inputs) for p in (packed, nearest)]
    assert one_sided[0] > one_sided[1]  # that measure would put round to nearest in its place
    unrounded, size = (
        two_sided_loss(weight, weight, x, float_x),
        float((x.double() @ weight.double().T).square().mean()),
    )
    for found, loss in ((packed, result.loss), (nearest, result.rtn_loss)):
        expected = (two_sided_loss(weight, found.dequantize(), x, float_x) - unrounded) / size
        assert loss == pytest.approx(expected, rel=1e-4)
    assert result.loss < 0
    assert solve_best(asked, RTN())[1].loss == one_sided[1]  # a solver of one side, with the same statistics


@pytest.mark.parametrize("kind", ["gptaq", "qronos"])
def test_two_sided_solvers_are_gptq_where_the_inputs_are_those_of_the_float_model(kind):
    weight, x = torch.randn(16, 32), correlated(100, 32)
    packed = [GPTQ(two_sided=k).solve(problem(weight, x, float_x=x)).unpacked() for k in (None, kind)]
    assert torch.equal(*packed)
    with pytest.raises(UnsupportedError, match="needs the inputs of the float model, and 'layer' has none"):
        GPTQ(two_sided=kind).solve(problem(weight, x))


@pytest.mark.parametrize("channels", [3, 4])
def test_exhaustive_search_is_the_floor_and_round_to_nearest_the_ceiling(channels):
    rows = 64
    x = torch.randn(100, channels) + 2 * torch.randn(100, 1)
    asked = problem(torch.randn(rows, channels), x, "int2", -1)
    nearest, solved = RTN().solve(asked), GPTQ(damp=0.0, order="none").solve(asked)
    assert torch.equal(nearest.scale, solved.scale)
    scale = nearest.scale.double()
    every = (
        torch.tensor(list(itertools.product(range(4), repeat=channels)), dtype=torch.float64) - 2
    )  # [codes, K]
    error = asked.weight.double()[:, None] - every[None] * scale[:, :, None]
    hessian = asked.inputs.hessian
    loss = torch.einsum("rck,kl,rcl->rc", error, hessian, error)

    def place(packed):
        """Where its codes are in `every`."""
        return (
            packed.unpacked().double() @ (4.0 ** torch.arange(channels - 1, -1, -1, dtype=torch.float64))
        ).long()[:, None]

    found, ceiling, floor = (
        loss.gather(1, place(solved))[:, 0],
        loss.gather(1, place(nearest))[:, 0],
        loss.min(1).values,
    )
    assert (found >= floor).all()
    assert floor.sum() <= found.sum() < ceiling.sum()
    # no other code of the last column is better
    last = loss.reshape(rows, -1, 4).gather(1, (place(solved) // 4)[:, :, None].expand(-1, 1, 4))[:, 0]
    assert torch.allclose(found, last.min(1).values, rtol=1e-5)


def test_registered_solvers_have_their_names():
    assert all(cls.name == name for name, cls in SOLVERS.items())


@pytest.mark.parametrize(
    ("solver", "fields"),
    [
        *(
            (GPTQ, {"order": "act"}),
            (GPTQ, {"two_sided": "both"}),
            (GPTQ, {"damp": -1.0}),
            (GPTQ, {"block": 0}),
            (GPTQ, {"alpha": 2.0}),
        ),
        *(
            (GPTQ, {"damp": "0.01"}),
            (GPTQ, {"block": 1.5}),
            (GPTQ, {"block": None}),
            (GPTQ, {"static_groups": "no"}),
        ),
        *((SOLVERS["hqq"], {"steps": 1.5}), (SOLVERS["hqq"], {"p": None}), (SOLVERS["hqq"], {"beta": "10"})),
        *(
            (SOLVERS["autoround"], {"steps": 2.5}),
            (SOLVERS["autoround"], {"lr": "0.1"}),
            (SOLVERS["autoround"], {"seed": None}),
        ),
    ],
)
def test_values_without_a_meaning_are_refused(solver, fields):
    with pytest.raises(ConfigError):
        solver(**fields)


def test_weights_with_nan_are_refused_by_name():
    weight = torch.randn(4, 32)
    weight[2, 5] = float("nan")
    with pytest.raises(InputError, match=r"'layer' holds 1 NaN .* \[2, 5\].* exclude"):
        solve_best(problem(weight), RTN())


def test_the_loss_is_that_of_the_outputs():
    weight, x = torch.randn(8, 32), correlated(50, 32)
    rounded = RTN().solve(problem(weight)).dequantize()
    outputs = x.double() @ weight.double().T
    expected = (outputs - x.double() @ rounded.double().T).square().sum() / outputs.square().sum()
    assert weighted_loss(weight, rounded, statistics(x)) == pytest.approx(float(expected), rel=1e-5)


# HQQ


ASYMMETRIC = [
    {"dtype": "uint4", "symmetric": False},
    {"dtype": "uint4", "symmetric": False, "float_zero": True},
]
FORMS = [
    *[{"dtype": f"int{bits}"} for bits in (2, 3, 4, 8)],
    *ASYMMETRIC,
    {"dtype": "uint2", "symmetric": False},
    {"dtype": "nf4"},
    {"dtype": "fp4_e2m1"},
    {"dtype": "int4", "scale_dtype": "fp16"},
    {"dtype": "uint4", "symmetric": False, "float_zero": True, "scale_dtype": "bf16"},
    {
        "dtype": "uint4",
        "symmetric": False,
        "float_zero": True,
        "double_quant": DoubleQuant(bits=6, group_size=4),
    },
    {"dtype": "int4", "double_quant": DoubleQuant(bits=8, group_size=-1)},
    {"dtype": "fp4_e2m1", "scale_dtype": "e4m3", "tensor_scale": True},
    {"dtype": "fp4_e2m1", "scale_dtype": "e8m0"},
]


def norm(weight, packed, group, p=0.7):
    return (weight - packed.dequantize()).abs().pow(p).reshape(-1, group).sum(1)


def loop_of_the_paper(weight, bits, steps=20, p=0.7, beta=10.0):
    """HQQ of one group in float64 as its authors write it, with errors in units of the scale.

    The loss of its best step.
    """
    w = weight.double()
    scale, top = (w.max() - w.min()) / (2**bits - 1), 2**bits - 1
    zero = -w.min() / scale
    losses = []
    for _ in range(steps + 1):
        q = (w / scale + zero).round().clamp(0, top)
        error = w / scale - (q - zero)
        losses.append(float((error * scale).abs().pow(p).sum()))
        kept = error.sign() * (error.abs() - error.abs().pow(p - 1) / beta).clamp(min=0)
        zero = (q - (w / scale - kept)).mean()
    return min(losses)


def test_hqq_is_at_least_as_good_as_the_best_step_of_the_authors_loop():
    weight = torch.randn(16, 64) + 0.3
    packed = HQQ().solve(problem(weight, dtype="uint3", group=32, symmetric=False, float_zero=True))
    expected = torch.tensor([loop_of_the_paper(row, 3) for row in weight.reshape(-1, 32)])
    assert (norm(weight, packed, 32) <= expected * (1 + 1e-4)).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_hqq_is_never_worse_than_its_start_and_better_in_many_groups(form):
    weight = torch.distributions.StudentT(4.0).sample((32, 64))
    asked = problem(weight, group=32, **form)
    start, found = norm(weight, RTN().solve(asked), 32), norm(weight, HQQ().solve(asked), 32)
    assert (found <= start * (1 + 1e-6)).all()
    if form["dtype"] != "int8" and form.get("scale_dtype") not in (
        "e8m0",
        "e4m3",
    ):  # with so few scales nothing else is near
        assert (found < start).float().mean() > 0.3


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_hqq_does_not_depend_on_the_size_of_the_weights(form):
    weight = torch.randn(8, 64)
    codes = [HQQ().solve(problem(weight * 2.0**power, group=32, **form)).unpacked() for power in (0, -10)]
    assert torch.equal(*codes)
    assert len(codes[1].unique()) > 2


def test_each_step_of_hqq_is_a_candidate():
    weight = torch.randn(16, 64)
    losses = [
        norm(weight, HQQ(steps=n).solve(problem(weight, group=32, **ASYMMETRIC[1])), 32)
        for n in (0, 1, 5, 20)
    ]
    assert all((b <= a).all() for a, b in itertools.pairwise(losses))


# AutoRound


def block_problem(block, x, forms, targets=None):
    layers = {
        n: Problem(name=n, weight=m.weight.detach(), **forms)
        for n, m in block.named_modules()
        if isinstance(m, nn.Linear)
    }
    samples = [((part,), {}) for part in x]
    with torch.no_grad():
        targets = [block(part) for part in x] if targets is None else targets
    return BlockProblem(
        name="block",
        module=block,
        layers=layers,
        samples=samples,
        targets=targets,
        run=lambda call: block(*call[0], **call[1]),
    )


def block_loss(block, x, packed):
    changed = copy.deepcopy(block)
    for name, weight in packed.items():
        changed.get_submodule(name).weight.data = weight.dequantize()
    with torch.no_grad():
        return float(sum((changed(part) - block(part)).square().sum() for part in x))


@pytest.mark.parametrize(
    "form",
    [
        {"dtype": "int2"},
        {"dtype": "int3"},
        *ASYMMETRIC,
        {"dtype": "nf4"},
        {"dtype": "int4", "scale_dtype": "fp16"},
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_autoround_beats_round_to_nearest_on_a_block(form):
    block = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).eval()
    x = correlated(16 * 10, 32).mul(0.1).reshape(16, 10, 32)
    asked = block_problem(block, x, {"form": low_bit(group_size=16, **form), "rule": "wls"})
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    nearest = block_loss(block, x, {name: RTN().solve(layer) for name, layer in asked.layers.items()})
    state = torch.random.get_rng_state()
    found = AutoRound().solve_block(asked)
    assert block_loss(block, x, found) < 0.98 * nearest
    again = AutoRound().solve_block(asked)
    assert all(torch.equal(found[n].unpacked(), again[n].unpacked()) for n in found)
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(block[0]) is nn.Linear
    assert {n: p.equal(before[n]) for n, p in block.named_parameters()} == dict.fromkeys(before, True)


def test_what_autoround_learns_on_is_what_it_stores():
    """Without a step that helps, the codes are those of round to nearest.

    And weights in training are those of the codes.
    """
    for form in FORMS:
        asked = problem(torch.randn(8, 32), correlated(50, 32), group=16, **form)
        start = RTN().solve(asked)
        rounding = _Rounding(asked)
        assert torch.equal(rounding.packed().unpacked(), start.unpacked()), form
        with torch.no_grad():
            rounding.offsets[0].uniform_(-0.5, 0.5)
            rounding.factors[0].uniform_(0.9, 1.1)
            values = rounding(asked.weight)
        assert torch.allclose(values, rounding.packed().dequantize(), rtol=1e-6, atol=1e-6), form


def test_autoround_solves_a_single_layer_by_its_weighted_loss():
    asked = problem(torch.randn(16, 64), correlated(300, 64), "int3", 32, "wls")
    loss = [
        weighted_loss(asked.weight, s.solve(asked).dequantize(), asked.inputs) for s in (RTN(), AutoRound())
    ]
    assert loss[1] < 0.98 * loss[0]


def test_autoround_takes_weights_that_lie_the_other_way_round():
    class Conv1D(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x):
            return x @ self.weight

    x = correlated(40, 24).reshape(4, 10, 24) * 0.1
    for rows in (24, 16):
        weight = torch.randn(rows, 24)
        plain, other = (
            nn.Sequential(nn.Linear(24, rows, bias=False)),
            nn.Sequential(Conv1D(weight.T.contiguous())),
        )
        plain[0].weight.data = weight
        form = {"form": low_bit(dtype="int3", group_size=8), "rule": "minmax"}
        first = block_problem(plain, x, form)
        found = AutoRound(steps=10).solve_block(first)
        same = dataclasses.replace(first, module=other, run=lambda call, other=other: other(*call[0]))
        assert torch.equal(found["0"].unpacked(), AutoRound(steps=10).solve_block(same)["0"].unpacked())


# what no solver may do

SOLVE = [
    GPTQ(),
    GPTQ(order="groups"),
    GPTQ(order="none"),
    GPTQ(two_sided="gptaq"),
    GPTQ(two_sided="qronos"),
    HQQ(),
    AutoRound(steps=5),
]


@settings(max_examples=60)
@given(
    form=st.sampled_from(FORMS),
    solver=st.sampled_from(SOLVE),
    group=st.sampled_from([4, 8, 16, -1]),
    rule=st.sampled_from(["minmax", "mse", "wls"]),
    kind=st.sampled_from(["normal", "zero", "constant", "tiny", "outliers", "positive"]),
    inputs=st.sampled_from(["many", "few", "one token", "dead", "zero", "equal"]),
    seed=st.integers(0, 2**31),
)
def test_no_layer_is_worse_than_round_to_nearest(form, solver, group, rule, kind, inputs, seed):
    torch.manual_seed(seed)
    weight = torch.randn(6, 16)
    weight = {
        "normal": weight,
        "zero": weight * (torch.arange(16) >= 8),
        "constant": torch.full_like(weight, 0.3),
        "tiny": weight * 1e-4,
        "outliers": weight + 50 * (torch.rand(6, 16) > 0.9),
        "positive": weight.abs() + 1,
    }[kind]
    x = correlated({"many": 100, "few": 5, "one token": 1}.get(inputs, 40), 16)
    x = {"dead": x * (torch.arange(16) % 3 > 0), "zero": x * 0, "equal": x[:, :1].expand(-1, 16)}.get(
        inputs, x
    )
    asked = problem(weight, x, group=group, rule=rule, float_x=x + 0.1 * x.roll(1, 1), **form)
    packed, result = solve_best(asked, solver)
    assert packed.dequantize().isfinite().all()
    assert result.loss <= result.rtn_loss
    two_sided = solver.needs.float_inputs
    assert result.loss == weighted_loss(weight, packed.dequantize(), asked.inputs, two_sided=two_sided)
    assert result.rtn_loss == weighted_loss(
        weight, RTN().solve(asked).dequantize(), asked.inputs, two_sided=two_sided
    )
    assert (result.asked, result.solver in (solver.name, "rtn"), result.tokens) == (solver.name, True, len(x))


@pytest.mark.parametrize("solver", [GPTQ(), AutoRound()])
def test_a_layer_that_calibration_never_reached_is_rounded_to_nearest_and_says_so(solver):
    weight = torch.randn(8, 32)
    for inputs in (None, InputStatistics.empty(32, hessian=True)):
        asked = Problem(
            name="expert",
            weight=weight,
            form=low_bit(dtype="int4", group_size=16),
            rule="wls",
            inputs=inputs,
        )
        packed, result = solve_best(asked, solver)
        assert torch.equal(packed.unpacked(), RTN().solve(asked).unpacked())
        assert (result.solver, result.asked, result.tokens, result.note) == (
            "rtn",
            solver.name,
            0,
            "calibration never reached it",
        )
    assert solve_best(problem(weight), HQQ())[1].note == ""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("solver", [RTN(), HQQ(), GPTQ(), GPTQ(order="none"), AutoRound(steps=3)], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        *(low_bit(dtype=f"int{bits}", group_size=16, scale_dtype="fp16") for bits in (2, 3, 4, 8)),
        *(low_bit(dtype=f"uint{bits}", group_size=16, symmetric=False) for bits in (2, 3, 4, 8)),
        low_bit(dtype="int4", group_size=16, symmetric=False, float_zero=True),
        low_bit(
            dtype="int4",
            group_size=16,
            symmetric=False,
            float_zero=True,
            double_quant=DoubleQuant(6, 8, "fp16"),
        ),
    ],
    ids=str,
)
@pytest.mark.sample(40)
def test_weights_of_zeros_stay_zeros(form, solver, rule):
    """Rows of zeros, and for solvers that spread no errors groups of zeros, also beside groups of one sign."""
    weight = torch.randn(6, 64)
    weight[2:4] = weight[2:4].abs() + 1
    weight[0], weight[1, :16], weight[2, 16:32], weight[4, 32:] = 0, 0, 0, 0
    inputs = InputStatistics.empty(64, hessian=True)
    inputs.add(torch.randn(100, 64))
    packed = solver.solve(Problem(name="fc", weight=weight, form=form, rule=rule, inputs=inputs))
    found, scale = packed.dequantize(), packed.params.scale
    assert found.isfinite().all()
    assert (scale.isfinite() & (scale != 0)).all()
    assert (found[0] == 0).all()
    if not isinstance(solver, GPTQ):
        assert (found.reshape(6, 4, 16)[(weight.reshape(6, 4, 16) == 0).all(2)] == 0).all()


def test_round_to_nearest_wins_where_a_solver_is_worse():
    class Bad:
        name, needs = "bad", RTN().needs

        def solve(self, asked):
            return RTN().solve(dataclasses.replace(asked, weight=-asked.weight))

    asked = problem(torch.randn(8, 32), correlated(50, 32))
    packed, result = solve_best(asked, Bad())
    assert torch.equal(packed.unpacked(), RTN().solve(asked).unpacked())
    assert (result.solver, result.asked) == ("rtn", "bad")
    assert result.loss == result.rtn_loss > 0


@pytest.mark.parametrize("order", ["none", "static", "groups"])
def test_channels_without_a_value_are_rounded_to_nearest(order):
    weight, x = torch.randn(8, 32), correlated(100, 32)
    x[:, [3, 17]] = 0
    solved = GPTQ(order=order, static_groups=True).solve(problem(weight, x, group=16))
    nearest = RTN().solve(problem(weight, x, group=16))
    assert torch.equal(solved.unpacked()[:, [3, 17]], nearest.unpacked()[:, [3, 17]])
    live = [k for k in range(32) if k not in (3, 17)]
    alone = obq(weight[:, live], damped(x[:, live]), 4, 30, True, range(30), True)
    if order == "none":
        whole = GPTQ(order=order).solve(problem(weight, x, group=-1)).unpacked()
        top = weight.abs().argmax(1)
        same = [row for row in range(8) if int(top[row]) in live]
        assert torch.equal(whole[same][:, live].double(), alone[same])


def test_a_singular_hessian_is_damped_more_and_says_so():
    weight, x = torch.randn(8, 32), correlated(5, 32)
    asked = problem(weight, x)
    _, result = solve_best(asked, GPTQ(damp=0.0))
    assert result.solver == "gptq"
    assert result.note == "its Hessian is not positive definite: damp was raised from 0 to 0.01"
    assert solve_best(problem(weight, x), GPTQ())[1].note == ""


def test_a_hessian_that_cannot_be_factored_is_said_so():
    asked = problem(torch.randn(8, 32), correlated(100, 32))
    asked.inputs.outer.sub_(1e9 * torch.ones(32, 32, dtype=torch.float64))
    packed = GPTQ().solve(asked)
    assert asked.notes == ["its Hessian cannot be factored: rounded to nearest"]
    assert torch.equal(packed.unpacked(), RTN().solve(asked).unpacked())


def test_statistics_that_overflowed_are_refused():
    asked = problem(torch.randn(8, 32), correlated(100, 32) * 1e25)
    with pytest.raises(CalibrationError, match="'layer' .* overflow"):
        solve_best(asked, GPTQ())


def test_a_weight_that_attention_reads_itself_is_calibrated():
    """`nn.MultiheadAttention` never calls its `out_proj`, and gives its weight to a function."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = (
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
        torch.randn(16, 12, 32),
    )
    prepared = nc.prepare(model, nc.WeightOnlyConfig("int4", group_size=32, solver=nc.GPTQ()))
    with torch.no_grad():
        assert torch.allclose(prepared(x), model(x), atol=1e-5)
    q = nc.convert(prepared, measure=False)
    attend = q.layers[0].self_attn
    assert attend.out_proj.result.solver == "gptq"
    assert attend.out_proj.result.note == ""
    assert attend.out_proj.result.tokens == 16 * 12
    assert attend.out_proj.result.loss < attend.out_proj.result.rtn_loss

"""Solvers of low-bit weights, against float64 re-implementations of the papers and exhaustive search."""

import itertools

import pytest
import torch

from nc import ConfigError
from nc.errors import InputError, UnsupportedError
from nc.lowbit.solvers import GPTQ, RTN, SOLVERS, Problem, solve_best
from nc.lowbit.solvers.gptq import column_order
from nc.lowbit.statistics import InputStatistics, weighted_loss
from nc.numerics.error_feedback import factor
from nc.spec.weight_format import WeightFormat


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
    return Problem(name="layer", weight=weight, form=WeightFormat(dtype=dtype, group_size=group, **form), rule=rule, inputs=inputs)


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
    """Codes by the update of Optimal Brain Quantization: one column of the inverse Hessian at a time is eliminated."""
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
@pytest.mark.parametrize(("order", "static"), [("none", False), ("none", True), ("static", True), ("groups", False), ("groups", True)])
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
    found = factor(hessian, 0.01)
    assert torch.allclose(found.upper @ found.upper.T, found.damped, rtol=1e-12)
    assert torch.allclose(found.upper.inverse(), torch.linalg.cholesky(found.damped.inverse(), upper=True), rtol=1e-8, atol=1e-10)
    right = torch.randn(32, 3, dtype=torch.float64)
    assert torch.allclose(found.damped @ found.solve(right), right, rtol=1e-8, atol=1e-8)


def gptaq(weight, hessian, cross, bits, group, alpha):
    """Static symmetric scales, columns as they stand, by the formulas of arXiv 2504.02692 with the factor U of the inverse."""
    weight = weight.double().clone()
    grids = [Grid(weight[:, s : s + group], bits, True) for s in range(0, weight.shape[1], group)]  # noqa: FBT003
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
    grid = Grid(best, bits, True)  # noqa: FBT003
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
    packed = GPTQ(order="none", two_sided="qronos", damp=0.0).solve(problem(weight, x, "int3", -1, float_x=float_x))
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
    every = torch.tensor(list(itertools.product(range(4), repeat=channels)), dtype=torch.float64) - 2  # [codes, K]
    error = asked.weight.double()[:, None] - every[None] * scale[:, :, None]
    hessian = asked.inputs.hessian
    loss = torch.einsum("rck,kl,rcl->rc", error, hessian, error)

    def place(packed):
        """Where its codes are in `every`."""
        return (packed.unpacked().double() @ (4.0 ** torch.arange(channels - 1, -1, -1, dtype=torch.float64))).long()[:, None]

    found, ceiling, floor = loss.gather(1, place(solved))[:, 0], loss.gather(1, place(nearest))[:, 0], loss.min(1).values
    assert (found >= floor).all()
    assert floor.sum() <= found.sum() < ceiling.sum()
    # no other code of the last column is better
    last = loss.reshape(rows, -1, 4).gather(1, (place(solved) // 4)[:, :, None].expand(-1, 1, 4))[:, 0]
    assert torch.allclose(found, last.min(1).values, rtol=1e-5)


def test_registered_solvers_have_their_names():
    assert all(cls.name == name for name, cls in SOLVERS.items())


@pytest.mark.parametrize("fields", [{"order": "act"}, {"two_sided": "both"}, {"damp": -1.0}, {"block": 0}, {"alpha": 2.0}])
def test_values_without_a_meaning_are_refused(fields):
    with pytest.raises(ConfigError):
        GPTQ(**fields)


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

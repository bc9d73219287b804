"""AWQ's clip search: against brute force in float64, on whole blocks, and through the workflow."""

import re

import pytest
import torch
from torch import nn

import nc
from nc.algorithms.solvers import GPTQ, RTN
from nc.algorithms.solvers.base import Problem
from nc.algorithms.transforms import Scope, Target, scale_sets
from nc.formats.tensor_format import low_bit
from nc.modules.layers import layers_of
from nc.modules.statistics import InputStatistics, weighted_loss
from nc.numerics import clipping
from nc.numerics.group_ranges import choose
from nc.numerics.groups import decode, encode

PARTS = [1 - i / 20 for i in range(10)]


def heavy(outputs, inputs):
    """A weight with a few large values, in columns that get small inputs; and inputs."""
    weight = torch.randn(outputs, inputs)
    weight[:, ::7] *= 4
    x = torch.randn(200, inputs) @ (torch.eye(inputs) + 0.2 * torch.randn(inputs, inputs))
    x[:, ::7] *= 0.05
    return weight, x


def rounded(group, part, bits, symmetric):
    """One group of weights rounded to nearest with a clipped range.

    Scale and zero point in fp32, as they are stored.
    """
    limit = group.abs().max() * part
    inside = group.clamp(-limit, limit)
    low, high = inside.min().clamp(max=0), inside.max().clamp(min=0)
    most = 2**bits - 1
    if symmetric:
        scale, zero = limit / (2 ** (bits - 1) - 1), 2 ** (bits - 1)
    else:
        scale = (high - low) / most
        zero = (-low / scale).round().clamp(0, most)
    group, scale = group.double(), scale.double()
    return ((group / scale).round() + zero).clamp(0, most).sub(zero) * scale


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (3, True), (4, False), (2, False)])
@pytest.mark.parametrize("group", [8, 24])
def test_the_part_of_every_group_is_the_best_of_all(bits, symmetric, group):
    weight, x = heavy(5, 24)
    form = low_bit(dtype=f"int{bits}" if symmetric else f"uint{bits}", group_size=group, symmetric=symmetric)
    hessian = (x.double().T @ x.double() / len(x)).float()
    found = clipping.search(weight, form, hessian)
    clipped = choose(weight, form, "minmax", clip=found)
    weights = decode(encode(weight, clipped, form), clipped, form).double()
    assert found.shape == (5, 24 // group)
    assert found.min() < 1
    for row in range(5):
        for i in range(24 // group):
            part = slice(i * group, (i + 1) * group)
            tokens = x[:, part].double()
            tried = [
                weight[row, part].double() - rounded(weight[row, part], p, bits, symmetric) for p in PARTS
            ]
            errors = [float((tokens @ error).square().sum()) for error in tried]
            own = float((tokens @ (weight[row, part].double() - weights[row, part])).square().sum())
            assert own == pytest.approx(min(errors), rel=1e-4)
            assert float(found[row, i]) == pytest.approx(PARTS[errors.index(min(errors))])


def test_the_whole_range_is_kept_where_nothing_is_better():
    weight = torch.tensor([[-7.0, -3, 0, 1, 2, 5, 6, 7]])  # on the grid of 4 bits
    form = low_bit(dtype="int4", group_size=-1)
    assert clipping.search(weight, form, torch.eye(8)).tolist() == [[1.0]]


SOLVERS = [RTN(), *(GPTQ(order=order) for order in ("none", "groups", "static")), GPTQ(static_groups=True)]


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_solvers_find_ranges_for_clipped_weights(solver):
    weight, x = heavy(6, 32)
    weight.clamp_(-4, 4)
    weight[:, ::4] = 4.0  # the largest of each group stay the largest, whatever is fed back
    inputs = InputStatistics.empty(32, hessian=True)
    inputs.add(x)
    form, clip = low_bit(dtype="int4", group_size=8), torch.full((6, 4), 0.6)
    clip[0, 1] = 1.0
    scale = solver.solve(
        Problem(name="", weight=weight, form=form, rule="minmax", inputs=inputs, clip=clip)
    ).params.scale
    whole = solver.solve(
        Problem(name="", weight=weight, form=form, rule="minmax", inputs=inputs)
    ).params.scale
    assert bool((scale[1:] < 0.95 * whole[1:]).all())
    if solver.name == "rtn" or solver.static_groups or solver.order == "static":
        assert torch.allclose(scale, clip * 4 / 7)
        assert torch.allclose(whole, torch.full_like(whole, 4 / 7))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q_proj, self.k, self.up, self.down = (
            nn.LayerNorm(24),
            *(nn.Linear(24, 24) for _ in range(4)),
        )

    def forward(self, x):
        hidden = self.norm(x)
        mixed = (self.q_proj(hidden) @ self.k(hidden).transpose(1, 2)).softmax(2) @ hidden
        return x + self.down(self.up(mixed).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model_with_outliers():
    model = Model().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                weight, _ = heavy(24, 24)
                module.weight.copy_(weight * 0.1)
            if isinstance(module, nn.LayerNorm):
                module.weight[::7] = 0.05
    return model


FORM = low_bit(dtype="int3", group_size=12)


def scope_of(block, rule):
    x = torch.randn(4, 16, 24)
    targets = {}
    for layer in layers_of(block):
        inputs = InputStatistics.empty(24, hessian=True)
        handle = layer.module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.add(args[0]))
        with torch.no_grad():
            block(x)
        handle.remove()
        targets[f"blocks.0.{layer.name}"] = Target(module=layer.module, form=FORM, rule=rule, inputs=inputs)
    return Scope(model=block, module=block, prefix="blocks.0", targets=targets, samples=[((x,), {})])


def error_of(scope, name, clip):
    target = scope.targets[name]
    weight = scale_sets.weight_of(target)
    after = (
        RTN()
        .solve(Problem(name="", weight=weight, form=FORM, rule=target.rule, inputs=target.inputs, clip=clip))
        .dequantize()
    )
    return scale_sets.BlockError(scope, 1000)({name.removeprefix("blocks.0."): after}), weighted_loss(
        weight, after, target.inputs
    )


def test_clipped_layers_lose_less_and_queries_and_keys_are_left_alone():
    block = model_with_outliers().blocks[0]
    scope = scope_of(block, "minmax")
    applied = nc.AWQ(grid=1, duo_scaling=False).apply(scope)  # the only exponent is 0: no scale
    assert "blocks.0.down" in scope.clips
    assert set(scope.clips) <= {"blocks.0.up", "blocks.0.down"}
    assert f"ranges clipped in {', '.join(scope.clips)}" in applied.text
    for name, clip in scope.clips.items():
        assert all(
            a < b for a, b in zip(error_of(scope, name, clip), error_of(scope, name, None), strict=True)
        )
        assert float(clip.min()) >= 0.55 - 1e-6


RULES = [
    ("minmax", None, True),
    ("minmax", False, False),
    ("wls", None, False),
    ("mse", None, False),
    ("mse", True, True),
]


@pytest.mark.parametrize(("rule", "clip", "clipped"), RULES)
def test_clip_says_for_which_range_rules(rule, clip, clipped, monkeypatch):
    monkeypatch.setattr(
        scale_sets.BlockError,
        "__call__",
        lambda _, weights: float(sum(w.double().abs().sum() for w in weights.values())),
    )
    asked = []
    search = clipping.search
    monkeypatch.setattr(clipping, "search", lambda *a: asked.append(a[3]) or search(*a))
    nc.AWQ(grid=1, duo_scaling=False, clip=clip).apply(scope_of(model_with_outliers().blocks[0], rule))
    assert asked == [rule, rule] * clipped


def test_statistics_follow_the_scales_that_were_folded():
    """What the search is given for a layer behind a scaled norm is what the layer gets now."""
    torch.manual_seed(1)
    block = model_with_outliers().blocks[0]
    with torch.no_grad():
        block.norm.weight[3] = 30.0
    scope = scope_of(block, "minmax")
    seen = {}
    search = clipping.search

    def spied(weight, form, hessian, *rest):
        seen[weight.data_ptr()] = hessian
        return search(weight, form, hessian, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "search", spied)
        patch.setattr("nc.algorithms.transforms.clip._QUERIES_AND_KEYS", re.compile("^nothing$"))
        applied = nc.AWQ(grid=6).apply(scope)
    assert "sets scaled" in applied.text
    assert "0 of" not in applied.text
    (x,) = scope.samples[0][0]
    with torch.no_grad():
        now = block.norm(x).reshape(-1, 24).double()
    assert torch.allclose(
        seen[block.q_proj.weight.data_ptr()].double(), now.T @ now / len(now), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("solver", [RTN(), GPTQ()], ids=lambda s: s.name)
def test_the_workflow_clips_and_counts_what_is_clipped(solver):
    model = model_with_outliers()
    data = [torch.randn(4, 16, 24) for _ in range(2)]
    results = {}
    for clip in (False, None):
        awq = nc.AWQ(grid=1, duo_scaling=False, clip=clip)
        config = nc.WeightOnlyConfig("int3", group_size=12, w_algo="minmax", solver=solver, transforms=[awq])
        prepared = nc.prepare(model, config)
        for x in data:
            prepared(x)
        results[clip] = nc.convert(prepared, backend="reference")
    plain, clipped = (nc.report(results[clip]) for clip in (False, None))
    assert "ranges clipped in" in clipped.text(details=True)
    assert "ranges clipped" not in str(plain)
    losses = {layer.operator: layer.loss for layer in plain.layers}
    first = {layer.operator: layer.loss for layer in clipped.layers if layer.operator.startswith("blocks.0.")}
    text = clipped.applied[0].text.partition("ranges clipped in ")[2].partition(";")[0]
    named = text.split(", ")
    assert all(name in first for name in named)
    if solver.needs.data:  # without it, and without a change, the loss is that of the weights
        assert all(first[name] < losses[name] for name in named)
    # of the weights that the user gave: the loss counts what is clipped
    for name in named:
        layer, packed = model.get_submodule(name), results[None].get_submodule(name).packed
        assert (packed.dequantize() - layer.weight).abs().max() < 3
        assert first[name] > 0

"""Transforms know all readers of what they scale, also those that calibration did not reach.

A norm whose readers can't be known is left alone with a reason, and a transform by which a block loses more is
undone.
"""

import pytest
import torch
import transformers
from suites.reports import said
from torch import nn
from torch.nn import functional as F

import nc
from nc.algorithms.transforms import smooth
from nc.algorithms.transforms.folding import fold, gain_offset, rewrite
from nc.algorithms.transforms.structure import difference, links_of
from nc.formats.tensor_format import low_bit
from nc.planning.layer_plan import LayerDecision
from nc.weights.block_validation import BlockValidation, Tokens, divided, held_out

WIDTH = 32
TRANSFORMS = [nc.AWQ(grid=4), nc.Smooth(), nc.TEQ(steps=4), nc.Rotation()]


class Norm(nn.Module):
    """A norm of root mean squares, with a gate where it gets one."""

    def __init__(self, size=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x, *gate):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return x * F.silu(gate[0]) if gate else x


class Block(nn.Module):
    """`paths` reads the result of a norm, and some of its linears."""

    def __init__(self, paths, linears=2):
        super().__init__()
        torch.manual_seed(0)
        self.norm = Norm()
        self.e = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(linears))
        self.paths = paths

    def forward(self, x):
        return x + self.paths(self, x, self.norm(x))


def two_experts(block, x, h):
    mask, out = x[..., 0] > 0, torch.zeros_like(h)
    out[~mask] = block.e[0](h[~mask])
    out[mask] = block.e[1](h[mask])
    return out


def expert_or_itself(block, x, h):
    mask, out = x[..., 0] > 0, torch.zeros_like(h)
    out[~mask] = block.e[0](h[~mask])
    out[mask] = h[mask]
    return out


def chosen(block, x, h):
    return torch.where(x[..., :1] > 0, h, block.e[0](h))


def if_any(block, x, h):
    return block.e[0](h) + h if (x[..., 0] > 0).any() else block.e[0](h)


def by_a_mask_in_numpy(block, x, h):
    mask, out = torch.from_numpy((x[..., 0] > 0).numpy()), torch.zeros_like(h)
    out[~mask] = block.e[0](h[~mask])
    out[mask] = 2 * h[mask]
    return out


def if_large(block, x, h):
    return block.e[0](h) + h if float(x[..., 0].max()) > 0 else block.e[0](h)


def if_long(block, x, h):
    return block.e[0](h) + (block.e[1](h) if x.shape[1] > 50 else 0)


def data(sign, seed=0, rows=2):
    """Tokens whose first channel has that sign: the path of `Block` depends on it."""
    x = torch.randn(rows, 12, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[..., 1:5] *= 10
    x[..., 0] = x[..., 0].abs() * sign
    return x


def quantized(model, *transforms, samples, dtype="int8"):
    config = nc.WeightOnlyConfig(dtype, group_size=16, solver=nc.RTN(), transforms=list(transforms))
    prepared = nc.prepare(model, config)
    for sample in samples:
        prepared(sample)
    return nc.convert(prepared)


def same_bits(one, other):
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.name)
def test_a_norm_is_left_alone_if_calibration_missed_a_reader(transform):
    """Scaled for the tokens of one expert, the other one's lost 20 to 35 dB."""
    model = nn.Sequential(Block(two_experts), nn.Linear(WIDTH, WIDTH)).eval()
    calibration = [data(-1, seed) for seed in range(5)]
    plain, q = (quantized(model, *some, samples=calibration) for some in ((), (transform,)))
    assert torch.equal(q[0].norm.weight, model[0].norm.weight)
    assert all(same_bits(a, b) for a, b in zip(plain[0].e, q[0].e, strict=True))
    text = "; ".join(a.text for a in nc.report(q).applied)
    assert transform.name == "rotation" or "no token that scales are fitted to reached '0.e.1'" in text


@pytest.mark.parametrize(
    ("paths", "linears", "reason"),
    [
        (expert_or_itself, 1, "norm: index_put_ reads its result too"),
        (by_a_mask_in_numpy, 1, "norm: mul reads its result too"),
        (chosen, 1, "norm: where reads its result too"),
        (if_any, 1, "norm: add reads its result too"),
        (if_large, 1, "a number that item() reads may decide what is called"),
        (if_long, 2, "nothing called 'e.1', which may read it"),
    ],
)
def test_what_reads_a_norm_on_a_path_that_was_not_taken(paths, linears, reason):
    block = Block(paths, linears).eval()
    links, why = links_of(block, ((data(-1),), {}))
    assert not [link for link in links if link.norm]
    assert reason in [f"{name}: {text}" if name else text for name, text in why.items()]
    for transform in TRANSFORMS[:3]:
        q = quantized(block, transform, samples=[data(-1, seed) for seed in range(3)])
        assert torch.equal(q.norm.weight, block.norm.weight)
        assert said(nc.report(q)).count(reason.partition(": ")[2] or reason)


def routed(block, x, h):
    """Of each token the best expert."""
    place, out = block.e[0](h).topk(1, -1)[1][..., 0], torch.zeros_like(h)
    for i in range(1, len(block.e)):
        mask = place == i
        out[mask] = block.e[i](h[mask])
    return out


def test_all_experts_read_what_some_tokens_of_a_sample_show():
    """Of 9 experts 2 tokens reach at most 2; the readers are known all the same."""
    block = Block(routed, 9).eval()
    call = ((data(1, rows=1)[:, :2],), {})
    (link,) = [link for link in links_of(block, call)[0] if link.norm]
    assert set(link.consumers) == {f"e.{i}" for i in range(9)}
    assert all(torch.equal(channels, torch.arange(WIDTH)) for channels in link.channels)
    x = data(1, seed=4)
    with torch.no_grad():
        before = block(x)
        rewrite(block, call, lambda wide: fold(wide, link, torch.rand(WIDTH) + 0.5))
        assert difference(before, block(x)) < 1e-5


@pytest.mark.parametrize("transform", TRANSFORMS[:3], ids=lambda t: t.name)
def test_samples_that_miss_an_expert(transform):
    block = Block(two_experts).eval()
    samples = [data(sign, seed) for seed in range(4) for sign in (-1, 1)]
    q = quantized(block, transform, samples=samples, dtype="int4")
    (applied,) = nc.report(q).applied
    assert "1 of 1 sets scaled" in applied.text or "undone" in applied.text or "no scales" in applied.text
    for sign in (-1, 1):
        x = data(sign, 77)
        plain = quantized(block, samples=samples, dtype="int4")
        lost, least = (float((m(x) - block(x)).square().mean()) for m in (q, plain))
        assert lost < 1.5 * least


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.norm, self.out = nn.Linear(WIDTH, WIDTH), Norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.norm(x, self.gate(x)))


@pytest.mark.parametrize("transform", TRANSFORMS[:3], ids=lambda t: t.name)
def test_a_norm_with_a_gate(transform):
    block = Gated().eval()
    with torch.no_grad():
        block.norm.weight[::16] *= 30
    (link,) = [link for link in links_of(block, ((data(1),), {}))[0] if link.norm]
    assert link.consumers == ("out",)
    assert gain_offset(block.norm.double(), link.call) == 0
    block.float()
    q = quantized(block, transform, samples=[data(1, seed) for seed in range(4)], dtype="int4")
    assert " of 1 sets scaled" in nc.report(q).applied[0].text


@pytest.mark.skipif(not hasattr(transformers, "Qwen3NextConfig"), reason="transformers is too old")
def test_a_model_whose_norms_have_gates():
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **sizes,
        **heads,
        **linear,
        **experts,
        linear_num_key_heads=2,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    )
    model = transformers.Qwen3NextForCausalLM(config).eval()
    ids = [torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(s)) for s in range(4)]
    q = quantized(model, nc.Smooth(), samples=ids)
    with torch.no_grad():
        expected, found = (m(ids[0]).logits for m in (model, q))
    assert difference(expected, found) < 0.2


def test_a_transform_that_makes_a_block_worse_is_undone(monkeypatch):
    """Bit for bit, and the report says so."""
    monkeypatch.setattr(smooth.Smooth, "_scale", lambda *_: torch.logspace(-2, 2, WIDTH))
    model = nn.Sequential(Block(lambda b, x, h: b.e[0](h), 1), Block(lambda b, x, h: b.e[0](h), 1)).eval()
    samples = [data(1, seed) for seed in range(5)]
    plain, q = (quantized(model, *some, samples=samples) for some in ((), (nc.Smooth(),)))
    assert same_bits(q, plain)
    applied = nc.report(q).applied
    assert [a.operators for a in applied] == [(), ()]
    assert all(": undone: the block's output loses" in a.text for a in applied)
    assert all("24 tokens that were held out, too few to know what others lose" in a.text for a in applied)


def judge(block, samples):
    form = low_bit(dtype="int4", group_size=16)
    decisions = {
        f"block.e.{i}": LayerDecision(
            operator=f"block.e.{i}", kind="linear", module_type="", shape=(WIDTH, WIDTH), form=form
        )
        for i in range(2)
    }
    calls = [((x,), {}) for x in samples]
    keeps = [None] * len(calls)
    return BlockValidation(block, "block", decisions, Tokens(calls, keeps, len(calls), calls, keeps))


def test_the_harm_of_an_expert_is_not_averaged_away():
    """The output gets better, because most tokens go to the other expert."""
    block = Block(two_experts).eval()
    mixed = torch.cat([data(-1, rows=20), data(1, rows=1)])
    judged = judge(block, [mixed])
    clip = torch.full((WIDTH, 2), 0.3)
    plain, changed = (judged.loss({name: clip}) for name in ("block.e.0", "block.e.1"))
    assert changed.output < plain.output
    assert changed.parts["block.e.1"][2] == 12
    assert changed.why_worse(plain).startswith("'block.e.1', which 12 of the tokens reach, loses")
    assert not plain.why_worse(plain)
    with torch.no_grad():
        expected = block(mixed)
        rounded = judged._rounded({"block.e.0": clip})(mixed)
    error = (rounded - expected).double().square().sum() / expected.double().square().sum()
    assert plain.output == pytest.approx(float(error), rel=1e-6)


def by_a_layer(block, x, h):
    score = block.e[0](h)[..., :1]
    return torch.where(score > 0, h, -h) + block.e[1](h)


def test_tokens_that_go_elsewhere_are_counted(monkeypatch):
    """Where decisions are those of the float block, what rounding makes of them is not seen."""
    block = Block(by_a_layer).eval()
    x = data(1, rows=40)
    judged = judge(block, [x])
    rounded = BlockValidation._rounded

    def with_other_scores(self, clips):
        found = rounded(self, {})
        if clips:
            found.e[0].register_forward_hook(lambda *call: -call[-1])
        return found

    monkeypatch.setattr(BlockValidation, "_rounded", with_other_scores)
    plain, changed = judged.loss({}), judged.loss({"block.e.0": torch.ones(1)})
    assert changed.output == plain.output
    with torch.no_grad():
        expected = block(x)
        other = with_other_scores(judged, {"block.e.0": torch.ones(1)})(x)
    error = (other - expected).double().square().sum() / expected.double().square().sum()
    assert changed.chosen == pytest.approx(float(error), rel=1e-6)
    assert changed.chosen > 10 * plain.chosen
    assert "because other tokens take another path" in changed.why_worse(plain)
    assert not plain.why_worse(changed)
    assert f"and {plain.chosen:.1e} → {changed.chosen:.1e} where rounded layers choose" in plain.text(changed)


def test_which_tokens_are_held_out():
    assert [sorted(held_out(n)) for n in (0, 1, 2, 3, 4, 9)] == [[], [], [1], [2], [3], [3, 7]]
    linear, x = nn.Linear(4, 4).eval(), torch.randn(8, 3, 4)
    keep = torch.ones(8, 3, dtype=torch.bool)
    some = divided(linear, [((x,), {})] * 5, [None] * 5, 5, held_out(5))
    assert (len(some.calls), len(some.held), some.counted, some.are_others) == (4, 1, 4, True)
    rows = divided(linear, [((x,), {})], [keep], 1, set())
    assert torch.equal(rows.calls[0][0][0], x[:6])
    assert torch.equal(rows.held[0][0][0], x[6:])
    assert (rows.held_keeps[0].shape, rows.are_others) == ((2, 3), True)

    class OfAllRows(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    for module, one in ((OfAllRows(), x), (linear, x[:1])):
        same = divided(module, [((one,), {})], [None], 1, set())
        assert not same.are_others
        assert len(same.held) == len(same.calls) == 1

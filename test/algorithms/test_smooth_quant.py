"""SmoothQuant: the fp32 function stays, outliers move, and a model with planted outliers recovers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import FP32, call, graph_of
from torch import nn
from torch.nn import functional as F

from nc import (
    ConfigError,
    SmoothQuantConfig,
    StateError,
    StaticQuantConfig,
    available_backends,
    convert,
    describe,
    load,
    prepare,
)
from nc.algorithms.smooth_quant import smooth
from nc.calibration.statistics import Samples
from nc.formats import OpSpec, SmoothSpec, TensorFormat
from nc.numerics.metrics import sqnr_db
from nc.numerics.smoothing import scales_for

ACTIVATION = TensorFormat(dtype="uint8", symmetric=False)
WEIGHT = TensorFormat(dtype="int8", symmetric=True, granularity="per_channel", narrow=True)
ENGINES = [name for name, why in available_backends().items() if name in ("ipex", "reference") and not why]


OUTLIERS = [3, 7, 20]


class Block(nn.Module):
    """A transformer block (pre-norm) with outliers planted in three channels of what its linears read."""

    def __init__(self, width=32, factor=50.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        with torch.no_grad():  # the function is that of a block without them
            for norm, readers in ((self.norm1, (self.q, self.k, self.v)), (self.norm2, (self.up,))):
                norm.weight[OUTLIERS] *= factor
                for linear in readers:
                    linear.weight[:, OUTLIERS] /= factor

    def forward(self, x):
        y = self.norm1(x)
        scores = F.softmax(self.q(y) @ self.k(y).transpose(-1, -2) / 4, -1)
        x = x + self.o(scores @ self.v(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(factor=50.0):
    return nn.Sequential(Block(factor=factor), Block(factor=factor)).eval()


def data(batches=4):
    return [torch.randn(3, 8, 32) for _ in range(batches)]


def quantized(model, config, batches, backend="reference", **options):
    prepared = prepare(model, config, example_inputs=batches[0], backend=backend, **options)
    for batch in batches:
        call(prepared, batch)
    return convert(prepared, **({} if backend == "reference" else {"isolate": "never"}))


def smoothed(model, x, **options):
    graph = graph_of(model, x)
    spec = OpSpec(activation=ACTIVATION, weight=WEIGHT, smooth=SmoothSpec(**{"alpha": 0.5, **options}))
    specs = {op.name: spec for op in graph.operators if op.kind == "linear"}
    values = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node):
            values[node.name] = super().run_node(node)
            return values[node.name]

    Recorder(graph.module).run(x)
    rows = {
        name: v.reshape(-1, v.shape[-1])
        for name, v in values.items()
        if isinstance(v, torch.Tensor) and v.dim() > 1
    }
    channels = {name: (v.amin(0), v.amax(0)) for name, v in rows.items()}
    return graph, smooth(graph.module, specs, channels, [(x,)])


# ---- scales ----


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 0), st.floats(0, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 1),
    st.sampled_from(["max", "min", "mean"]),
)
def test_scales_are_those_of_equation_4(channels, alpha, criterion):
    low, high, a, b = (torch.tensor(column, dtype=torch.float64) for column in zip(*channels, strict=True))
    got = scales_for(alpha, low, high, [a[None], -b[None]], criterion)
    combine = {"max": max, "min": min, "mean": lambda p, q: (p + q) / 2}[criterion]
    for i, (lo, hi, wa, wb) in enumerate(channels):
        x = max(-lo, hi)
        expected = 1.0 if x == 0 else max(x**alpha / combine(wa, wb) ** (1 - alpha), 1e-5)
        assert got[i].item() == pytest.approx(expected, rel=1e-9)


def test_dead_channels_and_dead_weights_give_finite_scales():
    low, high = torch.tensor([0.0, -1.0, 0.0]).double(), torch.tensor([0.0, 2.0, 0.0]).double()
    for alpha in (0.0, 0.5, 1.0):
        scales = scales_for(alpha, low, high, [torch.tensor([[1.0, 0.0, 0.0]]).double()], "max")
        assert bool(torch.isfinite(scales).all())
        assert bool((scales > 0).all())
        assert scales[0] == scales[2] == 1.0


# ---- the fp32 function ----


@pytest.mark.parametrize("options", [
    {}, {"folding": True}, {"scale_sharing": True}, {"alpha": None}, {"alpha": None, "do_blockwise": True, "folding": True},
    {"alpha": 0.0}, {"alpha": 1.0, "folding": True}, {"shared_criterion": "mean", "scale_sharing": True},
], ids=str)  # fmt: skip
def test_the_fp32_function_stays(options):
    model, x = transformer(), torch.randn(3, 8, 32)
    graph, result = smoothed(model, x, **options)
    more = torch.randn(5, 3, 32) * 3
    for value in (x, more):
        expected, got = graph.module(value)[0], result.module(value)[0]
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    assert torch.equal(graph.module(x)[0], model(x))  # and the graph is the one that it was


def multiplications(module):
    return sum(str(n.target) == "aten.mul.Tensor" for n in module.graph.nodes)


def test_where_the_scales_go():
    x = torch.randn(3, 8, 32)
    _, single = smoothed(transformer(), x)
    assert multiplications(single.module) == 12  # each linear has its own
    _, shared = smoothed(transformer(), x, scale_sharing=True)
    assert multiplications(shared.module) == 8  # q, k and v have one
    _, folded = smoothed(transformer(), x, folding=True)
    assert multiplications(folded.module) == 4  # behind attention and gelu nothing takes them
    assert {name.split(".")[1] for name in folded.folded} == {"q", "k", "v", "up"}
    assert single.folded == shared.folded == frozenset()


class Residual(nn.Module):
    """A post-norm block: what the linear reads is read by an addition too."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.next = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return y + self.next(self.fc(y))


def test_a_tensor_with_another_reader_is_not_folded_into():
    x = torch.randn(4, 16)
    graph, result = smoothed(Residual(), x, folding=True)
    assert result.folded == {"next"}  # into fc's rows and bias
    assert torch.allclose(result.module(x)[0], graph.module(x)[0], rtol=1e-4, atol=1e-4)


def test_linears_of_one_input_with_alphas_of_their_own_do_not_share():
    model, batches = transformer(), data()
    config = SmoothQuantConfig(scale_sharing=True, folding=True).set_local(
        "0.k", SmoothQuantConfig(alpha=0.9)
    )
    q = quantized(model, config, batches)
    assert q.graph.plan["0.k"].spec.smooth.alpha == 0.9
    assert q.graph.plan["0.q"].spec.smooth.alpha == 0.5
    assert sqnr_db(model(batches[0]), q(batches[0])) > 25


def test_normalisations_without_weights_and_root_mean_squares():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.bare, self.rms = nn.LayerNorm(16, elementwise_affine=False), nn.RMSNorm(16)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.b(self.rms(self.a(self.bare(x))))

    x = torch.randn(4, 16)
    graph, result = smoothed(Norms(), x, folding=True)
    assert "a" not in result.folded
    assert torch.allclose(result.module(x)[0], graph.module(x)[0], rtol=1e-4, atol=1e-4)


def test_tied_weights_stay_tied_to_nobody():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(F.gelu(self.a(x)))

    x, model = torch.randn(4, 16), Tied()
    before = model.a.weight.clone()
    graph, result = smoothed(model, x)
    assert torch.allclose(result.module(x)[0], graph.module(x)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(model.a.weight, before)


# ---- quantized ----


@pytest.mark.parametrize("backend", ENGINES)
def test_planted_outliers_cost_static_and_not_smoothquant(backend):
    model, batches, x = transformer(), data(12), torch.cat(data(8))
    noise = {}
    for name, config in {
        "static": StaticQuantConfig(),
        "smooth": SmoothQuantConfig(),
        "folded": SmoothQuantConfig(folding=True),
        "auto": SmoothQuantConfig(alpha="auto", folding=True),
    }.items():
        q = quantized(model, config, batches, backend)
        noise[name] = sqnr_db(model(x), q(x))
        if backend == "ipex":
            assert all(op.ran == "int8" for op in q.report().ops if op.kind == "linear")
    assert min(noise["smooth"], noise["folded"], noise["auto"]) > noise["static"] + 6, noise


def test_ranges_are_those_of_the_smoothed_tensors():
    """Min-max over all batches, against a second pass over the smoothed graph."""
    model, batches = transformer(), data(5)
    q = quantized(model, SmoothQuantConfig(folding=True, post=()), batches)
    plan = q.graph.plan["0.q"]
    scale = next(n.args[1] for n in q.graph.module.graph.nodes if n.name.startswith("quantize"))
    graph = graph_of(model, batches[0])
    low = torch.stack([model[0].norm1(x).amin((0, 1)) for x in batches]).amin(0).double()
    high = torch.stack([model[0].norm1(x).amax((0, 1)) for x in batches]).amax(0).double()
    weights = [layer.weight.double() for layer in (model[0].q, model[0].k, model[0].v)]
    s = scales_for(plan.spec.smooth.alpha, low, high, weights, "max")
    assert scale == pytest.approx(((high / s).max() - (low / s).min()).item() / 255, rel=1e-5)
    assert graph.operator("0.q").kind == "linear"


def test_other_algorithms_look_at_the_samples_again():
    model, batches = transformer(), data()
    q = quantized(model, SmoothQuantConfig(act_algo="percentile", percentile=100.0), batches)
    minmax = quantized(model, SmoothQuantConfig(), batches)
    scales = [
        [n.args[1] for n in m.graph.module.graph.nodes if n.name.startswith("quantize")] for m in (q, minmax)
    ]
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)  # the whole range either way


def test_auto_is_no_worse_than_any_alpha_of_its_grid():
    """By the criterion that it minimises: the output error of each linear."""
    model, batches = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32, bias=False)).eval(), data()
    with torch.no_grad():
        model[0].weight[:2] *= 30
    errors = {}
    for alpha in ("auto", 0.0, 0.25, 0.5, 0.75, 1.0):
        q = quantized(model, SmoothQuantConfig(alpha=alpha, alpha_step=0.25, folding=True, post=()), batches)
        errors[alpha] = sum((q(x) - model(x)).square().sum().item() for x in batches)
    best = min(error for alpha, error in errors.items() if alpha != "auto")
    assert errors["auto"] <= best * 1.05


def test_alpha_stays_where_no_other_is_better():
    model, batches = nn.Sequential(nn.Linear(4, 4)), [torch.zeros(2, 4), torch.zeros(2, 4)]
    q = quantized(model.eval(), SmoothQuantConfig(alpha="auto", init_alpha=0.3), batches)
    assert q.graph.plan["0"].spec.smooth.alpha == 0.3


def test_blockwise_finds_one_alpha_for_each_block():
    q = quantized(transformer(), SmoothQuantConfig(alpha="auto", do_blockwise=True, alpha_step=0.2), data())
    alphas = {d.operator: d.spec.smooth.alpha for d in q.graph.plan.quantized if d.spec.smooth}
    for _, names in itertools.groupby(sorted(alphas), key=lambda name: name[0]):
        assert len({alphas[name] for name in names}) == 1
    assert None not in alphas.values()


def test_fallback_by_name_and_by_type():
    model, batches = transformer(), data()
    config = (
        SmoothQuantConfig()
        .set_local("0.up", FP32)
        .set_local("1.up", StaticQuantConfig())
        .exclude(torch.matmul)
    )
    q = quantized(model, config, batches)
    plan = q.graph.plan
    assert not plan["0.up"].spec.quantized
    assert plan["1.up"].spec.quantized
    assert plan["1.up"].spec.smooth is None
    assert plan["1.down"].spec.smooth.alpha == 0.5
    assert not any(d.kind == "matmul" for d in plan.quantized)
    only = quantized(model, SmoothQuantConfig().exclude(nn.Linear), batches)
    assert {d.kind for d in only.graph.plan.quantized} == {"matmul"}


def test_statistics_serve_another_alpha(tmp_path):
    model, batches = transformer(), data()
    today = prepare(model, SmoothQuantConfig(), example_inputs=batches[0], backend="reference")
    for batch in batches:
        call(today, batch)
    today.statistics.save(tmp_path / "s")
    tomorrow = prepare(model, SmoothQuantConfig(alpha=0.8), example_inputs=batches[0], backend="reference")
    tomorrow.statistics.load(tmp_path / "s")
    direct = quantized(model, SmoothQuantConfig(alpha=0.8), batches)
    assert torch.equal(convert(tomorrow)(batches[0]), direct(batches[0]))
    static = prepare(model, StaticQuantConfig(act_algo="mse"), example_inputs=batches[0], backend="reference")
    for batch in batches:
        call(static, batch)
    static.statistics.save(tmp_path / "h")
    with pytest.raises(StateError, match="'channel_extremes'"):
        tomorrow.statistics.load(tmp_path / "h")


def test_saved_and_loaded(tmp_path):
    model, batches = transformer(), data()
    q = quantized(model, SmoothQuantConfig(alpha="auto"), batches)
    q.save(tmp_path / "m")
    again = load(tmp_path / "m", backend="reference")
    assert torch.equal(again(batches[0]), q(batches[0]))
    assert again.graph.plan == q.graph.plan


def test_batches_too_large_to_keep(monkeypatch):
    monkeypatch.setattr(Samples, "has_room", lambda self, inputs: False)
    model, batches = transformer(), data()
    quantized(model, SmoothQuantConfig(), batches)
    for config in (SmoothQuantConfig(alpha="auto"), SmoothQuantConfig(act_algo="kl")):
        with pytest.raises(StateError, match="none were kept"):
            quantized(model, config, batches)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 1.5),
        ("alpha", "best"),
        ("alpha", True),
        ("alpha_step", 0.0),
        ("shared_criterion", "sum"),
        ("folding", 1),
    ],
)
def test_values_that_can_not_be(field, value):
    with pytest.raises(ConfigError, match=field):
        SmoothQuantConfig(**{field: value})


def test_neural_compressors_way_to_say_it():
    config = SmoothQuantConfig(alpha="auto", auto_alpha_args={"alpha_min": 0.2, "do_blockwise": True})
    assert (config.alpha_min, config.do_blockwise) == (0.2, True)
    assert SmoothQuantConfig.from_dict(config.to_dict()) == config


def test_linears_behind_attention_are_quantized_without_it():
    q = quantized(transformer(), SmoothQuantConfig(), data())
    assert q.graph.plan["0.o"].spec.smooth is None
    assert q.graph.plan["0.o"].spec.quantized
    assert q.graph.plan["0.q"].spec.smooth is not None
    assert "alpha" in q.graph.plan.explain("0.o")
    assert "reads a matmul's result" in q.graph.plan.explain("0.o")
    (line,) = [a.text for a in q.report().algorithms if a.algorithm == "smooth_quant"]
    assert "; 2 linears that read the result of a matmul (attention) are quantized without it; " in line


@pytest.mark.parametrize(("key", "smoothed"), [("0.o", True), (r"0\..*", True), ("Linear", False)])
def test_a_linear_behind_attention_is_smoothed_where_a_rule_names_it(key, smoothed):
    config = StaticQuantConfig().set_local(key, SmoothQuantConfig(alpha=0.6))
    plan = describe(transformer(), config, data()[0], backend="reference")
    assert (plan["0.o"].spec.smooth is not None) == smoothed
    assert plan["0.q"].spec.smooth is None if key == "0.o" else plan["0.q"].spec.smooth.alpha == 0.6


class WideNorm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(shape), nn.Linear(shape[-1], 8)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)[..., 3] *= 30

    def forward(self, x):
        return self.fc(self.norm(x))


@pytest.mark.parametrize("shape", [[16, 16], [7, 16]])
def test_nothing_is_folded_into_a_norm_over_several_dimensions(shape):
    model, x = WideNorm(shape).eval(), torch.randn(4, *shape)
    with torch.enable_grad():  # IPEX, where it is imported, gets it wrong otherwise
        expected = model(x).detach()
    q = quantized(model, SmoothQuantConfig(folding=True), [x])
    assert sqnr_db(expected, q(x)) > 35


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        h = self.norm(x)
        a = self.a(h)
        h[:, :4] = 5.0
        return a, self.b(h)


@pytest.mark.parametrize("folding", [False, True])
def test_a_tensor_that_changes_between_two_readers_is_smoothed_for_each(folding):
    model, x = InPlace().eval(), torch.randn(8, 16)
    q = quantized(model, SmoothQuantConfig(scale_sharing=True, folding=folding), [x])
    for expected, got in zip(call(model, x), q(x), strict=True):
        assert sqnr_db(expected, got) > 30


def test_the_report_says_that_smoothing_changed_nothing_in_fp32():
    (line,) = [
        a.text
        for a in quantized(transformer(), SmoothQuantConfig(), data()).report().algorithms
        if "before and after" in a.text
    ]
    assert int(line.split()[-2]) > 100


@pytest.mark.parametrize(("limits", "least"), [((0.8, 1.0), 0.8), ((0.0, 1.0), 0.0)])
def test_auto_stays_within_its_limits(limits, least):
    model, x = nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(64, 64)
    with torch.no_grad():
        model[0].weight[:, 5] *= 60
    q = quantized(model, SmoothQuantConfig(alpha="auto", alpha_min=limits[0], alpha_max=limits[1]), [x])
    assert least <= q.graph.plan["0"].spec.smooth.alpha <= limits[1]


def test_the_history_of_each_smoothed_tensor_is_its_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, y):
            return self.a(torch.sigmoid(x)) + self.b(y)

    x, ys = torch.randn(8, 16), [torch.randn(8, 16).clamp(-2, 2) for _ in range(20)]
    ys[-1] = ys[-1] * 50
    prepared = prepare(Two().eval(), SmoothQuantConfig(), example_inputs=(x, x), backend="reference")
    for y in ys:
        prepared(x, y)
    growing = {f.operator: f.value for f in convert(prepared).report().health if f.kind == "still_growing"}
    assert growing.keys() == {"b"}
    assert growing["b"] > 0.9

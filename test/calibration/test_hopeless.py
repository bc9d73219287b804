"""What prepare and convert say of models in which nothing is quantized, which are far from fp32, or slower than it."""

import dataclasses
import math
import warnings

import pytest
import torch
from torch import nn

import nc
from nc.api.preparation import finish
from nc.backends.verdict import Verdict
from nc.calibration.costly import COSTLY, HOPELESS_DB, costly_operators
from nc.numerics.metrics import sqnr_db

X, IMAGE = torch.randn(8, 16), torch.randn(2, 3, 8, 8)


def linears():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()


class Loud(nn.Module):
    """One linear has a few weights that are 500 times as large as the others, and matter little."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 512), nn.Linear(512, 1), nn.Linear(16, 1)
        with torch.no_grad():
            self.b.weight.mul_(0.1)
            self.b.weight[0, :5] = torch.tensor([53.0, 23, -30, 40, -29])
            self.a.weight[:5], self.a.bias[:5] = 0, 1e-4

    def forward(self, x):
        return self.b(self.a(x).tanh()) + 0.01 * self.c(x)


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 8)

    def forward(self, x):
        return self.lstm(x)[0]


def without_kernels(prepared):
    """The graph for a backend that has no kernels."""
    capabilities = dataclasses.replace(prepared.capabilities, backend="bare", ops=())
    return prepared.quantized_graph(capabilities)


def quantized(model, config=None, x=X, **options):
    return nc.quantize(
        model, config or nc.StaticQuantConfig(), lambda p: p(x), example_inputs=x, measure=False, **options
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [nc.StaticQuantConfig(), nc.DynamicQuantConfig(), nc.SmoothQuantConfig()])
def test_a_model_in_another_dtype_is_refused_with_what_to_write(dtype, config):
    model, x = linears().to(dtype), X.to(dtype)
    with pytest.raises(
        nc.errors.InputError, match=r"(?s)0, 2: it computes in torch.*model\.float\(\).*strict=False"
    ):
        quantized(model, config, x)
    with pytest.warns(nc.NCWarning, match=r"model\.float\(\)") as caught:
        quantized(model, config, x, strict=False)
    assert {warning.filename for warning in caught} == {__file__}
    assert quantized(model.float(), config).report().ran_int8 == 2


def test_a_model_for_which_there_is_no_kernel_is_refused():
    with pytest.raises(
        nc.errors.UnsupportedError,
        match=r"for a conv2d only where a rule names it.*nc\.StaticQuantConfig\(\)",
    ):
        quantized(convolutions(), nc.DynamicQuantConfig(), IMAGE)
    with pytest.warns(nc.NCWarning, match="for a conv2d only where a rule names it"):
        quantized(convolutions(), nc.DynamicQuantConfig(), IMAGE, strict=False)
    lone = nn.Sequential(nn.Bilinear(16, 16, 4))
    lone.forward = lambda x: lone[0](x, x)
    with pytest.warns(nc.NCWarning, match="nc has no int8 form of bilinear"):
        quantized(lone.eval())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (nc.StaticQuantConfig().exclude(nn.Linear), "fp32 was asked for"),
        (nc.StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"), "fp32 was asked for"),
    ],
)
def test_what_a_configuration_leaves_in_fp32_itself_is_a_warning(config, text):
    with pytest.warns(nc.NCWarning, match=text):
        quantized(linears(), config)


def test_a_model_without_products_is_a_warning():
    with pytest.warns(nc.NCWarning, match="no operator with products"):
        quantized(nn.Sequential(nn.ReLU(), nn.Softmax(-1)).eval())


def test_one_operator_is_enough():
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        quantized(linears(), nc.StaticQuantConfig().exclude("0"))
        quantized(
            nn.Sequential(nn.Conv2d(3, 8, 8), nn.Flatten(), nn.Linear(8, 2)).eval(),
            nc.DynamicQuantConfig(),
            IMAGE,
        )
        quantized(linears(), nc.StaticQuantConfig(remainder="bf16").exclude("0"))


def test_another_backend_that_has_no_kernel_for_anything():
    prepared = nc.prepare(
        nn.Sequential(Recurrent()).eval(), nc.DynamicQuantConfig(), example_inputs=X[None], backend="native"
    )
    with pytest.warns(
        nc.NCWarning, match="Nothing is quantized: 0.lstm: backend 'bare' has no dynamic int8 kernel for lstm"
    ):
        finish._warn_of_result(prepared.plan, prepared.quant_config, without_kernels(prepared), None)


def test_a_hopeless_model_names_the_operator_that_costs_most():
    torch.manual_seed(0)
    with pytest.warns(
        nc.NCWarning,
        match=r'(?s)HOPELESS accuracy: .* dB.*b \(100%.*config\.exclude\("b"\).*SmoothQuantConfig',
    ) as caught:
        q = quantized(Loud().eval())
    assert {warning.filename for warning in caught} == {__file__}
    report = q.report()
    assert report.sqnr_vs_fp32_db < HOPELESS_DB
    assert [(f.kind, f.operator) for f in report.health][0] == (COSTLY, "b")
    for text in (str(report), report.summary()):
        assert text.startswith("HOPELESS accuracy")
        assert text.count("it alone leaves") == 1


def test_excluding_what_it_names_mends_it():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        q = quantized(Loud().eval(), nc.StaticQuantConfig().exclude("b"))
    assert q.report().sqnr_vs_fp32_db > 25
    assert not q.report().summary().startswith("HOPELESS")
    assert COSTLY not in {f.kind for f in q.report().health}


def test_ways_out_are_those_that_the_model_does_not_take():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 2)).eval()
    model[2].weight.data[:, :5] = torch.tensor([53.0, 23.0, -30.0, 40.0, -29.0])  # of inputs that are all 0
    model[0].weight.data[:5], model[0].bias.data[:5] = 0.0, 0.0
    with pytest.warns(nc.NCWarning, match="HOPELESS") as caught:
        q = quantized(model, nc.DynamicQuantConfig(keep_inaccurate=True))
    assert q.report().sqnr_vs_fp32_db < HOPELESS_DB
    for text in (q.report().summary(), *(str(warning.message) for warning in caught)):
        if "HOPELESS" in text:
            assert 'w_dtype="bf16"' in text
            assert not any(known in text for known in ("Smooth", "per_token", "like real inputs"))


def test_a_saved_hopeless_model_says_so(tmp_path):
    torch.manual_seed(0)
    with pytest.warns(nc.NCWarning, match="HOPELESS"):
        q = quantized(Loud().eval())
    nc.save(q, tmp_path / "q")
    assert (
        nc.load(tmp_path / "q").report().summary().splitlines()[:3] == q.report().summary().splitlines()[:3]
    )


def test_the_share_of_an_operator_is_its_error_alone():
    """Against the graph with all other operators excluded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).eval()
    prepared = nc.prepare(model, nc.StaticQuantConfig(post=()), example_inputs=X, backend="reference")
    prepared(X)
    graph = prepared.quantized_graph()
    found = {
        f.operator: f.value
        for f in costly_operators(prepared.graph.module, graph.module, graph.plan, graph.example)
    }
    noise = {}
    for name in ("0", "2", "4"):
        others = [other for other in ("0", "2", "4") if other != name]
        q = quantized(model, nc.StaticQuantConfig(post=()).exclude(*others), backend="reference")
        noise[name] = 10 ** (-sqnr_db(model(X), q(X)) / 10)
    expected = {
        name: value / sum(noise.values())
        for name, value in noise.items()
        if value >= 0.1 * sum(noise.values())
    }
    assert found == pytest.approx(expected, rel=1e-3)
    assert list(found) == sorted(expected, key=lambda name: -expected[name])


def test_the_measurement_stops_when_its_time_is_over():
    torch.manual_seed(0)
    prepared = nc.prepare(linears(), nc.StaticQuantConfig(), example_inputs=X, backend="reference")
    prepared(X)
    graph, now = prepared.quantized_graph(), iter(range(0, 1000, 10))
    parts = prepared.graph.module, graph.module, graph.plan, graph.example
    assert len(costly_operators(*parts, clock=lambda: next(now))) == 1
    assert math.isclose(sum(f.value for f in costly_operators(*parts)), 1)


@pytest.mark.parametrize(
    ("fp32_ms", "doubt", "warned"), [(1.0, "", True), (1.0, "the machine is busy", False), (3.0, "", False)]
)
def test_a_model_that_is_slower_warns_with_the_rule_to_paste(monkeypatch, fp32_ms, doubt, warned):
    verdict = Verdict(fp32_ms=fp32_ms, engine_ms=2.0, calls=5, threads=1, doubt=doubt)
    monkeypatch.setattr(finish, "speed_verdict", lambda *_, **__: dataclasses.replace(verdict))
    prepared = nc.prepare(linears(), nc.StaticQuantConfig(), example_inputs=X, backend="native")
    prepared(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nc.convert(prepared)
    texts = [str(w.message) for w in caught if issubclass(w.category, nc.NCWarning)]
    assert [text.startswith("SLOWER than fp32: it takes 2.00 times as long") for text in texts] == [
        True
    ] * warned


def deep(count=24):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(64, 64), nn.Tanh())]).eval()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.normal_(std=0.2)
    return model


def low_bit(model, calls, dtype="int2", **options):
    config = nc.WeightOnlyConfig(dtype, group_size=64)
    return nc.quantize(
        model, config, (lambda p: [p(x) for x in calls]) if calls else None, measure=False, **options
    )


def test_a_hopeless_low_bit_model_is_found_by_the_first_call():
    x = torch.randn(8, 64)
    model = deep()
    with pytest.warns(
        nc.NCWarning, match=r"HOPELESS accuracy: .* dB against the float model in the first call"
    ) as caught:
        q = low_bit(model, [x, 100 * x])
    assert {warning.filename for warning in caught} == {__file__}
    report = nc.report(q)
    assert report.sqnr_db == pytest.approx(sqnr_db(model(x), q(x)), abs=0.01)
    assert report.sqnr_db < HOPELESS_DB
    assert report.summary().startswith("HOPELESS accuracy")


def test_a_low_bit_model_that_is_near_says_how_near(tmp_path):
    x = torch.randn(8, 64)
    model = deep(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        q = low_bit(model, [x], "int8")
    expected = sqnr_db(model(x), q(x))
    assert (
        f"outputs in the first call of the prepared model: {expected:.1f} dB against the float model"
        in nc.report(q).summary()
    )
    nc.save(q, tmp_path / "q")
    assert nc.report(nc.load(tmp_path / "q", model=deep(2))).sqnr_db is None


def test_low_bit_layers_that_are_hopeless_by_themselves_need_no_call():
    model = deep(2)
    with pytest.warns(nc.NCWarning, match=r"HOPELESS layers below 10 dB by themselves: [02] \(") as caught:
        q = low_bit(model, [], "uint2")
    assert len(caught) == 1
    name, decibels = nc.report(q).hopeless[0]
    before, after = model.get_submodule(name).weight.detach(), q.get_submodule(name).weight.dequantize()
    assert decibels == pytest.approx(sqnr_db(before, after), abs=0.05)
    assert nc.report(q).sqnr_db is None


def test_padding_and_calls_with_a_cache_do_not_count():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep(2)

        def forward(self, x, attention_mask=None, past_key_values=None):
            y = self.inner(x)
            return y if past_key_values is None else y + past_key_values

    model, x = Padded().eval(), torch.randn(2, 3, 64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    x[1, 1:] = float("nan")

    def run(prepared):
        prepared(x, past_key_values=torch.ones(()))
        prepared(x, attention_mask=mask)

    q = nc.quantize(model, nc.WeightOnlyConfig("int8", group_size=64), run, measure=False)
    assert nc.report(q).sqnr_db == pytest.approx(sqnr_db(model(x)[mask.bool()], q(x)[mask.bool()]), abs=0.01)


def test_a_model_that_keeps_a_state_is_not_compared():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep(2)
            self.register_buffer("sum", torch.zeros(64))
            self.count = 0

        def forward(self, x):
            self.sum += self.inner(x).sum(0)
            self.count += 1
            return self.sum * self.count

    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        q = low_bit(Sums().eval(), [torch.randn(8, 64)] * 2, "int8")
    assert nc.report(q).sqnr_db is None

"""Weights in a few bits, activations in fp32: from configuration to report, on the reference backend, against float64 brute force."""

import numpy as np
import pytest
import torch
from torch import nn

from nc import (
    BackendError,
    ConfigError,
    DynamicQuantConfig,
    StaticQuantConfig,
    UnsupportedError,
    WeightOnlyConfig,
    available_backends,
    convert,
    describe,
    load,
    prepare,
    quantize,
)
from nc.ops import dequantize_per_group

ENGINES = [name for name in ("native", "ipex") if not available_backends()[name]]
X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64).sin()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)).eval()


def q_model(config=None, model=None, x=X):
    return quantize(model or mlp(), config or WeightOnlyConfig(), example_inputs=x, backend="reference")


def rounded(weight, bits, group):
    """A weight's values after rounding to nearest, group by group, in float64."""
    highest = 2 ** (bits - 1) - 1
    weight = weight.detach().double().numpy()
    result = np.empty_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            part = weight[row, start : start + group]
            scale = np.abs(part).max() / highest
            result[row, start : start + group] = np.clip(np.round(part / scale), -highest, highest) * scale
    return torch.from_numpy(result)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (3, 16), (2, 8), (8, 32)])
def test_outputs_are_those_of_weights_rounded_group_by_group(bits, group):
    model = mlp()
    q = q_model(WeightOnlyConfig(w_dtype=f"int{bits}", group_size=group), model)
    first, second = (rounded(m.weight, bits, m.in_features if group == -1 else group) for m in (model[0], model[2]))
    hidden = (X.double() @ first.T + model[0].bias.double()).relu()
    expected = hidden @ second.T + model[2].bias.double()
    assert torch.allclose(q(X).double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(q(X), model(X), rtol=1e-5, atol=1e-6)


def test_the_graph_holds_codes_and_a_scale_per_group():
    q = q_model()
    nodes = [n for n in q.graph.module.graph.nodes if n.target is dequantize_per_group]
    assert len(nodes) == 2
    codes, scale = (getattr(q.graph.module, n.target) for n in nodes[0].args[:2])
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8, (96, 64), (96, 2))
    assert (int(codes.min()), int(codes.max())) == (-7, 7)
    assert not any(name in str(q.graph.module.graph) for name in ("quantize_per_tensor", "_dynamic"))


def test_the_plan_and_the_report_say_what_was_asked():
    plan = describe(mlp(), WeightOnlyConfig(), X, backend="reference")
    assert [d.spec.mode for d in plan.quantized] == ["weight_only"] * 2
    assert "int4 sym per_group 32" in plan.table()
    assert "int4 per_group 32, weight only" in plan.explain("0")
    report = q_model().report()
    assert [(op.asked, op.ran) for op in report.ops if op.kind == "linear"] == [("int4 per_group 32, weight only", "fp32")] * 2
    assert "2 operators with int4 per_group 32, weight only" in str(report)
    assert "simulated" in str(report)
    assert report.sqnr_vs_fp32_db > 15


def test_it_needs_no_calibration_and_rounding_less_costs_less():
    prepared = prepare(mlp(), WeightOnlyConfig(), example_inputs=X, backend="reference")
    assert not prepared.observers
    noise = [q_model(WeightOnlyConfig(w_dtype=f"int{bits}")).graph.sqnr_vs_fp32_db for bits in (2, 4, 6, 8)]
    assert noise == sorted(noise)
    assert noise[-1] - noise[0] > 25


def test_an_artefact_gives_the_same_numbers_and_the_same_bytes(tmp_path):
    q = q_model()
    q.save(tmp_path / "a")
    again = load(tmp_path / "a", backend="reference")
    assert torch.equal(again(X), q(X))
    assert again.graph.plan == q.graph.plan
    again.save(tmp_path / "b")
    for file in ("model.json", "weights.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_weight_only_static_and_dynamic_operators_in_one_model():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)).eval()
    config = StaticQuantConfig().set_local("0", WeightOnlyConfig(group_size=16)).set_local("4", DynamicQuantConfig())
    q = quantize(model, config, lambda m: m(X), example_inputs=X, backend="reference")
    assert {d.operator: d.spec.mode for d in q.graph.plan.quantized} == {"0": "weight_only", "2": "static", "4": "dynamic"}
    assert "2 of" not in str(q.report().summary()).split("\n")[0]
    assert "1 operators with int4 per_group 16, weight only" in q.report().summary()


def test_rules_reach_weight_only_operators():
    config = WeightOnlyConfig().set_local("2", WeightOnlyConfig(w_dtype="int8")).exclude("0")
    plan = describe(mlp(), config, X, backend="reference")
    assert [d.operator for d in plan.quantized] == ["2"]
    assert plan["2"].spec.precision == "int8 per_group 32, weight only"
    assert plan["0"].reason == "fp32 was asked for"


def test_a_group_that_does_not_cover_a_weight_is_refused_with_the_nearest_that_do():
    with pytest.raises(ConfigError, match=r"Operator '2' \(linear, rule: global\): group_size .* 64 .* axis 1 of 96 .* 48 and 96"):
        describe(mlp(), WeightOnlyConfig(group_size=64), X, backend="reference")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"w_dtype": "int9"}, "w_dtype"),
        ({"w_dtype": "uint4"}, "w_dtype"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": True}, "group_size"),
        ({"act_dtype": "bf16"}, "act_dtype='bf16' contradicts w_dtype='int4'"),
        ({"w_dtype": "bf16"}, "contradicts"),
    ],
)
def test_values_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        WeightOnlyConfig(**fields)


def test_a_configuration_comes_back_from_plain_values():
    config = WeightOnlyConfig(w_dtype="int3", group_size=-1).set_local("2", WeightOnlyConfig(group_size=8))
    assert WeightOnlyConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("backend", ENGINES)
def test_an_engine_without_a_kernel_says_so(backend):
    plan = describe(mlp(), WeightOnlyConfig(), X, backend=backend)
    assert not plan.quantized
    assert plan["0"].reason == f"backend {backend!r} has no weight-only kernel for linear"
    prepared = prepare(mlp(), WeightOnlyConfig(), example_inputs=X, backend="reference")
    moved = convert(prepared, backend=backend, measure=False)
    assert not moved.graph.plan.quantized
    assert moved.graph.plan["0"].reason == f"backend {backend!r} has no weight-only kernel for linear"


@pytest.mark.parametrize("backend", ENGINES)
def test_an_engine_that_loads_such_an_artefact_computes_the_same_or_says_what_it_lacks(backend, tmp_path):
    q = q_model()
    q.save(tmp_path)
    try:
        loaded = load(tmp_path, backend=backend)
    except (BackendError, UnsupportedError) as error:
        assert "dequantize_per_group" in str(error)
    else:
        assert torch.allclose(loaded(X), q(X), rtol=1e-5, atol=1e-6)
        assert {op.ran for op in loaded.report().ops if op.kind == "linear"} == {"fp32"}

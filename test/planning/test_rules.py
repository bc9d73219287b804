"""resolve(): which rule decides for which operator, and that every decision can be explained."""

import dataclasses
import warnings

import pytest
import torch
from models import FP32, MLP, Attention, Function, OwnLinear, ResidualCNN, graph_of
from torch import nn
from torch.nn import functional as F

from nc import (
    ConfigError,
    DynamicQuantConfig,
    NCWarning,
    SmoothQuantConfig,
    StaticQuantConfig,
    UnknownFieldError,
    UnmatchedRuleError,
    UnmatchedTypeWarning,
    UnsupportedError,
    available_backends,
    describe,
    get_default_static_config,
    prepare,
    register_backend,
)
from nc.backends import get_backend
from nc.backends.base import Backend
from nc.formats import FLOAT, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Capabilities, OpSupport, TensorFormat
from nc.graph.plan import Plan
from nc.planning.rules import fit, resolve

SYM = StaticQuantConfig(act_sym=True)
INT8 = StaticQuantConfig(act_dtype="int8")
ALL = get_backend("reference").capabilities()


class Ten(nn.Module):
    """fc1 and fc10: the second starts with the name of the first."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc10 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.deep = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        y = self.deep(F.relu(self.fc10(F.relu(self.fc1(x)))))
        return torch.matmul(y, y.transpose(0, 1)) @ torch.matmul(x, x.transpose(0, 1))


@pytest.fixture(scope="module")
def ten():
    return graph_of(Ten(), torch.randn(3, 4))


@pytest.fixture(scope="module")
def cnn():
    return graph_of(ResidualCNN(), torch.randn(2, 3, 8, 8))


def plan_for(graph, *rules, capabilities=ALL, **options):
    config = StaticQuantConfig()
    for key, local in rules:
        config.set_local(key, local)
    return resolve(config, graph, capabilities, **options)


def floats(plan):
    return {d.operator for d in plan.decisions if d.reason == "fp32 was asked for"}


# ---- precedence ----

NAME, PATTERN, LATER, TYPE = "fc1", r"fc\d+", r"fc.*", nn.Linear


@pytest.mark.parametrize(
    ("rules", "winner"),
    [
        ([], "global"),
        ([(TYPE, FP32)], "type 'Linear'"),
        ([(PATTERN, FP32), (TYPE, SYM)], r"pattern 'fc\\d+'"),
        ([(TYPE, SYM), (PATTERN, FP32)], r"pattern 'fc\\d+'"),
        ([(NAME, FP32), (PATTERN, SYM), (TYPE, INT8)], "name 'fc1'"),
        ([(TYPE, INT8), (PATTERN, SYM), (NAME, FP32)], "name 'fc1'"),
        ([(PATTERN, SYM), (LATER, FP32)], "pattern 'fc.*'"),
        ([(LATER, SYM), (PATTERN, FP32)], r"pattern 'fc\\d+'"),
        ([("Linear", SYM), (TYPE, FP32)], "type 'Linear'"),
        ([(NAME, SYM), (NAME, FP32)], "name 'fc1'"),
    ],
)
def test_precedence(ten, rules, winner):
    """Exact name, then pattern (last declared), then type, then global, in whatever order they were declared."""
    decision = plan_for(ten, *rules)["fc1"]
    assert decision.rule == winner
    assert (decision.spec == FLOAT) == bool(rules)  # in each case FP32 is the rule that must win


def test_names_and_patterns_match_whole_names(ten):
    assert floats(plan_for(ten, ("fc1", FP32))) == {"fc1"}
    assert floats(plan_for(ten, (r"fc1.?", FP32))) == {"fc1", "fc10"}
    assert floats(plan_for(ten, (r"deep\..*", FP32))) == {"deep.0", "deep.2"}
    assert floats(plan_for(ten, (r".*\.0", FP32))) == {"deep.0"}


def test_every_call_of_a_module_is_meant_by_its_name():
    graph = graph_of(
        Function(lambda self, x: self.fc(F.relu(self.fc(x))), fc=nn.Linear(4, 4)), torch.randn(2, 4)
    )
    assert floats(plan_for(graph, ("fc", FP32))) == {"fc", "fc@1"}
    assert floats(plan_for(graph, ("fc@1", FP32))) == {"fc@1"}


def test_a_list_of_keys(ten):
    assert floats(plan_for(ten, (["fc1", r"deep\.2", torch.matmul], FP32))) == {
        "fc1",
        "deep.2",
        "matmul",
        "matmul_1",
        "matmul_2",
    }


@pytest.mark.parametrize("key", [nn.Linear, "Linear", "linear", F.linear, torch.addmm])
def test_linears_by_type(ten, key):
    assert floats(plan_for(ten, (key, FP32))) == {"fc1", "fc10", "deep.0", "deep.2"}


@pytest.mark.parametrize("key", [torch.matmul, "matmul", torch.bmm, torch.Tensor.matmul, "bmm"])
def test_matmuls_by_type(ten, key):
    assert floats(plan_for(ten, (key, FP32))) == {"matmul", "matmul_1", "matmul_2"}


@pytest.mark.parametrize("key", [torch.add, "add"])
def test_additions_by_type(cnn, key):
    assert floats(plan_for(cnn, (key, FP32))) == {"add"}


def test_convolutions_by_type(cnn):
    assert floats(plan_for(cnn, (nn.Conv2d, FP32))) == {"stem", "conv1", "conv2"}


def test_own_classes_by_type():
    block = Function(lambda self, x: F.linear(x, self.kernel), kernel=nn.Parameter(torch.randn(4, 4)))
    model = Function(
        lambda self, x: self.own(self.block(self.plain(x))),
        own=OwnLinear(4, 4),
        block=block,
        plain=nn.Linear(4, 4),
    )
    graph = graph_of(model, torch.randn(2, 4))
    linears = {"own", "block.linear", "plain"}
    assert {op.name for op in graph.operators if op.quantizable} == linears
    assert floats(plan_for(graph, (nn.Linear, FP32))) == linears  # a subclass is a Linear
    assert floats(plan_for(graph, (OwnLinear, FP32))) == {"own"}
    assert floats(plan_for(graph, ("OwnLinear", FP32))) == {"own"}
    assert floats(plan_for(graph, (Function, FP32))) == {"block.linear"}
    assert plan_for(graph, (nn.Linear, SYM), (OwnLinear, FP32))["own"].spec == FLOAT  # the last declared type


# ---- rules without effect ----


def test_an_unmatched_name_is_an_error_with_the_closest_names(ten):
    with pytest.raises(
        UnmatchedRuleError, match=r"'fc11' matches no operator.*closest names: fc10?, fc10?.*describe"
    ) as caught:
        plan_for(ten, ("fc11", FP32))
    assert isinstance(caught.value, ValueError)


def test_an_unmatched_name_is_a_warning_when_not_strict(ten):
    with pytest.warns(NCWarning, match="'fc11' matches no operator"):
        plan = plan_for(ten, ("fc11", FP32), strict=False)
    assert plan == plan_for(ten)


def test_a_module_that_is_no_operator_gets_a_hint(ten):
    with pytest.raises(
        UnmatchedRuleError, match=r"a module with 3 operators inside; .*'deep\\\\\.\.\*'"
    ) as caught:
        plan_for(ten, ("deep", FP32))
    pattern = str(caught.value).rpartition("write ")[2].strip(".'").replace("\\\\", "\\")
    assert floats(plan_for(ten, (pattern, FP32))) == {"deep.0", "deep.2"}


@pytest.mark.parametrize("key", [nn.Conv2d, "Conv2d", torch.add, nn.LSTM])
def test_an_unmatched_type_is_a_warning_that_lists_the_types(ten, key):
    with pytest.warns(
        UnmatchedTypeWarning, match="matches no operator of this model; its types: Linear, matmul"
    ):
        plan_for(ten, (key, FP32))


def test_warnings_point_at_the_users_line():
    for step in (prepare, describe):
        with pytest.warns(UnmatchedTypeWarning) as caught:
            step(
                MLP().eval(),
                StaticQuantConfig().set_local("Conv2d", FP32),
                example_inputs=torch.randn(2, 16),
                backend="reference",
            )
        assert caught[0].filename == __file__


def test_a_matched_rule_is_silent(ten):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_for(ten, ("fc1", FP32), (nn.Linear, SYM))


# ---- backends ----


def test_a_dtype_without_a_kernel_names_operator_field_and_what_is_legal(ten):
    limited = Capabilities(
        backend="tiny",
        ops=(
            OpSupport(kind="linear", activations=("uint8",), weights=("int8",)),
            OpSupport(kind="matmul", activations=("int8", "uint8")),
        ),
    )
    plan_for(ten, ("matmul", INT8), capabilities=limited)
    with pytest.raises(
        UnsupportedError,
        match=r"'deep\.2' \(linear\): act_dtype='int8' \(rule: pattern .*backend 'tiny'.*: uint8",
    ):
        plan_for(ten, (r"deep\.[2]", INT8), capabilities=limited)


def test_a_kind_without_a_kernel_stays_fp32_with_the_reason(ten):
    limited = Capabilities(
        backend="tiny", ops=(OpSupport(kind="linear", activations=("uint8",), weights=("int8",)),)
    )
    plan = plan_for(ten, capabilities=limited)
    assert plan["matmul"].spec == FLOAT
    assert plan["matmul"].reason == "backend 'tiny' has no int8 kernel for matmul"
    assert plan["fc1"].spec.quantized


def test_narrow_sums_concern_the_right_hand_side_only(ten):
    narrow_sums = frozenset({("linear", "uint8"), ("matmul", "uint8")})
    plan = plan_for(ten, capabilities=dataclasses.replace(ALL, narrow_sums=narrow_sums))
    linear, matmul = plan["fc1"].spec, plan["matmul"].spec
    assert (linear.activation.reduce_range, linear.weight.paired, linear.right) == (False, True, None)
    assert (matmul.input(0).reduce_range, matmul.input(1).reduce_range) == (False, True)
    assert str(linear.weight) == "int8 sym per_channel paired"
    assert matmul.activations == "uint8 affine, uint8 affine 7-bit"
    other = plan_for(ten, ("fc1", INT8), capabilities=dataclasses.replace(ALL, narrow_sums=narrow_sums))
    assert not other["fc1"].spec.weight.paired


def test_a_plan_for_another_backend(ten):
    plan = plan_for(ten, ("fc10", INT8))
    narrow_sums = frozenset({("linear", "uint8"), ("linear", "int8")})
    rows = tuple(dataclasses.replace(row) for row in ALL.ops if row.kind != "matmul")
    other = fit(plan, Capabilities(backend="other", ops=rows, narrow_sums=narrow_sums, isa=("avx2",)))
    assert (other.backend, other.isa) == ("other", ("avx2",))
    assert other["fc1"].spec.weight.paired
    assert (other["matmul"].spec, other["matmul"].reason) == (
        FLOAT,
        "backend 'other' has no int8 kernel for matmul",
    )
    assert (other["fc1"].rule, other["fc10"].rule) == (plan["fc1"].rule, plan["fc10"].rule)
    assert fit(plan, ALL) is plan
    only_uint8 = tuple(dataclasses.replace(row, activations=("uint8",)) for row in ALL.ops)
    with pytest.raises(
        UnsupportedError, match=r"'fc10' .linear.: act_dtype='int8' .*backend 'other'; legal there: uint8"
    ):
        fit(plan, Capabilities(backend="other", ops=only_uint8))


class TinyBackend(Backend):
    name = "tiny for test_rules"

    def why_unavailable(self):
        return "it is only a test."

    def capabilities(self):
        return Capabilities(backend=self.name, ops=())


def test_registered_backends(monkeypatch):
    import nc.backends

    monkeypatch.setattr(nc.backends, "_REGISTERED", {})
    register_backend(TinyBackend())
    assert get_backend(TinyBackend.name).name == TinyBackend.name
    assert available_backends()[TinyBackend.name] == "it is only a test."
    with pytest.raises(ValueError, match="exists already"):
        register_backend(TinyBackend())


class MisspeltBackend(TinyBackend):
    def capabilities(self):
        return Capabilities(backend=self.name, ops=(OpSupport(kind="linear", activations=("unit8",)),))


def test_names_in_capability_tables_are_checked():
    with pytest.raises(
        ConfigError,
        match=r"Row for 'linear' of a capability table: There is no dtype 'unit8' .* nearest names: uint8",
    ):
        register_backend(MisspeltBackend())
    assert MisspeltBackend.name not in available_backends()
    for fields in ({"weights": ("int_8",)}, {"fake": ("fp8",)}, {"dynamic": ("per_row",)}):
        with pytest.raises(ConfigError, match="Row for 'linear'"):
            OpSupport(kind="linear", **fields)
    with pytest.raises(ConfigError, match="nearest names: int8"):
        Capabilities(backend="x", ops=(), narrow_sums=frozenset({("linear", "int88")}))


def test_granularity_of_a_grouped_transposed_convolution_is_that_of_the_kernel():
    graph = graph_of(nn.ConvTranspose2d(4, 4, 3, groups=2), torch.randn(2, 4, 6, 6))
    decision = resolve(StaticQuantConfig(), graph, ALL).quantized[0]
    assert str(decision.spec.weight.granularity) == "per_tensor"
    assert ("w_granularity", "per_tensor", "kernel") in decision.fields
    rows = tuple(dataclasses.replace(row, grouped_weights=("per_channel",)) for row in ALL.ops)
    decision = resolve(StaticQuantConfig(), graph, dataclasses.replace(ALL, ops=rows)).quantized[0]
    assert str(decision.spec.weight.granularity) == "per_channel"
    assert ("w_granularity", "per_channel", "default") in decision.fields


# ---- decisions ----


def test_every_operator_in_fp32_has_a_reason():
    for model, x in (
        (Ten(), torch.randn(3, 4)),
        (ResidualCNN(), torch.randn(1, 3, 8, 8)),
        (Attention(), torch.randn(1, 3, 32)),
    ):
        plan = plan_for(graph_of(model, x), (".*", StaticQuantConfig()))
        assert all(bool(d.reason) != d.spec.quantized for d in plan.decisions)
        plan = plan_for(graph_of(model, x), (".*", FP32))
        assert all(d.reason and not d.spec.quantized for d in plan.decisions)


def test_defaults_of_each_kind(cnn):
    plan = plan_for(cnn)
    assert [(d.operator, d.kind) for d in plan.quantized] == [
        ("stem", "conv2d"), ("conv1", "conv2d"), ("conv2", "conv2d"), ("add", "add"), ("fc", "linear")
    ]  # fmt: skip
    assert str(plan["stem"].spec.weight) == "int8 sym per_channel"
    assert str(plan["stem"].spec.activation) == "uint8 affine"
    assert plan["add"].spec.weight is None


class Residual(nn.Module):
    """A transformer's residual stream: no int8 operator reads the sum."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.norm(x + self.fc(x)))


def test_additions_that_int8_would_not_help_stay_fp32_unless_a_rule_asks():
    graph = graph_of(Residual(), torch.randn(3, 4))
    assert plan_for(graph)["add"].reason == "no int8 operator reads the sum; it is fused in fp32"
    assert plan_for(graph, ("add", StaticQuantConfig()))["add"].spec.quantized
    assert plan_for(graph, (torch.add, StaticQuantConfig()))["add"].spec.quantized


def test_additions_of_a_shape_that_broadcasts_are_not_quantizable():
    """Engines take one shape on both sides; a free size against a size of 1 is not one shape."""

    def forward(self, x):
        y = F.relu(self.a(x))
        return self.b(self.c(y) + self.d(y.mean(1, keepdim=True)))

    model = Function(forward, **{name: nn.Linear(4, 4) for name in "abcd"})
    plan = plan_for(graph_of(model, torch.randn(2, 3, 4)))
    assert "add" not in [d.operator for d in plan.quantized]


def test_plan_is_the_same_for_the_same_request(ten):
    again = graph_of(Ten(), torch.randn(3, 4))
    assert plan_for(ten) == plan_for(again)
    assert plan_for(ten).fingerprint() == plan_for(again).fingerprint()


def test_fingerprints_differ_with_every_field(ten):
    plans = [
        plan_for(ten),
        plan_for(ten, ("fc1", SYM)),
        plan_for(ten, ("fc1", INT8)),
        plan_for(ten, ("fc1", FP32)),
    ]
    plans += [plan_for(ten, (".*", StaticQuantConfig(w_granularity="per_tensor")))]
    plans += [plan_for(ten, capabilities=dataclasses.replace(ALL, isa=("amx",)))]
    plans += [plan_for(ten, capabilities=dataclasses.replace(ALL, backend="other"))]
    plans += [dataclasses.replace(plan_for(ten), placement="outputs")]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_plan_survives_plain_values(ten):
    plan = plan_for(ten, ("fc1", FP32), (nn.Linear, SYM))
    import json

    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()


def test_codes_as_outputs_are_a_part_of_the_text(ten):
    text = "becomes codes, whoever reads it"
    assert text in str(dataclasses.replace(plan_for(ten), placement="outputs"))
    assert text not in str(plan_for(ten))


def test_the_table_has_a_row_per_operator(ten):
    plan = plan_for(ten, ("fc1", FP32))
    head, _, *rows = plan.table().splitlines()
    assert head.split()[:2] == ["operator", "type"]
    assert [row.split()[0] for row in rows] == [d.operator for d in plan.decisions]
    assert "fp32 was asked for" in rows[0]
    assert "uint8 affine" in rows[2]


def test_describe_is_the_plan_of_prepare():
    x, config = torch.randn(3, 4), get_default_static_config().set_local("fc1", FP32)
    plan = describe(Ten().eval(), config, x, backend="reference")
    assert plan == prepare(Ten().eval(), config, example_inputs=x, backend="reference").plan
    assert plan.to_dict()["backend"] == "reference"


# ---- fields that defer, strategies, white lists ----


def spec(plan, operator="fc1"):
    return plan[operator].spec


def test_fields_that_were_not_given_defer_level_by_level(ten):
    config = StaticQuantConfig(act_algo="kl", w_granularity="per_tensor")
    config.set_local(nn.Linear, StaticQuantConfig(act_sym=True, w_algo="mse"))
    config.set_local(r"fc\d", StaticQuantConfig(act_dtype="int8", act_sym=False))
    config.set_local("fc1", StaticQuantConfig(act_algo="percentile"))
    plan = resolve(config, ten, ALL)
    assert spec(plan).activation == TensorFormat(
        dtype="int8", symmetric=False, algo="percentile", percentile=99.999
    )
    assert (spec(plan).weight.algo, str(spec(plan).weight.granularity)) == ("mse", "per_tensor")
    sources = {name: (value, rule) for name, value, rule in plan["fc1"].fields}
    assert sources["act_algo"] == ("percentile", "name 'fc1'")
    assert sources["act_dtype"] == ("int8", r"pattern 'fc\\d'")
    assert sources["act_sym"] == ("False", r"pattern 'fc\\d'")  # given, although it is the default
    assert sources["w_algo"] == ("mse", "type 'Linear'")
    assert sources["w_granularity"] == ("per_tensor", "global")
    assert sources["w_dtype"] == ("int8", "default")
    assert (
        plan["fc1"].rules
        == r"name 'fc1' (w_algo: type 'Linear', act_dtype: pattern 'fc\\d', act_sym: pattern 'fc\\d')"
    )
    assert spec(plan, "fc10").activation == TensorFormat(dtype="uint8", symmetric=True, algo="kl")
    assert spec(plan, "matmul").activation == TensorFormat(dtype="uint8", symmetric=False, algo="kl")
    assert "percentile           99.999      default" in plan.explain("fc1")
    with pytest.raises(KeyError, match="closest: fc10"):
        plan.explain("fc100")


def test_an_outer_fp32_says_nothing_of_how_to_quantize(ten):
    """Quantize one operator only."""
    config = StaticQuantConfig(w_dtype="fp32", act_dtype="fp32").set_local(
        "fc1", StaticQuantConfig(act_sym=True)
    )
    plan = resolve(config, ten, ALL)
    assert [d.operator for d in plan.quantized] == ["fc1"]
    assert spec(plan).activation.symmetric


def test_fields_of_two_levels_that_contradict_each_other_name_the_operator(ten):
    config = StaticQuantConfig(excluded_precisions=("int8",), w_dtype="fp32", act_dtype="fp32").set_local(
        "fc1", StaticQuantConfig()
    )
    resolve(config, ten, ALL)  # an fp32 level passes nothing on
    config = StaticQuantConfig().set_local("fc1", StaticQuantConfig(act_dtype="int8"))
    config.set_local(nn.Linear, StaticQuantConfig(excluded_precisions=("fp32",)))
    resolve(config, ten, ALL)
    config = StaticQuantConfig(act_dtype="int8").set_local("fc1", SmoothQuantConfig(alpha_min=0.6))
    config.set_local(nn.Linear, SmoothQuantConfig(alpha_max=0.4))
    with pytest.raises(
        ConfigError, match=r"Operator 'fc1' \(rule: name 'fc1'\): alpha_min=0.6 is above alpha_max=0.4"
    ):
        resolve(config, ten, ALL)


def test_exclude_is_the_fp32_fallback(ten):
    plan = resolve(StaticQuantConfig().exclude("fc1", torch.matmul, r"deep\..*"), ten, ALL)
    assert floats(plan) == {"fc1", "matmul", "matmul_1", "matmul_2", "deep.0", "deep.2"}
    assert floats(resolve(DynamicQuantConfig().exclude("fc1"), ten, ALL)) == {"fc1"}
    assert StaticQuantConfig().exclude(["fc1", torch.matmul], "fc2") == StaticQuantConfig().exclude(
        "fc1", torch.matmul, "fc2"
    )


def test_a_white_list_leaves_everything_else_alone(ten):
    plan = resolve(StaticQuantConfig(act_sym=True, white_list=["fc1", r"deep\..*"]), ten, ALL)
    assert {d.operator for d in plan.quantized} == {"fc1", "deep.0", "deep.2"}
    assert spec(plan).activation.symmetric
    assert plan["fc10"].reason == "not on the white list"
    with pytest.raises(UnmatchedRuleError, match="'fc11' matches no operator"):
        resolve(StaticQuantConfig(white_list=["fc11"]), ten, ALL)


def test_a_rule_that_the_white_list_does_not_hold_for_has_the_fields_of_the_list_all_the_same(ten):
    config = StaticQuantConfig(act_sym=True, white_list=["fc1"]).set_local(
        "fc10", StaticQuantConfig(act_dtype="int8")
    )
    plan = resolve(config, ten, ALL)
    assert {d.operator for d in plan.quantized} == {"fc1", "fc10"}


def test_strategies_of_single_operators(ten):
    plan = resolve(StaticQuantConfig().set_local("fc1", DynamicQuantConfig()), ten, ALL)
    assert (spec(plan).mode, spec(plan).activation.granularity) == ("dynamic", PER_TOKEN)
    assert not spec(plan, "fc10").activation.dynamic
    plan = resolve(
        DynamicQuantConfig(w_granularity="per_tensor").set_local("fc1", StaticQuantConfig(act_algo="kl")),
        ten,
        ALL,
    )
    assert spec(plan).activation == TensorFormat(dtype="uint8", symmetric=False, algo="kl")
    assert spec(plan).weight.granularity == PER_CHANNEL  # other strategies pass nothing on
    assert spec(plan, "fc10").activation.dynamic
    assert (
        plan["matmul"].reason
        == "ranges found at each call are for a matmul only where a rule names it or its type"
    )


def test_matmuls_have_ranges_of_each_call_where_a_rule_names_them(ten):
    for key in ("matmul", torch.matmul, r"mat.*"):
        plan = resolve(DynamicQuantConfig().set_local(key, DynamicQuantConfig()), ten, ALL)
        assert (
            plan["matmul"].spec.activations == "uint8 affine per_token dynamic, int8 sym per_column dynamic"
        )
    plan = resolve(StaticQuantConfig() + DynamicQuantConfig(), ten, ALL)
    assert spec(plan, "matmul").mode == "static"
    plan = resolve(StaticQuantConfig().set_local("matmul", DynamicQuantConfig()), ten, ALL)
    assert (spec(plan, "matmul").mode, spec(plan).mode) == ("dynamic", "static")
    plan = resolve(DynamicQuantConfig(white_list=["matmul"]), ten, ALL)
    assert {d.kind for d in plan.quantized} == {"matmul"}
    per_tensor = DynamicQuantConfig().set_local("matmul", DynamicQuantConfig(act_granularity="per_tensor"))
    with pytest.raises(UnsupportedError, match="act_granularity='per_tensor' .* legal there: per_token"):
        resolve(per_tensor, ten, ALL)
    rows = tuple(dataclasses.replace(row, dynamic=()) for row in ALL.ops)
    plan = resolve(
        StaticQuantConfig().set_local("matmul", DynamicQuantConfig()), ten, dataclasses.replace(ALL, ops=rows)
    )
    assert plan["matmul"].reason.startswith(
        f"backend {ALL.backend!r} has no dynamic int8 kernel for matmul, but one with ranges from calibration"
    )


def test_smoothquant_passes_its_fields_on_to_static_operators_and_back(ten):
    plan = resolve(
        SmoothQuantConfig(act_algo="kl", alpha=0.7).set_local("fc1", StaticQuantConfig(act_sym=True)),
        ten,
        ALL,
    )
    assert (spec(plan).smooth, spec(plan).activation.algo) == (None, "kl")
    assert spec(plan, "fc10").smooth.alpha == 0.7
    assert spec(plan, "matmul").smooth is None
    assert str(spec(plan, "fc10").activations) == "uint8 affine kl smooth 0.7"


def test_added_strategies(cnn, ten):
    both = StaticQuantConfig(white_list=[nn.Conv2d]) + DynamicQuantConfig(white_list=["Linear"])
    plan = resolve(both, cnn, ALL)
    assert {d.operator: d.spec.activation.dynamic for d in plan.quantized} == {
        "stem": False, "conv1": False, "conv2": False, "fc": True
    }  # fmt: skip
    assert plan["add"].reason == "not on the white list"
    plan = resolve(
        StaticQuantConfig() + DynamicQuantConfig(), cnn, ALL
    )  # of two globals the later one where it has a kernel
    assert {d.operator for d in plan.quantized if d.spec.activation.dynamic} == {"fc"}
    assert plan["conv1"].spec.quantized
    plan = resolve(DynamicQuantConfig() + StaticQuantConfig(), cnn, ALL)
    assert not any(d.spec.activation.dynamic for d in plan.quantized)
    plan = resolve(
        (StaticQuantConfig() + DynamicQuantConfig()).set_local("fc", StaticQuantConfig()).exclude("stem"),
        cnn,
        ALL,
    )
    assert not plan["fc"].spec.activation.dynamic
    assert floats(plan) == {"stem"}


def test_rules_of_all_parts_count_and_the_parts_stay_as_they_are(ten):
    a, b = StaticQuantConfig().set_local("fc1", FP32), DynamicQuantConfig().set_local("fc10", FP32)
    both = a + b
    both.exclude("deep.0")
    assert floats(resolve(both, ten, ALL)) == {"fc1", "fc10", "deep.0"}
    assert floats(resolve(b, ten, ALL)) == {"fc10"}
    assert both == (a + b).exclude("deep.0")
    assert hash(both) == hash(a + b)


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = F.relu(self.conv1(x))
        y = F.relu(self.conv2(y) + y)
        y = self.conv3(y).mean((2, 3))
        return F.relu(self.a(y)) + self.b(y)


@pytest.mark.parametrize(
    ("key", "operators"),
    [
        ("Conv2d&relu", {"conv1"}),
        ("Conv2d&ReLU", {"conv1"}),
        ("Conv2d&add", {"conv2"}),
        ("Conv2d&add&relu", {"conv2"}),
        ("Linear&<built-in method relu of type object at 0x7f76cd7c4480>", {"a"}),
        ("Linear&add", {"b"}),
        ("Conv2d", {"conv1", "conv2", "conv3"}),
    ],
)
def test_fused_types_are_their_anchor_with_that_neighbour(key, operators):
    graph = graph_of(Neighbours(), torch.randn(2, 3, 4, 4))
    assert floats(plan_for(graph, (key, FP32))) == operators


def test_a_fused_type_without_a_match_warns_with_those_that_exist():
    graph = graph_of(Neighbours(), torch.randn(2, 3, 4, 4))
    with pytest.warns(
        UnmatchedTypeWarning,
        match="'Linear&gelu' matches no operator.*: Conv2d, Conv2d&add&relu, Conv2d&relu, Linear&add",
    ):
        plan_for(graph, ("Linear&gelu", FP32))


def test_a_granularity_without_a_kernel(ten):
    limited = dataclasses.replace(
        ALL, ops=(OpSupport(kind="linear", weights=("int8",), dynamic=("per_tensor",), affine_only=True),)
    )
    plan = resolve(DynamicQuantConfig(), ten, limited)  # nobody asked for per_token
    assert spec(plan).activation.granularity == PER_TENSOR
    assert ("act_granularity", "per_tensor", "kernel") in plan["fc1"].fields
    with pytest.raises(
        UnsupportedError, match=r"'fc1' \(linear\): act_granularity='per_token' .*legal there: per_tensor"
    ):
        resolve(DynamicQuantConfig(act_granularity="per_token"), ten, limited)
    with pytest.raises(UnsupportedError, match=r"'fc1' \(linear\): act_sym=True .*legal there: False"):
        resolve(DynamicQuantConfig(act_sym=True), ten, limited)
    assert (
        resolve(StaticQuantConfig(), ten, limited)["fc1"].reason
        == "backend 'reference' has no int8 kernel for linear, but one with ranges found at each call: add "
        "+ nc.DynamicQuantConfig()"
    )


def test_skip_slow_is_answered_with_what_measures():
    with pytest.raises(UnknownFieldError, match='guard="undo"'):
        DynamicQuantConfig(skip_slow=True)


def test_dynamic_linears_of_one_output_stay_fp32_if_no_rule_names_them():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 1))
    graph = graph_of(model, torch.randn(4096, 64))
    for config in (DynamicQuantConfig(), DynamicQuantConfig(keep_inaccurate=True)):
        plan = resolve(config, graph, ALL)
        assert [d.operator for d in plan.quantized] == ["0"]
        assert "one output" in plan["1"].reason
    kind = DynamicQuantConfig().set_local(nn.Linear, DynamicQuantConfig(act_granularity="per_tensor"))
    assert [d.operator for d in resolve(kind, graph, ALL).quantized] == ["0"]
    named = DynamicQuantConfig().set_local("1", DynamicQuantConfig())
    assert [d.operator for d in resolve(named, graph, ALL).quantized] == ["0", "1"]
    pattern = DynamicQuantConfig().set_local("[1-9]", DynamicQuantConfig())
    assert [d.operator for d in resolve(pattern, graph, ALL).quantized] == ["0", "1"]
    assert [d.operator for d in resolve(StaticQuantConfig(), graph, ALL).quantized] == ["0", "1"]


def test_a_plan_for_a_backend_without_dynamic_kernels(ten):
    plan = resolve(DynamicQuantConfig().set_local("fc10", StaticQuantConfig()), ten, ALL)
    rows = tuple(dataclasses.replace(row, dynamic=()) for row in ALL.ops)
    other = fit(plan, Capabilities(backend="other", ops=rows))
    assert other["fc1"].reason == (
        "backend 'other' has no dynamic int8 kernel for linear, but one with ranges from calibration: add "
        "+ nc.StaticQuantConfig()"
    )
    assert other["fc10"].spec.quantized


def test_no_call_changes_a_configuration(ten):
    config = (StaticQuantConfig().set_local("fc1", FP32)) + DynamicQuantConfig(white_list=["fc10"])
    before = config.to_json()
    x = torch.randn(3, 4)
    prepare(Ten().eval(), config, example_inputs=x, backend="reference")
    describe(Ten().eval(), config, x, backend="reference")
    assert config.to_json() == before


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.other(self.norm(self.linear(x)))


def test_the_name_of_a_module_that_is_spelled_like_a_type_means_that_module():
    x = torch.randn(2, 16)
    plan = describe(Named().eval(), StaticQuantConfig().exclude("linear"), x, backend="reference")
    assert [d.operator for d in plan.quantized] == ["other"]
    plan = describe(Named().eval(), StaticQuantConfig(white_list=["linear"]), x, backend="reference")
    assert [d.operator for d in plan.quantized] == ["linear"]
    plan = describe(Named().eval(), StaticQuantConfig().exclude("Linear"), x, backend="reference")
    assert plan.quantized == ()


def test_the_plan_shows_a_name_rule_for_what_has_no_integer_form():
    plan = describe(
        Named().eval(),
        StaticQuantConfig().set_local("norm", StaticQuantConfig(act_sym=True)),
        torch.randn(2, 16),
        backend="reference",
    )
    assert (plan["norm"].rule, plan["norm"].reason) == ("name 'norm'", "normalisation stays fp32")


def test_the_plan_knows_that_grouped_transposed_convolutions_take_one_scale():
    model = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 3, groups=4), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3)
    ).eval()
    plan = describe(model, StaticQuantConfig(), torch.randn(2, 8, 8, 8), backend="reference")
    assert (plan["0"].spec.weight.granularity, plan["2"].spec.weight.granularity) == (PER_TENSOR, PER_CHANNEL)
    assert ("w_granularity", "per_tensor", "kernel") in plan["0"].fields

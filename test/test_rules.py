"""resolve(): which rule decides for which operator, and that every decision can be explained."""

import dataclasses
import warnings

import pytest
import torch
from models import FP32, MLP, Attention, Function, ResidualCNN, graph_of
from test_capture import OwnLinear
from torch import nn
from torch.nn import functional as F

from nc import (
    NCWarning,
    StaticQuantConfig,
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
from nc.plan import Plan
from nc.rules import fit, resolve
from nc.spec import FLOAT, Capabilities, OpSupport

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
    graph = graph_of(Function(lambda self, x: self.fc(F.relu(self.fc(x))), fc=nn.Linear(4, 4)), torch.randn(2, 4))
    assert floats(plan_for(graph, ("fc", FP32))) == {"fc", "fc@1"}
    assert floats(plan_for(graph, ("fc@1", FP32))) == {"fc@1"}


def test_a_list_of_keys(ten):
    assert floats(plan_for(ten, (["fc1", r"deep\.2", torch.matmul], FP32))) == {"fc1", "deep.2", "matmul", "matmul_1", "matmul_2"}


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
    model = Function(lambda self, x: self.own(self.block(self.plain(x))), own=OwnLinear(4, 4), block=block, plain=nn.Linear(4, 4))
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
    with pytest.raises(UnmatchedRuleError, match=r"'fc11' matches no operator.*closest names: fc10?, fc10?.*describe") as caught:
        plan_for(ten, ("fc11", FP32))
    assert isinstance(caught.value, ValueError)


def test_an_unmatched_name_is_a_warning_when_not_strict(ten):
    with pytest.warns(NCWarning, match="'fc11' matches no operator"):
        plan = plan_for(ten, ("fc11", FP32), strict=False)
    assert plan == plan_for(ten)


def test_a_module_that_is_no_operator_gets_a_hint(ten):
    with pytest.raises(UnmatchedRuleError, match=r"a module with 3 operators inside; .*'deep\\\\\.\.\*'") as caught:
        plan_for(ten, ("deep", FP32))
    pattern = str(caught.value).rpartition("write ")[2].strip(".'").replace("\\\\", "\\")
    assert floats(plan_for(ten, (pattern, FP32))) == {"deep.0", "deep.2"}


@pytest.mark.parametrize("key", [nn.Conv2d, "Conv2d", torch.add, nn.LSTM])
def test_an_unmatched_type_is_a_warning_that_lists_the_types(ten, key):
    with pytest.warns(UnmatchedTypeWarning, match="matches no operator of this model; its types: Linear, matmul"):
        plan_for(ten, (key, FP32))


def test_warnings_point_at_the_users_line():
    for step in (prepare, describe):
        with pytest.warns(UnmatchedTypeWarning) as caught:
            step(MLP().eval(), StaticQuantConfig().set_local("Conv2d", FP32), example_inputs=torch.randn(2, 16), backend="reference")
        assert caught[0].filename == __file__


def test_a_matched_rule_is_silent(ten):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_for(ten, ("fc1", FP32), (nn.Linear, SYM))


# ---- backends ----


def test_a_dtype_without_a_kernel_names_operator_field_and_what_is_legal(ten):
    limited = Capabilities(
        backend="tiny",
        ops=(OpSupport(kind="linear", activations=("uint8",), weights=("int8",)), OpSupport(kind="matmul", activations=("int8", "uint8"))),
    )
    plan_for(ten, ("matmul", INT8), capabilities=limited)
    with pytest.raises(UnsupportedError, match=r"'deep\.2' \(linear\): act_dtype='int8' \(rule: pattern .*backend 'tiny'.*: uint8"):
        plan_for(ten, (r"deep\.[2]", INT8), capabilities=limited)


def test_a_kind_without_a_kernel_stays_fp32_with_the_reason(ten):
    limited = Capabilities(backend="tiny", ops=(OpSupport(kind="linear", activations=("uint8",), weights=("int8",)),))
    plan = plan_for(ten, capabilities=limited)
    assert plan["matmul"].spec == FLOAT
    assert plan["matmul"].reason == "backend 'tiny' has no int8 kernel for matmul"
    assert plan["fc1"].spec.quantized


def test_seven_bits_reach_the_right_hand_side_only(ten):
    seven_bit = frozenset({("linear", "uint8"), ("matmul", "uint8")})
    plan = plan_for(ten, capabilities=dataclasses.replace(ALL, seven_bit=seven_bit))
    linear, matmul = plan["fc1"].spec, plan["matmul"].spec
    assert (linear.activation.reduce_range, linear.weight.reduce_range, linear.right) == (False, True, None)
    assert (matmul.input(0).reduce_range, matmul.input(1).reduce_range) == (False, True)
    assert str(linear.weight) == "int8 sym per_channel 7-bit"
    assert matmul.activations == "uint8 affine, uint8 affine 7-bit"
    other = plan_for(ten, ("fc1", INT8), capabilities=dataclasses.replace(ALL, seven_bit=seven_bit))
    assert not other["fc1"].spec.weight.reduce_range


def test_a_plan_for_another_backend(ten):
    plan = plan_for(ten, ("fc10", INT8))
    seven_bit = frozenset({("linear", "uint8"), ("linear", "int8")})
    rows = tuple(dataclasses.replace(row) for row in ALL.ops if row.kind != "matmul")
    other = fit(plan, Capabilities(backend="other", ops=rows, seven_bit=seven_bit, isa=("avx2",)))
    assert (other.backend, other.isa) == ("other", ("avx2",))
    assert other["fc1"].spec.weight.reduce_range
    assert (other["matmul"].spec, other["matmul"].reason) == (FLOAT, "backend 'other' has no int8 kernel for matmul")
    assert (other["fc1"].rule, other["fc10"].rule) == (plan["fc1"].rule, plan["fc10"].rule)
    assert fit(plan, ALL) is plan
    only_uint8 = tuple(dataclasses.replace(row, activations=("uint8",)) for row in ALL.ops)
    with pytest.raises(UnsupportedError, match=r"'fc10' .linear.: act_dtype='int8' .*backend 'other'; legal there: uint8"):
        fit(plan, Capabilities(backend="other", ops=only_uint8))


class TinyBackend:
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


# ---- decisions ----


def test_every_operator_in_fp32_has_a_reason():
    for model, x in ((Ten(), torch.randn(3, 4)), (ResidualCNN(), torch.randn(1, 3, 8, 8)), (Attention(), torch.randn(1, 3, 32))):
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
    plans = [plan_for(ten), plan_for(ten, ("fc1", SYM)), plan_for(ten, ("fc1", INT8)), plan_for(ten, ("fc1", FP32))]
    plans += [plan_for(ten, (".*", StaticQuantConfig(w_granularity="per_tensor")))]
    plans += [plan_for(ten, capabilities=dataclasses.replace(ALL, isa=("amx",)))]
    plans += [plan_for(ten, capabilities=dataclasses.replace(ALL, backend="other"))]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_plan_survives_plain_values(ten):
    plan = plan_for(ten, ("fc1", FP32), (nn.Linear, SYM))
    import json

    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()


def test_the_table_has_a_row_per_operator(ten):
    plan = plan_for(ten, ("fc1", FP32))
    head, _, *rows = str(plan).splitlines()
    assert head.split()[:2] == ["operator", "type"]
    assert [row.split()[0] for row in rows] == [d.operator for d in plan.decisions]
    assert "fp32 was asked for" in rows[0]
    assert "uint8 affine" in rows[2]


def test_describe_is_the_plan_of_prepare():
    x, config = torch.randn(3, 4), get_default_static_config().set_local("fc1", FP32)
    plan = describe(Ten().eval(), config, x, backend="reference")
    assert plan == prepare(Ten().eval(), config, example_inputs=x, backend="reference").plan
    assert plan.to_dict()["backend"] == "reference"

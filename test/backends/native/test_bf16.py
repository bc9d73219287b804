"""What is not int8 in bf16: the plan, the rounding, and the kernels where this CPU has them."""

import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, TransposeNet, quantized, worst_db
from torch import nn

from nc import (
    BackendUnavailableError,
    ConfigError,
    DynamicQuantConfig,
    SmoothQuantConfig,
    StaticQuantConfig,
    UnsupportedError,
    VerificationError,
    available_backends,
    compare,
    export_pt2,
    load,
    prepare,
)
from nc.backends import get_backend
from nc.backends.native import OPS
from nc.backends.native.operators import float_attention
from nc.backends.native.plans import row_linears as row_format
from nc.capture.capture import capture
from nc.kernels import cpu
from nc.planning.rules import fit, resolve

LOW = StaticQuantConfig(w_dtype="bf16", act_dtype="bf16")
REST = StaticQuantConfig(remainder="bf16")
#: Products of two activations in bf16.
PRODUCTS = StaticQuantConfig(remainder="bf16").set_local("matmul", LOW)
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16")

native = pytest.mark.skipif(
    bool(available_backends()["native"] or get_backend("native").capabilities().why_no_bf16),
    reason=available_backends()["native"] or get_backend("native").capabilities().why_no_bf16 or "it can run",
)


@pytest.fixture
def without_products(monkeypatch):
    """Plans for an engine that has no int8 kernel for products of two activations."""
    monkeypatch.setattr("nc.backends.native.OPS", tuple(row for row in OPS if row.kind != "matmul"))


@pytest.fixture
def on_bf16(monkeypatch, without_products):  # it patches
    """Plans as on a CPU with AVX512-BF16; nothing runs there."""
    monkeypatch.setattr(cpu, "machine_features", lambda: FEATURES)


def decisions(model, config, x, backend="native"):
    plan = resolve(config, capture(model.eval(), x), get_backend(backend).capabilities())
    return {d.operator: d for d in plan.decisions}


@pytest.mark.parametrize("strategy", [StaticQuantConfig, SmoothQuantConfig])
@pytest.mark.usefixtures("on_bf16")
def test_the_remainder_is_what_has_no_int8_kernel(strategy):
    found = decisions(Attention(), strategy(remainder="bf16"), torch.randn(2, 5, 32))
    assert {name: d.spec.precision for name, d in found.items() if d.spec.precision != "fp32"} == {
        **dict.fromkeys(("query", "key", "value", "out"), "int8"),
        **dict.fromkeys(("matmul", "matmul_1"), "bf16"),
    }
    assert found["matmul"].reason == "backend 'native' has no int8 kernel for matmul"
    assert found["softmax"].spec.precision == "fp32"


@pytest.mark.usefixtures("on_bf16")
def test_fp32_is_the_default_and_what_is_excluded_stays_fp32():
    x = torch.randn(2, 5, 32)
    assert all(d.spec.precision != "bf16" for d in decisions(Attention(), StaticQuantConfig(), x).values())
    config = StaticQuantConfig(remainder="bf16").set_local(
        "matmul_1", StaticQuantConfig(excluded_precisions=("bf16",))
    )
    found = decisions(Attention(), config, x)
    assert (found["matmul"].spec.precision, found["matmul_1"].spec.precision) == ("bf16", "fp32")
    config = StaticQuantConfig(remainder="bf16", excluded_precisions=("bf16",))
    assert all(d.spec.precision != "bf16" for d in decisions(Attention(), config, x).values())


@pytest.mark.usefixtures("on_bf16")
def test_what_loses_its_kernel_on_another_backend_becomes_remainder():
    """Prepared for one that has an int8 matmul."""
    x = torch.randn(2, 5, 32)
    config = StaticQuantConfig(remainder="bf16").set_local(
        "matmul_1", StaticQuantConfig(excluded_precisions=("bf16",))
    )
    plan = resolve(config, capture(Attention().eval(), x), get_backend("reference").capabilities())
    assert (plan["matmul"].spec.precision, plan["matmul_1"].spec.precision) == ("int8", "int8")
    fitted = fit(plan, get_backend("native").capabilities())
    assert (fitted["matmul"].spec.precision, fitted["matmul_1"].spec.precision) == ("bf16", "fp32")
    assert fitted.isa[-1] == "avx512_bf16"


@pytest.mark.usefixtures("on_bf16")
def test_rules_ask_for_bf16_by_name_and_type():
    found = decisions(MLP(), StaticQuantConfig().set_local("fc2", LOW), torch.randn(4, 16))
    assert (found["fc1"].spec.precision, found["fc2"].spec.precision) == ("int8", "bf16")
    assert found["fc2"].reason == "bf16 was asked for"
    found = decisions(
        MLP(),
        DynamicQuantConfig().set_local(nn.Linear, DynamicQuantConfig(w_dtype="bf16", act_dtype="bf16")),
        torch.randn(4, 16),
    )
    assert found["fc1"].spec.precision == found["fc2"].spec.precision == "bf16"
    # all of it; sums have too little arithmetic to gain from it
    found = decisions(ResidualCNN(), LOW, torch.randn(2, 3, 8, 8))
    assert {d.kind for d in found.values() if d.spec.bf16} == {"conv2d", "linear"}
    assert found["add"].reason == "bf16 was asked for; add stays fp32"


@pytest.mark.usefixtures("on_bf16")
def test_bf16_that_is_asked_for_and_excluded_is_an_error():
    with pytest.raises(ConfigError, match="'bf16' is asked for, but excluded_precisions"):
        StaticQuantConfig(w_dtype="bf16", act_dtype="bf16", excluded_precisions=("bf16",))
    config = StaticQuantConfig(excluded_precisions=("bf16",)).set_local("fc2", LOW)
    with pytest.raises(
        ConfigError,
        match=r"Operator 'fc2' \(rule: name 'fc2'\): bf16 was asked for, but 'bf16' is in excluded_precisions",
    ):
        decisions(MLP(), config, torch.randn(4, 16))
    for dtypes in ({"w_dtype": "bf16"}, {"act_dtype": "bf16"}, {"w_dtype": "bf16", "act_dtype": "fp32"}):
        with pytest.raises(ConfigError, match="contradicts"):
            StaticQuantConfig(**dtypes)


@pytest.mark.parametrize("config", [REST, StaticQuantConfig().set_local("matmul", LOW)])
@pytest.mark.usefixtures("without_products")
def test_a_cpu_without_bf16_refuses(monkeypatch, config):
    monkeypatch.setattr(cpu, "machine_features", lambda: FEATURES[:-1])
    with pytest.raises(
        UnsupportedError,
        match="Operator 'matmul' can't compute in bf16 on backend 'native': this CPU has no AVX512-BF16",
    ):
        prepare(Attention().eval(), config, example_inputs=torch.randn(2, 5, 32), backend="native")
    # where everything has an int8 kernel nothing is left to refuse
    prepare(MLP().eval(), REST, example_inputs=torch.randn(4, 16), backend="native")


def test_onednn_kept_from_bf16_says_by_what(monkeypatch):
    monkeypatch.setattr(cpu, "detected", lambda: FEATURES)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
    assert get_backend("native").capabilities().why_no_bf16.endswith("ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI)")


def test_another_backend_refuses():
    with pytest.raises(
        UnsupportedError,
        match="Operator 'fc2' can't compute in bf16 on backend 'ipex': it has no bf16 kernels",
    ):
        decisions(MLP(), StaticQuantConfig().set_local("fc2", LOW), torch.randn(4, 16), backend="ipex")


def test_inputs_weights_and_results_are_rounded_and_sums_are_not():
    """Against the same in float64."""
    x, model = torch.randn(64, 16), MLP().eval()
    q = quantized(
        model, x, StaticQuantConfig(w_dtype="fp32", act_dtype="fp32").set_local("fc1", LOW), "reference"
    )
    with torch.no_grad():
        rounded = [t.bfloat16().double() for t in (x, model.fc1.weight, model.fc1.bias)]
        hidden = torch.nn.functional.linear(*rounded).bfloat16().double().relu()
        expected = torch.nn.functional.linear(hidden, model.fc2.weight.double(), model.fc2.bias.double())
        exact = model.double()(x.double())
        model.float()
    # now and then a sum in fp32 falls to the other side of a tie
    assert worst_db([expected], [q(x).double()]) > 80
    assert 35 < worst_db([exact], [q(x).double()]) < 60


def test_an_artefact_holds_bf16_weights_and_says_what_it_needs(tmp_path, monkeypatch):
    x = torch.randn(4, 16)
    monkeypatch.setattr(cpu, "machine_features", lambda: FEATURES)
    prepared = prepare(
        MLP().eval(), StaticQuantConfig().set_local("fc2", LOW), example_inputs=x, backend="native"
    )
    prepared(x)
    graph = prepared.quantized_graph()
    assert graph.plan.isa == ("avx512_vnni", "avx512_bf16")
    assert {b.dtype for b in graph.module.buffers()} == {torch.int8, torch.bfloat16, torch.float32}
    monkeypatch.undo()
    reference = quantized(MLP().eval(), x, StaticQuantConfig().set_local("fc2", LOW), "reference")
    reference.save(tmp_path / "a")
    again = load(tmp_path / "a", backend="reference")
    assert torch.equal(again(x), reference(x))
    assert again.graph.plan == reference.graph.plan
    assert again.report().ops[-1].asked == "bf16"
    monkeypatch.setattr(cpu, "machine_features", lambda: FEATURES[:-1])
    for backend in ("native", "ipex"):
        if not available_backends()[backend]:
            with pytest.raises(
                UnsupportedError, match=f"computes in bf16, which backend '{backend}' can't here"
            ):
                load(tmp_path / "a", backend=backend)
    if not available_backends()["native"]:
        with pytest.raises(UnsupportedError, match="computes in bf16, which backend 'native' can't here"):
            export_pt2(again, tmp_path / "m.pt2")


# ---- the kernels ----


class Chain(nn.Module):
    """The first convolution gives what the second one reads."""

    def __init__(self, kind=nn.Conv2d):
        super().__init__()
        self.first, self.second = kind(3, 8, 3, padding=1), kind(8, 4, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


CASES = {
    "attention": (Attention, PRODUCTS, (2, 5, 32), {"matmul", "matmul_1"}),
    "dynamic": (Attention, DynamicQuantConfig(remainder="bf16"), (2, 5, 32), {"matmul", "matmul_1"}),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        PRODUCTS,
        (2, 5, 32),
        {"self_attn.matmul", "self_attn.matmul_1"},
    ),
    "fallback": (MLP, StaticQuantConfig().set_local("fc2", LOW), (4, 16), {"fc2"}),
    "first": (MLP, StaticQuantConfig().set_local("fc1", LOW), (4, 16), {"fc1"}),
    "all": (ResidualCNN, LOW, (2, 3, 8, 8), {"stem", "conv1", "conv2", "fc"}),
    "between": (ResidualCNN, StaticQuantConfig().set_local("conv1", LOW), (2, 3, 8, 8), {"conv1"}),
    "behind a convolution": (Chain, StaticQuantConfig().set_local("second", LOW), (2, 3, 8, 8), {"second"}),
    "behind one of one dimension": (
        lambda: Chain(nn.Conv1d),
        StaticQuantConfig().set_local("second", LOW),
        (2, 3, 8),
        {"second"},
    ),
    "behind one of three": (
        lambda: Chain(nn.Conv3d),
        StaticQuantConfig().set_local("second", LOW),
        (2, 3, 4, 4, 4),
        {"second"},
    ),
    "transposed": (TransposeNet, StaticQuantConfig().set_local("up", LOW), (2, 3, 6, 6), {"up"}),
}


@native
@pytest.mark.parametrize("case", CASES)
def test_native_computes_them_in_bf16(case):
    make, config, shape, expected = CASES[case]
    x = torch.randn(shape)
    q = quantized(make().eval(), x, config, "native")
    ran = {op.operator for op in q.report().ops if op.ran == "bf16"}
    assert ran == {op.operator for op in q.report().ops if op.asked == "bf16"}
    assert ran == expected
    assert not q.report().not_int8
    for size in (shape[0], 1, 3):
        x = torch.randn(size, *shape[1:])
        assert worst_db([q.reference(x)], [q(x)]) > 35
    assert not compare(q, "reference").disagreements


def conversions(profile):
    return sorted(step.name for step in profile.steps if step.name in ("from_bf16", "to_bf16"))


@native
@pytest.mark.skipif(not float_attention.why_unavailable(), reason="attention is one function in C")
def test_results_go_from_kernel_to_kernel_in_bf16():
    """No conversion between the projections and the first product, nor between two products."""
    x = torch.randn(2, 32, 128)  # smaller products are no work for oneDNN
    profile = quantized(Attention(128, 4).eval(), x, PRODUCTS, "native").report(profile_inputs=x).profile
    kernels = {
        step.operators[0]: str(step.kernels[0]) for step in profile.steps if step.operators and step.kernels
    }
    assert all(
        "-> bf16" in kernels[name] for name in ("query", "matmul", "matmul_1")
    )  # key and value are in query's
    # the softmax's input and result, and the last product's result on its way to codes
    assert conversions(profile) == ["from_bf16", "from_bf16", "to_bf16"]


@native
@pytest.mark.skipif(bool(float_attention.why_unavailable()), reason="attention is no function in C")
def test_an_attention_with_products_in_bf16_between_int8_linears_is_one_function():
    x = torch.randn(2, 32, 128)
    q = quantized(Attention(128, 4).eval(), x, PRODUCTS, "native")
    profile = q.report(profile_inputs=x).profile
    of_attention = next(step for step in profile.steps if "matmul" in step.operators)
    assert {"matmul", "softmax", "matmul_1"} <= set(of_attention.operators)
    assert str(of_attention.kernels[0]).startswith("function c:float_attention")
    assert conversions(profile) == []
    assert worst_db([q.reference(x)], [q(x)]) > 30
    assert {op.ran for op in q.report().ops if op.kind == "matmul"} == {"bf16"}


@native
def test_a_chain_of_linears_converts_at_its_ends_alone():
    chain = Function(lambda self, x: self.b(self.a(x)), a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    x = torch.randn(4, 16)
    profile = quantized(chain.eval(), x, LOW, "native").report(profile_inputs=x).profile
    in_c = not row_format.why_unavailable(row_format.BF16)
    assert conversions(profile) == ([] if in_c else ["from_bf16", "to_bf16"])


@native
def test_compiled_too():
    try:
        q = quantized(Attention().eval(), torch.randn(2, 5, 32), REST, "native", compile=True)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    for shape in ((2, 5, 32), (3, 7, 32)):
        x = torch.randn(shape)
        assert worst_db([q.reference(x)], [q(x)]) > 35


@native
def test_a_wrong_bf16_kernel_is_noticed(monkeypatch):
    """One percent off is far more than rounding leaves."""
    from nc.backends.native import bf16, passes

    real = bf16.compute_in_bf16

    def wrong(module):
        for node in module.graph.nodes:
            if node.op == "get_attr" and module.get_buffer(node.target).dtype == torch.bfloat16:
                setattr(module, node.target, getattr(module, node.target) * 1.01)
        real(module)

    monkeypatch.setattr(passes, "compute_in_bf16", wrong)
    x = torch.randn(4, 16)
    config = StaticQuantConfig().set_local("fc2", LOW)
    with pytest.raises(VerificationError, match="in .* place"):
        quantized(MLP().eval(), x, config, "native")
    q = quantized(MLP().eval(), x, config, "native", verify="off")
    assert compare(q, "reference").disagreements

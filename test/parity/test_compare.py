"""nc.compare: each verdict for a fault made on purpose, and no disagreement between healthy engines."""

import dataclasses
import math

import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, prepared_for, quantized
from suites.backend_suite import MODELS
from torch import fx, nn
from torch.nn import functional as F

import nc
from nc import (
    BackendError,
    ConfigError,
    DynamicQuantConfig,
    InputError,
    StateError,
    StaticQuantConfig,
    available_backends,
    convert,
)
from nc.backends import engine_options, get_backend
from nc.backends.reference import ReferenceBackend
from nc.graph.fx_utils import call_function, copy_module, retarget
from nc.kernels import cpu
from nc.ops import dequantize_per_tensor, quantize_per_tensor
from nc.parity.compare import VERDICTS
from nc.proof.intermediates import name_of, places_of, points_at, with_outputs
from nc.proof.rounding_bounds import slack_of

ENGINES = [
    *(["native"] if not available_backends()["native"] else []),
    pytest.param("ipex", marks=pytest.mark.ipex),
]


class Engine(ReferenceBackend):
    """The reference with a fault: `change` rewrites the graph, or `late` the functions that it calls."""

    name = "faulty"

    def __init__(self, change):
        self.change = change

    def capabilities(self):
        return dataclasses.replace(super().capabilities(), backend=self.name)

    def lower(self, graph, **options):
        module, _ = copy_module(graph.module)
        self.change(module)
        module.graph.lint()
        module.recompile()
        return super().lower(dataclasses.replace(graph, module=module))


@pytest.fixture
def faulty(monkeypatch):
    """Compare a network on a faulty engine with the reference."""

    def compare(change, model, x, other=None):
        monkeypatch.setattr("nc.backends._REGISTERED", {})
        nc.register_backend(Engine(change))
        q = convert(prepared_for(model, x, backend="faulty"), verify="off")
        return nc.compare(q, inputs=x if other is None else other)

    return compare


def verdicts(comparison):
    return {t.tensor: t.verdict for t in comparison.tensors}


def chain():
    """Three linears with an activation between.

    X, relu and relu_1 are read as codes, linear_2 is the output.
    """

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))

    return Function(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 4))


def codes_of(module, name):
    """The quantize node of a tensor."""
    return next(n for n in module.graph.nodes if n.target is quantize_per_tensor and n.args[0].name == name)


def behind_codes(function):
    """A fault in the codes of `relu`."""

    def change(module):
        node = codes_of(module, "relu")
        users = list(node.users)
        with module.graph.inserting_after(node):
            wrong = call_function(module.graph, function, (node,))
        for user in users:
            user.replace_input_with(node, wrong)

    return change


def one_more(codes):
    """All codes are too high by one."""
    return (codes.int() + 1).clamp(max=255).to(torch.uint8)


def near_ties_other_way(x, scale, zero_point, low, high, dtype):
    """Rounds half up instead of half to even."""
    return torch.floor(x / scale + 0.5).add(zero_point).clamp(low, high).to(dtype)


def test_healthy_engines_are_equal(faulty):
    found = faulty(lambda module: None, chain(), torch.randn(8, 16))
    assert verdicts(found) == dict.fromkeys(("x", "relu", "relu_1", "linear_2"), "equal")
    assert [t.operator for t in found.tensors] == ["x", "a", "b", "c"]
    assert (found.disagreements, found.first, found.unread) == ((), None, ())
    assert str(found) == "faulty against reference, 4 tensors: 4 equal"


def test_a_scale_that_is_two_percent_off_is_the_operators_fault(faulty):
    def change(module):
        node = next(n for n in module.graph.nodes if n.name == "linear_1")
        weight = getattr(module, node.args[1].args[1].target)
        module.register_buffer("wrong_scale", weight * 1.02)
        with module.graph.inserting_before(node.args[1]):
            node.args[1].update_arg(1, module.graph.get_attr("wrong_scale"))

    found = faulty(change, chain(), torch.randn(64, 16))
    assert verdicts(found)["x"] == verdicts(found)["relu"] == "equal"
    assert found.first.operator == "b"
    assert found.first.operators == ("b", "relu_1")
    assert [t.operator for t in found.disagreements] == ["b"]
    engine, reference = found.first.sides
    assert engine.wrong > 0
    assert engine.error > 1
    assert (reference.wrong, reference.error < 1e-3) == (0, True)
    assert found.tensors[-1].verdict in ("within one quantum", "propagated")
    assert found.tensors[-1].since == ("relu_1",)
    assert "'b' (between the tensors above and relu_1: b, relu_1): faulty is wrong in " in str(found)


def test_codes_that_are_all_one_too_high_are_no_rounding(faulty):
    """Within one quantum of the reference, and wrong all the same: only at a tie may a code be another."""
    found = faulty(behind_codes(one_more), chain(), torch.randn(8, 16))
    assert found.first.operator == "a"
    assert found.first.distance == 1
    assert 0.4 < found.first.sides[0].error <= 1
    assert found.tensors[2].verdict in ("within one quantum", "propagated")


def test_a_single_wrong_code_is_found(faulty):
    def wrong(codes):
        codes = codes.clone()
        codes[5, 3] += 2
        return codes

    found = faulty(behind_codes(wrong), chain(), torch.randn(8, 16))
    assert (found.first.tensor, found.first.different, found.first.sides[0].wrong) == ("relu", 1, 1)


def ties(rows=8):
    """Inputs of which every second one stands at a tie, with a scale of exactly 1/2: [-64, 63.5]."""
    x = torch.arange(rows * 16).reshape(rows, 16) / 4 - rows * 2
    x[0, 0], x[-1, -1] = -64.0, 63.5
    return x


def test_other_roundings_of_a_tie_are_within_one_quantum_and_propagate(faulty):
    def change(module):
        retarget(codes_of(module, "x"), near_ties_other_way)

    found = faulty(change, chain(), ties())
    assert found.disagreements == ()
    assert found.tensors[0].verdict == "within one quantum"
    assert found.tensors[0].different > 20
    assert found.tensors[0].since == ()
    assert found.tensors[0].sides[0].error == 0
    assert {t.since for t in found.tensors[1:]} == {("x",)}
    assert "propagated" in verdicts(found).values()


def test_a_fault_of_a_fp32_result_is_found(faulty):
    def change(module):
        output = next(iter(reversed(module.graph.nodes)))
        node = next(n for n in module.graph.nodes if n.name == "linear_2")
        with module.graph.inserting_after(node):
            wrong = call_function(module.graph, torch.ops.aten.mul.Tensor, (node, 1.0005))
        output.replace_input_with(node, wrong)

    found = faulty(change, chain(), torch.randn(8, 16))
    assert (found.first.operator, found.first.how) == ("c", "fp32")
    assert found.first.sides[0].error == pytest.approx(0.0005 * 255, rel=0.05)


def test_infinities_and_nan_on_one_side_only_are_wrong(faulty):
    for bad in (math.inf, math.nan):

        def change(module, bad=bad):
            output = next(iter(reversed(module.graph.nodes)))
            with module.graph.inserting_before(output):
                output.args = (
                    (
                        call_function(module.graph, torch.ops.aten.mul.Tensor, (output.args[0][0], bad)),
                        *output.args[0][1:],
                    ),
                )

        found = faulty(change, chain(), torch.randn(8, 16))
        assert [t.tensor for t in found.disagreements] == ["linear_2"]
        assert found.first.distance == math.inf


def test_masks_of_minus_infinity_are_equal(faulty):
    def forward(self, x):
        return self.a(x).masked_fill(x > 1, -math.inf)

    assert set(
        verdicts(
            faulty(lambda module: None, Function(forward, a=nn.Linear(8, 8)), torch.randn(8, 8))
        ).values()
    ) == {"equal"}


def test_outputs_of_integers_are_compared_exactly(faulty):
    def forward(self, x):
        return self.a(x).argmax(-1)

    def change(module):
        retarget(next(n for n in module.graph.nodes if "argmax" in n.name), torch.ops.aten.argmin.default)

    model = Function(forward, a=nn.Linear(8, 8))
    found = faulty(change, model, torch.randn(16, 8))
    assert (found.first.tensor, found.first.how) == ("argmax", "exact")
    assert set(verdicts(faulty(lambda module: None, model, torch.randn(16, 8))).values()) == {"equal"}


# --- reading ---


def test_an_engine_that_computes_something_else_when_it_is_read_is_not_read(faulty):
    """As fusers do: a tensor that somebody else reads is made by another kernel."""

    def change(module):
        node = codes_of(module, "relu")
        if len(node.users) > 1:
            retarget(node, near_ties_other_way)
            node.args = (node.args[0], node.args[1] * 1.3, *node.args[2:])

    found = faulty(change, chain(), torch.randn(8, 16))
    assert found.unread == ("relu",)
    assert verdicts(found) == dict.fromkeys(("x", "relu_1", "linear_2"), "equal")
    assert found.tensors[1].operators == ("a", "relu", "b", "relu_1")
    assert "not read, because reading them changes the results of an engine: relu" in str(found)


def test_an_engine_that_fails_on_a_tensor_is_not_asked_for_it(faulty):
    def change(module):
        if len(codes_of(module, "relu").users) > 1:
            msg = "can't do that"
            raise BackendError(msg)

    found = faulty(change, chain(), torch.randn(8, 16))
    assert found.unread == ("relu",)
    assert verdicts(found) == dict.fromkeys(("x", "relu_1", "linear_2"), "equal")


@pytest.mark.ipex
def test_equal_codes_are_read_one_by_one():
    """Where operators work in place each reader has codes of its own.

    IPEX hangs on a graph that returns one tensor twice.
    """

    def forward(self, x):
        y = self.norm(x)
        z = torch.zeros_like(y)
        z[:, 0] = 2.0
        return self.a(y) + z, self.b(y)

    model = Function(forward, norm=nn.LayerNorm(16), a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    q = quantized(model, torch.randn(4, 16), None, "ipex")
    assert [t.tensor for t in healthy(q, None).tensors].count("layer_norm") == 2


def test_an_engine_that_shows_a_tensor_wrongly_is_not_accused(faulty):
    """What it makes of a tensor tells what the tensor was."""

    def change(module):
        node = codes_of(module, "relu")
        for user in [u for u in node.users if next(iter(u.users)).op == "output"]:
            user.args = (node, 2 * node.args[1], node.args[2], user.args[3])

    found = faulty(change, chain(), torch.randn(8, 16))
    assert found.unread == ("relu",)
    assert found.disagreements == ()


def test_ties_in_unread_codes_excuse_no_more_than_they_can_do(faulty):
    def change(module, wrong=1.0):
        node = codes_of(module, "x")
        retarget(node, near_ties_other_way)
        if len(node.users) > 1:
            node.args = (node.args[0], node.args[1] * 1.3, *node.args[2:])
        linear = next(n for n in module.graph.nodes if n.name == "linear")
        with module.graph.inserting_before(linear):
            linear.update_arg(
                0, call_function(module.graph, torch.ops.aten.mul.Tensor, (linear.args[0], wrong))
            )

    model = MLP()
    found = faulty(change, model, ties())
    assert found.unread == ("x",)
    assert found.disagreements == ()
    assert any(t.different for t in found.tensors)
    found = faulty(lambda module: change(module, 1.3), model, ties())
    assert found.first.operator == "fc1"


NETWORKS = {
    "linear": (lambda self, x, q: self.a(q), {"a": nn.Linear(8, 8)}, (4, 8)),
    "convolution": (lambda self, x, q: F.relu(self.a(q)), {"a": nn.Conv2d(3, 4, 3, padding=1)}, (2, 3, 6, 6)),
    "transposed": (lambda self, x, q: F.silu(self.a(q)), {"a": nn.ConvTranspose2d(3, 4, 3)}, (2, 3, 6, 6)),
    "pools": (lambda self, x, q: F.avg_pool2d(F.max_pool2d(q, 2), 2).flatten(1), {}, (2, 3, 8, 8)),
    "chunks": (lambda self, x, q: torch.cat([c * 2 for c in q.chunk(2, 1)], 1), {}, (2, 4, 6)),
    "sum": (lambda self, x, q: q + x - q.transpose(0, 1), {}, (4, 4)),
    "products": (
        lambda self, x, q: (q @ q.transpose(-1, -2)) / 3 + (q * x) @ x.transpose(-1, -2),
        {},
        (2, 4, 8),
    ),
    "softmax": (lambda self, x, q: torch.softmax(q, -1), {}, (2, 4, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_slack_is_never_less_than_what_ties_do(name):
    """Every tie the other way, at random: no result is further off than its slack; and slack is finite."""
    function, layers, shape = NETWORKS[name]
    model = Function(lambda self, x: function(self, x, F.hardtanh(x, -64, 64)), **layers)
    module = nc.prepare(
        model.eval(), StaticQuantConfig(), example_inputs=torch.randn(shape), backend="reference"
    ).graph.module
    module, _ = copy_module(module)
    start = next(n for n in module.graph.nodes if "hardtanh" in n.name)
    with module.graph.inserting_after(start):
        codes = call_function(module.graph, quantize_per_tensor, (start, 0.5, 128, 0, 255, torch.uint8))
    with module.graph.inserting_after(codes):
        back = call_function(module.graph, dequantize_per_tensor, (codes, 0.5, 128, torch.uint8))
    start.replace_all_uses_with(back, delete_user_cb=lambda user: user is not codes)
    x = torch.randint(-40, 40, shape) / 4
    values, slacks = {}, {}

    class Recorder(fx.Interpreter):
        def run_node(self, node):
            values[node] = super().run_node(node)
            slack = slack_of(node, values[node], values, slacks) if node.op == "call_function" else None
            if slack is not None:
                slacks[node] = slack
            return values[node]

    with torch.no_grad():
        Recorder(module).run(x)
    last = next(iter(reversed(module.graph.nodes))).args[0][0]
    assert 0 < slacks[last].max() < math.inf
    expected, largest = values[last], 0.0
    for _ in range(20):
        other = torch.where(torch.rand(shape) < 0.5, x + 1e-4, x - 1e-4)
        codes.args = (codes.args[0], 0.5, 128, 0, 255, torch.uint8)
        module.recompile()
        with torch.no_grad():
            node_values = {}

            class Flipped(fx.Interpreter):
                def run_node(self, node, other=other, node_values=node_values):
                    value = super().run_node(node)
                    if node is codes:  # the one of this test
                        value = quantize_per_tensor(other, 0.5, 128, 0, 255, torch.uint8)
                    node_values[node] = value
                    return value

            Flipped(module).run(x)
        off = (node_values[last] - expected).abs()
        assert bool((off <= slacks[last] * (1 + 1e-5) + 1e-6).all())
        largest = max(largest, off.max().item())
    assert largest > 0


# --- the front door ---


def test_inputs_come_in_every_form():
    x, mask = torch.randn(2, 6, 32), torch.zeros(2, 1, 6, 6)
    q = quantized(Attention(), (x, mask))
    results = [
        nc.compare(q, "reference", inputs) for inputs in ((x, mask), [x, mask], {"x": x, "mask": mask}, None)
    ]
    assert len({str(r) for r in results}) == 1
    assert {
        t.verdict
        for t in nc.compare(q, q.reference, (torch.randn(3, 9, 32), torch.zeros(3, 1, 9, 9))).tensors
    } == {"equal"}


def test_low_bit_weights_alone_have_no_graph(tmp_path):
    x = torch.randn(4, 16)
    q = nc.quantize(MLP().eval(), nc.WeightOnlyConfig("int8", group_size=-1))
    for step, wrong in {
        "compare": lambda: nc.compare(q, "reference", x),
        "export_onnx": lambda: nc.export_onnx(q, tmp_path / "model.onnx"),
        "export_pt2": lambda: nc.export_pt2(q, tmp_path / "model.pt2"),
    }.items():
        with pytest.raises(
            StateError,
            match=rf"{step}\(\) needs a captured graph, .* MLP with low-bit weights .*export_weights.*StaticQuantConfig",
        ):
            wrong()
    inside = nc.quantize(
        q, nc.StaticQuantConfig(), lambda p: p(x), example_inputs=x, backend="reference"
    )  # what the message says
    assert nc.compare(inside, "reference", x).tensors is not None


def test_what_can_not_be_compared_says_why(tmp_path):
    x = torch.randn(4, 16)
    q = quantized(MLP().eval(), x)
    for wrong in (lambda: nc.compare(MLP(), q, x), lambda: nc.compare(q, MLP(), x)):
        with pytest.raises(
            StateError, match=r"compare\(\) expects the result of convert\(\) or load\(\).*but got MLP"
        ):
            wrong()
    with pytest.raises(ConfigError, match="load the model with backend='native'"):
        nc.compare(q, "native", x)
    with pytest.raises(
        InputError, match="Expected inputs to be a tensor, a tuple, a list or a dict, but got an int"
    ):
        nc.compare(q, inputs=3)
    with pytest.raises(InputError, match="expected size 16 in dimension 1"):
        nc.compare(q, inputs=torch.randn(4, 15))
    q.save(tmp_path / "a")
    again = nc.load(tmp_path / "a", backend="reference")
    assert {t.verdict for t in nc.compare(q, again, x).tensors} == {"equal"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.fc1.weight.data.mul_(-1), "the constant 'fc1_weight_int8' has other values"),
        (
            lambda m: setattr(m, "act", nn.GELU()),
            r"'relu' \(operator 'act'\) calls relu.default in the first and gelu.default in the second",
        ),
        (
            lambda m: setattr(m, "fc2", nn.Sequential(m.fc2, nn.Tanh())),
            r"'output' calls|calls output in the first and tanh.default",
        ),
    ],
)
def test_models_that_differ_say_where(change, message):
    model, x = MLP().eval(), torch.randn(4, 16)
    q = quantized(model, x, StaticQuantConfig(post=()))
    change(model)
    with pytest.raises(ConfigError, match=f"The two are not the same quantized model: .*{message}"):
        nc.compare(q, quantized(model.eval(), x, StaticQuantConfig(post=())), x)


def test_other_quantization_parameters_are_another_model():
    model, x = MLP().eval(), torch.randn(4, 16)
    with pytest.raises(ConfigError, match="has the arguments"):
        nc.compare(quantized(model, x), quantized(model, 2 * x), x)


def test_plain_values_and_counts(faulty):
    found = faulty(behind_codes(one_more), chain(), torch.randn(8, 16))
    plain = found.to_dict()
    assert plain["engines"] == ("faulty", "reference")
    assert list(plain["counts"]) == list(VERDICTS)
    assert sum(plain["counts"].values()) == len(found.tensors) == 4
    assert plain["tensors"][1]["sides"][0]["wrong"] == found.first.sides[0].wrong


def test_points_of_a_block_with_a_residual_stream():
    model = MODELS["feed-forward"][0]().eval()
    graph = quantized(model, torch.randn(2, 6, 32)).graph
    int8 = frozenset(d.operator for d in graph.plan.quantized)
    places = places_of(graph.module, int8)
    assert [name_of(n) for n in places] == ["layer_norm", "gelu"]
    points = points_at(graph.module, places, int8)
    assert [(p.operator, p.how, p.above) for p in points] == [
        ("norm", "codes", ()),
        ("up", "codes", (0,)),
        ("down", "fp32", (1,)),
    ]
    tapped = with_outputs(graph.module, places)
    assert len(list(tapped.graph.nodes)[-1].args[0]) == 3


# --- engines ---


def healthy(q, *inputs):
    """No disagreement for any of the inputs; the last comparison."""
    for values in inputs:
        found = nc.compare(q, inputs=values, isolate="never")
        assert found.disagreements == (), found
        assert found.tensors
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_on_small_networks(engine, name):
    build, shape, _ = MODELS[name]
    prepared = prepared_for(build(), torch.randn(shape), backend=engine)
    prepared(torch.randn(8, *shape[1:]))
    q = convert(prepared, isolate="never")
    found = healthy(q, None, torch.randn(5, *shape[1:]))
    assert found.engines == (engine, "reference")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_engines_agree_on_every_activation_type(engine, dtype, symmetric):
    """The native engine shifts int8 codes to uint8; what is compared are the codes of the quantized graph."""
    x = torch.randn(2, 3, 8, 8)
    q = quantized(ResidualCNN(), x, StaticQuantConfig(act_dtype=dtype, act_sym=symmetric), engine)
    found = nc.compare(q, inputs=torch.randn(3, 3, 8, 8), isolate="never")
    assert sum(t.how == "codes" for t in found.tensors) >= 4
    if engine == "ipex" and dtype == "int8" and not cpu.accumulates_wide():
        # oneDNN itself halves and rounds the weights of convolutions there
        assert {t.operator for t in found.disagreements} <= {"stem", "conv1", "add"}
        assert found.first.operator == "stem"
        assert all(t.sides[0].error < 3 for t in found.disagreements)
    else:
        assert found.disagreements == (), found


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
@pytest.mark.parametrize("zero_point", [3, 4])
def test_how_engines_round_ties(engine, zero_point):
    """compare-engines.md: on their own, quantize nodes round `x / s` and add the zero point.

    Int8 kernels of engines add it first.
    """
    model = Function(lambda self, x: self.b(F.relu(self.a(x))), a=nn.Linear(16, 16), b=nn.Linear(16, 4))
    x = torch.arange(1024).remainder(256).reshape(64, 16) / 4
    graph = quantized(model, x, None, engine, verify="off").graph
    module, _ = copy_module(graph.module)
    for name, scale, zero in (("x", 0.25, 0), ("relu", 0.5, zero_point)):
        node = codes_of(module, name)
        node.args = (node.args[0], scale, zero, 0, 255, torch.uint8)
        for user in list(node.users):
            user.args = (node, scale, zero, user.args[3])
    linear = next(n for n in module.graph.nodes if n.name == "linear")
    codes, scales, bias = linear.args[1].args[0].target, linear.args[1].args[1].target, linear.args[2].target
    for name, value in (
        (codes, 64 * torch.eye(16, dtype=torch.int8)),
        (scales, torch.full((16,), 1 / 64)),
        (bias, torch.zeros(16)),
    ):
        setattr(module, name, value)  # the linear gives back its input, exactly
    module.recompile()
    tapped = dataclasses.replace(graph, module=with_outputs(module, [codes_of(module, "relu")]))
    values = (
        get_backend(engine)
        .lower(tapped, verify="off", **engine_options(get_backend(engine), isolate="never"))
        .run([x])[-1]
    )
    before, after = (x / 0.5).round() + zero_point, (x / 0.5 + zero_point).round()
    assert int((before != after).sum()) == (512 if zero_point % 2 else 0)
    assert torch.equal(values / 0.5 + zero_point, before if engine == "reference" else after)


@pytest.mark.ipex
@pytest.mark.skipif(bool(available_backends()["native"]), reason="needs two engines")
@pytest.mark.parametrize("name", ["mlp", "residual", "encoder"])
def test_two_engines_against_each_other(name, tmp_path):
    build, shape, _ = MODELS[name]
    config = (
        StaticQuantConfig().set_local(".*matmul.*", nc.StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
        if name == "encoder"
        else None
    )
    quantized(build(), torch.randn(shape), config, "native").save(tmp_path / "a")
    a, b = (nc.load(tmp_path / "a", backend=engine, isolate="never") for engine in ("ipex", "native"))
    found = nc.compare(a, b, torch.randn(shape), isolate="never")
    assert found.engines == ("ipex", "native")
    assert found.disagreements == (), found


@pytest.mark.ipex
def test_the_sum_that_ipex_gives_another_tensors_scale_is_found():
    """A known fault, compare-engines.md.

    An int8 sum written over the codes of the model's input keeps their scale and zero point.
    """

    def forward(self, x):
        return self.c(F.max_pool1d(self.b(F.gelu(self.a(x))) + x, 2))

    torch.manual_seed(0)
    model = Function(forward, a=nn.Linear(32, 32), b=nn.Linear(32, 32), c=nn.Linear(16, 8))
    x = torch.randn(2, 5, 32)
    found = nc.compare(quantized(model, x, None, "ipex", verify="off"), "reference", x, isolate="never")
    assert found.first is not None
    assert "add" in found.first.operators


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.fc = kind(16, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.rnn(torch.tanh(x))[0])


@pytest.mark.ipex
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_linears_are_bounded_by_the_ties_of_their_inputs(granularity, symmetric):
    model = MODELS["encoder"][0]().eval()
    x = torch.randn(2, 6, 32)
    config = DynamicQuantConfig(act_granularity=granularity, act_sym=symmetric)
    q = nc.quantize(model, config, example_inputs=x, backend="ipex")
    found = healthy(q, x, torch.randn(5, 9, 32))
    dynamic = [t for t in found.tensors if t.how == "dynamic"]
    assert {t.operator for t in dynamic} >= {"attention.query", "up", "down"} - {"down"}
    assert all(side.unit == "quanta" for t in dynamic for side in t.sides)


@pytest.mark.ipex
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_judged_as_a_whole(kind):
    x = torch.randn(2, 5, 16)
    q = nc.quantize(Recurrent(kind).eval(), DynamicQuantConfig(), example_inputs=x, backend="ipex")
    layers = [t for t in healthy(q, x).tensors if t.how == "recurrent"]
    assert layers
    assert all(side.unit == "dB" and side.error > 30 for t in layers for side in t.sides)

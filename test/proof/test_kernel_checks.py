"""Verification per kernel.

A wrong kernel is found and named whatever the outputs say, and plans for new sizes are compared too.
"""

import dataclasses
import math
import warnings

import pytest
import torch
from models import Attention, Function, ResidualCNN, graph_of, quantized
from torch import nn

import nc
from nc import (
    DynamicQuantConfig,
    NCWarning,
    StaticQuantConfig,
    VerificationError,
    WeightOnlyConfig,
    available_backends,
)
from nc.backends.native import lower, operators, planned, references
from nc.backends.native.operators import dynamic_attention
from nc.backends.native.plans import plan_instance
from nc.backends.native.plans.execution_plan import FunctionCall
from nc.backends.passes import Pass
from nc.graph.catalogue import schema_arguments
from nc.graph.fx_utils import call_function, run_with
from nc.graph.views import returned, set_argument
from nc.kernels.onednn.descriptions import DST
from nc.ops import quantize_per_tensor
from nc.proof import few_places, kernels
from nc.proof.kernels import check_kernels, compared_names
from nc.proof.rounding_bounds import slack_of

pytestmark = pytest.mark.skipif(
    bool(available_backends()["native"]), reason="the native backend can't run here"
)

QLINEAR = torch.ops.onednn.qlinear_pointwise.default


def deep(blocks=12, width=32):
    """So many linears that one wrong one is lost among the roundings of all."""
    layers = [layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 8)).eval()


def low_bit(model, act_dtype):
    """Its linears have 8-bit weights, and round their inputs."""
    config = WeightOnlyConfig("int8", group_size=-1, act_dtype=act_dtype, w_algo="minmax")
    return nc.quantize(model, config, backend="reference")


def quantized_names(graph):
    return frozenset(d.operator for d in graph.plan.quantized)


def own_values(graph, inputs):
    """The values of the quantized graph itself, by name, and its outputs."""
    found = {}

    def note(node, value, _):
        found[node.name] = value
        return value

    outputs = run_with(graph.module, inputs, note)
    return outputs, {name: found[name] for name in compared_names(graph.module, quantized_names(graph))}


def check(graph, outputs, values):
    return check_kernels(graph.module, quantized_names(graph), graph.example, outputs, values)


@pytest.fixture(params=["cnn", "attention", "deep", "dynamic", "low bit", "low bit in blocks"])
def graph(request):
    models = {
        "cnn": (ResidualCNN(), torch.randn(2, 3, 16, 16)),
        "attention": (Attention(), torch.randn(2, 6, 32)),
        "deep": (deep(), torch.randn(16, 32)),
        "dynamic": (deep(2), torch.randn(16, 32)),
        "low bit": (low_bit(deep(2), "int8"), torch.randn(16, 32)),
        "low bit in blocks": (low_bit(deep(2, 36), "int8_block32"), torch.randn(16, 36)),
    }
    model, x = models[request.param]
    static = request.param in ("cnn", "attention", "deep")
    config = StaticQuantConfig() if static else DynamicQuantConfig()
    return quantized(model, x, config, backend="reference").graph


def test_the_graphs_own_values_are_right(graph):
    found = check(graph, *own_values(graph, graph.example))
    assert not found.faults
    assert not found.unread
    assert found.quanta == 0
    assert found.db == math.inf
    assert found.tensors > len(graph.plan.quantized) // 2


def test_each_wrong_tensor_is_found_and_no_other(graph):
    outputs, values = own_values(graph, graph.example)
    nodes = {node.name: node for node in graph.module.graph.nodes}
    inner = [name for name in values if nodes[name].op == "call_function"]
    for name in inner:
        value = values[name]
        if nodes[name].target is quantize_per_tensor:
            wrong = value.flatten().clone()
            at = wrong.numel() // 2
            wrong[at] = wrong[at] + 3 if wrong[at] < 100 else wrong[at] - 3
            wrong = wrong.view(value.shape)
        else:
            wrong = value + 0.01 * value.abs().max()
        faults = check(graph, outputs, {**values, name: wrong}).faults
        # the tensors behind it are what this one makes them in the graph, but here they are not: the next
        # ones differ too
        assert faults[0].tensor in (name, nodes[name].args[0].name), name


def test_outputs_are_compared(graph):
    outputs, values = own_values(graph, graph.example)
    leaf = next(leaf for leaf in returned(graph.module) if hasattr(leaf, "name"))
    (fault,) = check(graph, [outputs[0] * 1.01, *outputs[1:]], values).faults
    assert fault.tensor == leaf.name


def test_tensors_that_are_not_shown_are_judged_with_the_next(graph):
    outputs, _ = own_values(graph, graph.example)
    found = check(graph, outputs, {})
    assert not found.faults
    assert found.unread
    assert check(graph, [2 * outputs[0], *outputs[1:]], {}).faults


@pytest.mark.parametrize("act_dtype", ["int8", "int8_block32"])
def test_a_low_bit_linear_may_round_a_tie_either_way(act_dtype):
    """An input at half a code; one that is no tie may not have the next code."""
    size = 40
    model = low_bit(nn.Sequential(nn.Linear(size, 8)).eval(), act_dtype)
    x = torch.full((16, size), 127.0)
    x[:, 3] = 10.5
    x[:, 5] = 10.2
    graph = quantized(model, x, DynamicQuantConfig(), backend="reference").graph
    outputs, values = own_values(graph, graph.example)
    weight = model[0].weight
    assert not check(graph, [outputs[0] + weight[:, 3]], values).faults
    assert not check(graph, [outputs[0] - weight[:, 3]], values).faults
    assert check(graph, [outputs[0] + 3 * weight[:, 3]], values).faults
    assert check(graph, [outputs[0] + weight[:, 3] + 2 * weight[:, 5].abs()], values).faults


def test_codes_of_the_other_signedness_are_the_same_codes():
    graph = quantized(deep(2), torch.randn(16, 32), StaticQuantConfig(), backend="reference").graph
    outputs, values = own_values(graph, graph.example)
    for name, value in values.items():
        if value.dtype is torch.uint8:
            shifted = (value.to(torch.int16) - 128).to(torch.int8)
            assert not check(graph, outputs, {**values, name: shifted}).faults
            assert check(graph, outputs, {**values, name: shifted.clamp(max=0)}).faults


def test_codes_that_are_all_a_little_off_are_found():
    """One quantum is within the bound of an element, but not when all have it."""
    graph = quantized(deep(2), torch.randn(64, 32), StaticQuantConfig(), backend="reference").graph
    outputs, values = own_values(graph, graph.example)
    name = next(name for name, value in values.items() if value.dtype is torch.uint8)
    off = torch.where(values[name] < 255, values[name] + 1, values[name])
    fault = check(graph, outputs, {**values, name: off}).faults[0]
    assert fault.tensor == next(n for n in graph.module.graph.nodes if n.name == name).args[0].name
    one = values[name].clone()
    one.view(-1)[5] += 1
    found = check(graph, outputs, {**values, name: one})
    assert not [f for f in found.faults if f.tensor == fault.tensor]
    assert 0 < found.quanta <= kernels.MOST_QUANTA


def test_nan_has_no_right_code_and_equals_itself():
    error = kernels._of_codes(
        torch.tensor([0, 3], dtype=torch.uint8), torch.tensor([math.nan, 3.2]), torch.zeros(())
    )
    assert error == kernels._Error()
    values = torch.tensor([math.nan, math.inf, 1.0])
    assert kernels._of_values(values, values.clone(), torch.zeros(())).db == math.inf
    assert kernels._of_values(values, torch.tensor([0.0, math.inf, 1.0]), torch.zeros(())).wrong
    assert kernels._of_values(torch.tensor([math.nan]), torch.tensor([1.0]), torch.zeros(())).wrong


def with_fault(monkeypatch, change):
    """Let a pass behind all others change the lowered graph, whoever runs it."""
    finish = lower.finish
    monkeypatch.setattr(lower, "finish", lambda **options: (*finish(**options), Pass("fault", change)))


def scaled(module, which=5, factor=1.1):
    """One linear in the middle gives codes of another scale."""
    node = [n for n in module.graph.nodes if n.target is QLINEAR][which]
    set_argument(node, "output_scale", schema_arguments(node)["output_scale"] * factor)


def test_a_wrong_kernel_is_an_error_that_names_it(monkeypatch):
    """The outputs alone would pass."""
    torch.manual_seed(0)
    model, x = deep(), torch.randn(64, 32)
    with_fault(monkeypatch, scaled)
    with pytest.raises(VerificationError, match="in .* place.*'10' .*quanta beyond their rounding") as error:
        quantized(model, x, StaticQuantConfig(), backend="native")
    assert "set_local('10'" in str(error.value)
    with pytest.warns(NCWarning, match="'10'"):
        q = quantized(model, x, StaticQuantConfig(), backend="native", verify="warn")
    assert q.engine.report().sqnr_db > 15
    assert "tensors are wrong" in q.report().details["kernels compared"]


def only_way():
    (way,) = operators.table()[QLINEAR].ways.values()
    return way


def instead(monkeypatch, way):
    """Let plans compute linears another way."""
    known = operators.table()
    known = {**known, QLINEAR: dataclasses.replace(known[QLINEAR], ways={"faulty": way})}
    monkeypatch.setattr(operators, "table", lambda: known)


@pytest.mark.needs_plans
def test_a_wrong_plan_is_not_used(monkeypatch):
    """What runs the graph is then the next executor, and the report says why."""
    way = only_way()
    seen = []

    def faulty(recorder, node, arguments):
        seen.append(node)
        return way(
            recorder,
            node,
            {**arguments, "output_scale": arguments["output_scale"] * (1.1 if len(seen) == 6 else 1)},
        )

    instead(monkeypatch, faulty)
    q = quantized(deep(), torch.randn(64, 32), StaticQuantConfig(), backend="native")
    assert (
        q.report()
        .details["run by"]
        .startswith(
            "TorchScript: oneDNN primitives compute something else than the quantized graph, the first time "
            "at '10'"
        )
    )
    assert "codes within 0.01 quanta" in q.report().details["kernels compared"]


@pytest.fixture
def wrong_for_one_row(monkeypatch):
    """A kernel that is wrong for a batch of one."""
    way = only_way()

    def faulty(recorder, node, arguments):
        if recorder.read(arguments["qx"]).tensor.shape[0] == 1 and node.meta["operators"] == ["10", "11"]:
            arguments = {**arguments, "output_scale": arguments["output_scale"] * 2}
        return way(recorder, node, arguments)

    instead(monkeypatch, faulty)


@pytest.mark.usefixtures("wrong_for_one_row")
@pytest.mark.needs_plans
def test_a_plan_for_new_sizes_that_is_wrong_is_not_used():
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    q = quantized(deep(), x, StaticQuantConfig(), backend="native")
    with pytest.warns(
        NCWarning,
        match=r"Kernels for inputs of sizes \(1, 32\) compute something else.*'10'.*they are slower",
    ) as given:
        first = q(x[:1])
    assert given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(q(x[:1]), first)
        q(x[:7])
    assert torch.allclose(first, q.reference(x[:1]), rtol=0, atol=1e-5)
    assert (
        q.report().details["sizes compared"]
        == "2 beside the example's, 1 of them wrong: torch's operators compute those"
    )


@pytest.mark.usefixtures("wrong_for_one_row")
@pytest.mark.needs_plans
def test_new_sizes_are_not_compared_where_that_is_asked(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    q = quantized(deep(), x, StaticQuantConfig(), backend="native", verify_sizes=False)
    nc.save(q, tmp_path / "q")
    for each in (q, nc.load(tmp_path / "q", backend="native", verify_sizes=False)):
        assert not torch.allclose(each(x[:1]), each.reference(x[:1]), rtol=0, atol=1e-4)
        assert "sizes compared" not in each.report().details
    with pytest.warns(NCWarning, match="compute something else"):
        nc.load(tmp_path / "q", backend="native")(x[:1])


@pytest.mark.usefixtures("wrong_for_one_row")
@pytest.mark.needs_plans
def test_where_nothing_is_right_the_call_fails(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    q = quantized(deep(), x, StaticQuantConfig(), backend="native")
    monkeypatch.setattr(
        "nc.backends.native.references.Reference.why_unlike_for", lambda *_: "computes something else: 3.0 dB"
    )
    for _ in range(2):
        with pytest.raises(
            VerificationError, match="What would take their place computes something else: 3.0 dB"
        ):
            q(x[:1])
    q(x[:2])


@pytest.mark.needs_plans
def test_given_up_plans_are_compared_once(monkeypatch):
    monkeypatch.setattr(planned, "_MOST_PLANS", 2)
    x = torch.randn(8, 32)
    q = quantized(deep(2), x, StaticQuantConfig(), backend="native")
    for rows in (1, 2, 3, 4, 1, 2, 3, 4):
        q(x[:rows])
    assert q.report().details["sizes compared"] == "4 beside the example's, none wrong"


@pytest.mark.needs_plans
def test_wrong_sizes_stay_known_when_their_plan_is_given_up(monkeypatch, wrong_for_one_row):
    monkeypatch.setattr(planned, "_MOST_PLANS", 2)
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    q = quantized(deep(), x, StaticQuantConfig(), backend="native")
    with pytest.warns(NCWarning):
        first = q(x[:1])
    for rows in (2, 3, 4, 5):
        q(x[:rows])
    assert torch.equal(q(x[:1]), first)


def test_dynamic_kernels_are_compared(monkeypatch):
    def change(module):
        names = ("linear_with_input_q_dq", "row_linear", "row_chain")  # FBGEMM's, and those of nc
        node = next(n for n in module.graph.nodes if any(name in str(n.target) for name in names))
        if "row_chain" in str(node.target):
            scale = schema_arguments(node)["scale"]
            setattr(module, scale.target, getattr(module, scale.target) * 1.02)
            return
        user = next(iter(node.users))
        with module.graph.inserting_after(node):
            wrong = call_function(module.graph, torch.ops.aten.mul.Tensor, (node, 1.02))
        user.replace_input_with(node, wrong)

    q = quantized(deep(3), torch.randn(16, 32), DynamicQuantConfig(), backend="native")
    assert "fp32 results to" in q.report().details["kernels compared"]
    with_fault(monkeypatch, change)
    with pytest.raises(VerificationError, match="'0'.*fp32 values have .* dB, expected at least 60"):
        quantized(deep(3), torch.randn(16, 32), DynamicQuantConfig(), backend="native")


@pytest.mark.skipif(bool(dynamic_attention.why_unavailable()), reason="attention is no function in C")
def test_attention_with_ranges_of_each_call_is_compared(monkeypatch):
    def change(module):
        for node in [n for n in module.graph.nodes if "dynamic_attention" in str(n.target)]:
            readers = list(node.users)
            with module.graph.inserting_after(node):
                wrong = call_function(module.graph, torch.ops.aten.mul.Tensor, (node, 1.05))
            for reader in readers:
                reader.replace_input_with(node, wrong)

    config = DynamicQuantConfig().set_local("matmul", DynamicQuantConfig())
    model, x = Attention().eval(), torch.randn(2, 24, 32)
    for size in (1e-3, 1.0, 1e3):  # no code at a tie is a fault
        assert "run by" not in quantized(model, x * size, config, backend="native").report().details
    with_fault(monkeypatch, change)
    q = quantized(model, x, config, backend="native")
    assert "fp32 values have 2" in q.report().details["run by"]  # 26 dB, without which torch computes it


def test_verification_can_be_off(monkeypatch):
    with_fault(monkeypatch, scaled)
    q = quantized(deep(), torch.randn(64, 32), StaticQuantConfig(), backend="native", verify="off")
    assert "kernels compared" not in q.report().details


def test_a_check_reads_well():
    found = kernels.KernelCheck(3, 0.0, 130.2, ("softmax",), ())
    assert str(found) == (
        "3 tensors, codes within 0.01 quanta of their rounding, fp32 results to 130 dB; 1 that are in no "
        "memory were judged with the next"
    )
    fault = kernels.Fault("relu", "fc", ("fc", "act"), "codes are off")
    assert (
        str(dataclasses.replace(found, faults=(fault,)))
        == "1 of 3 tensors are wrong, the first of 'fc' (one of fc, act): codes are off"
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: torch.nn.functional.linear(x, torch.zeros(3, 8)),
        lambda _, x: torch.softmax(x - torch.tensor([0.0] * 7 + [1e4]), -1),
        lambda _, x: x * torch.zeros(8),
    ],
    ids=["weights of 0", "probabilities of 0", "factors of 0"],
)
def test_what_has_no_bound_times_0_has_none(function):
    graph = graph_of(Function(function), torch.randn(2, 8))
    env, slacks = {}, {}
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            env[node], slacks[node] = torch.randn(2, 8), torch.full((2, 8), torch.inf)
        elif node.op == "get_attr":
            env[node] = getattr(graph.module, node.target)
        elif node.op == "call_function":
            args = torch.fx.map_arg(node.args, env.__getitem__)
            env[node] = node.target(*args)
            found = slack_of(node, env[node], env, slacks)
            if found is not None:
                slacks[node] = found
                assert not bool(found.isnan().any())
                assert bool(found.isinf().all())


#: Where a kernel is wrong → rows and columns of its result [rows, columns].
WRONG_AT = {
    "the last block of rows": (slice(96, None), slice(None)),
    "the last row": (slice(-1, None), slice(None)),
    "the last column": (slice(None), slice(-1, None)),
    "the second panel of columns": (slice(None), slice(32, 64)),
    "the piece of the second thread": (slice(52, None), slice(None)),
    "one row of each block": (slice(5, None, 16), slice(None)),
}


@pytest.fixture
def spoiled(monkeypatch):
    """Let the kernel of one operator be wrong at some places where there are 103 rows."""
    found = {"where": None}
    real = plan_instance.PlanInstance._calls

    def calls(self, entries):
        execute = real(self, entries)
        (entry,) = entries if len(entries) == 1 else (None,)
        if found["where"] is None or entry is None or "0" not in entry.step.operators:
            return execute
        refs = entry.tensors if isinstance(entry, FunctionCall) else [entry.tensors[DST][1]]

        def wrong(tensors):
            execute(tensors)
            result = plan_instance._filled(self._tensor(refs[0]), tensors)
            result = result[: 103 * 96].view(103, 96)
            rows, columns = found["where"]
            result[rows, columns] = result[rows, columns] + 9

        return wrong

    monkeypatch.setattr(plan_instance.PlanInstance, "_calls", calls)
    return found


@pytest.mark.needs_plans
@pytest.mark.parametrize("where", WRONG_AT)
def test_a_fault_in_a_part_of_new_sizes_is_found(spoiled, where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8))
    q = quantized(model, torch.randn(64, 96), StaticQuantConfig(), backend="native")
    spoiled["where"] = WRONG_AT[where]
    with pytest.warns(NCWarning, match=r"sizes \(103, 96\) compute something else.*'0'"):
        q(torch.randn(103, 96))


@pytest.mark.needs_plans
def test_kernels_are_compared_once_for_a_class_of_sizes(monkeypatch):
    """Sizes with the same rest of a block are alike to the kernels in C; the reference runs for none.

    How a product of oneDNN divides a size depends on all of it.
    """
    torch.manual_seed(0)
    q = quantized(deep(), torch.randn(64, 32), StaticQuantConfig(), backend="native")
    of_onednn = any("matmul" in op.kernel for op in q.report().ops)
    looks, wholes = [], []
    look, whole = references.Reference.few_places, references.Reference.kernels
    monkeypatch.setattr(references.Reference, "few_places", lambda *a: looks.append(a[-1]) or look(*a))
    monkeypatch.setattr(references.Reference, "kernels", lambda *a: wholes.append(0) or whole(*a))
    for rows in (203, 203 + 2 * 192, 203 + 3 * 192):
        q(torch.randn(rows, 32))
    assert q.report().details["sizes compared"] == "3 beside the example's, none wrong"
    assert not wholes
    assert [bool(look) for look in looks] == [True, True, of_onednn]  # 203 and 587 differ in their magnitude
    assert all(len({name for each in look for name in each.operators}) < 12 for look in looks)


class TwoOutputs(nn.Module):
    """Outputs of other dtypes and without dimensions, a PReLU, and many operators between two products."""

    def __init__(self):
        super().__init__()
        self.first, self.slopes, self.last = nn.Linear(32, 64), nn.PReLU(64), nn.Linear(64, 40)

    def forward(self, x):
        y = self.slopes(self.first(x))
        for _ in range(100):
            y = (y + 0.01).sin()
        y = self.last(y)
        return y, y.argmax(-1), y.mean()


@pytest.mark.needs_plans
def test_new_sizes_of_any_outputs(tmp_path):
    torch.manual_seed(0)
    q = quantized(TwoOutputs(), torch.randn(8, 32), StaticQuantConfig(), backend="native")
    nc.save(q, tmp_path / "q")
    x = torch.randn(103, 32)
    for model in (q, nc.load(tmp_path / "q", backend="native")):
        got, expected = model(x), model.reference(x)
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0.1)
        assert got[1].dtype == torch.int64
        assert model.report().details["sizes compared"].startswith("1 beside the example's, none wrong")


@pytest.mark.needs_plans
@pytest.mark.parametrize("where", ["__init__", "see", "check"])
def test_a_comparison_that_fails_costs_no_call(monkeypatch, where):
    """All places are compared then."""
    q = quantized(deep(2), torch.randn(8, 32), StaticQuantConfig(), backend="native")

    def fails(*_):
        raise IndexError(where)

    monkeypatch.setattr(few_places.FewPlaces, where, fails)
    assert torch.isfinite(q(torch.randn(103, 32))).all()
    expected = f"1 beside the example's, none wrong, 1 of them at all places (IndexError: {where})"
    assert q.report().details["sizes compared"] == expected

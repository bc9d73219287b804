"""Low-bit linears of captured graphs: the kernels of modules, bit for bit.

What reports, artefacts and programs say of them.
"""

import copy
import dataclasses

import pytest
import torch
from models import WHY_NO_PLANS
from suites.low_bit import exact, form, native, ran, weight
from suites.reports import said
from torch import nn

import nc
from nc.backends import get_backend
from nc.backends.base import Backend
from nc.backends.low_bit import graph as low_bit
from nc.backends.low_bit.engine import set_backend
from nc.backends.native import package
from nc.backends.native import planned as planning
from nc.backends.native.executors import TorchScriptExecutor
from nc.backends.native.plans import code_products
from nc.backends.native.plans.execution_plan import AtenCall
from nc.export import export
from nc.graph.fx_utils import copy_module
from nc.kernels.low_bit import compiled
from nc.kernels.low_bit import kernel as kernel_module
from nc.nn import KernelChoice, QuantLinear
from nc.ops import quant_linear

ENGINES = [name for name in ("native", "ipex") if not nc.available_backends()[name]]


def captured(model, x, dynamic_shapes=None):
    """(the graph of a model, the same with kernels)."""
    module = export(model, x, dynamic_shapes).graph.module
    lowered, _ = copy_module(module)
    low_bit.replace_low_bit(lowered, "native")
    lowered.recompile()
    return module, lowered


def layer_of(
    name="int4", group=32, kind="symmetric", act="fp32", *, bias=True, scale_dtype="fp32", outputs=48
):
    packed = weight(form(name, group, kind, scale_dtype), outputs)
    return QuantLinear(packed, torch.randn(outputs) if bias else None, act)


def calls(module, target):
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target is target]


#: Of fp32 activations.
KERNELS = "bag (M <= 8), blocks" if compiled.why_unavailable() else "c fp32"
FORMATS = [
    ("int4", 32, "symmetric"),
    ("int4", 16, "zero point"),
    ("int3", 32, "minimum"),
    ("int8", -1, "symmetric"),
    ("int2", 32, "symmetric"),
    ("nf4", 32, "symmetric"),
    ("fp4_e2m1", 32, "symmetric"),
    ("fp8_e4m3", -1, "symmetric"),
]


@native
@pytest.mark.parametrize("act", ["fp32", "bf16", "int8", "int8_block32"])
@pytest.mark.parametrize(("name", "group", "kind"), FORMATS)
def test_a_graph_computes_what_the_module_computes_to_the_last_bit(name, group, kind, act):
    layer = layer_of(name, group, kind, act)
    module, lowered = captured(layer, torch.randn(2, 3, 128))
    assert len(calls(module, quant_linear)) == len(calls(lowered, low_bit.operator())) == 1
    assert not calls(lowered, quant_linear)
    scripted = TorchScriptExecutor().build(lambda _: lowered, (torch.randn(2, 3, 128),)).call
    by_plan = None if WHY_NO_PLANS else planning.planned(lowered, lambda: pytest.fail("no plan"))
    set_backend(layer, "native")
    for shape in ((2, 3, 128), (1, 1, 128), (9, 3, 128), (0, 3, 128)):
        x = torch.randn(shape)
        expected = layer(x)
        assert torch.equal(lowered(x)[0], expected)
        assert torch.equal(scripted(x)[0], expected)
        assert by_plan is None or torch.equal(by_plan(x)[0], expected)
    in_c = str(low_bit.kernel_choices(lowered).popitem()[1]).startswith("c ")
    plans = {} if by_plan is None else by_plan._plans
    calls_of = [[type(e) for e in plan.entries] for key, plan in plans.items() if key[1][0].numel()]
    assert all((AtenCall in entries) != in_c for entries in calls_of)
    assert act != "fp32" or torch.allclose(
        expected.double(), x.double() @ exact(layer.packed).T + layer.bias, rtol=1e-5, atol=1e-5
    )


@native
@pytest.mark.parametrize(
    "fields",
    [{"double_quant": True, "w_sym": False}, {"w_dtype": "fp4_e2m1", "scale_dtype": "e8m0"}],
    ids=str,
)
def test_scales_of_two_levels_and_powers_of_two(fields):
    (layer,) = nc.quantize(
        nn.Sequential(nn.Linear(128, 32)).eval(),
        nc.WeightOnlyConfig(**{"group_size": 32, **fields}),
        backend="native",
    )
    _, lowered = captured(nn.Sequential(layer), torch.randn(2, 128))
    for rows in (2, 20):
        x = torch.randn(rows, 128)
        assert torch.equal(lowered(x)[0], layer(x))


@native
@pytest.mark.usefixtures("without_c")
def test_the_number_of_rows_chooses_the_kernel_in_each_call():
    _, lowered = captured(layer_of(), torch.randn(2, 128))
    assert "quantized::embedding_bag_4bit_rowwise_offsets" in ran(lambda: lowered(torch.randn(8, 128)))
    assert "aten::mm" not in ran(lambda: lowered(torch.randn(8, 128)))
    assert "aten::mm" in ran(lambda: lowered(torch.randn(9, 128)))
    ((_, choice),) = low_bit.kernel_choices(lowered).items()
    assert str(choice) == "bag (M <= 8), blocks"


@native
@pytest.mark.usefixtures("without_c")
@pytest.mark.parametrize(("rows", "kernels", "tensors"), [(2, "bag (M <= 8)", 3), (20, "blocks", 0)])
def test_where_sizes_are_fixed_only_what_will_run_is_packed(rows, kernels, tensors):
    x = torch.randn(rows, 128)
    _, lowered = captured(layer_of(), x, {"input": None})
    ((_, choice),) = low_bit.kernel_choices(lowered).items()
    assert str(choice) == kernels
    assert sum(name.startswith("low_bit_layout") for name, _ in lowered.named_buffers()) == tensors


@native
@pytest.mark.usefixtures("without_c")
def test_layers_that_are_called_twice_share_what_is_packed():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = layer_of(outputs=128)

        def forward(self, x):
            return self.fc(self.fc(x))

    _, lowered = captured(Twice(), torch.randn(2, 128))
    first, second = calls(lowered, low_bit.operator())
    assert [n.target for n in first.args[-2] if n is not None] == [
        n.target for n in second.args[-2] if n is not None
    ]
    assert sum(name.startswith("low_bit_layout") for name, _ in lowered.named_buffers()) == 3


def test_a_weight_that_is_computed_stays_with_the_operator():
    packed = weight(form())

    class Net(nn.Module):
        def forward(self, x, codes):
            return quant_linear(x, codes, packed.scale, None, None, None, None, None, "int4", 128, "fp32")

    module, lowered = captured(Net(), (torch.randn(2, 128), packed.codes))
    assert len(calls(lowered, quant_linear)) == 1
    assert list(low_bit.kernel_choices(lowered).values()) == [KernelChoice(())]
    x = torch.randn(2, 128)
    assert torch.equal(lowered(x, packed.codes)[0], module(x, packed.codes)[0])


def test_a_cpu_without_vector_code_gets_the_operator_and_the_reason(monkeypatch):
    monkeypatch.setattr(kernel_module, "features", lambda **_: ())
    _, lowered = captured(layer_of(), torch.randn(2, 128))
    assert len(calls(lowered, quant_linear)) == 1
    ((_, choice),) = low_bit.kernel_choices(lowered).items()
    assert str(choice) == "reference"
    assert ("bag", "this CPU has no avx2") in [(name, why.split(" (")[0]) for name, why in choice.refused]


@native
def test_a_registered_backend_computes_by_its_own_rows(monkeypatch):
    rows, seen = get_backend("native").low_bit_kernels(), []
    bag = next(row for row in rows if row.name == "bag")
    own = dataclasses.replace(
        bag, name="own", max_rows=4, linear=lambda x, *a: seen.append(len(x)) or bag.linear(x, *a)
    )
    monkeypatch.setattr(
        "nc.backends._REGISTERED",
        {"mine": type("Mine", (Backend,), {"name": "mine", "low_bit_kernels": lambda _: (own,)})()},
    )
    layer = layer_of()
    lowered, _ = copy_module(export(layer, torch.randn(2, 128)).graph.module)
    low_bit.replace_low_bit(lowered, "mine")
    lowered.recompile()
    for rows in (3, 5):  # for more rows it has none
        x = torch.randn(rows, 128)
        assert torch.allclose(lowered(x)[0], layer(x), rtol=1e-4, atol=1e-5)
    assert seen == [3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.act = nn.Linear(32, 64), nn.ReLU()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(self.up(self.act(self.enc(x))).relu())


LOW_BIT = nc.WeightOnlyConfig("int4", group_size=32, white_list=["up", "down"])
MIXED = nc.StaticQuantConfig() + LOW_BIT


@pytest.fixture(scope="module", params=ENGINES)
def mixed(request):
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    prepared = nc.prepare(Net().eval(), MIXED, example_inputs=x, backend=request.param)
    prepared(x)
    return nc.convert(prepared, measure=False), request.param


def test_the_report_of_a_captured_model_names_kernels_and_refusals(mixed):
    q, backend = mixed
    report, planned = q.report(), backend == "native" and not WHY_NO_PLANS
    ops = {op.operator: op for op in report.ops}
    assert (ops["enc"].ran, ops["up"].ran, ops["up"].asked) == ("int8", "int4 weight", "int4 weight")
    assert ops["up"].kernel == ops["down"].kernel == KERNELS
    assert ops["enc"].kernel.partition(" ")[0] == (
        ("matmul" if code_products.why_unavailable() else "function") if planned else ""
    )
    refused = dict(ops["up"].refused)
    others = set() if compiled.why_unavailable() == "" else {"c fp32", "int4pack", "dyn_quant_4bit"}
    assert set(refused) == {"c int8", "c int8 block32"} | others | (
        {"ipex weight-only"} if backend == "ipex" else set()
    )
    assert (
        'kernel c int8 is not used for 2 layers: it multiplies int8 only; ask for act_dtype="int8"'
        in said(report)
    )
    assert ("AVX512-FP16" in said(report)) is (backend == "ipex")
    head = next(line for line in report.text(details=True).splitlines() if line.startswith("operator"))
    assert head.split() == ["operator", "type", "asked", "ran", "kernel", "why"]
    assert ("run by" in report.details) is (
        backend == "native" and not planned
    )  # an executor without Python between the calls
    assert report.to_dict()["ops"][1]["refused"] is not None


def test_engines_compute_what_the_graph_says_for_other_numbers_of_rows(mixed):
    q, backend = mixed
    for rows in (1, 4, 8, 9, 40):
        x = torch.randn(rows, 32)
        expected = q.reference(x)
        assert (
            q(x) - expected
        ).abs().max() < 0.02 * expected.abs().max()  # a code of `enc` may be the next one
    names = ran(lambda: q(torch.randn(4, 32)))
    in_c = (
        backend == "native" and KERNELS == "c fp32" and not WHY_NO_PLANS
    )  # called from the plan, not from torch
    assert ("nc_low_bit::linear" in names) is not in_c
    assert "nc::quant_linear" not in names
    assert ("quantized::embedding_bag_4bit_rowwise_offsets" in names) is (KERNELS != "c fp32")
    assert "nc_low_bit::linear" not in ran(lambda: q.reference(torch.randn(4, 32)))
    assert backend in ENGINES


def test_packed_layouts_are_no_part_of_artefacts_and_copies(mixed, tmp_path):
    q, backend = mixed
    x = torch.randn(4, 32)
    nc.save(q, tmp_path / "q")
    for file in (tmp_path / "q").iterdir():
        data = file.read_bytes()
        assert b"low_bit_layout" not in data
        assert b"nc_low_bit" not in data
    again = nc.load(tmp_path / "q", backend=backend)
    assert torch.equal(again(x), q(x))
    for now, before in zip(
        again.report().ops, q.report().ops, strict=True
    ):  # before, other numbers of rows may have had other kernels
        assert now.kernel in before.kernel.split(" or ")
    assert torch.equal(copy.deepcopy(q)(x), q(x))
    plain = nc.load(tmp_path / "q", backend="reference")
    assert {op.kernel for op in plain.report().ops} == {"", "reference"}
    assert q.report().weight_bytes < 64 * 128 * 2 * 4


@pytest.mark.skipif("ipex" not in ENGINES, reason="IPEX writes TorchScript")
def test_a_program_of_ipex_holds_the_operator_not_layouts_of_this_cpu(mixed, tmp_path):
    q, backend = mixed
    if backend != "ipex":
        pytest.skip("another engine")
    nc.export_torchscript(q, tmp_path / "q.pt")
    program = torch.jit.load(tmp_path / "q.pt")
    text = str(program.graph)
    assert "nc::quant_linear" in text
    assert "nc_low_bit" not in text
    x = torch.randn(4, 32)
    assert torch.allclose(program(x)[0], q(x), rtol=1e-4, atol=1e-5)


@native
def test_a_quantized_model_that_is_captured_keeps_its_kernels():
    q = nc.quantize(Net().eval(), LOW_BIT, backend="native")
    x = torch.randn(3, 32)
    captured_model = nc.quantize(q, nc.DynamicQuantConfig(), example_inputs=x, backend="native")
    assert [op.kernel for op in captured_model.report().ops if op.kind == "quant_linear"] == [KERNELS] * 2
    expected = q(x)
    assert (captured_model(x) - expected).abs().max() < 0.05 * expected.abs().max()


@native
@pytest.mark.exhaustive
def test_compiled_between_the_kernels():
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    prepared = nc.prepare(Net().eval(), MIXED, example_inputs=x, backend="native")
    prepared(x)
    q = nc.convert(prepared, measure=False, compile=True)
    assert [op.kernel for op in q.report().ops if op.kind == "quant_linear"] == [KERNELS] * 2
    for rows in (4, 20):
        x = torch.randn(rows, 32)
        assert (q(x) - q.reference(x)).abs().max() < 0.02 * q.reference(x).abs().max()


@native
def test_a_program_of_aot_inductor_says_that_it_holds_these_weights_in_fp32(tmp_path, monkeypatch):
    class CompilationBeginsError(Exception):
        """Far enough: what is to be said has been said, and the compiler takes a minute."""

    def stop(*_):
        raise CompilationBeginsError

    monkeypatch.setattr(package, "_compile", stop)
    x = torch.randn(4, 32)
    prepared = nc.prepare(Net().eval(), MIXED, example_inputs=x, backend="native")
    prepared(x)
    q = nc.convert(prepared, measure=False)
    with (
        pytest.raises(CompilationBeginsError),
        pytest.warns(nc.errors.NCWarning, match=r"2 linears .* in fp32.*: up, down\."),
    ):
        nc.export_pt2(q, tmp_path / "q.pt2")


@pytest.mark.ipex
@pytest.mark.exhaustive
def test_the_child_that_runs_a_model_first_knows_the_operator():
    x = torch.randn(4, 32)
    prepared = nc.prepare(Net().eval(), MIXED, example_inputs=x, backend="ipex")
    prepared(x)
    q = nc.convert(prepared, measure=False, isolate="always")
    assert {op.kernel for op in q.report().ops if op.kind == "quant_linear"} == {KERNELS}

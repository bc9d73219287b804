"""Every operator that reads a weight is in plan and report, and the shares of weights and multiply-adds are right."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from suites.reports import said
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import nc
from nc.capture.capture import capture
from nc.graph.plan import Decision
from nc.graph.shares import Part, shares_of

ROWS, STEPS = torch.randn(6, 32), torch.randn(6, 5, 32)


class Net(nn.Module):
    """A function of parameters, modules and one input."""

    def __init__(self, function, *shapes, modules=()):
        super().__init__()
        self.function = function
        self.w = nn.ParameterList(torch.randn(*shape) / 6 for shape in shapes)
        self.m = nn.ModuleList(modules)

    def forward(self, x):
        return self.function(self, x)


class Product(torch.autograd.Function):
    """A user's own product."""

    @staticmethod
    def forward(ctx, x, w):
        return torch.tensordot(x, w, dims=([1], [1]))


@torch.jit.script
def scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product in TorchScript."""
    return torch.tensordot(x, w, dims=([1], [0]))


@torch.library.custom_op("nc_test::product", mutates_args=())
def custom(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product that nothing is known of."""
    return x @ w


@custom.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1])


#: name: (model, input, kind of the operator that reads the weight, its multiply-adds)
CASES = {
    "rnn": (
        Net(lambda s, x: s.m[0](x)[0], modules=[nn.RNN(32, 16, 2, batch_first=True)]),
        STEPS,
        "rnn",
        30 * 16 * (32 + 16 * 3),
    ),
    "rnn relu both ways": (
        Net(lambda s, x: s.m[0](x)[0], modules=[nn.RNN(32, 16, nonlinearity="relu", bidirectional=True)]),
        STEPS,
        "rnn",
        2 * 30 * 16 * (32 + 16),
    ),
    "rnn cell": (Net(lambda s, x: s.m[0](x), modules=[nn.RNNCell(32, 16)]), ROWS, "rnn_cell", 6 * 16 * 48),
    "bilinear": (
        Net(lambda s, x: s.m[0](x, x), modules=[nn.Bilinear(32, 32, 4)]),
        ROWS,
        "bilinear",
        6 * 32 * 32 * 4,
    ),
    "linear of a parameter": (Net(lambda s, x: F.linear(x, s.w[0]), (8, 32)), ROWS, "linear", 6 * 8 * 32),
    "matmul of a parameter": (Net(lambda s, x: x @ s.w[0], (32, 8)), ROWS, "linear", 6 * 8 * 32),
    "a matrix per sample": (Net(lambda s, x: x @ s.w[0], (6, 32, 8)), STEPS, "matmul", 30 * 8 * 32),
    "einsum": (Net(lambda s, x: torch.einsum("bi,oi->bo", x, s.w[0]), (8, 32)), ROWS, "einsum", 6 * 8 * 32),
    "einsum with dots": (
        Net(lambda s, x: torch.einsum("...i,oi->...o", x, s.w[0]), (8, 32)),
        STEPS,
        "einsum",
        30 * 8 * 32,
    ),
    "baddbmm": (
        Net(lambda s, x: torch.baddbmm(s.w[1], x, s.w[0]), (6, 32, 8), (6, 5, 8)),
        STEPS,
        "baddbmm",
        30 * 8 * 32,
    ),
    "tensordot": (
        Net(lambda s, x: torch.tensordot(x, s.w[0], dims=1), (32, 8)),
        ROWS,
        "tensordot",
        6 * 8 * 32,
    ),
    "autograd function": (Net(lambda s, x: Product.apply(x, s.w[0]), (8, 32)), ROWS, "tensordot", 6 * 8 * 32),
    "scripted function": (Net(lambda s, x: scripted(x, s.w[0]), (32, 8)), ROWS, "tensordot", 6 * 8 * 32),
    "custom operator": (Net(lambda s, x: custom(x, s.w[0]), (32, 8)), ROWS, "nc_test::product", None),
    "a view of it": (
        Net(lambda s, x: torch.tensordot(x, s.w[0][:8].t(), dims=1), (10, 32)),
        ROWS,
        "tensordot",
        6 * 8 * 32,
    ),
    "computed from two": (
        Net(lambda s, x: torch.tensordot(x, s.w[0] @ s.w[1], dims=1), (32, 4), (4, 8)),
        ROWS,
        "tensordot",
        6 * 8 * 32,
    ),
    "index": (Net(lambda s, x: s.w[0][(x[:, 0] > 0).long()], (8, 32)), ROWS, "index", 0),
    "gather": (Net(lambda s, x: torch.gather(s.w[0], 0, (x > 0).long()), (8, 32)), ROWS, "gather", 0),
    "positions": (Net(lambda s, x: x + s.w[0][: x.shape[1]], (50, 32)), STEPS, "add", 0),
    "embedding bag": (
        Net(lambda s, x: s.m[0]((x[:, :3] > 0).long()), modules=[nn.EmbeddingBag(10, 8)]),
        ROWS,
        "embedding_bag",
        0,
    ),
    "distances": (Net(lambda s, x: torch.cdist(x, s.w[0]), (10, 32)), ROWS, "cdist", 6 * 10 * 32),
    "a weight of the input": (
        Net(
            lambda s, x: F.conv1d(x[None], s.m[0](x).mean(0)[:, None, None].expand(8, 6, 1)),
            modules=[nn.Linear(32, 8)],
        ),
        ROWS,
        "linear",
        6 * 8 * 32,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_reads_a_weight_is_in_plan_and_report(name):
    model, x, kind, products = CASES[name]
    plan = nc.describe(model.eval(), nc.StaticQuantConfig(), x, backend="reference")
    readers = [d for d in plan.decisions if d.weights]
    assert [d.kind for d in readers] == [kind]
    (decision,) = readers
    assert {weight for weight, _ in decision.weights} == {
        n for n, p in model.named_parameters() if p.dim() > 1
    }
    assert decision.multiply_adds == products
    assert decision.reason or decision.spec.quantized
    q = nc.convert(prepared(model, x), measure=False)
    (line,) = [op for op in q.report().ops if op.weights]
    assert (line.operator, line.reason != "" or line.ran == "int8") == (decision.operator, True)
    assert line.operator in said(q.report())
    assert q.report().unknown_multiply_adds == ((line.operator,) if products is None else ())


def prepared(model, x):
    """Calibrated with one batch."""
    found = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x, backend="reference")
    found(x)
    return found


def test_names_of_other_operators_do_not_depend_on_what_is_listed_for_its_weight():
    model = Net(lambda s, x: (x + s.w[0]) + s.m[0](x), (5, 32), modules=[nn.Linear(32, 32)])
    plan = nc.describe(model, nc.StaticQuantConfig(), STEPS, backend="reference")
    assert [(d.operator, bool(d.weights)) for d in plan.decisions] == [
        ("add_1", True),
        ("m.0", True),
        ("add", False),
    ]


def test_vectors_and_buffers_that_are_no_weights_are_not_listed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(32, 1).t()[None]), nn.Linear(32, 32)
            self.register_buffer("table", torch.randn(50, 32))

        def forward(self, x):
            return self.fc(x * self.scale + self.table[: x.shape[1]])

    plan = nc.describe(Scaled().eval(), nc.StaticQuantConfig(), STEPS, backend="reference")
    assert [d.operator for d in plan.decisions] == ["fc"]


@pytest.mark.parametrize("static", [False, True])
def test_shares_add_up_to_what_is_counted(static):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 32)
            self.mix, self.unmix = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))
            self.fc, self.head = nn.Linear(32, 64), nn.Linear(64, 4)

        def forward(self, ids):
            return self.head(
                self.fc(torch.tensordot(torch.tensordot(self.embed(ids), self.mix, 1), self.unmix, 1))
            )

    ids, config = torch.randint(0, 20, (3, 7)), nc.StaticQuantConfig() if static else nc.DynamicQuantConfig()
    q = nc.quantize(
        Both().eval(),
        config.exclude("head"),
        lambda p: p(ids),
        example_inputs=ids,
        backend="native",
        measure=False,
    )
    report = q.report()
    int8, others = 32 * 64, 20 * 32 + 2 * 32 * 32 + 64 * 4
    assert report.weight_shares == pytest.approx(
        {"int8": int8 / (int8 + others), "fp32": others / (int8 + others)}
    )
    int8, others = 21 * 32 * 64, 21 * (2 * 32 * 32 + 64 * 4)
    assert report.multiply_add_shares == pytest.approx(
        {"int8": int8 / (int8 + others), "fp32": others / (int8 + others)}
    )
    assert report.to_dict()["weight_shares"] == report.weight_shares
    assert "weights: 59.0% fp32, 41.0% int8 of 5.0 k" in report.summary()
    assert "multiply-adds on the example: 52.9% fp32, 47.1% int8" in report.summary()


def test_weights_that_stay_fp32_are_a_part_of_their_own():
    part = Part(operator="rnn", form="int8", weights=(("w", 30), ("u", 90)), multiply_adds=240)
    kept, floats = part.without(["w"])
    assert (kept.form, list(kept.weights), kept.multiply_adds) == ("int8", [("u", 90)], 180)
    assert (floats.form, list(floats.weights), floats.multiply_adds) == ("fp32", [("w", 30)], 60)
    assert shares_of(part.without(["w"])).weights == {"int8": 90, "fp32": 30}
    assert [each.multiply_adds for each in dataclasses.replace(part, multiply_adds=None).without(["w"])] == [
        None
    ] * 2
    assert part.without([]) == part.without(["another"]) == (part,)
    assert dataclasses.replace(part, form="fp32").without(["w"])[0].form == "fp32"
    nothing = dataclasses.replace(part, weights=(("w", 0),))
    assert shares_of(nothing.without(["w"])).multiply_adds == {"int8": 240}


def test_shares_of_weights_that_two_operators_read():
    parts = [
        Part(operator="a", form="int8", weights=(("w", 10),), multiply_adds=5),
        Part(operator="b", form="int8", weights=(("w", 10),), multiply_adds=5),
        Part(operator="c", form="fp32", weights=(("w", 10),), multiply_adds=None),
    ]
    shares = shares_of(parts)
    assert (shares.weights, shares.multiply_adds, shares.unknown) == (
        {"int8": 10, "fp32": 10},
        {"int8": 10},
        ("c",),
    )
    assert "multiply-adds of c are not known" in shares.lines()


class Mixed(nn.Module):
    """Convolutions of all kinds, attention and a linear."""

    def __init__(self):
        super().__init__()
        self.conv, self.deep = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.up, self.line = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv1d(4, 16, 3, dilation=2)
        self.attend, self.fc = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x):
        x = self.line(self.up(self.deep(self.conv(x)).relu()).flatten(2)).transpose(1, 2)
        return self.fc(self.attend(x, x, x, need_weights=False)[0])


def test_multiply_adds_are_those_that_torch_counts():
    model, x = Mixed().eval(), torch.randn(2, 3, 9, 9)
    plan = nc.describe(model, nc.StaticQuantConfig(), x, backend="reference")
    module = capture(model, x).module
    with (
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        module(x)
    assert 2 * sum(d.multiply_adds for d in plan.decisions) == counter.get_total_flops()


def test_a_saved_model_knows_its_shares(tmp_path):
    model, x, *_ = CASES["bilinear"]
    q = nc.convert(prepared(nn.Sequential(nn.Linear(32, 32), model), x), measure=False)
    nc.save(q, tmp_path / "saved")
    loaded = nc.load(tmp_path / "saved", backend="reference")
    assert loaded.report().weight_shares == q.report().weight_shares
    assert loaded.report().multiply_add_shares == q.report().multiply_add_shares


def test_weight_only_lists_weights_that_are_in_no_layer():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.attend, self.rnn = (
                nn.Linear(32, 64),
                nn.MultiheadAttention(64, 4, batch_first=True),
                nn.RNN(64, 32),
            )

        def forward(self, x):
            x = self.fc(x)
            return self.rnn(self.attend(x, x, x)[0])[0]

    model, config = Experts().eval(), nc.WeightOnlyConfig("int4", group_size=32)
    plan = nc.describe(model, config)
    assert {"attend.in_proj_weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"} <= {
        row.split()[0] for row in plan.table().splitlines()
    }
    with pytest.warns(nc.NCWarning, match="Most weights"):
        q = nc.quantize(model, config)
    report = nc.report(q)
    low, others = 32 * 64 + 64 * 64, 3 * 64 * 64 + 64 * 32 + 32 * 32
    assert report.weight_shares == pytest.approx(
        {"float": others / (low + others), "int4": low / (low + others)}
    )
    assert report.multiply_add_shares == {}
    assert "attend.in_proj_weight" in said(report)
    timed = nc.report(q, profile_inputs=STEPS)
    assert timed.multiply_add_shares == {"int4": 1.0}
    assert "multiply-adds of attend.in_proj_weight" in timed.summary()


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": [["w", [3, {"float": "nan"}]]]},
        {"weights": [["w", [3, True]]]},
        {"weights": [[7, [3]]]},
        {"float_weights": [7]},
    ],
)
def test_names_and_sizes_of_stored_weights_are_checked(wrong):
    decision = Decision(operator="a", kind="linear", module_type="Linear", weights=(("w", (3, 4)),))
    data = decision.to_dict()
    assert Decision.from_dict(data) == decision
    with pytest.raises(TypeError, match="names and sizes of weights"):
        Decision.from_dict({**data, **wrong})

"""Recurrent layers against torch's own.

Any number of rows and steps, and states that are given or returned.
"""

import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suites.cpus import as_cpu
from suites.recurrent import float64_layers
from suites.reports import said
from torch import nn
from torch.utils._pytree import tree_leaves

import nc
from nc import DynamicQuantConfig, StaticQuantConfig, available_backends, convert, load, prepare
from nc.backends import dynamic
from nc.backends.native import recurrent
from nc.errors import CaptureError, InputError, NCWarning, UnsupportedError
from nc.formats.reasons import Cause
from nc.graph.views import set_argument
from nc.kernels import cpu
from nc.numerics.metrics import sqnr_db
from nc.ops import RECURRENT
from nc.planning.rules import fit
from nc.process.unavailable import Unavailable

pytestmark = pytest.mark.isas
ENGINES = [
    name for name, why in available_backends().items() if name in ("ipex", "native", "reference") and not why
]
LAYERS = [
    (cls, options)
    for cls in (nn.LSTM, nn.GRU, nn.RNN)
    for options in (
        {},
        {"batch_first": True, "bidirectional": True},
        {"num_layers": 2, "bias": False},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
    )
] + [
    (nn.LSTM, {"proj_size": 4}),
    (nn.LSTM, {"proj_size": 4, "num_layers": 2, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


class Layer(nn.Module):
    """A recurrent layer, with the states that it is given."""

    def __init__(self, cls, inputs=8, hidden=16, **options):
        super().__init__()
        self.rnn = cls(inputs, hidden, **options)

    def forward(self, x, *states):
        if not states:
            return self.rnn(x)
        return self.rnn(x, states if isinstance(self.rnn, nn.LSTM) else states[0])

    def inputs(self, rows, steps, states=False):
        layer = self.rnn
        x = torch.randn((rows, steps) if layer.batch_first else (steps, rows)).unsqueeze(-1) * torch.randn(
            layer.input_size
        )
        if not states:
            return (x,)
        layers = layer.num_layers * (1 + layer.bidirectional)
        hidden = torch.randn(layers, rows, layer.proj_size or layer.hidden_size).tanh()
        return (
            (x, hidden, torch.randn(layers, rows, layer.hidden_size))
            if isinstance(layer, nn.LSTM)
            else (x, hidden)
        )


def worst_db(expected, got):
    pairs = zip(tree_leaves(expected), tree_leaves(got), strict=True)
    return min(sqnr_db(a.detach(), b) for a, b in pairs if a.numel())


# ---- any number of steps ----


@pytest.mark.parametrize("states", [False, True], ids=["no states", "states"])
@pytest.mark.parametrize(("cls", "options"), LAYERS, ids=str)
def test_any_number_of_rows_and_steps(cls, options, states):
    model = Layer(cls, **options).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NCWarning)  # which would say that sizes are fixed
        prepared = prepare(
            model, DynamicQuantConfig(), example_inputs=model.inputs(3, 5, states), backend="reference"
        )
    for rows, steps in ((3, 5), (1, 9), (4, 1), (2, 30)):
        inputs = model.inputs(rows, steps, states)
        with torch.no_grad():
            assert worst_db(model(*inputs), prepared(*inputs)) > 120


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_dynamic_shapes_may_name_the_steps(cls, rows):
    model = Layer(cls, batch_first=True).eval()
    free = {"x": {0: torch.export.Dim("rows"), 1: torch.export.Dim("steps")}}
    prepared = prepare(
        model,
        DynamicQuantConfig(),
        example_inputs=model.inputs(rows, 5),
        dynamic_shapes=free,
        backend="reference",
    )
    inputs = model.inputs(2, 11)
    with torch.no_grad():
        assert worst_db(model(*inputs), prepared(*inputs)) > 120


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("config", [DynamicQuantConfig(), StaticQuantConfig()], ids=["dynamic", "static"])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_engines_take_any_number_of_rows_and_steps(backend, cls, config, tmp_path):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = cls(8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 4)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = Tagger().eval(), torch.randn(3, 6, 8)
    prepared = prepare(model, config, example_inputs=x, backend=backend)
    prepared(x)
    q = convert(prepared, **({"isolate": "never"} if backend == "ipex" else {}))
    q.save(tmp_path / "m")
    again = load(tmp_path / "m", backend=backend)
    for rows, steps in ((3, 6), (1, 17), (5, 1), (2, 3)):
        y = torch.randn(rows, steps, 8)
        assert sqnr_db(model(y).detach(), q(y)) > 20
        assert sqnr_db(q.reference(y), q(y)) > 60
        assert torch.equal(again(y), q(y))


def test_states_of_other_sizes_are_refused():
    """torch's kernels do not look at them, and read beyond the end of their memory."""
    model = Layer(nn.LSTM, proj_size=4).eval()
    x, h, c = model.inputs(3, 5, states=True)
    prepared = prepare(model, DynamicQuantConfig(), example_inputs=(x, h, c), backend="reference")
    for wrong in (
        (x, h[:, :2], c[:, :2]),
        (x, h.repeat(2, 1, 1), c),
        (x, h, c.repeat(2, 1, 1)),
        (x, h[..., :3], c),
        (x[..., :7], h, c),
    ):
        with pytest.raises(InputError):
            prepared(*wrong)


def test_one_feature_and_one_row():
    """Sizes of 1, which export takes for ones that might be free."""
    model = Layer(nn.GRU, 1, 1, batch_first=True).eval()
    prepared = prepare(
        model, DynamicQuantConfig(), example_inputs=model.inputs(1, 1, states=True), backend="reference"
    )
    inputs = model.inputs(4, 7, states=True)
    with torch.no_grad():
        assert worst_db(model(*inputs), prepared(*inputs)) > 120
    with pytest.raises(InputError):
        prepared(torch.randn(4, 7, 2), inputs[1])


@pytest.mark.parametrize(("enforce_sorted", "states"), [*itertools.product((False, True), (False, True))])
def test_packed_sequences_are_an_error_that_says_what_to_do(enforce_sorted, states):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=enforce_sorted
            )
            hx = (torch.zeros(1, len(x), 16),) * 2 if states else None
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed, hx)[0], batch_first=True)[0]

    with pytest.raises(CaptureError, match="padded sequences"):
        nc.describe(Packed().eval(), DynamicQuantConfig(), (torch.randn(3, 5, 8), torch.tensor([5, 3, 2])))


# ---- int8, a range for each row of each step ----

CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


class Steps(nn.Module):
    """A loop over a cell, with a head."""

    def __init__(self, cls, steps=3, hidden=24, outputs=4, **options):
        super().__init__()
        self.cell, self.head, self.steps = cls(8, hidden, **options), nn.Linear(hidden, outputs), steps

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.head.in_features)
        state = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Cells:
    """Makes loops over a cell."""

    def __init__(self, cls):
        self.cls = cls

    def __call__(self, features, hidden):
        return Loop(self.cls, features, hidden)

    def __str__(self):
        return self.cls.__name__


class Loop(nn.Module):
    """Outputs of all steps of one cell; x: [steps, rows, features]."""

    def __init__(self, cls, features, hidden):
        super().__init__()
        self.cell = cls(features, hidden)

    def forward(self, x):
        h = torch.zeros(x.shape[1], self.cell.hidden_size)
        state, outputs = (h, h) if isinstance(self.cell, nn.LSTMCell) else h, []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


def converted(model, inputs, config=None, backend="native", **options):
    prepared = prepare(model.eval(), config or DynamicQuantConfig(), example_inputs=inputs, backend=backend)
    return convert(prepared, measure=False, **options)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("cls", "options"), LAYERS, ids=str)
def test_layers_with_ranges_per_row_against_float64(backend, cls, options):
    model = Layer(cls, **options)
    inputs = model.inputs(5, 7, states=True)
    with torch.no_grad():
        q = converted(model, inputs, backend=backend)

        floats = [name.removeprefix("rnn.") for name in q.graph.plan["rnn"].in_fp32]
        matrices = {name: p.numel() for name, p in model.rnn.named_parameters() if name.startswith("weight")}
        first = [name for name in matrices if name.startswith("weight_ih_l0")]
        is_small = sum(matrices[name] for name in first) <= 0.25 * sum(matrices.values())
        assert floats == (first if is_small else [])

        def weight(name):
            values = getattr(model.rnn, name).double()
            if name in floats:
                return values
            scale = (values.abs().amax(1, keepdim=True) / 127).float().double()
            return (values / scale).round() * scale

        for rows, steps in ((5, 7), (1, 1), (9, 3)):
            more = model.inputs(rows, steps, states=True)
            expected = float64_layers(model.rnn, more[0], more[1:], weight, float_input=bool(floats))
            # a value between two codes can go either way
            assert worst_db(expected, [t.double() for t in tree_leaves(q(*more))]) > 45
        assert worst_db(model(*inputs), q(*inputs)) > 25
    decision = q.graph.plan["rnn"]
    assert str(decision.spec.activation.granularity) == "per_token"
    if backend == "native":
        assert [(op.operator, op.asked, op.ran) for op in q.report().ops] == [("rnn", "int8", "int8")]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN, Cells(nn.LSTMCell), Cells(nn.GRUCell)], ids=str)
def test_channels_of_very_different_size_cost_no_accuracy(backend, cls):
    """As mel energies: one channel takes the range of a row, and small ones decide the result too."""
    sizes = torch.logspace(0, 5, 10)
    model = cls(10, 64) if isinstance(cls, Cells) else Layer(cls, 10, 64, num_layers=3)
    first = next(p for name, p in model.named_parameters() if "weight_ih" in name)
    with torch.no_grad():
        first *= 10 / sizes
    x = torch.randn(5, 9, 10) * sizes
    q = converted(model, (x,), backend=backend)
    assert worst_db(model(x), q(x)) > 24
    assert q.graph.plan.quantized
    if backend == "reference":  # whose report says nothing of kernels
        return
    op = next(op for op in q.report().ops if op.asked == "int8")
    name = "weight_ih" if isinstance(cls, Cells) else "weight_ih_l0"
    assert (
        op.reason == f"{name} stays fp32: what the first layer reads has no bounds, and its product is small"
    )
    assert op.ran == "int8"
    assert 0 < q.report().weight_shares["fp32"] < 0.25


def test_what_a_layer_reads_is_rounded_where_that_product_is_not_small():
    q = converted(Layer(nn.LSTM, 32, 16), (torch.randn(5, 9, 32),))
    assert q.graph.plan["rnn"].in_fp32 == ()
    assert q.report().weight_shares == {"int8": 1.0}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("cls", "options"), LAYERS, ids=str)
def test_a_row_depends_on_no_other_row(backend, cls, options):
    """Rows of very different size, each of them also alone; of the engine bit for bit."""
    model = Layer(cls, **options)
    with torch.no_grad():
        q = converted(model, model.inputs(2, 5, states=True), backend=backend)
        x, *states = model.inputs(9, 6, states=True)
        axis = 0 if model.rnn.batch_first else 1
        sizes = torch.logspace(-4, 4, 9)
        x = x * (sizes[:, None, None] if axis == 0 else sizes[:, None])
        together = tree_leaves(q(x, *states))
        for row in range(9):
            alone = tree_leaves(q(x.narrow(axis, row, 1), *(s[:, row : row + 1] for s in states)))
            for i, (one, all_) in enumerate(zip(alone, together, strict=True)):
                mine = all_.narrow(axis if i == 0 else 1, row, 1)
                assert torch.equal(one, mine) if backend == "native" else sqnr_db(mine, one) > 40


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_one_range_for_all_rows_can_be_asked_for_and_the_report_says_what_that_means(cls):
    model = Layer(cls)
    with torch.no_grad():
        q = converted(model, model.inputs(2, 5), DynamicQuantConfig(act_granularity="per_tensor"))
        x = torch.randn(6, 2, 8) * torch.tensor([1.0, 1e3])[:, None]
        alone, together = q(x[:, :1])[0], q(x)[0][:, :1]
    assert sqnr_db(alone, together) < 30
    assert [f.operator for f in q.graph.health if f.kind == "shared_range"] == ["rnn"]
    assert "the other rows" in said(q.report())


def test_what_is_not_finite_stays_in_its_row():
    for cls in (nn.LSTM, nn.GRU, nn.RNN):
        model = Layer(cls, batch_first=True)
        with torch.no_grad():
            q = converted(model, model.inputs(3, 6))
            x = torch.randn(5, 6, 8)
            clean = q(x)[0]
            for value in (torch.nan, torch.inf, -torch.inf):
                x[2, 3, 1] = value
                y = q(x)[0]
                assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
                assert torch.equal(y[2, :3], clean[2, :3])
                assert y[2, 3:].isnan().all()
                assert q.reference(x)[0][2, 3:].isnan().all()


def test_large_and_tiny_values():
    for cls in (nn.LSTM, nn.GRU, nn.RNN):
        model = Layer(cls)
        with torch.no_grad():
            q = converted(model, model.inputs(3, 6))
            for size in (0.0, 1e-38, 1e-20, 1e4, 1e20, 3e38):
                x = torch.randn(4, 3, 8).clamp(-1, 1) * size
                assert sqnr_db(q.reference(x)[0], q(x)[0]) > 60


def test_no_rows_and_no_steps():
    model = Layer(nn.LSTM, batch_first=True)
    with torch.no_grad():
        q = converted(model, model.inputs(3, 6))
        assert [t.shape for t in tree_leaves(q(torch.randn(0, 6, 8)))] == [(0, 6, 16), (1, 0, 16), (1, 0, 16)]
        with pytest.raises(InputError):  # as torch does
            q(torch.randn(3, 0, 8))


@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from(["lstm", "gru", "rnn", "rnn_relu"]),
    st.booleans(),
)
def test_the_c_code_of_either_instruction_set_computes_the_reference(
    features, hidden, rows, steps, kind, vnni
):
    name = kind.partition("_")[0]
    outputs = {"lstm": 4, "gru": 3, "rnn": 1}[name] * hidden
    codes = [torch.randint(-127, 128, (outputs, k), dtype=torch.int8) for k in (features, hidden)]
    scales = [torch.rand(outputs) * 0.01 + 1e-4 for _ in codes]
    biases = [torch.randn(outputs) for _ in codes]
    x, hx = (
        torch.randn(steps, rows, features),
        [torch.randn(1, rows, hidden) for _ in range(2 if name == "lstm" else 1)],
    )
    packed = [
        part for c, s, b in zip(codes, scales, biases, strict=True) for part in (*recurrent.pack(c, s), b)
    ] + [None] * 4
    features_of_cpu = cpu.code_features() if vnni else ("avx2",)
    with pytest.MonkeyPatch.context() as patch:
        as_cpu(patch, *features_of_cpu)
        assert recurrent._code().isa() == ("avx512_vnni" if "avx512_vnni" in features_of_cpu else "avx2")
        got = recurrent.layers(x, hx, packed, kind, 1, False, False, features, hidden)
    params = [c * s[:, None] for c, s in zip(codes, scales, strict=True)] + biases
    options = (
        True,
        1,
        False,
        False,
        0,
        255,
        torch.uint8,
        True,
        *([kind == "rnn_relu"] if name == "rnn" else []),
    )
    expected = RECURRENT[name](x, hx if name == "lstm" else hx[0], params, *options)
    assert worst_db(expected, got) > (
        30 if steps > 1 else 100
    )  # after the first step a value between two codes can go either way


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_computes_the_same(threads):
    model = Layer(nn.LSTM, bidirectional=True, num_layers=2)
    before = torch.get_num_threads()
    with torch.no_grad():
        q, inputs = converted(model, model.inputs(3, 6)), model.inputs(7, 5)
        torch.set_num_threads(1)
        expected = tree_leaves(q(*inputs))
        torch.set_num_threads(threads)
        try:
            assert all(map(torch.equal, expected, tree_leaves(q(*inputs))))
        finally:
            torch.set_num_threads(before)


def test_sizes_that_the_weights_do_not_fit_are_refused():
    packed = [*recurrent.pack(torch.ones(12, 5, dtype=torch.int8), torch.ones(12)), None]
    packed += [*recurrent.pack(torch.ones(12, 4, dtype=torch.int8), torch.ones(12)), None] + [None] * 4
    x, h = torch.randn(2, 3, 5), torch.randn(1, 3, 4)
    assert len(recurrent.layers(x, [h], packed, "gru", 1, False, False, 5, 4)) == 2
    for wrong in ((x[..., :4], h), (x, h[:, :2]), (x, h[..., :3]), (x.double(), h), (x[0], h)):
        with pytest.raises(ValueError, match="can't take"):
            recurrent.layers(wrong[0], [wrong[1]], packed, "gru", 1, False, False, 5, 4)
    for features, hidden in ((50, 4), (5, 40), (5, 1)):
        x, h = torch.randn(2, 3, features), torch.randn(1, 3, hidden)
        with pytest.raises(ValueError, match="a matrix of a recurrent layer does not fit"):
            recurrent.layers(x, [h], packed, "gru", 1, False, False, features, hidden)
    packed[:3] = recurrent.pack_float(torch.ones(12, 5)), None, None
    x, h = torch.randn(2, 3, 5), torch.randn(1, 3, 4)
    assert len(recurrent.layers(x, [h], packed, "gru", 1, False, False, 5, 4)) == 2
    with pytest.raises(ValueError, match="a matrix of a recurrent layer does not fit"):
        recurrent.layers(torch.randn(2, 3, 6), [h], packed, "gru", 1, False, False, 6, 4)


# ---- cells ----


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", CELLS)
def test_cells_are_lines_of_plan_and_report(cls, bias, backend, tmp_path):
    model, x = Steps(cls, bias=bias), torch.randn(5, 3, 8)
    with torch.no_grad():
        q = converted(model, x, backend=backend)
        kind = {"LSTMCell": "lstm_cell", "GRUCell": "gru_cell", "RNNCell": "rnn_cell"}[cls.__name__]
        lines = [(d.operator, d.kind, d.module_type) for d in q.graph.plan.decisions]
        assert lines[:-1] == [
            (name, kind, f"torch.nn.modules.rnn.{cls.__name__}") for name in ("cell", "cell@1", "cell@2")
        ]
        for y in (x, torch.randn(1, 3, 8), torch.randn(9, 3, 8)):
            assert sqnr_db(model(y), q(y)) > 25
            assert sqnr_db(q.reference(y), q(y)) > 60
        q.save(tmp_path / "m")
        assert torch.equal(load(tmp_path / "m", backend=backend)(x), q(x))
    quantized = backend != "ipex" or cls is not nn.RNNCell
    assert [d.spec.mode for d in q.graph.plan.decisions[:-1]] == (["dynamic"] if quantized else ["float"]) * 3
    if backend == "native":
        assert {op.ran for op in q.report().ops} == {"int8"}
        report = converted(
            Steps(cls, bias=bias, hidden=64, outputs=32), x
        ).report()  # a head that fills its panels
        assert report.weight_bytes < 0.5 * report.float_bytes  # the steps share what is packed


@pytest.mark.parametrize("cls", CELLS)
def test_rules_for_cells(cls):
    model, x = Steps(cls).eval(), torch.randn(5, 3, 8)
    fp32 = DynamicQuantConfig(w_dtype="fp32", act_dtype="fp32")
    for key in (cls, cls.__name__, "cell"):
        plan = nc.describe(model, DynamicQuantConfig().set_local(key, fp32), x)
        assert [d.operator for d in plan.quantized] == ["head"]
    static = nc.describe(model, StaticQuantConfig(), x)
    kind = cls.__name__.lower().replace("cell", "_cell")
    assert f"has no int8 kernel for {kind}, but one with ranges found at each call" in static["cell"].reason


def test_a_recurrent_network_of_torch_is_quantized():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(32, 64, batch_first=True), nn.Linear(64, 4)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    q = converted(Net(), torch.randn(2, 5, 32))
    assert [(op.operator, op.kind, op.ran) for op in q.report().ops] == [
        ("rnn", "rnn", "int8"),
        ("head", "linear", "int8"),
    ]
    assert q.report().weight_bytes < 0.4 * q.report().float_bytes


def test_a_plan_of_static_kernels_runs_recurrent_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn, self.head = (
                nn.Conv1d(8, 16, 3, padding=1),
                nn.LSTM(16, 24, batch_first=True),
                nn.Linear(24, 4),
            )

        def forward(self, x):
            return self.head(self.rnn(self.conv(x).relu().transpose(1, 2))[0])

    model, x = Net().eval(), torch.randn(2, 8, 6)
    prepared = prepare(
        model, StaticQuantConfig().set_local("rnn", DynamicQuantConfig()), example_inputs=x, backend="native"
    )
    prepared(x)
    q = convert(prepared, measure=False)
    assert {op.operator: op.ran for op in q.report().ops if op.asked == "int8"} == {
        "conv": "int8",
        "rnn": "int8",
        "head": "int8",
    }
    for y in (x, torch.randn(3, 8, 11), torch.randn(1, 8, 2)):
        assert sqnr_db(q.reference(y), q(y)) > 30
        assert sqnr_db(model(y).detach(), q(y)) > 20


# ---- never silently bad ----


class Spread(nn.Module):
    """A layer whose input has one channel that is far larger than the others, and that hardly counts."""

    def __init__(self, cls):
        super().__init__()
        self.layer, self.head = cls(16, 16), nn.Linear(16, 4)
        weights = [w for name, w in self.layer.named_parameters() if "weight_ih" in name or name == "weight"]
        with torch.no_grad():
            for weight in weights:
                weight[:, 0] /= 1e6

    def forward(self, x):
        y = self.layer(x)
        while isinstance(y, tuple):
            y = y[0]
        return self.head(y)

    def inputs(self):
        return (
            torch.randn(6, 16) * torch.tensor([1e4, *[1.0] * 15])
            if isinstance(self.layer, (nn.Linear, *CELLS))
            else self.sequence()
        )

    def sequence(self):
        return torch.randn(5, 6, 16) * torch.tensor([1e4, *[1.0] * 15])


@pytest.mark.parametrize("cls", [nn.Linear, nn.LSTM, nn.GRU, nn.RNN, *CELLS])
def test_an_operator_whose_own_result_is_noise_stays_fp32(cls):
    model = Spread(cls).eval()
    with torch.no_grad():
        x = model.inputs()
        q = converted(model, x)
        assert sqnr_db(model(x), q(x)) > 30
        assert {op.operator: (op.asked, op.ran) for op in q.report().ops} == {
            "layer": ("int8", "fp32"),
            "head": ("int8", "int8"),
        }
        decision = q.graph.plan["layer"]
        assert decision.stays_for(Cause.INACCURATE)
        found = float(decision.argument("db"))
        forced = converted(
            model, x, DynamicQuantConfig().set_local("layer", DynamicQuantConfig(keep_inaccurate=True))
        )
        assert {op.ran for op in forced.report().ops} == {"int8"}
        assert [f.operator for f in forced.graph.health if f.kind == "inaccurate"] == ["layer"]
        # the figure is that of the operator alone
        layer = model.layer
        alone = converted(Only(layer), x, DynamicQuantConfig(keep_inaccurate=True))
        assert found == pytest.approx(sqnr_db(tree_leaves(layer(x))[0], tree_leaves(alone(x))[0]), abs=0.1)
    assert found < 10
    assert f"{found} dB" in said(q.report())


class Only(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def test_a_result_of_zeros_is_not_inaccurate():
    model = Layer(nn.RNN, bias=False)
    q = converted(model, (torch.zeros(5, 3, 8),))
    assert [d.spec.mode for d in q.graph.plan.decisions] == ["dynamic"]


# ---- where there is no C code ----


def test_without_c_code_the_reference_computes_and_the_report_says_why(monkeypatch):
    monkeypatch.setattr(recurrent, "_code", lambda: Unavailable("there is no C compiler"))
    model = Layer(nn.LSTM)
    with torch.no_grad():
        q = converted(model, model.inputs(3, 5))
        x = model.inputs(2, 7)
        assert worst_db(model(*x), q(*x)) > 25
    (line,) = q.report().ops
    assert (line.asked, line.ran) == ("int8", "fp32")
    assert "there is no C compiler" in line.reason


def test_the_operator_says_the_sizes_of_its_results():
    packed = [*recurrent.pack(torch.ones(12, 5, dtype=torch.int8), torch.ones(12)), None]
    packed += [*recurrent.pack(torch.ones(12, 4, dtype=torch.int8), torch.ones(12)), None] + [None] * 4
    for batch_first in (False, True):
        x = torch.randn(3, 2, 5) if batch_first else torch.randn(2, 3, 5)
        arguments = (x, [torch.randn(1, 3, 4)], packed, "gru", 1, False, batch_first, 5, 4)
        torch.library.opcheck(
            recurrent.recurrent_layers(), arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", ["x", "h"])
def test_the_operator_takes_fp32_alone(which, dtype):
    """It reads addresses: states in another dtype would be taken for fp32."""
    packed = [*recurrent.pack(torch.ones(12, 5, dtype=torch.int8), torch.ones(12)), None]
    packed += [*recurrent.pack(torch.ones(12, 4, dtype=torch.int8), torch.ones(12)), None] + [None] * 4
    given = {"x": torch.randn(2, 3, 5), "h": torch.randn(1, 3, 4)}
    given[which] = given[which].to(dtype)
    with pytest.raises(ValueError, match="in fp32 can't take .*float"):
        recurrent.layers(given["x"], [given["h"]], packed, "gru", 1, False, False, 5, 4)


def test_a_plan_for_rows_can_go_to_a_backend_with_one_range():
    prepared = prepare(
        Layer(nn.LSTM).eval(), DynamicQuantConfig(), example_inputs=(torch.randn(5, 3, 8),), backend="native"
    )
    ipex = nc.backends.get_backend("ipex").capabilities()
    assert str(fit(prepared.plan, ipex)["rnn"].spec.activation.granularity) == "per_tensor"
    asked = DynamicQuantConfig(act_granularity="per_token")
    prepared = prepare(Layer(nn.LSTM).eval(), asked, example_inputs=(torch.randn(5, 3, 8),), backend="native")
    with pytest.raises(UnsupportedError, match="per_token"):
        fit(prepared.plan, ipex)


@pytest.mark.needs_plans
def test_a_plan_runs_a_layer_whose_last_state_alone_is_read():
    """What reads the state is judged as the layer is: each step rounds what the last one made."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(10, 64, 3, batch_first=True), nn.Linear(64, 8)

        def forward(self, x):
            return self.out(self.rnn(x)[1][0][-1])

    torch.manual_seed(0)
    model = Encoder()
    with torch.no_grad():
        for parameter in model.rnn.parameters():
            parameter.mul_(6)
    x = torch.randn(20, 100, 10)
    q = converted(model, (x,), DynamicQuantConfig(keep_inaccurate=True))
    assert 30 < q.report().sqnr_db < 60
    assert "something else" not in q.report().details.get("run by", "")


def test_torch_has_no_kernel_for_a_layer_with_a_matrix_in_fp32():
    config = DynamicQuantConfig(act_granularity="per_tensor")
    q = converted(Layer(nn.LSTM), (torch.randn(5, 9, 8),), config, backend="reference")
    (node,) = (n for n in q.graph.module.graph.nodes if n.target in RECURRENT.values())
    assert dynamic._is_layer_of_torch(node)
    set_argument(node, "float_input", True)
    assert not dynamic._is_layer_of_torch(node)

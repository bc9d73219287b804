"""Models that ask for sizes in Python.

The captured path, the conditions on sizes that it needs, and their check at each call.
"""

import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import graph_of
from torch import nn
from torch.nn import functional as F

import nc
from nc.capture import size_paths
from nc.capture.size_paths import Guards, PathsSeen, those_that_matter
from nc.graph.size_conditions import SizeCondition, parsed
from nc.numerics.metrics import sqnr_db

G = torch.Generator().manual_seed(0)


class SamePadding(nn.Module):
    """Convolutions padded as TensorFlow does it, whose amount is asked in Python."""

    def __init__(self, *strides):
        super().__init__()
        channels = [3, *(4 + i for i in range(len(strides)))]
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, s) for a, b, s in zip(channels, channels[1:], strides, strict=False)
        )

    def forward(self, x):
        for layer in self.layers:
            pads = []
            for size, stride in zip(
                (x.shape[3], x.shape[2]), (layer.stride[1], layer.stride[0]), strict=True
            ):
                total = max(3 - stride, 0) if size % stride == 0 else max(3 - size % stride, 0)
                pads += [total // 2, total - total // 2]
            x = F.relu(layer(F.pad(x, pads)))
        return x


class Asking(nn.Module):
    """Does one of two things, by an answer about the size of a dimension."""

    def __init__(self, ask, one, other):
        super().__init__()
        self.layer, self.ask, self.one, self.other = nn.Linear(8, 8), ask, one, other

    def forward(self, x):
        return self.layer(self.one(x) if self.ask(x.shape[1]) else self.other(x))


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        if x.shape[1] % 3:
            msg = "whole windows only"
            raise ValueError(msg)
        return self.layer(x)


def quantized(model, *inputs, backend="reference", **options):
    prepared = nc.prepare(
        model.eval(), nc.StaticQuantConfig(), example_inputs=inputs, backend=backend, **options
    )
    prepared(*inputs)
    return nc.convert(prepared)


def texts(model, *inputs, **options):
    return [condition.text for condition in graph_of(model.eval(), *inputs, **options).signature.conditions]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_size_that_takes_another_path_is_refused_and_says_where(backend, tmp_path):
    model = SamePadding(2, 2).eval()
    q = quantized(model, torch.randn(2, 3, 16, 16, generator=G), backend=backend)
    for height, width in [(16, 16), (20, 16), (8, 24), (4, 4)]:
        x = torch.randn(1, 3, height, width, generator=G)
        with torch.no_grad():
            torch.testing.assert_close(q(x), model(x), rtol=0, atol=0.1)
    q.save(tmp_path / "saved")
    for m in (q, nc.load(tmp_path / "saved", backend=backend)):
        for height, width, text in [
            (17, 16, r"x.shape\[2\] % 2"),
            (16, 18, r"x.shape\[3\] // 2\) % 2"),
            (6, 16, r"x.shape\[2\] // 2\) % 2"),
        ]:
            with pytest.raises(
                nc.InputError, match=rf"at test_size_paths.py:\d+, in forward.*{text}\) == 0, but x.shape"
            ):
                m(torch.randn(2, 3, height, width))
    assert (
        nc.load(tmp_path / "saved", backend=backend).graph.signature.conditions
        == q.graph.signature.conditions
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("strides", [(1,), (2,), (3,), (1, 2, 1, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(24, 24), (25, 24), (17, 30)], ids=str)
def test_what_is_not_refused_is_right(strides, sizes):
    model = SamePadding(*strides).eval()
    graph = graph_of(model, torch.randn(2, 3, *sizes, generator=G))
    seen = set()
    for height in range(10, 40):
        x = torch.randn(2, 3, height, sizes[1], generator=G)
        try:
            inputs = graph.signature.bind((x,), {})
        except nc.InputError:
            seen.add("refused")
            continue
        seen.add("taken")
        with torch.no_grad():
            torch.testing.assert_close(graph.module(*inputs)[0], model(x), rtol=1e-4, atol=1e-5)
    assert seen == ({"taken"} if set(strides) == {1} else {"taken", "refused"})


def double(x):
    return x * 2


def same(x):
    return x


X = torch.randn(2, 6, 8, generator=G)


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda n: n % 2 == 0, ["(in0_1 % 2) == 0"]),
        (lambda n: n > 4, ["in0_1 > 4"]),
        (lambda n: n <= 512, ["in0_1 <= 512"]),
        (lambda n: n < 100_000, ["in0_1 < 100000"]),  # nothing of that size is tried
        (lambda n: n != 1, ["in0_1 != 1"]),
        (lambda n: n > 1, ["in0_1 != 1"]),
        (lambda n: n * 3 > 7 and n % 4 != 1, ["3*in0_1 > 7", "(in0_1 % 4) != 1"]),
    ],
)
def test_a_condition_is_what_was_asked(ask, expected):
    assert texts(Asking(ask, double, same), X) == expected


@pytest.mark.parametrize(
    "ask", [lambda n: n % 2 == 0, lambda n: n > 4, lambda n: n <= 512, lambda n: n != 1, lambda n: n > 1]
)
def test_a_question_without_consequence_is_no_condition(ask):
    assert texts(Asking(ask, same, lambda x: x * 1.0), X) == []


def test_where_one_question_matters_the_others_are_still_none():
    def forward(x):
        if x.shape[1] > 4:  # no consequence
            x = x + 0
        return double(x) if x.shape[1] % 2 == 0 else same(x)

    assert texts(Asking(lambda n: True, forward, same), X) == ["(in0_1 % 2) == 0"]


def test_a_model_that_refuses_a_size_is_refused_by_the_graph():
    with pytest.raises(
        nc.InputError, match=r"captured with \(x.shape\[1\] % 3\) == 0, but x.shape\[1\] is 7"
    ):
        quantized(Windows(), X)(torch.randn(2, 7, 8))


def test_a_table_that_grows_is_put_back_and_nothing_is_said():
    class Growing(nn.Module):
        """Makes a new table of positions for longer inputs, as FSMT of transformers does."""

        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(8, 8), nn.Parameter(torch.arange(20.0)[:, None])

        def forward(self, x):
            if x.shape[1] > len(self.table):
                warnings.warn("a new table", UserWarning, stacklevel=2)
                self.table = nn.Parameter(torch.arange(2.0 * x.shape[1])[:, None])
            return self.layer(x) + self.table[: x.shape[1]]

    model = Growing().eval()
    table = model.table
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        graph = graph_of(model, X)
    assert model.table is table
    assert [condition.text for condition in graph.signature.conditions] == ["in0_1 <= 20"]


def test_a_long_example_is_tried_near_its_size():
    assert texts(Asking(lambda n: n % 2 == 0, same, lambda x: x * 1.0), torch.randn(1, 5000, 8)) == []
    assert texts(Asking(lambda n: n % 2 == 0, same, double), torch.randn(1, 5000, 8)) == ["(in0_1 % 2) == 0"]


def test_the_batch_is_a_size_too():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x * 2 if x.shape[0] > 40 else x)

    q = quantized(Pairs(), X)
    assert q(X.repeat(20, 1, 1)).shape == (40, 6, 8)
    with pytest.raises(nc.InputError, match=r"captured with x.shape\[0\] <= 40, but x.shape\[0\] is 42"):
        q(X.repeat(21, 1, 1))


def test_sizes_that_depend_on_each_other():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, y):
            return self.layer(x) + y.unflatten(1, (x.shape[1], 2)).sum(2)

    n = torch.export.Dim("n", min=2, max=100)
    inputs = (torch.randn(2, 4, 8), torch.randn(2, 8, 8))
    q = quantized(Halves(), *inputs, dynamic_shapes={"x": {1: n}, "y": {1: 2 * n}})
    assert q(torch.randn(2, 6, 8), torch.randn(2, 12, 8)).shape == (2, 6, 8)
    with pytest.raises(
        nc.InputError,
        match=r"expected y.shape\[1\] == 2\*x.shape\[1\], but y.shape\[1\] is 10 and x.shape\[1\] is 6",
    ):
        q(torch.randn(2, 6, 8), torch.randn(2, 10, 8))


def test_a_size_that_is_a_multiple():
    class Fold(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x):
            return self.layer(x.reshape(x.shape[0], -1, 16))

    n = torch.export.Dim("n", min=2, max=100)
    q = quantized(Fold(), torch.randn(2, 8, 8), dynamic_shapes={"x": {1: 2 * n}})
    assert q(torch.randn(2, 12, 8)).shape == (2, 6, 8)
    with pytest.raises(nc.InputError, match=r"expected x.shape\[1\] % 2 == 0, but x.shape\[1\] is 11"):
        q(torch.randn(2, 11, 8))


class Flat(nn.Module):
    """A classifier without a global pool.

    Its linear fits images of one size, and of others with as many positions.
    """

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8 * 8 * 8, 10)

    def forward(self, x):
        return self.linear(F.relu(self.conv(x)).flatten(1))


@pytest.mark.parametrize(
    "config", [nc.StaticQuantConfig(), nc.DynamicQuantConfig()], ids=["static", "dynamic"]
)
@pytest.mark.parametrize("backend", [name for name, why in nc.available_backends().items() if not why])
def test_sizes_that_do_not_fit_an_operator_are_refused_before_an_engine_computes_addresses_with_them(
    backend, config
):
    x = torch.randn(2, 3, 16, 16, generator=G)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Nothing is quantized", nc.NCWarning
        )  # not every engine has dynamic linears
        prepared = nc.prepare(Flat().eval(), config, example_inputs=x, backend=backend, strict=False)
    prepared(x)
    q = nc.convert(prepared, measure=False)
    assert q(torch.randn(3, 3, 15, 16)).shape == (3, 10)
    assert q(torch.randn(1, 3, 8, 32)).shape == (1, 10)
    for height, width in [(40, 40), (8, 8), (14, 16), (16, 64)]:
        with pytest.raises(
            nc.InputError, match=r"do not fit inputs of these sizes: expected .* == (512|64),"
        ):
            q(torch.randn(2, 3, height, width))


@pytest.mark.parametrize("size", [11, 13, 15, 16, 19, 23])
def test_sizes_that_the_example_is_the_smallest_of_are_no_condition(size):
    """The last feature map has one position, or few.

    With fewer no kernel can go on, with more all is the same.
    """
    layers = nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(8, 8, size // 8, 1), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 5)).eval()
    graph = graph_of(model, torch.randn(2, 3, size, size, generator=G))
    for height, width in [(size + 1, size + 1), (size + 4, size), (size, size + 5), (41, 41), (97, 38)]:
        x = torch.randn(2, 3, height, width, generator=G)
        (got,) = graph.module(*graph.signature.bind((x,), {}))
        assert sqnr_db(model(x), got) > 100


def test_calibration_refuses_another_path_too():
    prepared = nc.prepare(
        SamePadding(2).eval(),
        nc.StaticQuantConfig(),
        example_inputs=torch.randn(2, 3, 16, 16),
        backend="reference",
    )
    with pytest.raises(nc.InputError, match="asks for sizes"):
        prepared(torch.randn(2, 3, 15, 16))


def test_a_program_for_others_has_those_sizes_fixed(tmp_path):
    pytest.importorskip("openvino")
    import openvino

    q = quantized(SamePadding(2).eval(), torch.randn(2, 3, 16, 16, generator=G), backend="native")
    with pytest.warns(
        nc.NCWarning, match=r"test_size_paths.py:\d+, in forward.*fixed in it to those of example_inputs"
    ):
        nc.export_openvino(q, tmp_path / "model.xml")
    shape = openvino.Core().read_model(tmp_path / "model.xml").inputs[0].get_partial_shape()
    assert [d.is_dynamic for d in shape] == [True, False, False, False]
    assert [shape[i].get_length() for i in (1, 2, 3)] == [3, 16, 16]


def test_sizes_that_only_the_model_refuses_stay_free_in_a_program_for_others(tmp_path):
    openvino = pytest.importorskip("openvino")
    nc.export_openvino(quantized(Windows(), X, backend="native"), tmp_path / "model.xml")
    assert [
        dim.is_dynamic
        for dim in openvino.Core().read_model(tmp_path / "model.xml").inputs[0].get_partial_shape()
    ] == [
        True,
        True,
        False,
    ]


def test_mobilenet_v1_of_transformers():
    transformers = pytest.importorskip("transformers")
    model = transformers.MobileNetV1Model(
        transformers.MobileNetV1Config(image_size=64, depth_multiplier=0.25)
    ).eval()
    q = quantized(model, torch.randn(2, 3, 64, 64, generator=G), backend="native")
    assert q(torch.randn(2, 3, 96, 64)).last_hidden_state.shape == (2, 256, 3, 2)
    for size in (65, 88, 200):
        with pytest.raises(nc.InputError, match=r"modeling_mobilenet_v1.py:\d+, in apply_tf_padding"):
            q(torch.randn(2, 3, size, size))


@pytest.mark.parametrize(
    "text",
    ["", "in0_0 ==", "__import__('os')", "in0_0.__class__", "[in0_0]", "9**9**9", "in0_0 < 1 < 2", "x > 1", "print(in0_0)", "max(*in0_0)",
     "(lambda: 1)()", "'a' * in0_0", "(" * 500 + "1" + ")" * 500, "max()", "in0_0 @ in0_0"],
)  # fmt: skip
def test_text_that_is_no_condition(text):
    with pytest.raises(ValueError, match="condition on sizes|no condition"):
        parsed(text)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "__import__('os')"},
        {"text": "in7_0 > 1"},
        {"text": "in0_9 > 1"},
        {"text": 5},
        {"where": 5},
        {"more": 1},
        {"text": None},
        {"silent": 1},
    ],
)
def test_an_artefact_with_another_condition_is_refused(change, tmp_path):
    q = quantized(SamePadding(2).eval(), torch.randn(2, 3, 16, 16, generator=G))
    q.save(tmp_path / "saved")
    path = tmp_path / "saved" / "model.json"
    document = json.loads(path.read_text())
    entry = (
        document["graph"]["signature"]["conditions"][0]
        if "graph" in document
        else document["signature"]["conditions"][0]
    )
    entry.update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(nc.ArtefactError):
        nc.load(tmp_path / "saved", backend="reference")


@given(st.integers(1, 99), st.integers(1, 99))
def test_text_is_computed_as_python_computes_it(a, b):
    for text in [
        "in0_0 + 2 * in1_3 - 7 >= 4",
        "(in0_0 // 4) % 3 != 1",
        "max(in0_0, in1_3, 5) * 2 < 60 and not in0_0 == 7",
        "math.ceil(in0_0 / 3) > 4 or -in1_3 <= -50",
        "min(in0_0, abs(in1_3 - 40)) == 3",
        "round(in0_0 / 7) <= math.floor(in1_3 / 2)",
    ]:
        import math

        names = {"in0_0": a, "in1_3": b}
        assert SizeCondition(text, "").holds(names) == bool(
            eval(text, {"math": math}, names)
        )  # the text above, nobody else's


def test_what_cannot_be_computed_does_not_hold():
    assert not SizeCondition("8 % (in0_0 - 3) == 0", "").holds({"in0_0": 3})


def test_sizes_that_change_together_are_tried_together():
    guards = Guards({"in0_0": "in0_0", "in1_0": "in1_0"}, asked=(SizeCondition("in1_0 % 2 == 0", "here"),))
    tried = []

    def outcome(sizes):
        tried.append((sizes["in0_0"], sizes["in1_0"]))
        return (
            PathsSeen.SAME if sizes["in0_0"] == sizes["in1_0"] else PathsSeen.FAILED
        )  # a model that takes one batch only

    assert those_that_matter(guards, {"in0_0": 4, "in1_0": 4}, outcome) == ()
    assert tried == [(5, 5), (1, 1)]


def test_guards_of_several_parts_fix_no_size():
    """A max pool asks for its output sizes in one guard with `and`."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)).eval()
    graph = graph_of(net, torch.randn(2, 3, 16, 16))
    assert not [dim for leaf in graph.signature.leaves for dim in leaf.dims[2:] if isinstance(dim, int)]
    assert graph.signature.conditions == ()


def test_no_file_of_ours_is_named_as_the_place_that_asks(monkeypatch):
    """Functions of torch are called through modes of ours."""
    places, place = [], size_paths._place
    monkeypatch.setattr(size_paths, "_place", lambda where: places.append(place(where)) or places[-1])

    class Triangle(nn.Module):
        def forward(self, x):
            return x.tril(x.shape[0] - 2) * x.unfold(0, 2, x.shape[0] // 2)[:1, :, :1].sum()

    graph_of(Triangle(), torch.randn(4, 8))
    assert places
    assert not any(places)

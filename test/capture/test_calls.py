"""Calls of the user's model while it is captured.

As the user makes them, without noise, on values that the model takes.
"""

import collections
import dataclasses
import importlib

import pytest
import torch
from models import call, sqnr_db
from torch import nn

import nc
from nc import CaptureError, InputError, NCWarning, StaticQuantConfig
from nc.capture.examples import with_sizes

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
X = torch.linspace(-2, 2, 32).reshape(4, 8)


def checked(model, inputs, *others):
    """The prepared model, which gives what the model gives, also for other inputs."""
    prepared = nc.prepare(model.eval(), StaticQuantConfig(), example_inputs=inputs, backend="reference")
    for each in (inputs, *others):
        expected, got = call(model, each), call(prepared, each)
        assert expected.shape == got.shape
        assert sqnr_db(expected, got) > 100
    return prepared


class Two(nn.Module):
    """Two arguments, by position or by name."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x, skipped=None, y=None):
        return self.f(x) if y is None else self.f(x) * y


def hooked(kind):
    """A model with hooks that change inputs and outputs."""
    model = Two()
    if kind == "position":
        model.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
        model.register_forward_hook(lambda _, args, output: output + args[0].sum())
    elif kind == "several":
        model.register_forward_pre_hook(lambda _, args: args[0] * 2)
        model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        model.register_forward_hook(lambda _, args, output: output.relu(), always_call=True)
    else:
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "y": kwargs["y"] + 1}), with_kwargs=True
        )
        model.register_forward_hook(lambda _, args, kwargs, output: output * kwargs["x"], with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("position", X),
        ("position", (X,)),
        ("position", (X, None, X)),
        ("several", (X,)),
        ("keyword", {"x": X, "y": X}),
    ],
    ids=["tensor", "tuple", "hole", "several", "keyword"],
)
def test_hooks_of_the_model(kind, inputs):
    model = hooked(kind)
    q = nc.convert(checked(model, inputs), measure=False)
    assert sqnr_db(call(model, inputs), call(q, inputs)) > 25


@pytest.mark.parametrize("shape", [(4, 8), (4, 6, 8)])
def test_nothing_is_printed(shape, capfd):
    class Halves(Two):
        def forward(self, x):
            a, b = self.f(x).chunk(2, 1)
            return a * b

    nc.prepare(Halves().eval(), StaticQuantConfig(), example_inputs=torch.ones(shape), backend="reference")
    assert capfd.readouterr() == ("", "")


class Bags(nn.Module):
    """Rows of a table by offsets into one list of ids."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="sum")
        self.f = nn.Linear(16, 4)

    def forward(self, ids, offsets):
        return self.f(self.bag(ids, offsets))


def test_offsets_stay_within_what_they_are_offsets_of():
    """torch 2.8 reads what lies beyond."""
    values = {"ids": torch.arange(20), "offsets": torch.tensor([0, 4, 10, 15]), "x": torch.randn(4, 3)}
    assert with_sizes(values, {"in0_0": 1})["offsets"].tolist() == [0, 1, 1, 1]
    assert with_sizes(values, {"in0_0": 12})["offsets"].tolist() == [0, 4, 10, 12]
    assert with_sizes(values, {"in1_0": 6})["offsets"].tolist() == [0, 0, 4, 4, 10, 15]
    assert with_sizes(values, {"in2_0": 1})["offsets"].tolist() == [0, 4, 10, 15]


@pytest.mark.ipex
def test_offsets_in_a_process_that_has_imported_ipex(recwarn, tmp_path):
    """IPEX puts an operator of its own in the place of torch's, which no other machine has."""
    importlib.import_module("intel_extension_for_pytorch")
    inputs = torch.arange(20) * 7 % 50, torch.tensor([0, 4, 10, 15])
    checked(Bags(), inputs, (inputs[0][:7], torch.tensor([0, 3])))
    q = nc.quantize(
        Bags().eval(), StaticQuantConfig(), lambda m: m(*inputs), example_inputs=inputs, backend="reference"
    )
    assert [str(n.target) for n in q.graph.module.graph.nodes if "embedding_bag" in str(n.target)] == [
        "aten.embedding_bag.default"
    ]
    nc.save(q, tmp_path)
    assert torch.equal(nc.load(tmp_path, backend="reference")(*inputs), q(*inputs))
    assert [str(w.message) for w in recwarn if isinstance(w.message, NCWarning)] == []


@pytest.mark.parametrize("threads", [1, 2])
def test_offsets(threads, recwarn):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids = torch.arange(20) * 7 % 50
        checked(
            Bags(),
            (ids, torch.tensor([0, 4, 10, 15])),
            (ids[:7], torch.tensor([0, 3])),
            (ids.repeat(3), torch.arange(0, 60, 2)),
        )
    finally:
        torch.set_num_threads(before)
    assert [str(w.message) for w in recwarn if isinstance(w.message, NCWarning)] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("last", ["behind", "in front"])
@pytest.mark.parametrize("fast", [True, False])
def test_encoder_with_padding(last, fast, monkeypatch):
    """torch's encoder leaves padding out where all of it is behind the tokens, and gives zeros there.

    It does not where its fast path is off.
    """
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", fast)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))
    x, mask = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    inputs = {"src": x, "src_key_padding_mask": mask}
    other = {"src": x, "src_key_padding_mask": mask.flip(1)}
    checked(model, *((inputs, other) if last == "behind" else (other, inputs)))
    assert "forward" not in vars(model.layers[-1])
    assert model.enable_nested_tensor


def test_inference_tensors():
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), torch.randn(4, 8)
    weight = model[0].weight
    prepared = checked(model, x)
    assert model[0].weight is weight
    assert weight.is_inference()
    with torch.inference_mode():
        nc.convert(prepared, measure=False)(x)
        checked(model, x)


class Remembers(Two):
    """Its last result, in a plain attribute, and how often it was called, in one of a submodule."""

    def __init__(self, *, reads=False):
        super().__init__()
        self.reads, self.last, self.f.calls = reads, None, 0

    def forward(self, x):
        y, self.f.calls = self.f(x), self.f.calls + 1
        if self.reads and self.last is not None:
            y = y + self.last
        self.last = y
        return y


class RemembersOnce(Two):
    """A table that only the first call computes."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(8)
        return self.f(x) * self.table


def test_state_is_named(recwarn):
    names = "self.last and self.f.calls"
    model = Remembers()
    if RELEASE >= (2, 9):  # before, torch.export refuses every tensor that is kept
        with pytest.warns(NCWarning, match=f"Remembers.forward changes {names} at each call"):
            checked(model, X)
        assert model.f.calls == 1  # of the call that is compared
    with pytest.raises(
        CaptureError, match=f"forward changes {names} at each call, and a graph keeps nothing"
    ):
        nc.prepare(Remembers(reads=True).eval(), StaticQuantConfig(), example_inputs=X, backend="reference")
    recwarn.clear()
    checked(RemembersOnce(), X)
    assert not [w for w in recwarn if isinstance(w.message, NCWarning)]


def test_random_numbers_are_named():
    class Draws(Two):
        def forward(self, x):
            return self.f(x) + torch.randn_like(x)

    with pytest.raises(CaptureError, match="it draws random numbers"):
        nc.prepare(Draws().eval(), StaticQuantConfig(), example_inputs=X, backend="reference")


COUNT, SUM = 0, torch.zeros(4, 8)


class Kept:
    """An object with a tensor."""

    def __init__(self):
        self.sum = torch.zeros(4, 8)


class Counts(Two):
    """Adds up results in some place that is no buffer; which, says the class below."""

    sum = torch.zeros(4, 8)

    def __init__(self):
        super().__init__()
        self.object, self.tensor, self.table = Kept(), torch.zeros(4, 8), {"sum": torch.zeros(4, 8)}


class InObject(Counts):
    def forward(self, x):
        self.object.sum = self.object.sum + self.f(x)
        return self.object.sum


class InObjectInPlace(Counts):
    def forward(self, x):
        return 2 * self.object.sum.add_(self.f(x))


class InTable(Counts):
    def forward(self, x):
        return 2 * self.table["sum"].add_(self.f(x))


class InClass(Counts):
    def forward(self, x):
        Counts.sum = Counts.sum + self.f(x)
        return Counts.sum


class InGlobal(Counts):
    def forward(self, x):
        global SUM  # that is what is tried
        SUM = SUM + self.f(x)
        return SUM


class InGlobalNumber(Counts):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return self.f(x) * COUNT


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (InObject, "self.object.sum"),
        (InObjectInPlace, "self.object.sum"),
        (InTable, "self.table"),
        (InClass, "Counts.sum"),
        (InGlobal, "the global SUM"),
        (InGlobalNumber, "the global COUNT"),
    ],
)
def test_state_outside_of_attributes_is_named_and_left_as_it_was(cls, name):
    model = cls().eval()
    with pytest.raises(
        CaptureError, match=f"forward changes {name}.* at each call, and a graph keeps nothing"
    ):
        nc.prepare(model, StaticQuantConfig(), example_inputs=X, backend="reference")
    sums = (model.object.sum, model.table["sum"], Counts.sum, SUM)
    assert COUNT == 0
    for value in sums:
        assert type(value) is torch.Tensor
        assert not value.any()


def test_state_that_nothing_shows_is_not_called_random():
    calls = []

    class Hidden(Two):
        def forward(self, x):
            calls.append(1)
            return self.f(x) * len(calls)

    with pytest.raises(
        CaptureError,
        match="keeps something from call to call that nc does not see, or draws random numbers of Python",
    ):
        nc.prepare(Hidden().eval(), StaticQuantConfig(), example_inputs=X, backend="reference")


@dataclasses.dataclass
class Unknown:
    """A dataclass that nobody registered."""

    first: torch.Tensor


def test_unknown_classes():
    class Gives(Two):
        def forward(self, x):
            return Unknown(self.f(x))

    class Takes(Two):
        def forward(self, x, more):
            return self.f(x) + more.first

    class Plain:
        def __init__(self):
            self.first = X

    class GivesPlain(Two):
        def forward(self, x):
            self.f(x)
            return Plain()

    with pytest.raises(
        CaptureError,
        match=r"GivesPlain returns a Plain, .*: return its tensors as a tuple, list, dict or dataclass",
    ):
        nc.prepare(GivesPlain().eval(), StaticQuantConfig(), example_inputs=X, backend="reference")
    with pytest.raises(
        CaptureError,
        match=r"Gives returns a Unknown, .* call torch.export.register_dataclass\(Unknown\) before prepare",
    ):
        nc.prepare(Gives().eval(), StaticQuantConfig(), example_inputs=X, backend="reference")
    with pytest.raises(InputError, match=r"hold a Unknown.*call torch.export.register_dataclass"):
        nc.prepare(Takes().eval(), StaticQuantConfig(), example_inputs=(X, Unknown(X)), backend="reference")
    with pytest.raises(InputError, match="Argument 'more' of example_inputs holds a Plain"):
        nc.prepare(Takes().eval(), StaticQuantConfig(), example_inputs=(X, Plain()), backend="reference")


def test_another_structure_is_written_as_python_does():
    class Sums(Two):
        def forward(self, x, more):
            return self.f(x) + more["a"][0]

    prepared = nc.prepare(
        Sums().eval(), StaticQuantConfig(), example_inputs=(X, {"a": (X,)}), backend="reference"
    )
    with pytest.raises(
        InputError,
        match=r"'more': expected the structure \{'a': \(_,\)\}, .*, but got the structure \{'a': \[_, _\]\}",
    ):
        prepared(X, {"a": [X, X]})


def test_dicts_of_another_order_or_class_stand_for_each_other():
    class Sums(Two):
        def forward(self, more):
            return self.f(more["a"]) + more["b"]

    prepared = nc.prepare(
        Sums().eval(), StaticQuantConfig(), example_inputs=({"a": X, "b": 2 * X},), backend="reference"
    )
    expected = prepared({"a": X, "b": 2 * X})
    assert torch.equal(prepared(collections.OrderedDict(b=2 * X, a=X)), expected)


@pytest.mark.parametrize(("inputs", "call"), [({"x": X, "y": X}, r"\*\*inputs"), ((X, X), r"\*inputs")])
def test_inputs_that_are_not_unpacked_are_named(inputs, call):
    class Sums(Two):
        def forward(self, x, y):
            return self.f(x) + y

    prepared = nc.prepare(Sums().eval(), StaticQuantConfig(), example_inputs=inputs, backend="reference")
    with pytest.raises(InputError, match=rf"Argument 'y' is missing.*did you mean model\({call}\)"):
        prepared(inputs)
    with pytest.raises(
        InputError,
        match=r"Argument 'x': expected one value, as in example_inputs, but got the structure \[_\]",
    ):
        prepared([X], X)

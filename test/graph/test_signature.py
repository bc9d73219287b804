"""The call contract: every argument that does not fit is refused with words that say which and what to do."""

import collections
import dataclasses

import numpy
import pytest
import torch
from models import quantized
from torch import nn

import nc
from nc import InputError, StaticQuantConfig, prepare


class Model(nn.Module):
    """Two tensors that share their batch, an optional third, one flag."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y, extra=None, flag=False):
        z = self.fc(x) + self.fc(y)
        return (z if extra is None else z + extra) * (2 if flag else 1)


@pytest.fixture(scope="module")
def prepared():
    example = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, 3, 4), "flag": True}
    return prepare(Model().eval(), StaticQuantConfig(), example_inputs=example, backend="reference")


def good(batch=2, length=3, **others):
    return {"x": torch.randn(batch, length, 4), "y": torch.randn(batch, length, 4), "flag": True, **others}


def refused(model, match, *args, **kwargs):
    with pytest.raises(InputError, match=match) as caught:
        model(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_other_sizes_are_fine(prepared):
    for batch, length in ((1, 1), (5, 7), (2, 3)):
        assert prepared(**good(batch, length)).shape == (batch, length, 4)


def test_missing(prepared):
    text = refused(prepared, "'y' is missing", torch.randn(2, 3, 4), flag=True)
    assert "captured with x, y, flag" in text


def test_unknown(prepared):
    text = refused(prepared, "'z' was not in example_inputs", **good(z=torch.randn(2, 3, 4)))
    assert "x, y, flag" in text


def test_not_captured(prepared):
    text = refused(prepared, "'extra' was not in example_inputs", **good(extra=torch.randn(2, 3, 4)))
    assert "Give it in example_inputs to prepare" in text


def test_not_captured_but_none(prepared):
    prepared(**good(extra=None))
    prepared(**good(never_heard_of=None))


def test_too_many(prepared):
    refused(prepared, r"at most 4 positional arguments \(.*\), but got 5", *[torch.randn(2, 3, 4)] * 5)


def test_twice(prepared):
    refused(prepared, "'x' twice", torch.randn(2, 3, 4), **good())


def test_none_instead_of_a_tensor(prepared):
    refused(prepared, "'x': expected a tensor, but got NoneType", **good(x=None))


def test_a_list_instead_of_a_tensor(prepared):
    refused(prepared, "'x'.*structure", **good(x=[1.0]))


def test_a_number_instead_of_a_tensor(prepared):
    refused(prepared, "'x': expected a tensor, but got float", **good(x=1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_dtype(prepared, dtype):
    text = refused(
        prepared,
        f"'x': expected dtype torch.float32, but got {dtype}",
        **good(x=torch.zeros(2, 3, 4, dtype=dtype)),
    )
    assert "Call .to(torch.float32)" in text


def test_rank(prepared):
    refused(prepared, r"'x': expected 3 dimensions, but got shape \(3, 4\)", **good(x=torch.randn(3, 4)))


def test_fixed_size(prepared):
    refused(
        prepared, "'x': expected size 4 in dimension 2", **good(x=torch.randn(2, 3, 1))
    )  # would broadcast, or crash a kernel
    text = refused(prepared, "'x': expected size 4 in dimension 2", **good(x=torch.randn(2, 3, 5)))
    assert "The model fixes it" in text
    assert "(2, 3, 5)" in text


def test_sizes_that_must_be_equal(prepared):
    refused(prepared, "'y': expected size 2 in dimension 0", **good(y=torch.randn(1, 3, 4)))
    text = refused(
        prepared, "'y': expected size 2 in dimension 0, as another input has", **good(y=torch.randn(5, 3, 4))
    )
    assert "(5, 3, 4)" in text


def test_device(prepared):
    text = refused(prepared, "'x' is on device meta", **good(x=torch.randn(2, 3, 4, device="meta")))
    assert "Call .cpu()" in text


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (torch.Tensor.to_sparse, r"torch.sparse_coo.*\.to_dense\(\)"),
        (torch.Tensor.to_mkldnn, r"_mkldnn.*\.to_dense\(\)"),
        (lambda x: torch.nested.nested_tensor(list(x)), r"nested.*\.to_padded_tensor"),
    ],
)
def test_layout(prepared, make, what):
    refused(prepared, f"'x' is .*{what}", **good(x=make(torch.randn(2, 3, 4))))


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_sign_that_is_not_in_memory_yet(backend):
    x = torch.randn(1, 1)
    q_model = quantized(nn.Linear(1, 8).eval(), x, None, backend)
    later = torch.complex(torch.zeros(1, 1), -x).conj().imag
    assert later.is_neg()
    assert torch.equal(q_model(later), q_model(x))


@pytest.mark.parametrize("value", [False, None, 2, "yes", torch.tensor(True)])
def test_constant(prepared, value):
    text = refused(prepared, "'flag' was captured as the constant True", **good(flag=value))
    assert "example_inputs" in text


def test_a_constant_left_out(prepared):
    inputs = good()
    del inputs["flag"]
    refused(prepared, "'flag' is missing", **inputs)


def test_a_default_that_the_example_took_can_not_be_changed_later():
    example = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, 3, 4)}
    prepared = prepare(Model().eval(), StaticQuantConfig(), example_inputs=example, backend="reference")
    refused(prepared, "'flag' was not in example_inputs", **example, flag=True)


def test_structures_inside_arguments():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, batch):
            return self.fc(batch["a"]) + batch["b"][1]

    example = ({"a": torch.randn(2, 4), "b": (torch.randn(2, 4), torch.randn(2, 4))},)
    prepared = prepare(Inner().eval(), StaticQuantConfig(), example_inputs=example, backend="reference")
    refused(prepared, r"'batch'.*structure", {"a": torch.randn(2, 4)})
    refused(prepared, r"'batch'.*structure", {"a": torch.randn(2, 4), "b": [torch.randn(2, 4)] * 2})
    refused(
        prepared, r"batch\['b'\]\[1\]", {"a": torch.randn(2, 4), "b": (torch.randn(2, 4), torch.randn(2))}
    )


Named = collections.namedtuple("Named", "a, b")


@dataclasses.dataclass
class Members:
    """A registered one, for inputs and outputs."""

    a: torch.Tensor
    b: torch.Tensor


torch.export.register_dataclass(Members)


class OfOne(nn.Module):
    """One argument, whose members `get` reads."""

    def __init__(self, get):
        super().__init__()
        self.fc, self.get = nn.Linear(4, 4), get

    def forward(self, batch):
        return self.fc(self.get(batch, "a")) - self.get(batch, "b")


def test_the_order_of_keys_does_not_matter():
    one, two = torch.randn(2, 4), torch.randn(2, 4)
    model = OfOne(lambda batch, name: batch[name]).eval()
    prepared = prepare(
        model, StaticQuantConfig(), example_inputs=({"a": one, "b": two},), backend="reference"
    )
    expected = prepared({"a": one, "b": two})
    assert torch.equal(prepared({"b": two, "a": one}), expected)
    assert torch.equal(prepared(batch={"b": two, "a": one}), expected)
    refused(prepared, r"'batch'.*structure", {"b": two, "c": one})
    refused(prepared, r"'batch'.*structure", {"b": two, "a": one, "c": one})


@pytest.mark.filterwarnings(
    "ignore:The captured model takes inputs of exactly"
)  # torch frees no sizes in dataclasses
@pytest.mark.parametrize("cls", [Named, Members])
def test_a_loaded_model_takes_the_users_own_classes(cls, tmp_path):
    example = (cls(torch.randn(2, 4), torch.randn(2, 4)),)
    q_model = nc.quantize(
        OfOne(getattr).eval(),
        StaticQuantConfig(),
        lambda p: p(*example),
        example_inputs=example,
        backend="reference",
    )
    nc.save(q_model, tmp_path / "model")
    loaded = nc.load(tmp_path / "model", backend="reference")
    assert torch.equal(loaded(*example), q_model(*example))
    refused(loaded, r"'batch'.*structure", {"a": torch.randn(2, 4)})


def test_structures_that_do_not_fit_are_explained():
    example = (collections.defaultdict(list, a=torch.randn(2, 4), b=torch.randn(2, 4)),)
    model = OfOne(lambda batch, name: batch[name]).eval()
    prepared = prepare(model, StaticQuantConfig(), example_inputs=example, backend="reference")
    for other in (
        {"a": example[0]["a"], "b": example[0]["b"]},
        Members(*example[0].values()),
        Named(*example[0].values()),
    ):
        refused(prepared, r"'batch'.*structure", other)
    prepared = prepare(
        OfOne(getattr).eval(),
        StaticQuantConfig(),
        example_inputs=(Named(*example[0].values()),),
        backend="reference",
    )
    for other in (Members(*example[0].values()), tuple(example[0].values()), dict(example[0])):
        refused(prepared, r"'batch'.*structure", other)


def test_a_dataclass_that_torch_does_not_know():
    other = dataclasses.make_dataclass("Other", ["a", "b"])
    with pytest.raises(InputError, match=r"hold a Other.*register_dataclass"):
        prepare(
            OfOne(getattr).eval(),
            StaticQuantConfig(),
            example_inputs=(other(torch.randn(2, 4), torch.randn(2, 4)),),
        )


def test_an_array_instead_of_a_constant(prepared):
    refused(prepared, "'flag' was captured as the constant True", **good(flag=numpy.ones(2)))


def test_a_refused_call_changes_nothing(prepared):
    before = {key: dict(o.state) for key, o in prepared.observers.items()}
    refused(prepared, "dtype", **good(x=torch.zeros(2, 3, 4, dtype=torch.float64)))
    assert {key: dict(o.state) for key, o in prepared.observers.items()} == before

"""The call contract: every argument that does not fit is refused with words that say which and what to do."""

import pytest
import torch
from torch import nn

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
    text = refused(prepared, "no argument 'z'", **good(z=torch.randn(2, 3, 4)))
    assert "x, y, flag" in text


def test_not_captured(prepared):
    text = refused(prepared, "'extra' was not in example_inputs", **good(extra=torch.randn(2, 3, 4)))
    assert "Give it in example_inputs to prepare" in text


def test_not_captured_but_none(prepared):
    prepared(**good(extra=None))
    prepared(**good(never_heard_of=None))


def test_too_many(prepared):
    refused(prepared, "at most 4 positional arguments, but got 5", *[torch.randn(2, 3, 4)] * 5)


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
    text = refused(prepared, f"'x': expected dtype torch.float32, but got {dtype}", **good(x=torch.zeros(2, 3, 4, dtype=dtype)))
    assert "Call .to(torch.float32)" in text


def test_rank(prepared):
    refused(prepared, r"'x': expected 3 dimensions, but got shape \(3, 4\)", **good(x=torch.randn(3, 4)))


def test_fixed_size(prepared):
    refused(prepared, "'x': expected size 4 in dimension 2", **good(x=torch.randn(2, 3, 1)))  # would broadcast, or crash a kernel
    text = refused(prepared, "'x': expected size 4 in dimension 2", **good(x=torch.randn(2, 3, 5)))
    assert "the model fixes it" in text
    assert "(2, 3, 5)" in text


def test_sizes_that_must_be_equal(prepared):
    refused(prepared, "'y': expected size 2 in dimension 0", **good(y=torch.randn(1, 3, 4)))
    text = refused(prepared, "'y': expected size 2 in dimension 0, as another input has", **good(y=torch.randn(5, 3, 4)))
    assert "(5, 3, 4)" in text


def test_device(prepared):
    text = refused(prepared, "'x' is on device meta", **good(x=torch.randn(2, 3, 4, device="meta")))
    assert "Call .cpu()" in text


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
    refused(prepared, r"batch\['b'\]\[1\]", {"a": torch.randn(2, 4), "b": (torch.randn(2, 4), torch.randn(2))})


def test_a_refused_call_changes_nothing(prepared):
    before = {key: dict(o.state) for key, o in prepared.observers.items()}
    refused(prepared, "dtype", **good(x=torch.zeros(2, 3, 4, dtype=torch.float64)))
    assert {key: dict(o.state) for key, o in prepared.observers.items()} == before

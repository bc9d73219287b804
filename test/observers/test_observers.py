"""Observers and the prepared model's calibration: order, merging, bad values, and what survives an error."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from models import FP32, MLP, Function, call, prepared_for
from suites.reports import said
from torch import nn
from torch.nn import functional as F

from nc import CalibrationError, InputError, StateError, StaticQuantConfig, convert, prepare, quantize
from nc.formats import TensorFormat
from nc.observers import ALGORITHMS, Observer

batches = st.lists(
    st_np.arrays(
        np.float32,
        st_np.array_shapes(max_dims=3, max_side=4, min_side=0),
        elements=st.floats(-(2**100), 2**100, width=32),
    ),
    min_size=1,
    max_size=5,
).filter(lambda arrays: any(a.size for a in arrays))
STATISTICS = {a.statistic.name: a.statistic for a in ALGORITHMS.values()}
statistics = pytest.mark.parametrize("name", STATISTICS)
exact = pytest.mark.parametrize("name", sorted(name for name, s in STATISTICS.items() if not s.by_batch))


def observed(name, arrays):
    observer = Observer(STATISTICS[name], "fc")
    for array in arrays:
        observer(torch.from_numpy(array))
    return observer


def extremes(observer):
    return observer.state["low"].item(), observer.state["high"].item()


def ranges(prepared):
    return {key: extremes(observer) for key, observer in prepared.observers.items()}


# ---- one observer ----


@given(batches)
def test_minmax_is_the_range_of_everything_seen(arrays):
    low, high = ALGORITHMS["minmax"].find_range(
        observed("extremes", arrays).state, TensorFormat(dtype="uint8", symmetric=False)
    )
    flat = np.concatenate([a.ravel() for a in arrays])
    assert (low.item(), high.item()) == (flat.min(), flat.max())
    assert low.dtype == high.dtype == torch.float32


@exact
@given(batches, st.randoms())
def test_order_and_split_do_not_matter(name, arrays, random):
    expected = extremes(observed(name, arrays))
    shuffled = list(arrays)
    random.shuffle(shuffled)
    assert extremes(observed(name, shuffled)) == expected
    assert extremes(observed(name, [np.concatenate([a.ravel() for a in arrays])])) == expected


@exact
@given(batches, batches)
def test_merging_is_seeing_both(name, first, second):
    a, b = observed(name, first), observed(name, second)
    a.merge(b)
    both = observed(name, first + second)
    assert extremes(a) == extremes(both)
    assert a.batches == both.batches
    assert extremes(b) == extremes(observed(name, second))


@statistics
def test_a_fresh_observer_does_not_share_its_state(name):
    observed(name, [np.float32([5.0, -5.0])])
    assert extremes(observed(name, [np.float32([1.0, 2.0])])) == (1.0, 2.0)


@statistics
def test_empty_tensors_are_no_observation(name):
    observer = observed(name, [np.zeros((0, 3), np.float32)])
    assert observer.batches == 0


@statistics
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_and_change_nothing(name, bad):
    observer = observed(name, [np.float32([1.0, 2.0])])
    x = torch.tensor([[0.0, bad, 100.0], [bad, -100.0, 3.0]])
    with pytest.raises(CalibrationError, match=r"The input of operator 'fc'.*shape \(2, 3\)") as caught:
        observer(x)
    assert ("2 NaN and 0 infinite" if math.isnan(bad) else "0 NaN and 2 infinite") in str(caught.value)
    assert "set_local('fc'" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert extremes(observer) == (1.0, 2.0)
    assert observer.batches == 1


@statistics
def test_the_whole_range_of_float32_is_finite(name):
    """high - low overflows; neither of them does."""
    limit = torch.finfo(torch.float32).max
    assert extremes(observed(name, [np.float32([-limit, limit])])) == (-limit, limit)


def test_the_input_comes_back_untouched():
    x = torch.randn(3)
    assert Observer(STATISTICS["extremes"], "fc")(x) is x


# ---- calibration of a prepared model ----


def test_ranges_do_not_depend_on_the_order_or_split_of_the_data():
    model, data = MLP().eval(), torch.randn(12, 16)
    results = []
    for parts in (data.split(3), reversed(data.split(4)), [data]):
        prepared = prepare(model, StaticQuantConfig(), example_inputs=data[:2], backend="reference")
        for part in parts:
            prepared(part)
        results.append(ranges(prepared))
    for key, (low, high) in results[0].items():
        for other in results[1:]:
            assert other[key] == (pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5))


def test_example_inputs_do_not_calibrate():
    prepared = prepare(
        MLP().eval(), StaticQuantConfig(), example_inputs=torch.full((2, 16), 1e6), backend="reference"
    )
    assert not any(o.batches for o in prepared.observers.values())
    prepared(torch.rand(2, 16))
    assert all(abs(v) < 100 for pair in ranges(prepared).values() for v in pair)


class Overflowing(nn.Module):
    """Large inputs are finite at fc1 and infinite at fc2."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        nn.init.eye_(self.fc1.weight)

    def forward(self, x):
        return self.fc2(torch.exp(self.fc1(x)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_values_in_a_batch_name_operator_and_batch(bad):
    prepared = prepared_for(MLP(), torch.randn(3, 16))
    before = ranges(prepared)
    x = torch.randn(3, 16) * 100
    x[1, 2] = bad
    with pytest.raises(CalibrationError, match=r"Calibration batch 2: The input of operator 'fc1'"):
        prepared(x)
    assert ranges(prepared) == before
    prepared(torch.randn(3, 16))
    convert(prepared)


def test_batches_are_counted_as_the_user_counts_them():
    """Refused by the signature: never a batch. Empty or with bad values: one of the loop all the same."""
    prepared = prepared_for(MLP(), torch.randn(3, 16))
    with pytest.raises(InputError):
        prepared(torch.randn(3, 7))
    prepared(torch.empty(0, 16))
    bad = torch.full((1, 16), math.nan)
    for number in (3, 4):
        with pytest.raises(CalibrationError, match=f"Calibration batch {number}: "):
            prepared(bad)


def test_a_batch_that_overflows_half_way_leaves_no_trace():
    """The message says to leave the batch out; then what its first layers saw must not count either."""
    prepared = prepared_for(Overflowing(), torch.randn(3, 4))
    before = ranges(prepared)
    with pytest.raises(CalibrationError, match="'fc2'"):
        prepared(torch.full((3, 4), 1000.0))
    assert ranges(prepared) == before


def test_an_error_in_the_users_loop_loses_nothing():
    prepared = prepare(
        MLP().eval(), StaticQuantConfig(), example_inputs=torch.randn(2, 16), backend="reference"
    )
    data = torch.randn(4, 16)

    def run(model):
        model(data)
        msg = "the user's own"
        raise KeyError(msg)

    with pytest.raises(KeyError):
        run(prepared)
    before = ranges(prepared)
    assert len(before) == 2
    convert(prepared)
    prepared(data)
    assert ranges(prepared) == before


def test_an_error_in_run_fn_of_quantize_is_the_users_own():
    def run(model):
        msg = "the user's own"
        raise KeyError(msg)

    with pytest.raises(KeyError, match="the user's own"):
        quantize(
            MLP().eval(), StaticQuantConfig(), run, example_inputs=torch.randn(2, 16), backend="reference"
        )


def test_quantize_is_the_three_steps_in_one():
    model, x = MLP().eval(), torch.randn(4, 16)
    expected = convert(prepared_for(model, x))(x)
    for run_args in ((x,), [x], x):
        got = quantize(
            model,
            StaticQuantConfig(),
            lambda m, data: m(data),
            run_args,
            example_inputs=x,
            backend="reference",
        )
        assert torch.equal(got(x), expected)


def test_convert_without_calibration_is_refused():
    prepared = prepare(
        MLP().eval(), StaticQuantConfig(), example_inputs=torch.randn(2, 16), backend="reference"
    )
    with pytest.raises(StateError, match="Nothing was calibrated.*before convert"):
        convert(prepared)


def test_nothing_to_quantize_needs_no_calibration():
    x = torch.randn(2, 16)
    model = MLP().eval()
    prepared = prepare(
        model, StaticQuantConfig().set_local(".*", FP32), example_inputs=x, backend="reference"
    )
    assert torch.equal(convert(prepared)(x), model(x))


def test_converting_twice_gives_the_same():
    x = torch.randn(3, 16)
    prepared = prepared_for(MLP(), x)
    first, second = convert(prepared), convert(prepared)
    assert torch.equal(first(x), second(x))
    assert first.graph.plan.fingerprint() == second.graph.plan.fingerprint()
    assert first.graph.module.code == second.graph.module.code


def test_calibrating_further_after_a_convert():
    x = torch.randn(3, 16)
    prepared = prepared_for(MLP(), x)
    first = convert(prepared)
    before = first(x)
    prepared(x * 5)
    second = convert(prepared)
    assert torch.equal(first(x), before)
    assert not torch.equal(second(x), before)
    low, high = ranges(prepared)[next(iter(prepared.observers))]
    assert (low, high) == (pytest.approx((x * 5).min().item()), pytest.approx((x * 5).max().item()))


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.a(x), self.b(y)


def test_an_operator_that_never_ran_stays_fp32_and_the_report_says_so():
    model, x, y = TwoBranches().eval(), torch.randn(3, 4), torch.randn(2, 4)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=(x, y), backend="reference")
    call(prepared, (x, torch.randn(0, 4)))
    q = convert(prepared)
    report = {op.operator: op for op in q.report().ops}
    assert (report["b"].asked, report["b"].ran) == ("int8", "fp32")
    assert report["b"].reason == "never executed during calibration"
    assert report["a"].asked == "int8"
    assert torch.equal(q(x, y)[1], model(x, y)[1])
    assert not torch.equal(q(x, y)[0], model(x, y)[0])
    assert "never executed" in said(q.report())


def test_an_addition_whose_side_never_ran():
    model = Function(
        lambda self, x, y: self.c(F.relu(self.a(x)) + self.b(y).sum(0)), **{n: nn.Linear(4, 4) for n in "abc"}
    ).eval()
    x, y = torch.randn(3, 4), torch.randn(2, 4)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=(x, y), backend="reference")
    call(prepared, (x, torch.randn(0, 4)))
    assert torch.isfinite(convert(prepared)(x, y)).all()

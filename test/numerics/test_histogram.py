"""The dyadic histogram against exact rational arithmetic, and the range algorithms against brute force on the data itself."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from nc.formats import TensorFormat
from nc.numerics import affine, weight_mse
from nc.numerics.affine import choose_qparams, dequantize, quantize
from nc.numerics.histogram import (
    BINS,
    MIN_EXPONENT,
    SIDE,
    centres,
    coarsen,
    count,
    edges,
    exponent_for,
    magnitudes,
    quantile,
)
from nc.observers import ALGORITHMS, Observer
from nc.observers.histogram import HISTOGRAM
from nc.observers.kl import divergence

LIMIT = float(torch.finfo(torch.float32).max)
floats = st.floats(-LIMIT, LIMIT, width=32, allow_subnormal=True)
arrays = st_np.arrays(np.float32, st.integers(1, 40), elements=floats)
AFFINE, SYMMETRIC = TensorFormat(dtype="uint8", symmetric=False), TensorFormat(dtype="uint8", symmetric=True)
SIGNED = TensorFormat(dtype="int8", symmetric=True)


def observed(parts, statistic=HISTOGRAM):
    observer = Observer(statistic, "fc")
    for part in parts:
        observer(torch.as_tensor(part))
    return observer


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def bin_of(x, exponent):
    """By definition: truncated towards zero, in exact arithmetic."""
    return math.trunc(Fraction(float(x)) / Fraction(2) ** exponent) + SIDE


# ---- the grid ----


@given(floats)
def test_the_grid_is_the_finest_that_holds_a_value(x):
    k = exponent_for(abs(x))
    assert Fraction(abs(x)) < (SIDE + 1) * Fraction(2) ** k
    assert k == MIN_EXPONENT or Fraction(abs(x)) >= (SIDE + 1) * Fraction(2) ** (k - 1)


@given(arrays)
def test_counts_are_those_of_the_definition(x):
    k = exponent_for(float(np.abs(x).max()))
    expected = np.bincount([bin_of(v, k) for v in x], minlength=BINS)
    assert np.array_equal(count(torch.from_numpy(x), k).numpy(), expected)


@given(arrays, st.integers(0, 14))
def test_coarsening_is_counting_on_the_coarser_grid(x, by):
    k = exponent_for(float(np.abs(x).max()))
    expected = np.bincount([bin_of(v, k + by) for v in x], minlength=BINS)
    assert np.array_equal(coarsen(count(torch.from_numpy(x), k), by).numpy(), expected)


def test_borders_and_centres():
    borders = edges(-3)
    assert len(borders) == BINS + 1
    assert torch.equal(borders, -borders.flip(0))
    x = torch.tensor([-5.03, -0.125, -0.1, 0.0, 0.1249, 0.125, 7.7])
    where = count(x, -3).nonzero().flatten()
    for value, at in zip((-5.03, -0.125, 0.0, 0.125, 7.7), where, strict=True):
        assert borders[at] <= value <= borders[at + 1]
    middle = centres(-3, -5.03, 7.7)
    assert middle[SIDE] == 0.0
    assert middle.min() == -5.03
    assert middle.max() == 7.7


# ---- exact, whatever the order ----


@given(st.lists(arrays, min_size=1, max_size=6), st.randoms())
def test_any_split_and_order_gives_the_same_bits(parts, random):
    whole = observed([np.concatenate(parts)]).state
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert same(observed(parts).state, whole)
    assert same(observed(shuffled).state, whole)


@given(st.lists(arrays, min_size=1, max_size=4), st.lists(arrays, min_size=1, max_size=4))
def test_merging_halves_is_running_the_whole(first, second):
    a, b = observed(first), observed(second)
    a.merge(b)
    assert same(a.state, observed(first + second).state)


def test_threads_do_not_matter():
    x = torch.randn(300_000)
    states = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            states.append(observed([x]).state)
    finally:
        torch.set_num_threads(before)
    assert same(*states)


def test_memory_is_bounded():
    observer = observed([torch.randn(1000) * 10.0**i for i in range(-30, 30)])
    assert sum(t.numel() * t.element_size() for t in observer.state.values()) <= 64 * 1024


# ---- quantiles ----


@given(st.integers(0, 10_000), st.floats(0.001, 0.999))
def test_quantiles_are_within_a_bin_of_the_datas(seed, share):
    x = torch.randn(999, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    k = exponent_for(float(x.abs().max()))
    found = quantile(count(x, k), k, float(x.min()), float(x.max()), share)
    below, above = (
        float(torch.quantile(x.double(), share, interpolation=how)) for how in ("lower", "higher")
    )
    assert below - 2 * 2.0**k <= found <= above + 2 * 2.0**k


def test_quantiles_at_the_ends_are_the_extremes():
    x = torch.randn(1000)
    k = exponent_for(float(x.abs().max()))
    counts = count(x, k)
    assert quantile(counts, k, float(x.min()), float(x.max()), 0.0) == pytest.approx(
        float(x.min()), abs=2 * 2.0**k
    )
    assert quantile(counts, k, float(x.min()), float(x.max()), 1.0) == float(x.max())


@given(arrays)
def test_magnitudes_are_counts_of_absolute_values(x):
    k = exponent_for(float(np.abs(x).max()))
    assert torch.equal(
        magnitudes(count(torch.from_numpy(x), k)), count(torch.from_numpy(np.abs(x)), k)[SIDE:]
    )


# ---- the algorithms ----


def find(name, x, spec, **fields):
    spec = dataclasses.replace(
        spec, algo=name, **({"percentile": 99.999} if name == "percentile" else {}) | fields
    )
    algorithm = ALGORITHMS[name]
    low, high = algorithm.find_range(observed([x], algorithm.statistic).state, spec)
    assert low.dtype == high.dtype == torch.float32
    return float(low), float(high)


def mean_squared_error(x, low, high, spec):
    scale, zero = choose_qparams(
        torch.tensor(low),
        torch.tensor(high),
        quant_min=spec.quant_min,
        quant_max=spec.quant_max,
        symmetric=spec.symmetric,
    )
    codes = quantize(x, scale, int(zero), spec.quant_min, spec.quant_max, dtype=spec.dtype.storage)
    return float((dequantize(codes, scale, int(zero)).double() - x.double()).square().mean())


def outliers():
    return torch.cat([torch.randn(20_000), torch.tensor([40.0, -25.0])])


@pytest.mark.parametrize("spec", [AFFINE, SYMMETRIC, SIGNED], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "data",
    [
        lambda: torch.randn(5000),
        lambda: torch.randn(5000).relu(),
        lambda: -torch.rand(5000),
        lambda: torch.full((9,), 3.0),
        outliers,
    ],
    ids=["normal", "relu", "negative", "constant", "outliers"],
)
def test_ranges_lie_within_the_data_and_around_its_middle(name, spec, data):
    x = data()
    low, high = find(name, x, spec)
    assert min(float(x.min()), 0.0) <= low <= high <= max(float(x.max()), 0.0)
    if float(x.min()) < float(x.median()) < float(x.max()):
        assert low <= float(x.median()) <= high


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-40, 3.0, LIMIT, -LIMIT])
def test_one_value(name, value):
    low, high = find(name, torch.full((7,), value), AFFINE)
    value = float(torch.tensor(value))
    assert min(low, 0.0) <= value <= max(high, 0.0)


@pytest.mark.parametrize("percentile", [99.0, 99.9, 60.0])
@pytest.mark.parametrize("spec", [AFFINE, SIGNED], ids=str)
def test_percentile_covers_that_share(percentile, spec):
    x = torch.randn(100_000) + 0.5
    low, high = find("percentile", x, spec, percentile=percentile)
    if spec.symmetric:
        assert float((x.abs() <= max(-low, high)).double().mean()) == pytest.approx(
            percentile / 100, abs=2e-3
        )
        return
    outside = (100 - percentile) / 200
    assert float((x < low).double().mean()) == pytest.approx(outside, abs=2e-3)
    assert float((x > high).double().mean()) == pytest.approx(outside, abs=2e-3)


def test_percentile_100_is_minmax():
    x = torch.randn(5000)
    low, high = find("percentile", x, AFFINE, percentile=100.0)
    assert (low, high) == (pytest.approx(float(x.min()), abs=5e-3), float(x.max()))


@pytest.mark.parametrize("spec", [AFFINE, SIGNED], ids=str)
@pytest.mark.parametrize(
    "data",
    [outliers, lambda: torch.randn(20_000), lambda: torch.randn(20_000).exp()],
    ids=["outliers", "normal", "exp"],
)
def test_mse_is_as_good_as_searching_the_data_itself(spec, data):
    """All pairs of a grid of ends, with the errors of the values themselves instead of bins."""
    x = data()
    found = mean_squared_error(x, *find("mse", x, spec), spec)
    grid = [1 - i / 20 for i in range(20)]
    ends = [
        (float(x.min()) * a, float(x.max()) * b) for a in grid for b in (grid if not spec.symmetric else [a])
    ]
    best = min(mean_squared_error(x, low, high, spec) for low, high in ends)
    assert found <= best * 1.05
    assert found <= mean_squared_error(x, float(x.min()), float(x.max()), spec) * 1.0001


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_mse_clips_either_end(sign):
    low, high = sorted(
        sign * end
        for end in find("mse", sign * torch.cat([torch.randn(200_000), torch.tensor([12.0])]), AFFINE)
    )
    assert -6 < low < -3
    assert 3 < high < 11


def migacz(hist, i, codes):
    """KL(P || Q) of the first i bins, as the talk describes it, bin by bin in plain Python."""
    p = [float(h) for h in hist[:i]]
    p[-1] += sum(hist[i:])
    q = [0.0] * i
    for level in range(codes):
        members = [j for j in range(i) if j * codes // i == level]
        filled = [j for j in members if hist[j]]
        for j in filled:
            q[j] = sum(hist[j] for j in members) / len(filled)
    ps, qs = sum(p), sum(q)
    missing = sum(1 for a, b in zip(p, q, strict=True) if a and not b)
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if a:
            total += a / ps * math.log(a / ps / (1e-4 if not b else b / qs * (1 - 1e-4 * missing)))
    return total


def test_divergence_is_that_of_the_description():
    hist = (
        torch.cat([torch.randn(400).abs(), torch.tensor([5.0, 5.3])])
        .mul(32)
        .long()
        .bincount(minlength=SIDE + 1)
    )
    counts = torch.cat([torch.zeros(SIDE), hist]).double()
    for last, codes in ((40, 16), (99, 16), (128, 128), (170, 7)):
        assert divergence(counts, SIDE, SIDE + last, codes) == pytest.approx(
            migacz(hist.tolist(), last + 1, codes), rel=1e-9
        )


def test_kl_takes_the_least_divergence():
    x = torch.cat([torch.randn(3000).abs(), torch.tensor([14.0, 15.9])])
    state = observed([x]).state
    hist, width = state["counts"][SIDE:].tolist(), 2.0 ** int(state["exponent"])
    bins = max(i for i, h in enumerate(hist) if h) + 1
    low, high = find("kl", x, AFFINE)
    assert low == float(x.min())
    least = min(migacz(hist, i, 256) for i in range(256, bins + 1, 5))
    assert migacz(hist, round(high / width), 256) <= least * 1.1
    assert high < 8


@pytest.mark.parametrize("share", [0.2, 0.45, 0.55, 0.9])
def test_kl_is_not_led_by_a_relus_zeros(share):
    """Zeros are exact whatever the range.

    Below half of all values they used to weigh so much that 2 % of the others were cut off.
    """
    positive = torch.randn(100_000).abs()
    zeros = torch.zeros(round(len(positive) * share / (1 - share)))
    assert find("kl", torch.cat([positive, zeros]), AFFINE)[1] == pytest.approx(
        find("kl", positive, AFFINE)[1], rel=0.1
    )


def test_kl_clips_outliers_on_both_sides():
    low, high = find("kl", outliers(), AFFINE)
    assert -25 < low < -2
    assert 2 < high < 40


def test_moving_average_is_torchs():
    from torch.ao.quantization import MovingAverageMinMaxObserver

    theirs = MovingAverageMinMaxObserver()
    parts = [torch.randn(50) * (i + 1) for i in range(8)]
    for part in parts:
        theirs(part)
    algorithm = ALGORITHMS["moving_average"]
    low, high = algorithm.find_range(observed(parts, algorithm.statistic).state, AFFINE)
    assert float(low) == pytest.approx(float(theirs.min_val), rel=1e-5)
    assert float(high) == pytest.approx(float(theirs.max_val), rel=1e-5)


def test_merged_moving_averages_are_weighted_by_batches():
    statistic = ALGORITHMS["moving_average"].statistic
    a, b = (
        observed([torch.tensor([0.0, 1.0])] * 3, statistic),
        observed([torch.tensor([0.0, 5.0])], statistic),
    )
    a.merge(b)
    assert float(a.state["high"]) == pytest.approx(2.0)
    assert int(a.state["batches"]) == 4


# ---- weights ----


def test_weight_ranges_are_the_best_of_the_grid():
    rows = torch.randn(5, 4096)
    rows[2, 3] = 12.0
    rows[4] = 0.0

    def rounded(limit):
        scale, zero_point = affine.choose_qparams(
            -limit, limit, quant_min=-127, quant_max=127, symmetric=True
        )
        codes = affine.quantize(
            rows, scale, zero_point, -127, 127, dtype=torch.int8, block_size=(1, rows.shape[1])
        )
        return affine.dequantize(codes, scale, zero_point, (1, rows.shape[1]))

    low, high = weight_mse.best_range(rows, rounded)
    for row, limit in zip(rows.double(), high.double(), strict=True):
        amax = float(row.abs().max())
        errors = {}
        for i in range(80):
            scale = amax * (1 - i / 100) / 127 or 1.0
            errors[i] = float(((row / scale).round().clamp(-127, 127) * scale - row).abs().pow(2.4).sum())
        chosen = float(
            ((row / (float(limit) / 127 or 1.0)).round().clamp(-127, 127) * (float(limit) / 127) - row)
            .abs()
            .pow(2.4)
            .sum()
        )
        assert chosen <= min(errors.values()) * 1.001 + 1e-12
    assert torch.equal(low, -high)
    assert high[2] < 12.0
    assert high[4] == 0.0

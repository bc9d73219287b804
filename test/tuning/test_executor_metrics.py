"""Metrics that an executor computes: the numbers of those computed here, sent as artefacts; errors are notes."""

import concurrent.futures
import gc
import math
import multiprocessing
import threading
import time
import weakref

import pytest
import torch
from suites.metrics import power
from torch import nn

import nc
from nc.errors import ConfigError
from nc.tuning import executor_metrics
from nc.tuning import run as running
from nc.tuning.executor_metrics import Elsewhere
from nc.tuning.run import CTRL_C, OUT_OF_TIME, Run
from nc.tuning.trials import Trials

DATA = [torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def fails(model):
    if isinstance(model, nn.Sequential):
        return 1.0
    msg = "no data here"
    raise OSError(msg)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def tuned(model, **more):
    def run_fn(prepared):
        for batch in DATA:
            prepared(batch)

    candidates = {
        "static": nc.StaticQuantConfig(),
        "rows": nc.DynamicQuantConfig(act_granularity="per_token"),
    }
    return nc.tune(model, DATA[0], run_fn, **{"metric": power, "candidates": candidates, "points": 1, **more})


def test_processes_give_the_metrics_that_are_computed_here(model, tmp_path):
    here = tuned(model)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        there = tuned(model, executor=pool, trials=tmp_path / "trials")
    assert not [note for note in there.notes if "left out" in note]
    known = {point.name: point.metric for point in here.measured}
    found = {point.name: point.metric for point in there.measured}
    assert {"fp32", "static", "rows"} <= set(found)
    for name in ("fp32", "static", "rows"):
        assert found[name] == pytest.approx(known[name], rel=1e-5)
    assert there.measured[0].name == "fp32"
    assert len(list((tmp_path / "trials").glob("*.json"))) == len(there.measured)


def test_what_is_sent_is_an_artefact_and_times_are_measured_before(model, monkeypatch):
    events = []
    original = executor_metrics.judged

    def judged(given, *more):
        events.append(type(given))
        return original(given, *more)

    monkeypatch.setattr(executor_metrics, "judged", judged)
    phases = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        front = tuned(model, executor=pool, progress=lambda p: phases.append((p.phase, len(events))))
    assert set(events) == {bytes}
    assert len(events) == len(front.measured) - 1
    before = [count for phase, count in phases if "metric" not in phase]
    assert set(before) == {0}


def test_what_fails_elsewhere_is_left_out_with_its_error(model):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        front = tuned(model, metric=fails, executor=pool)
    assert [point.name for point in front.measured] == ["fp32"]
    assert any(
        "static is left out: its metric failed elsewhere: OSError: no data here" in n for n in front.notes
    )


def test_another_cpu_is_no_answer(model, monkeypatch):
    monkeypatch.setattr(executor_metrics, "judged", lambda *_: (1.0, ["sse"]))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        front = tuned(model, executor=pool)
    assert [point.name for point in front.measured] == ["fp32"]
    assert any("another kind of CPU (sse)" in note for note in front.notes)


def test_a_metric_that_does_not_end_is_given_up_with_the_budget(model):
    hold = threading.Event()

    def waits(given):
        if not isinstance(given, nn.Sequential):
            hold.wait()
        return 1.0

    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        front = tuned(model, metric=waits, executor=pool, budget=12)  # of which 9.6 s are for times
    finally:
        hold.set()
        pool.shutdown()
    assert [point.name for point in front.measured] == ["fp32"]
    assert any("the budget ended before its metric was computed" in note for note in front.notes)


def test_what_is_wrong_is_said_before_anything_is_done(model):
    for more, text in (({"executor": "dask"}, "executor='dask'"), ({"executor": True}, "executor=True")):
        with pytest.raises(ConfigError, match=text):
            tuned(model, **more)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pytest.raises(ConfigError, match="metric=, which is"),
    ):
        tuned(model, metric=None, executor=pool)


def test_a_number_that_is_none_is_left_out(model):
    def odd(given):
        return 1.0 if isinstance(given, nn.Sequential) else math.nan

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        front = tuned(model, metric=odd, executor=pool)
    assert [point.name for point in front.measured] == ["fp32"]
    assert any("nan" in note for note in front.notes)


def test_a_budget_that_ends_keeps_what_was_measured(model, monkeypatch):
    """Times are measured in a part of the budget, so that there is time for their metrics."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = Elsewhere(pool, power)
        run = Run({}, Trials(None), time.monotonic() + 100, None, made)
        assert not run.is_over()
        later = time.monotonic() + 85
        monkeypatch.setattr(running.time, "monotonic", lambda: later)
        assert run.is_over()
        assert run.notes == [OUT_OF_TIME]


def test_ctrl_c_while_times_are_measured_gives_what_was_sent(model):
    phases = []

    def progress(at):
        phases.append(at.phase)
        if at.phase == "rows":
            raise KeyboardInterrupt

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        front = tuned(model, executor=pool, progress=progress)
    assert [point.name for point in front.measured] == ["fp32", "static"]
    assert CTRL_C in front.notes


def test_an_executor_that_takes_no_work_is_a_typed_error(model):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(ConfigError, match="takes no work: RuntimeError"):
        tuned(model, executor=pool)


def test_an_executor_that_ends_on_the_way_gives_reasons(model):
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def progress(at):
        if at.phase == "auto":
            pool.shutdown()

    front = tuned(model, executor=pool, progress=progress)
    assert [point.name for point in front.measured] == ["fp32"]
    assert any("static is left out: it could not be sent: RuntimeError" in note for note in front.notes)


def test_a_metric_that_cannot_be_sent_is_said_at_the_first_point(model):
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(ConfigError, match="can't be sent the metric"),
    ):
        tuned(model, metric=lambda given: power(given), executor=pool)


def test_models_with_low_bit_weights_wait_on_disk(model):
    """However many candidates there are, none is kept in memory until the metrics are computed."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = Elsewhere(pool, power, model)
        expected, alive = [], []
        for bits in (4, 8):
            config = nc.WeightOnlyConfig(f"int{bits}", group_size=-1)
            low_bit = nc.quantize(model, config, measure=False)
            expected.append(power(low_bit))
            made.keep(low_bit)
            alive.append(weakref.ref(low_bit))
            del low_bit
        gc.collect()
        assert [each() for each in alive] == [None, None]
        assert dict(made.values(lambda: 100)) == {0: expected[0], 1: expected[1]}
        made.close()

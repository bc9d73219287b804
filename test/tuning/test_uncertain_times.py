"""Times of a busy machine: ratios of rounds, measured again, and never a winner without a word."""

import dataclasses
import time
import warnings

import pytest
import torch

import nc
from nc.errors import ConfigError, NCWarning
from nc.profiling.load import Load
from nc.tuning import measure
from nc.tuning.autoquant import choose
from nc.tuning.front import Front, FrontPoint
from nc.tuning.trials import Result

CALM, BUSY = Load(seconds=1.0, share=1.0), Load(seconds=1.0, share=0.2)
MODEL, X = torch.nn.Linear(4, 4).eval(), torch.zeros(2, 4)


def point(name, ratio, spread, note=""):
    result = Result(
        metric=1.0, sqnr_db=30.0, fp32_ratio=ratio, ms=10 / ratio, spread=spread, weight_bytes=1, note=note
    )
    return FrontPoint(name=name, config=nc.DynamicQuantConfig(), result=result, drop=0.0)


FP32, TWO = point("fp32", 1.0, (1.0, 1.0)), point("two", 2.0, (1.9, 2.1))
WILD = point("wild", 43.2, (1.2, 52.0), "this machine is busy")
WILDER = point("wilder", 50.0, (0.8, 90.0), "this machine is busy")


@pytest.mark.parametrize(
    ("points", "name", "warned"),
    [
        ((FP32, TWO), "two", False),
        ((FP32, TWO, WILD), "two", False),
        ((FP32, WILD), "wild", True),
        ((FP32, WILD, WILDER), "wild", True),
        ((FP32, WILDER), "fp32", False),
        ((FP32, point("slow", 0.5, (0.4, 0.6)), WILD), "fp32", False),
    ],
)
def test_the_fastest_is_one_whose_time_is_certain_where_there_is_one(points, name, warned):
    front = Front(measured=points)
    with pytest.warns(NCWarning, match="is uncertain, .*busy") if warned else warnings.catch_warnings():
        assert front.fastest(max_drop=0.1).name == name


def test_the_most_accurate_of_those_that_are_fast_enough_is_one_whose_time_is_certain():
    better = dataclasses.replace(WILD, result=dataclasses.replace(WILD.result, metric=2.0))
    assert Front(measured=(TWO, better)).most_accurate(max_ms=6).name == "two"
    with pytest.warns(NCWarning, match="is uncertain"):
        assert Front(measured=(FP32, better)).most_accurate(max_ms=6).name == "wild"


def test_autoquant_takes_one_whose_time_is_certain():
    assert "two is 2.00 times" in choose(Front(measured=(FP32, TWO, WILD)), None).why
    assert "wild is 43.20 times" in choose(Front(measured=(FP32, WILD)), None).why


@pytest.fixture
def rounds(monkeypatch):
    """What each measurement gives: its rounds and the load; the clocks that were asked for."""
    given, clocks = [], []

    def timed_rounds(calls, seconds, clock, least):
        clocks.append(clock)
        found, load = given.pop(0)
        return [dict(zip(("fp32", "quantized"), each, strict=True)) for each in found], 1, load

    monkeypatch.setattr(measure, "timed_rounds", timed_rounds)
    return given, clocks


def timed():
    return measure.timed(MODEL, ((X,), {}), MODEL)


def test_the_ratio_is_the_median_of_the_rounds_ratios(rounds):
    # a machine that is fast half of the time: the medians are of other rounds
    found = [(10.0, 5.0), (1.0, 0.5), (10.0, 5.0), (1.0, 0.5), (10.0, 0.5)]
    rounds[0].append((found, CALM))
    measured = timed()
    assert measured.fp32 / measured.own == pytest.approx(2.0)  # the ratio of the medians is 20
    assert (measured.doubt, rounds[1]) == ("", [time.perf_counter])


def test_what_was_disturbed_is_measured_again_by_cpu_time(rounds):
    rounds[0].extend([([(10.0, 0.2)] * 3 + [(10.0, 9.0)] * 2, BUSY), ([(8.0, 4.0)] * 5, CALM)])
    measured = timed()
    assert (measured.fp32, measured.own, measured.doubt) == (10.0, 5.0, "")
    assert rounds[1] == [time.perf_counter, time.process_time]


def test_the_narrower_of_two_disturbed_measurements_counts_and_stays_uncertain(rounds):
    rounds[0].extend([([(10.0, 0.2)] * 3 + [(10.0, 9.0)] * 2, BUSY), ([(8.0, 4.0)] * 5, BUSY)])
    measured = timed()
    assert measured.own == 5.0
    assert "busy" in measured.doubt


def test_rounds_that_differ_too_much_are_uncertain_on_a_calm_machine_too(rounds):
    wide = [(10.0, 0.2), (10.0, 0.3), (10.0, 5.0), (10.0, 9.0), (10.0, 9.0)]
    rounds[0].extend([(wide, CALM), (wide, CALM)])
    assert "single rounds differ by a factor of" in timed().doubt


def test_the_spread_of_several_calls_is_that_of_all():
    one, other = measure.Timed(1.0, 0.5, (1.9, 2.1), ""), measure.Timed(1.0, 0.5, (1.5, 2.0), "")
    assert measure.spread_of([one, other]) == (1.5, 2.1)


def test_the_best_point_of_any_kind_can_be_written_and_read(tmp_path):
    config = nc.AutoConfig(error_factor=3.0)
    config.to_json_file(tmp_path / "config.json")
    assert nc.AutoConfig.from_json_file(tmp_path / "config.json") == config
    assert nc.AutoConfig.from_json(config.to_json()) == config
    nc.DynamicQuantConfig().to_json_file(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="Expected the configuration of an AutoConfig"):
        nc.AutoConfig.from_json_file(tmp_path / "other.json")
    assert dataclasses.is_dataclass(config)

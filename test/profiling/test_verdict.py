"""The verdict: how fast against fp32, what costs more than it gains, and which rule excludes that.

No test here reads a real clock.
"""

import dataclasses
import gc
import itertools
import json
import time
import weakref

import pytest
import torch
from models import MLP, Attention, Function, ResidualCNN, prepared_for, quantized
from torch import nn

import nc
from nc import StaticQuantConfig, available_backends, convert, load, quantize
from nc.backends import verdict
from nc.backends.base import EngineModel
from nc.backends.reference import ReferenceBackend
from nc.backends.verdict import OpCost, Verdict, fastest, judged, measure, operator_costs
from nc.graph.plan import Decision, Plan
from nc.planning.rules import spec_of
from nc.profiling.latency import compare, doubt
from nc.profiling.load import Load, LoadWatch
from nc.profiling.own_model import OwnModel
from nc.profiling.profile import EngineCall

native = pytest.mark.skipif(
    bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
)
ROWS = torch.randn(4, 16)
INT8 = spec_of("static_quant", StaticQuantConfig().defaults(), "linear")


def plan_of(**kinds):
    """Kinds by operator; int8 but for activations and norms."""
    decisions = [
        Decision(
            operator=name, kind=kind, module_type="", **({} if kind in ("relu", "norm") else {"spec": INT8})
        )
        for name, kind in kinds.items()
    ]
    return Plan(decisions=tuple(decisions), backend="native")


# ---- arithmetic ----


def test_ratio_and_words():
    fast = Verdict(fp32_ms=9.0, engine_ms=4.0, calls=20, threads=2, costs=())
    assert fast.ratio == 2.25
    assert str(fast) == (
        "2.25 times as fast as fp32: quantized 4.00 ms, fp32 9.00 ms (example inputs, 2 threads, median of 20 "
        "calls each)"
    )
    slow = Verdict(fp32_ms=4.0, engine_ms=10.0, calls=1, threads=1)
    assert str(slow).splitlines() == [
        "SLOWER than fp32: it takes 2.50 times as long, quantized 10.00 ms, fp32 4.00 ms "
        "(example inputs, 1 thread, only one call each, for lack of time)",
        "which operators cost more than they gain was not measured; report(profile_inputs=...) shows the "
        "time of each",
    ]
    assert str(dataclasses.replace(fast, engine_ms=8.99)).startswith("1.00 times as fast as fp32")


def test_microseconds():
    small = Verdict(fp32_ms=0.0137, engine_ms=0.0285, calls=600, threads=1, costs=())
    assert str(small).startswith(
        "SLOWER than fp32: it takes 2.08 times as long, quantized 28.5 us, fp32 13.7 us (example inputs, 1 thread, "
    )


def test_spread_doubt_and_what_was_timed():
    found = Verdict(
        fp32_ms=9.0,
        engine_ms=4.0,
        calls=40,
        threads=1,
        rounds=20,
        round_ratio=2.2,
        interval=(2.1, 2.3),
        quartiles=(2.0, 2.4),
        timed="a copy",
    )
    assert found.certain
    assert str(found) == (
        "2.20 times as fast as fp32: quantized 4.00 ms, fp32 9.00 ms "
        "(example inputs, 1 thread, median of 40 calls each; in half of 20 rounds 2.00 to 2.40 times as fast; fp32 is a "
        "copy)"
    )
    doubtful = dataclasses.replace(found, doubt="the moon is full")
    assert not doubtful.certain
    assert str(doubtful).startswith(
        "cannot tell whether it is faster than fp32: the moon is full. Measured: quantized 4.00 ms, fp32 9.00 ms"
    )
    assert json.loads(json.dumps(doubtful.to_dict())) == {
        **{f.name: None for f in dataclasses.fields(Verdict)},
        **{
            "fp32_ms": 9.0,
            "engine_ms": 4.0,
            "calls": 40,
            "threads": 1,
            "rounds": 20,
            "round_ratio": 2.2,
            "ratio": 2.2,
            "losses": [],
        },
        **{
            "interval": [2.1, 2.3],
            "quartiles": [2.0, 2.4],
            "doubt": "the moon is full",
            "certain": False,
            "exclude": [],
            "timed": "a copy",
        },
    }


QUIET = Load(seconds=1.0, share=1.0, switches=2.0, runnable=1, cores=2)


@pytest.mark.parametrize(
    ("interval", "quartiles", "load", "why"),
    [
        ((2.1, 2.3), (2.0, 2.4), QUIET, ""),
        ((0.4, 0.5), (0.4, 0.5), QUIET, ""),
        (None, None, QUIET, "no time for more calls"),
        ((0.9, 1.1), (0.9, 1.2), QUIET, "smaller than the spread"),
        ((2.0, 4.0), (2.0, 3.1), QUIET, "differ too much"),
        ((2.1, 2.3), (2.0, 2.4), dataclasses.replace(QUIET, share=0.5), "got 50 % of a core"),
        ((2.1, 2.3), (2.0, 2.4), dataclasses.replace(QUIET, switches=90.0), "90 times per second"),
        ((99.0, 99.1), (99.0, 99.1), dataclasses.replace(QUIET, runnable=5), "5 threads want its 2 cores"),
    ],
)
def test_doubts(interval, quartiles, load, why):
    found = doubt(interval, quartiles, load)
    assert why in found
    assert bool(found) is bool(why)


def test_in_doubt_nothing_is_said_of_operators():
    found = judged(dataclasses.replace(CALL, doubt="busy"), [cost("fc", 50, 20)], PLAN)
    assert (found.losses, found.exclude) == ((), ())
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("times", "lost"),
    [((50, 50, 50, 50, 50), True), ((10, 50, 50, 50, 50), True), ((10, 10, 50, 50, 50), False)],
)
def test_a_loss_is_beyond_the_spread_of_single_runs(times, lost):
    runs = [[cost("fc", ms, 20), cost("head", 1, 2)] for ms in times]
    assert bool(judged(CALL, [cost("fc", 50, 20), cost("head", 1, 2)], PLAN, runs).losses) is lost


def test_conversions_count_for_the_operator_that_they_serve():
    plan = plan_of(a="linear", relu="relu", norm="norm", b="linear", q="linear", k="linear")
    engine = [
        EngineCall(name="quantize", converts=True, serves="a", ms=1.0),
        EngineCall(name="linear", operators=("a", "relu"), ms=2.0),
        EngineCall(name="dequantize", converts=True, serves="a", ms=4.0),
        EngineCall(name="layer_norm", operators=("norm",), ms=8.0),
        EngineCall(name="quantize", converts=True, serves="b", ms=16.0),
        EngineCall(name="linear", operators=("b",), ms=32.0),
        EngineCall(name="quantize", converts=True, ms=64.0),
        EngineCall(name="linear", operators=("q", "k"), ms=128.0),
        EngineCall(name="view", ms=256.0),
    ]
    fp32 = [
        *(
            EngineCall(name=name, operators=(name,), ms=ms)
            for name, ms in zip(("a", "relu", "norm", "b", "q", "k"), range(1, 7), strict=True)
        ),
        EngineCall(name="view", ms=100.0),
    ]
    assert operator_costs(fp32, engine, plan) == (
        OpCost(operators=("a", "relu"), engine_ms=7.0, fp32_ms=3.0),
        OpCost(operators=("b",), engine_ms=48.0, fp32_ms=4.0),
        OpCost(operators=("q", "k"), engine_ms=128.0, fp32_ms=11.0),
    )


def test_the_fastest_run_of_each_step_counts():
    runs = [
        [EngineCall(name="a", ms=3.0), EngineCall(name="b", ms=1.0)],
        [EngineCall(name="a", ms=2.0), EngineCall(name="b", ms=5.0)],
    ]
    assert [step.ms for step in fastest(runs)] == [2.0, 1.0]


PLAN = plan_of(c1="conv2d", relu="relu", c2="conv2d", fc="linear", head="linear")
CALL = Verdict(fp32_ms=100.0, engine_ms=120.0, calls=9, threads=1)


def cost(name, engine_ms, fp32_ms):
    return OpCost(operators=tuple(name.split("+")), engine_ms=engine_ms, fp32_ms=fp32_ms)


def test_losses_the_largest_first_and_the_rule_that_excludes_them():
    found = judged(
        CALL, [cost("c1+relu", 30, 20), cost("c2", 10, 40), cost("fc", 50, 20), cost("head", 1, 2)], PLAN
    )
    assert found.losses == (cost("fc", 50, 20), cost("c1+relu", 30, 20))
    assert str(found).splitlines()[1:] == [
        "2 of 4 int8 kernels cost more than they gain: fc (50.00 ms, fp32 20.00 ms), c1 + relu (30.00 ms, "
        "fp32 20.00 ms)",
        'config.exclude("fc", "c1") leaves their operators in fp32',
    ]


@pytest.mark.parametrize(("engine_ms", "lost"), [(20.9, False), (21.9, False), (22.1, True)])
def test_a_tenth_is_no_loss(engine_ms, lost):
    assert bool(judged(CALL, [cost("fc", engine_ms, 20.0)], PLAN).losses) is lost


@pytest.mark.parametrize(("engine_ms", "lost"), [(1.9, False), (2.1, True)])
def test_a_hundredth_of_the_call_is_no_loss(engine_ms, lost):
    assert bool(judged(CALL, [cost("fc", engine_ms, 1.0)], PLAN).losses) is lost


def test_a_type_of_which_all_lose_is_excluded_as_a_type():
    found = judged(
        CALL, [cost("c1+relu", 30, 20), cost("c2", 60, 40), cost("fc", 30, 20), cost("head", 2, 2)], PLAN
    )
    assert found.exclude == ("torch.nn.Conv2d", '"fc"')


def test_fp32_is_better_where_everything_loses():
    costs = [cost("c1+relu", 30, 20), cost("fc", 30, 20)]
    assert (
        str(judged(CALL, costs, PLAN)).splitlines()[-1]
        == "on this machine the fp32 model is the better choice"
    )
    faster = dataclasses.replace(CALL, engine_ms=90.0)
    assert (
        str(judged(faster, costs, PLAN)).splitlines()[-1]
        == 'config.exclude("c1", "fc") leaves their operators in fp32'
    )


def test_long_lists_are_cut_and_say_where_the_rest_is():
    plan = plan_of(**{f"l{i}": "linear" for i in range(8)})
    lines = str(
        judged(CALL, [cost(f"l{i}", 20, 10) for i in range(7)] + [cost("l7", 1, 1)], plan)
    ).splitlines()
    assert lines[1].endswith("l4 (20.00 ms, fp32 10.00 ms), …")
    assert lines[2] == (
        'config.exclude("l0", "l1", "l2", "l3", "l4", …) leaves their operators in fp32 (all: '
        "report.verdict.exclude)"
    )


def test_the_rule_is_one_that_a_configuration_takes():
    model, x = (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 4)
        ),
        torch.randn(1, 3, 6, 6),
    )
    plan = nc.describe(model.eval(), StaticQuantConfig(), x, backend="reference")
    found = judged(CALL, [cost("0", 30, 20), cost("1", 30, 20), cost("3", 30, 20), cost("4", 1, 1)], plan)
    config = eval(f"StaticQuantConfig().exclude({', '.join(found.exclude)})")
    assert [d.operator for d in nc.describe(model, config, x, backend="reference").quantized] == ["4"]


# ---- measuring ----


class Machine:
    """A clock that only what runs moves on."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def clock(self):
        return self.now

    def takes(self, name, seconds, result=None):
        def call(*_):
            self.calls.append(name)
            self.now += seconds
            return result

        return call


class Quiet:
    """A machine that does nothing else."""

    def look(self):
        pass

    def load(self):
        return QUIET


@pytest.fixture
def machine(monkeypatch):
    """Makes a measurement in which one call of fp32, of the engine, and of either's steps takes so many seconds."""
    prepared = prepared_for(MLP(), ROWS)
    q = convert(prepared)
    steps = [
        EngineCall(name="linear", operators=("fc1", "act"), ms=2.0),
        EngineCall(name="linear", operators=("fc2",), ms=1.0),
    ]

    def run(fp32, engine, in_steps=None, seconds=1.0):
        made = Machine()
        module = q.graph.module
        monkeypatch.setattr(
            verdict, "copy_module", lambda _: (made_module(module, made.takes("fp32", fp32)), {})
        )
        steps_of_fp32 = [EngineCall(name="x", operators=("fc1",), ms=1.0)]
        monkeypatch.setattr(verdict, "node_steps", made.takes("fp32 steps", fp32, steps_of_fp32))
        lowered = EngineModel(
            run=made.takes("engine", engine),
            report=None,
            steps=in_steps and made.takes("engine steps", in_steps, steps),
        )
        return measure(prepared.graph.module, q.graph, lowered, seconds, made.clock, watch=Quiet()), made

    return run


def made_module(module, call):
    copy = torch.fx.GraphModule(module, module.graph)
    copy.recompile = lambda: None
    copy.forward = call
    return copy


def test_they_take_turns_and_the_first_round_warms_up(machine):
    found, made = machine(0.02, 0.01)
    assert made.calls == ["fp32", "engine"] * 17  # the 17th ends behind the half of a second
    assert (found.calls, found.costs) == (16, None)
    assert (found.fp32_ms, found.engine_ms) == pytest.approx((20, 10))
    assert found.ratio == pytest.approx(2)


def test_small_models_are_called_often_and_take_no_second(machine):
    found, made = machine(2e-5, 1e-5, 1e-5)
    assert (found.rounds, found.calls, found.ratio) == (60, 600, pytest.approx(2))
    assert made.calls.count("fp32") == made.calls.count("engine") == 601
    assert made.calls.count("engine steps") == made.calls.count("fp32 steps") == 5
    assert made.now < 0.1


@pytest.mark.parametrize("call", [0.001, 0.03, 0.1, 0.2, 0.3, 0.49, 0.6])
def test_the_time_is_kept(machine, call):
    found, made = machine(call, call / 2, call / 2)
    tells = 1.5 * call < 0.5  # three rounds behind the first, in at most two seconds
    assert made.now <= max(1.0, 6 * call if tells else 1.5 * call) + 1e-9
    assert found.calls >= (3 if tells else 1)


def test_a_slow_model_is_called_once_each(machine):
    found, made = machine(3.0, 2.0, 2.0)
    assert made.calls == ["fp32", "engine"]
    assert (found.calls, found.costs, found.ratio) == (1, None, 1.5)
    assert "only one call each" in str(found)
    assert "no time for more calls" in found.doubt


def test_what_costs_more_is_found(machine):
    found, _ = machine(0.001, 0.002, 0.002)
    assert found.costs == (
        OpCost(operators=("fc1", "act"), engine_ms=2.0, fp32_ms=1.0),
        OpCost(operators=("fc2",), engine_ms=1.0, fp32_ms=0.0),
    )
    assert "every int8 operator costs more than it gains" in str(found)


def test_one_slow_moment_does_not_decide():
    """The ratio is the median over rounds of both times.

    A round in which the machine does something else is one of many.
    """
    made, turns = Machine(), itertools.count()

    def sometimes():
        made.now += 1.0 if next(turns) % 7 == 3 else 0.002

    found = compare(made.takes("slow", 0.004), sometimes, 20.0, made.clock, Quiet())
    assert found.ratio == pytest.approx(2)
    assert found.interval == pytest.approx((2, 2))
    assert found.doubt == ""


def test_times_that_vary_tell_nothing():
    made, turns = Machine(), itertools.count()

    def varies():
        made.now += (0.001, 0.004)[next(turns) // 2 % 2]

    assert "differ too much" in compare(made.takes("slow", 0.004), varies, 1.0, made.clock, Quiet()).doubt


def test_other_work_is_seen():
    """A thread that sleeps gets no CPU time; one that computes alone does."""
    watch = LoadWatch()
    time.sleep(0.05)
    assert "got" in watch.load().disturbed()


# ---- the user's own module ----


def own_verdict(own, calls):
    prepared = prepared_for(MLP(), ROWS)
    q = convert(prepared)
    lowered = EngineModel(run=lambda _: calls.append("engine"), report=None, steps=None)
    return measure(
        prepared.graph.module,
        q.graph,
        lowered,
        0.0,
        own=own,
        quantized=lambda *a, **k: calls.append((a, k)),
        watch=Quiet(),
    )


def test_what_the_user_calls_is_timed():
    model, calls = MLP().train(), []
    modes, x = [], ROWS.clone()
    model.register_forward_pre_hook(
        lambda m, args: modes.append((m.training, torch.is_grad_enabled(), args[0] is x))
    )
    found = own_verdict(OwnModel(model, (x,), {}), calls)
    assert found.timed == ""
    ((args, kwargs),) = calls
    assert kwargs == {}
    assert args[0] is not x  # calls may write into their arguments
    assert torch.equal(args[0], x)
    assert set(modes) == {(False, False, False)}  # eval mode, no gradients, inputs of its own
    assert model.training


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (lambda: OwnModel(MLP(), (ROWS,), {}), "your model does not exist any more"),
        (lambda: OwnModel(KEPT, (ROWS, ROWS), {}), "your model fails on the example inputs: TypeError"),
        (lambda: OwnModel(KEPT, (), {"x": [object()]}), "calls change its inputs, which hold a object"),
    ],
)
def test_else_the_captured_graph_is_timed_and_the_verdict_says_so(own, why):
    calls = []
    found = own_verdict(own(), calls)
    assert found.timed == f"the captured graph: {why}"
    assert f"; fp32 is the captured graph: {why})" in str(found)
    assert calls == ["engine"]


KEPT = MLP().eval()


def test_the_module_is_not_kept(engine):
    model = MLP().eval()
    prepared = nc.prepare(model, StaticQuantConfig(), example_inputs=ROWS, backend="engine")
    prepared(ROWS)
    assert convert(prepared).verdict.timed == ""
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert "does not exist" in convert(prepared).verdict.timed


# ---- convert, report, load ----


class Engine(ReferenceBackend):
    name = "engine"

    def lower(self, graph, **options):
        return dataclasses.replace(super().lower(graph), steps=None)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(nc.backends._REGISTERED, "engine", Engine())


def test_the_report_begins_with_it(engine):
    q = quantize(MLP().eval(), StaticQuantConfig(), lambda m: m(ROWS), example_inputs=ROWS, backend="engine")
    report = q.report()
    assert report.verdict is q.verdict
    assert q.verdict.calls == 1  # see conftest.py
    assert q.verdict.brief("quantized") in " ".join(str(report).split())
    first, _, rest = report.text(details=True).partition("\n\n")
    assert first.split() == " ".join(q.verdict.facts()).split()
    assert rest.index(f"backend {report.backend}") < rest.index("\noperator")
    assert max(map(len, report.text(details=True).splitlines())) <= 80
    assert report.summary().startswith(f"{q.verdict}\nbackend")
    assert json.loads(json.dumps(report.to_dict()))["verdict"]["ratio"] == q.verdict.ratio


def test_off_by_argument(engine, monkeypatch):
    monkeypatch.setattr("nc.profiling.latency.interleaved", lambda *_, **__: pytest.fail("measured"))
    quantities = {"example_inputs": ROWS, "backend": "engine"}
    made = [
        convert(prepared_for(MLP(), ROWS, backend="engine"), measure=False),
        quantize(MLP().eval(), StaticQuantConfig(), lambda m: m(ROWS), measure=False, **quantities),
        convert(prepared_for(MLP(), ROWS)),  # the reference
    ]
    for q in made:
        assert q.verdict is None
        assert q.report().to_dict()["verdict"] is None
        assert "\nspeed: not measured against fp32\n" in str(q.report())


def test_it_is_not_saved(engine, tmp_path):
    prepared = prepared_for(MLP(), ROWS, backend="engine")
    for name, measured in (("a", True), ("b", False)):
        convert(prepared, measure=measured).save(tmp_path / name)
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    one, other = (json.loads((tmp_path / name / "model.json").read_text(encoding="utf-8")) for name in "ab")
    for each in (one, other):
        each.pop("evidence")  # what reports draw of a conversion is kept
    assert one == other
    assert load(tmp_path / "a", backend="engine").verdict is None


# ---- the native backend ----


@native
@pytest.mark.parametrize(
    ("build", "shape"), [(MLP, (4, 16)), (ResidualCNN, (2, 3, 16, 16)), (Attention, (2, 5, 32))]
)
def test_every_int8_operator_of_native_has_its_times(build, shape, monkeypatch):
    """Each step takes one millisecond, whatever the machine does."""
    x = torch.randn(shape)
    monkeypatch.setattr("nc.profiling.nodes.time.perf_counter", itertools.count(0, 1e-3).__next__)
    prepared = prepared_for(build(), x, backend="native")
    q = convert(prepared, measure=False)
    before = [t.clone() for t in q.engine.run(q.graph.example)]
    found = measure(prepared.graph.module, q.graph, q.engine, 1.0, lambda: 0.0)
    for a, b in zip(before, q.engine.run(q.graph.example), strict=True):
        assert torch.equal(a, b)
    int8 = {op.operator for op in q.report().ops if op.asked == "int8" and op.ran == "int8"}
    names = [name for c in found.costs for name in c.operators]
    assert int8 <= set(names)
    assert len(set(names)) == len(names)
    for c in found.costs:
        assert c.engine_ms > 0.99
        assert c.fp32_ms > 0.99


@native
def test_conversions_of_native_are_attributed(monkeypatch):
    """quantize → fc1 → dequantize → tanh and norm → quantize → fc2.

    Four conversions or less, none left over.
    """
    model = Function(
        lambda m, x: (lambda y: (m.fc2(y), y))(
            m.norm(torch.tanh(m.fc1(x)))
        ),  # y is an output too: the norm does not write codes
        fc1=nn.Linear(16, 16),
        norm=nn.LayerNorm(16),
        fc2=nn.Linear(16, 16),
    )
    q = quantized(model, ROWS, backend="native")
    served = [step.serves for step in q.engine.steps(q.graph.example) if step.converts]
    assert served[0] == "fc1"
    assert served[-1] == "fc2"
    assert set(served) == {"fc1", "fc2"}


def test_one_unit_for_both():
    found = Verdict(fp32_ms=0.0999, engine_ms=0.11, calls=20, threads=1, costs=())
    assert "quantized 110.0 us, fp32 99.9 us" in str(found)

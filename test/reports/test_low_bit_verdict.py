"""The verdict on low-bit layers: which are timed, and what a slower format says.

No test reads a real clock for a figure.
"""

import dataclasses
import json
import warnings
import weakref

import pytest
import torch
from torch import nn

import nc
from nc import NCWarning, WeightOnlyConfig
from nc.profiling.load import Load
from nc.reports import weight_verdict as verdict
from nc.reports.weight_verdict import measure

QUIET = Load(seconds=1.0, share=1.0, switches=2.0, runnable=1, cores=2)
BUSY = dataclasses.replace(QUIET, runnable=9)


class Machine:
    """A clock that only calls of layers move on.

    Float layers take 1 ms, low-bit ones as long as their format says.
    """

    def __init__(self, monkeypatch, load=QUIET, **ms):
        self.now, self.called, self.loaded = 0.0, [], load
        self.ms = ms
        monkeypatch.setattr(verdict, "_call_float", self.float)
        monkeypatch.setattr(verdict, "_call_low_bit", self.low_bit)

    def float(self, layers, x):
        self.called.append(("float", len(layers), len(x)))
        self.now += 1e-3 * len(layers)

    def low_bit(self, layers, x):
        self.called.append((layers[0].form.dtype.name, len(layers), len(x)))
        self.now += 1e-3 * len(layers) * self.ms[layers[0].form.dtype.name] * (1 if len(x) == 1 else 0.5)

    def clock(self):
        return self.now

    def look(self):
        pass

    def load(self):
        return self.loaded

    def measure(self, model, seconds=1.0):
        return measure(model, seconds, self.clock, self)


def two_formats():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)], nn.Linear(64, 32)).eval()
    config = WeightOnlyConfig("int4", group_size=32).set_local(
        "5", WeightOnlyConfig("fp8_e4m3", group_size=-1)
    )
    return nc.quantize(model, config, measure=False)


def test_layers_of_each_shape_and_format_in_turns(monkeypatch):
    machine = Machine(monkeypatch, int4=0.5, fp8_e4m3=4.0)
    found = machine.measure(two_formats())
    of_one = [("float", 1, 1), ("fp8_e4m3", 1, 1), ("float", 2, 1), ("int4", 2, 1)]
    assert machine.called[:8] == of_one * 2
    assert {rows for _, _, rows in machine.called} == {1, 32}
    assert [(x.count, x.shape, x.rows) for x in found.layers] == [
        (1, (32, 64), 1),
        (5, (64, 64), 1),
        (1, (32, 64), 32),
        (5, (64, 64), 32),
    ]
    assert [x.ratio for x in found.layers] == pytest.approx([0.25, 2, 0.5, 4])
    assert [x.low_bit_ms for x in found.layers] == pytest.approx([4, 0.5, 2, 0.25])
    # five layers at 0.5 and one at 4, against six
    assert [x.ratio for x in found.totals] == pytest.approx([6 / 6.5, 6 / 3.25])
    assert [x.form.split()[0] for x in found.slower] == ["fp8_e4m3"] * 2


def test_it_warns_where_all_together_are_slower(monkeypatch):
    machine = Machine(monkeypatch, int4=0.5, fp8_e4m3=40.0)
    with pytest.warns(
        NCWarning,
        match=r"they take 7.1 times as long for 1 row and 3.5 .*format fp8_e4m3[^,]*\).*int4.* is faster",
    ):
        verdict.warn_if_slower(machine.measure(two_formats()))


@pytest.mark.parametrize(("load", "ms"), [(QUIET, 0.5), (QUIET, 1.05), (BUSY, 40.0)])
def test_else_it_does_not(monkeypatch, load, ms):
    machine = Machine(monkeypatch, load, int4=ms, fp8_e4m3=ms)
    found = machine.measure(two_formats())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict.warn_if_slower(found)
    assert ("cannot tell" in str(found)) is (load is BUSY)


def test_words(monkeypatch):
    machine = Machine(monkeypatch, int4=0.5, fp8_e4m3=40.0)
    lines = str(machine.measure(two_formats())).splitlines()
    assert lines[0].startswith("low-bit layers against float32 ones, called alone, ")
    assert lines[1].startswith("  1 row: SLOWER, they take 7.08 times as long (")
    assert lines[2].startswith("  32 rows: SLOWER, they take 3.54 times as long (")
    assert lines[3].startswith("  1 x fp8_e4m3")
    assert (
        "32 x 64, 1 row: SLOWER, they take 40.00 times as long (40.00 ms against 1.00 ms; in half of the "
        "rounds 0.03 to 0.03)" in lines[3]
    )
    assert len(lines) == 5


def test_slow_layers_get_three_rounds_and_slower_ones_say_so(monkeypatch):
    machine = Machine(monkeypatch, int4=100.0)
    model = nc.quantize(
        nn.Sequential(nn.Linear(64, 64)).eval(), WeightOnlyConfig("int4", group_size=32), measure=False
    )
    assert not machine.measure(model, 0.3).totals[0].doubt
    assert len(machine.called) == 2 * 2 * 4
    assert "no time" in machine.measure(model, 0.0).totals[0].doubt


def test_large_shapes_are_left_out(monkeypatch):
    monkeypatch.setattr(verdict, "_MOST_BYTES", 4 * 64 * 48)
    found = Machine(monkeypatch, int4=1.0, fp8_e4m3=1.0).measure(two_formats())
    assert [x.shape for x in found.layers] == [(32, 64)] * 2
    assert found.untimed == 5
    assert "5 large layers were not timed" in str(found)


def test_a_model_of_embeddings_has_none():
    model = nc.quantize(
        nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64)).eval(), WeightOnlyConfig("int4", group_size=32)
    )
    assert measure(model, 0.0) is not None
    assert measure(nn.Sequential(nn.Linear(4, 4)), 0.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convert_measures_and_the_report_begins_with_it(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32, bias=False)).eval().to(dtype)
    state = torch.get_rng_state()
    q = nc.quantize(model, WeightOnlyConfig("int8", group_size=32))
    report = nc.report(q)
    assert report.verdict.dtype == str(dtype)[6:]
    assert report.summary().startswith(str(report.verdict))
    json.dumps(report.to_dict()["verdict"])
    assert torch.equal(state, torch.get_rng_state())
    assert (
        nc.report(nc.quantize(model, WeightOnlyConfig("int8", group_size=32), measure=False)).verdict is None
    )


def test_convert_warns(monkeypatch):
    found = Machine(monkeypatch, int8=9.0).measure(
        nc.quantize(nn.Sequential(nn.Linear(64, 64)).eval(), WeightOnlyConfig("int8", group_size=32))
    )
    monkeypatch.setattr("nc.api.preparation.weights.low_bit_verdict", lambda _: found)
    with pytest.warns(NCWarning, match="SLOWER"):
        nc.quantize(nn.Sequential(nn.Linear(64, 64)).eval(), WeightOnlyConfig("int8", group_size=32))


def test_hooks_are_not_called_and_float_weights_go():
    q = nc.quantize(
        nn.Sequential(nn.Linear(64, 64)).eval(), WeightOnlyConfig("int8", group_size=32), measure=False
    )
    q[0].register_forward_hook(lambda *_: pytest.fail("called"))
    before = weakref.WeakSet()
    made = torch.full

    def full(*args, **kwargs):
        tensor = made(*args, **kwargs)
        before.add(tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "full", full)
        measure(q, 0.0)
    assert not list(before)

"""`config="auto"`: what is held out, what is tried, and what comes of it."""

import copy
import dataclasses
import pickle
import re
import types
import warnings

import pytest
import torch
from models import MLP, Attention, ResidualCNN, worst_db
from torch import nn

import nc
from nc.api.auto import prepared as module_under_test
from nc.api.auto import validation
from nc.api.preparation import captured, finish
from nc.backends.verdict import OpCost, Verdict
from nc.profiling.load import Load


class Meets(nn.Module):
    """The rows of a batch are not independent."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x - x.mean(0))


class Letters(nn.Module):
    """Its outputs have the batch in their second dimension."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x):
        return self.fc(x).transpose(0, 1).log_softmax(-1)


QUIET = Load(seconds=1.0, share=1.0)
BUSY = Load(seconds=1.0, share=0.3)


def batches(count, rows, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, *shape, generator=generator) for _ in range(count)]


def prepared(model, example, **options):
    torch.manual_seed(0)
    return nc.prepare(model.eval(), "auto", example_inputs=example, **{"backend": "reference", **options})


def with_times(monkeypatch, load=QUIET, **times):
    """Inject what calls take, in ms; others take 100 ms."""

    def timed(calls, *_):
        for call in calls.values():
            call()
        return [{name: times.get(name.split(",")[0].replace(" ", "_"), 100.0) for name in calls}], 1, load

    monkeypatch.setattr(module_under_test, "timed_rounds", timed)


def text_of(q_model):
    return next(a.text for a in q_model.report().algorithms if a.algorithm == "auto")


class TestWhatIsHeldOut:
    def test_a_quarter_of_the_rows_of_each_batch(self):
        x = batches(3, 8, 16)
        model = MLP().eval()
        found = prepared(model, x[0])
        for batch in x:
            torch.testing.assert_close(found(batch), model(batch))
        held = torch.cat([each[0] for each in found.held.batches])
        seen = torch.cat([each[0] for each in found.observed.samples.batches])
        assert torch.equal(held, torch.cat([batch[6:] for batch in x]))
        assert torch.equal(seen, torch.cat([batch[:6] for batch in x]))

    def test_ranges_do_not_know_them(self):
        (x,) = batches(1, 8, 16)
        x[7] = 1e3
        found = prepared(MLP(), x)
        found(x)
        low, high = (found.observed.observers["x", "extremes"].state[name] for name in ("low", "high"))
        assert float(high) == float(x[:6].max())
        assert float(low) == float(x[:6].min())

    def test_of_batches_with_one_row_the_second_and_each_fourth_behind_it(self):
        x = batches(7, 1, 16)
        found = prepared(MLP(), x[0])
        for batch in x:
            found(batch)
        assert [int(torch.equal(b[0], x[1]) or torch.equal(b[0], x[5])) for b in found.held.batches] == [1, 1]
        assert len(found.observed.samples.batches) == 5

    @pytest.mark.parametrize("count", range(2, 8))
    def test_of_models_whose_rows_meet_whole_batches(self, count):
        x = batches(count, 8, 16)
        found = prepared(Meets(), x[0])
        for batch in x:
            torch.testing.assert_close(found(batch), found.graph.module(batch)[0])
        assert [each[0].tolist() for each in found.held.batches] == [b.tolist() for b in x[1::4]]
        assert len(found.observed.samples.batches) == count - len(x[1::4])

    def test_of_outputs_with_the_batch_elsewhere_rows_too(self):
        """As those of CTC: [time, batch, letters]."""
        x = batches(2, 8, 5, 16)
        found = prepared(Letters(), x[0])
        for batch in x:
            torch.testing.assert_close(found(batch), Letters.forward(found.own.model, batch))
        assert [len(each[0]) for each in found.held.batches] == [2, 2]
        assert torch.equal(found.held.batches[1][0], x[1][6:])

    def test_of_a_fixed_batch_whole_batches(self):
        class Fixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(16, 4)

            def forward(self, x):
                return self.fc(x).reshape(8, 4) + torch.arange(8.0)[:, None]

        x = batches(3, 8, 16)
        found = prepared(Fixed(), x[0])
        for batch in x:
            found(batch)
        assert [len(each[0]) for each in found.held.batches] == [8]

    @pytest.mark.parametrize(("rows", "held"), [(1, []), (2, [1]), (3, [1]), (4, [1]), (7, [2]), (64, [8])])
    def test_of_one_batch_some_rows_if_it_has_two(self, rows, held):
        (x,) = batches(1, rows, 16)
        found = prepared(MLP(), torch.randn(4, 16))
        found(x)
        assert [len(each[0]) for each in found.held.batches] == held

    def test_of_large_batches_not_of_the_first_alone(self):
        x = batches(6, 64, 16)
        found = prepared(MLP(), x[0])
        for batch in x:
            found(batch)
        assert [len(each[0]) for each in found.held.batches] == [8, 8, 8, 8]

    @pytest.mark.parametrize("whole", [False, True])
    def test_batches_that_are_too_large_to_keep_are_no_reason_to_hold_nothing(self, monkeypatch, whole):
        monkeypatch.setattr(validation, "_BYTES", 100)
        x = batches(3, 8, 16)
        found = prepared(Meets() if whole else MLP(), x[0])
        for batch in x:
            found(batch)
        assert [len(each[0]) for each in found.held.batches] == [8 if whole else 1]

    def test_what_is_no_number_is_an_error_as_elsewhere(self):
        x = batches(2, 8, 16)
        x[1][7, 3] = float("nan")
        found = prepared(MLP(), x[0])
        found(x[0])
        with pytest.raises(nc.CalibrationError, match="Calibration batch 2"):
            found(x[1])
        assert len(found.held.batches) == 1

    def test_inputs_that_do_not_fit(self):
        class Embeds(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.fc = nn.Embedding(10, 16), nn.Linear(16, 4)

            def forward(self, ids):
                return self.fc(self.table(ids))

        ids = torch.randint(0, 10, (8, 5))
        found = prepared(Embeds(), ids)
        with pytest.raises(nc.InputError):
            found(ids + 10)
        with pytest.raises(nc.InputError):
            found(ids.float())
        found(ids)
        assert len(found.held.batches) == 1

    @pytest.mark.parametrize("model", [MLP(), Attention()], ids=["linears", "attention"])
    def test_with_one_row_ranges_are_not_fitted_to_it(self, model):
        """Static ranges of the one batch that judges them look better than they are."""
        x = torch.randn(1, 16) if isinstance(model, MLP) else torch.randn(1, 6, 32)
        found = prepared(model, x)
        found(x)
        q_model = nc.convert(found)
        assert {d.spec.mode for d in q_model.graph.plan.quantized} == {"dynamic"}
        text = text_of(q_model)
        assert "none was held out" in text
        assert "its algorithms are left out" in text
        other = 3 * torch.randn(32, *x.shape[1:])
        assert worst_db(model(other), q_model(other)) > 30


class TestWhatIsTaken:
    def test_the_fastest_of_those_near_the_least_error(self, monkeypatch):
        x = batches(4, 8, 16)
        with_times(monkeypatch, static=1.0, SmoothQuant=2.0, ranges_per_row=3.0)
        config = nc.AutoConfig(error_factor=1e9, least_gain=0.0)
        found = nc.prepare(MLP().eval(), config, example_inputs=x[0], backend="native")
        for batch in x:
            found(batch)
        q_model = nc.convert(found)
        assert "chosen: static, it is the fastest" in text_of(q_model)
        assert {d.spec.mode for d in q_model.graph.plan.quantized} == {"static"}
        with_times(monkeypatch, static=3.0, SmoothQuant=2.0, ranges_per_row=1.0)
        assert {d.spec.mode for d in nc.convert(found).graph.plan.quantized} == {"dynamic"}

    def test_on_a_busy_machine_what_suits_the_model(self, monkeypatch):
        x = batches(4, 8, 16)
        with_times(monkeypatch, load=BUSY, static=1.0)
        found = nc.prepare(MLP().eval(), nc.AutoConfig(1e9), example_inputs=x[0], backend="native")
        for batch in x:
            found(batch)
        text = text_of(nc.convert(found))
        assert "this machine is busy" in text
        assert "chosen: ranges per row" in text

    @pytest.mark.parametrize(
        ("model", "shape", "mode"),
        [
            (MLP(), (16,), "dynamic"),
            (ResidualCNN(), (3, 16, 16), "static"),
            (Attention(), (6, 32), "dynamic"),
        ],
        ids=["linears", "convolutions", "attention"],
    )
    def test_without_times_what_suits_the_model(self, model, shape, mode):
        x = batches(4, 8, *shape)
        found = prepared(model, x[0])
        for batch in x:
            found(batch)
        q_model = nc.convert(found, measure=False)
        assert mode in {d.spec.mode for d in q_model.graph.plan.quantized}
        assert worst_db(model(x[0]), q_model(x[0])) > 15

    def test_the_choice_is_in_the_artefact(self, tmp_path):
        x = batches(2, 8, 16)
        q_model = nc.quantize(
            MLP().eval(), run_fn=lambda m: [m(b) for b in x], example_inputs=x[0], backend="reference"
        )
        nc.save(q_model, tmp_path / "model")
        assert text_of(nc.load(tmp_path / "model")) == text_of(q_model)

    def test_nothing_calibrated_is_an_error(self):
        (x,) = batches(1, 8, 16)
        with pytest.raises(nc.StateError, match="Nothing was calibrated"):
            nc.convert(prepared(MLP(), x))

    @pytest.mark.parametrize("left_out", [False, True])
    def test_what_is_delivered_is_verified(self, monkeypatch, left_out):
        seen, lower = [], captured.lower

        def noted(*args, **options):
            seen.append(options["verify"])
            return lower(*args, **options)

        monkeypatch.setattr(captured, "lower", noted)
        worth = -1 if left_out else 1  # of each algorithm, in dB
        monkeypatch.setattr(
            module_under_test.PreparedAuto, "sqnr_db", lambda _, q: 60.0 + worth * len(q.graph.applied)
        )
        x = batches(2, 8, 16)
        found = prepared(MLP(), x[0])
        for batch in x:
            found(batch)
        text = text_of(nc.convert(found, measure=False))
        assert ("are left out" in text) is left_out
        assert seen == ["off"] * (len(seen) - 1 - left_out) + ["raise"] * (1 + left_out)

    def test_late_candidates_are_tried_where_others_are_slow(self, monkeypatch):
        x = batches(4, 8, 16)
        config = nc.AutoConfig(error_factor=1.0, least_gain=0.0)
        found = nc.prepare(MLP().eval(), config, example_inputs=x[0], backend="native")
        for batch in x:
            found(batch)
        with_times(monkeypatch, static=1.0, ranges_per_row=1.2, SmoothQuant=1.0)
        assert "SmoothQuant" not in text_of(nc.convert(found))
        monkeypatch.setattr(
            module_under_test.PreparedAuto, "sqnr_db",
            lambda _, q: 40.0 if q.graph.plan.quantized[0].spec.mode == "dynamic" else 20.0,
        )  # fmt: skip
        with_times(monkeypatch, static=1.0, ranges_per_row=2.0, SmoothQuant=1.5)
        assert "SmoothQuant: 20.0 dB, 1.50 ms" in text_of(nc.convert(found))

    def test_ranks_of_a_process_group_do_not_choose(self, monkeypatch):
        x = batches(2, 8, 16)
        found = prepared(MLP(), x[0])
        found(x[0])
        monkeypatch.setattr(
            module_under_test.Ranks, "current", lambda: types.SimpleNamespace(alone=False, rank=0, count=2)
        )
        with pytest.raises(nc.StateError, match="ranks would choose differently"):
            nc.convert(found)

    def test_it_is_copied_but_not_pickled(self):
        x = batches(2, 8, 16)
        found = prepared(MLP(), x[0])
        found(x[0])
        other = copy.deepcopy(found)
        other(x[1])
        assert (len(found.held.batches), len(other.held.batches)) == (1, 2)
        assert torch.isfinite(nc.convert(other, measure=False)(x[0])).all()
        with pytest.raises(nc.StateError, match="statistics.save"):
            pickle.dumps(found)

    def test_progress_names_what_is_tried(self):
        x = batches(2, 8, 16)
        found, seen = prepared(MLP(), x[0]), []
        for batch in x:
            found(batch)
        nc.convert(found, progress=lambda *each: seen.append(each))
        assert [done for done, _, _ in seen] == list(range(len(seen)))
        assert {total for _, total, _ in seen} == {len(seen)}
        assert seen[-1][2].endswith("algorithms")

    def test_a_model_without_anything_to_quantize(self):
        with pytest.warns(nc.NCWarning, match="Nothing is quantized"):
            prepared(nn.Sequential(nn.ReLU()), torch.randn(4, 4))


class Loud(nn.Module):
    """One convolution has a few weights that are 500 times as large as the others, and matter little."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(16, 512, 1), nn.Conv1d(512, 4, 1), nn.Conv1d(16, 4, 1)
        with torch.no_grad():
            self.b.weight.mul_(0.1)
            self.b.weight[:, :5, 0] = torch.tensor([53.0, 23, -30, 40, -29])
            self.a.weight[:5], self.a.bias[:5] = 0, 1e-4

    def forward(self, x):
        return self.b(self.a(x).tanh()) + 0.01 * self.c(x)


class TestTheWorstOperators:
    def converted(self, monkeypatch, config="auto", measure=True, load=QUIET, **times):
        torch.manual_seed(0)
        monkeypatch.setenv("NC_MAX_ISA", "avx2")  # which has no bf16
        x = batches(4, 16, 16, 6)
        with_times(monkeypatch, load, **times)
        costs = tuple(OpCost(operators=(name,), engine_ms=0.25, fp32_ms=0.5) for name in "abc")
        verdict = Verdict(fp32_ms=2.0, engine_ms=1.0, calls=1, threads=1, costs=costs)
        monkeypatch.setattr(finish, "speed_verdict", lambda *_, **__: verdict)
        found = nc.prepare(Loud().eval(), config, example_inputs=x[0], backend="native")
        for batch in x:
            found(batch)
        return nc.convert(found, measure=measure)

    def test_the_one_that_decides_is_left_in_float(self, monkeypatch):
        q_model = self.converted(monkeypatch)
        ops = {op.operator: op for op in q_model.report().ops}
        assert (ops["a"].ran, ops["b"].ran) == ("int8", "fp32")
        assert "of the error of int8: left out by measurement" in ops["b"].reason
        assert "b in float" in text_of(q_model)
        ranks = next(a for a in q_model.graph.applied if a.algorithm == "sensitivity")
        assert "b" not in ranks.operators  # of what is delivered
        assert "0.25 ms, fp32 0.50 ms" in ranks.text

    def test_not_where_it_costs_time(self, monkeypatch):
        config = nc.AutoConfig(min_sqnr_db=None)
        q_model = self.converted(monkeypatch, config, before=1.0, after=9.0)
        assert {op.ran for op in q_model.report().ops if op.kind == "conv1d"} == {"int8"}
        assert "9.00 times as long" in text_of(q_model)
        ranks = next(a for a in q_model.graph.applied if a.algorithm == "sensitivity")
        assert ranks.operators[0] == "b"

    @pytest.mark.parametrize(
        "given",
        [{"before": 1.0, "after": 9.0}, {"load": BUSY}, {"measure": False}],
        ids=["slow", "busy", "no times"],
    )
    def test_below_the_floor_whatever_is_known_of_times(self, monkeypatch, given):
        q_model = self.converted(monkeypatch, **given)
        ops = {op.operator: op for op in q_model.report().ops}
        assert (ops["a"].ran, ops["b"].ran) == ("int8", "fp32")
        first = str(q_model.report())
        assert re.match(r"static.* has \d+\.\d dB on 16 rows\s+held out, less than 20", first)
        assert "1 of 3 are in float" in re.sub(r"\s+", " ", first)

    def test_unknown_times_keep_no_bad_operator_above_the_floor_either(self, monkeypatch):
        config = nc.AutoConfig(min_sqnr_db=None)
        ops = {op.operator: op.ran for op in self.converted(monkeypatch, config, load=BUSY).report().ops}
        assert (ops["a"], ops["b"]) == ("int8", "fp32")


class TestTheFloor:
    """Of a model whose operators share the error, so that no few of them can be mended."""

    def converted(self, floor):
        x = batches(3, 8, 3, 16, 16)
        torch.manual_seed(0)
        config = nc.AutoConfig(min_sqnr_db=floor)
        found = nc.prepare(ResidualCNN().eval(), config, example_inputs=x[0], backend="reference")
        for batch in x:
            found(batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            q_model = nc.convert(found, measure=False)
        kinds = ("conv2d", "linear", "add")
        decisions = [d for d in q_model.graph.plan.decisions if d.kind in kinds]
        floats = [d for d in decisions if not d.spec.quantized]
        assert q_model.report().headline().startswith("static") == bool(floats)
        warned = any("Nothing is quantized" in str(each.message) for each in caught)
        assert warned == (floats == decisions)
        for decision in floats:
            assert f"less than {floor:g} dB: left out by measurement" in decision.reason
        return found.sqnr_db(q_model), len(floats), len(decisions)

    def test_operators_go_to_float_until_it_is_reached_or_all_are(self):
        db, floats, count = self.converted(None)
        assert floats == 0
        assert self.converted(db - 0.1)[1] == 0
        more, floats, _ = self.converted(db + 1)
        assert 0 < floats < count
        assert more >= db + 1
        _, floats, _ = self.converted(500.0)
        assert floats == count


class TestConfiguration:
    @pytest.mark.parametrize("value", ["auto", nc.AutoConfig(), {"auto": {}}, nc.AutoConfig().to_dict()])
    def test_its_forms(self, value):
        (x,) = batches(1, 8, 16)
        assert (
            nc.prepare(MLP().eval(), value, example_inputs=x, backend="reference").quant_config
            == nc.AutoConfig()
        )
        assert "linear" in str(nc.describe(MLP().eval(), value, x, backend="reference"))

    def test_convert_takes_the_same(self):
        x = batches(2, 8, 16)
        found = prepared(MLP(), x[0])
        for batch in x:
            found(batch)
        nc.convert(found, "auto", measure=False)
        with pytest.raises(nc.ConfigError, match="another configuration"):
            nc.convert(found, nc.AutoConfig(error_factor=3.0))

    @pytest.mark.parametrize(
        "fields",
        [
            {"error_factor": 0.5},
            {"least_gain": -1},
            {"error_factor": "2"},
            {"min_sqnr_db": "20"},
            {"min_sqnr_db": True},
            {"min_sqnr_db": float("nan")},
        ],
    )
    def test_values_out_of_range(self, fields):
        with pytest.raises(nc.ConfigError, match="out of range|expected a number of dB, or None"):
            nc.AutoConfig(**fields)

    @pytest.mark.parametrize("value", ["static", {"auto": {"factor": 2}}, {"auto": {}, "static_quant": {}}])
    def test_other_words(self, value):
        with pytest.raises(nc.ConfigError):
            nc.prepare(MLP().eval(), value, example_inputs=torch.randn(2, 16))


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        nc.AutoConfig().error_factor = 3.0

"""What fails while `"auto"` tries it: passed over, with its traceback in the report, or a typed error."""

import pytest
import torch
from models import MLP, worst_db

import nc
from nc.api.auto import prepared as module_under_test
from nc.api.preparation.captured import PreparedModel
from nc.errors import BackendError

X = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def prepared(**options):
    torch.manual_seed(0)
    found = nc.prepare(MLP().eval(), "auto", example_inputs=X[0], **{"backend": "reference", **options})
    for batch in X:
        found(batch)
    return found


DEFECT = ZeroDivisionError("a defect")


def failing(monkeypatch, fails, error=DEFECT):
    """`lowered` raises for those preparations for which `fails(plan, asked)` is true."""
    lowered = PreparedModel.lowered

    def broken(self, asked):
        if fails(self.plan, asked):
            raise error
        return lowered(self, asked)

    monkeypatch.setattr(PreparedModel, "lowered", broken)


def modes(plan):
    return {d.spec.mode for d in plan.quantized}


def text_of(report):
    return next(applied.text for applied in report.algorithms if applied.algorithm == "auto")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a defect"), AssertionError(), MemoryError("no memory"), KeyError("x")]
)
def test_a_candidate_that_fails_is_passed_over_with_its_traceback(monkeypatch, error):
    failing(monkeypatch, lambda plan, _: modes(plan) == {"dynamic"}, error)
    q_model = nc.convert(prepared(), measure=False)
    assert modes(q_model.graph.plan) == {"static"}
    report = q_model.report()
    assert f"ranges per row: {type(error).__name__}" in text_of(report)
    assert "in broken\n    raise error" in report.details["ranges per row failed"]
    assert "chosen: static" in text_of(report)
    assert worst_db(prepared().own.model(X[0]), q_model(X[0])) > 20


def test_what_fails_when_it_is_delivered_is_passed_over_too(monkeypatch):
    """As a kernel that is wrong: it is found by the verification of what is delivered."""
    failing(monkeypatch, lambda plan, asked: asked.verify == "raise" and modes(plan) == {"dynamic"})
    steps = []
    q_model = nc.convert(prepared(), measure=False, progress=lambda *each: steps.append(each))
    assert modes(q_model.graph.plan) == {"static"}
    assert "ranges per row: ZeroDivisionError: a defect" in text_of(q_model.report())
    assert "raise error" in q_model.report().details["ranges per row failed"]
    assert [done for done, _, _ in steps] == list(range(len(steps)))
    assert all(done < total for done, total, _ in steps)


def test_where_all_fail_it_is_fp32(monkeypatch):
    failing(monkeypatch, lambda plan, _: bool(plan.quantized))
    with pytest.warns(nc.NCWarning, match="Nothing is quantized"):
        q_model = nc.convert(prepared(), measure=False)
    assert not q_model.graph.plan.quantized
    reasons = {op.reason for op in q_model.report().ops if op.kind == "linear"}
    assert len(reasons) == 1
    assert "every form of the model in int8 failed: ranges per row: ZeroDivisionError" in reasons.pop()
    assert worst_db(prepared().own.model(X[0]), q_model(X[0])) > 100


def test_where_fp32_fails_too_the_error_names_all(monkeypatch):
    failing(monkeypatch, lambda *_: True)
    with pytest.raises(BackendError, match="(?s)ranges per row: Zero.*static: Zero.*In fp32: Zero"):
        nc.convert(prepared(), measure=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_ends_it_ends_it(monkeypatch, error):
    failing(monkeypatch, lambda *_: True, error())
    with pytest.raises(error):
        nc.convert(prepared(), measure=False)


def test_times_that_can_not_be_measured_are_unknown(monkeypatch):
    def timed(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(module_under_test, "timed_rounds", timed)
    q_model = nc.convert(prepared(backend="native"))
    assert "times could not be measured: ZeroDivisionError" in text_of(q_model.report())
    assert "Traceback" in q_model.report().details["times failed"]


def test_a_candidate_that_can_not_be_prepared_is_passed_over(monkeypatch):
    make = module_under_test.PreparedModel.__init__

    def broken(self, graph, plan, *args, **options):
        if modes(plan) == {"dynamic"}:
            raise ZeroDivisionError
        make(self, graph, plan, *args, **options)

    monkeypatch.setattr(PreparedModel, "__init__", broken)
    found = prepared()
    assert "ranges per row" not in found.models
    assert "Traceback" in nc.convert(found, measure=False).report().details["ranges per row failed"]

    def always(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(PreparedModel, "__init__", always)
    with pytest.raises(BackendError, match="could be prepared: ZeroDivisionError"):
        prepared()

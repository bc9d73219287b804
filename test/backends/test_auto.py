"""`backend="auto"`: the next engine takes a model that one can't compute, and the report says why."""

import copy
import dataclasses
import re

import pytest
import torch
from models import MLP, prepared_for, worst_db
from torch import nn

import nc
from nc import (
    BackendError,
    InputError,
    NCError,
    NCWarning,
    StateError,
    StaticQuantConfig,
    UnmatchedTypeWarning,
    UnsupportedError,
    VerificationError,
    available_backends,
    convert,
    describe,
    load,
    prepare,
    quantize,
)
from nc.backends import AUTO, auto_order, get_backend
from nc.backends.auto_order import CONVOLUTIONS, LINEARS, Race
from nc.backends.reference import ReferenceBackend

X = torch.randn(4, 16)
WHY_NO_NATIVE = available_backends()["native"]


class Engine(ReferenceBackend):
    """The reference under another name; raises `error`, if it has one, when it is to lower a graph."""

    def __init__(self, name, error=None):
        self.name, self.error, self.graphs = name, error, []

    def lower(self, graph, **options):
        self.graphs.append(graph)
        if self.error is not None:
            raise self.error
        return super().lower(graph)


@pytest.fixture
def engines(monkeypatch):
    """Registers engines, which are then all that "auto" tries."""

    def register(*made, order=()):
        monkeypatch.setattr(nc.backends, "AUTO", order)
        monkeypatch.setattr(nc.backends, "_REGISTERED", {engine.name: engine for engine in made})
        return made

    return register


WRONG = VerificationError("3 dB")


@pytest.mark.parametrize("error", [WRONG, BackendError("it crashed"), UnsupportedError("no bf16")])
def test_the_next_engine_takes_over(engines, error):
    engines(Engine("first", error), Engine("second"))
    prepared = prepared_for(MLP(), X, backend="auto")
    assert prepared.backend == "first"
    q = convert(prepared)
    assert q.backend == "second"
    expected = (
        f'"auto" takes the first of first, second that can run here and computes this model; first: {error}'
    )
    assert q.report().chosen == expected
    assert expected in q.report().summary().splitlines()
    torch.testing.assert_close(q(X), q.reference(X))


def test_an_error_of_any_type_in_an_engine_is_a_backend_error_and_the_next_takes_over(engines):
    engines(Engine("first", IndexError("no such kernel")), Engine("second"))
    prepared = prepared_for(MLP(), X, backend="auto")
    assert "'first' fails on this model: IndexError: no such kernel" in convert(prepared).report().chosen
    with pytest.raises(BackendError, match="IndexError: no such kernel") as caught:
        convert(prepared, backend="first")
    assert isinstance(caught.value.__cause__, IndexError)


def test_an_error_during_a_call_is_typed_by_what_is_wrong(engines):
    engine = Engine("first")
    engines(engine)
    q = convert(prepared_for(MLP(), X, backend="first"))

    def fail(inputs):
        msg = "no such kernel"
        raise RuntimeError(msg)

    q.engine = dataclasses.replace(q.engine, run=fail)
    with pytest.raises(BackendError, match="'first' fails on these inputs: RuntimeError: no such kernel"):
        q(X)
    with pytest.raises(InputError, match=r"shapes are \(5, 16\); the model was captured with \(4, 16\)"):
        q(torch.randn(5, 16))


def test_what_is_in_front_and_can_not_run_is_named_too(engines):
    absent, broken, works = engines(Engine("absent"), Engine("broken", WRONG), Engine("works"))
    absent.why_unavailable = lambda: "not installed."
    q = quantize(MLP().eval(), StaticQuantConfig(), lambda m: m(X), example_inputs=X)
    assert q.report().chosen.endswith("; absent: not installed. broken: 3 dB")
    assert not absent.graphs
    assert len(broken.graphs) == len(works.graphs) == 1


def test_convert_begins_with_the_engine_that_was_planned_for(engines, monkeypatch):
    first, _ = engines(Engine("first"), Engine("second"))
    with monkeypatch.context() as patch:
        patch.setattr(first, "why_unavailable", lambda: "not installed.")
        prepared = prepared_for(MLP(), X, backend="auto")
    q = convert(prepared)
    assert q.backend == "second"
    assert not first.graphs
    assert q.report().chosen.endswith("; first: it could not run when the model was prepared.")


def test_an_engine_that_works_is_the_last_one_tried(engines):
    first, second = engines(Engine("first"), Engine("second"))
    q = convert(prepared_for(MLP(), X, backend="auto"))
    assert q.report().chosen == '"auto" takes the first of first, second that can run here'
    assert first.graphs
    assert not second.graphs


def test_a_named_engine_raises(engines):
    _, second = engines(Engine("first", WRONG), Engine("second"))
    with pytest.raises(VerificationError, match="^3 dB$"):
        convert(prepared_for(MLP(), X, backend="first"))
    with pytest.raises(VerificationError, match="^3 dB$"):
        convert(prepared_for(MLP(), X, backend="auto"), backend="first")
    assert not second.graphs
    assert convert(prepared_for(MLP(), X, backend="first"), backend="auto").backend == "second"


UNABLE = UnsupportedError("no bf16")


class NoBF16(Engine):
    """Has every kernel, but nothing in bf16."""

    def capabilities(self):
        return dataclasses.replace(
            super().capabilities(), why_no_bf16="it has no bf16 kernels", backend=self.name
        )


LOW = StaticQuantConfig().set_local("2", StaticQuantConfig(w_dtype="bf16", act_dtype="bf16"))
NO_BF16 = "Operator '2' can't compute in bf16 on backend 'first': it has no bf16 kernels"


def mlp():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()


def test_an_engine_without_what_the_configuration_asks_for_is_passed_over(engines):
    first, second = engines(NoBF16("first"), Engine("second"))
    prepared = prepare(mlp(), LOW, example_inputs=X)
    assert (prepared.backend, prepared.asked, list(prepared.failed)) == ("second", "auto", ["first"])
    prepared(X)
    assert describe(mlp(), LOW, X)["2"].spec.bf16
    for q in (convert(prepared), convert(prepared, backend="auto")):
        assert q.backend == "second"
        assert f"can run here and computes this model; first: {NO_BF16}" in q.report().chosen
        assert q.report().chosen in q.report().summary().splitlines()
    assert not first.graphs
    assert len(second.graphs) == 2
    for call in (
        lambda: prepare(mlp(), LOW, example_inputs=X, backend="first"),
        lambda: describe(mlp(), LOW, X, backend="first"),
    ):
        with pytest.raises(UnsupportedError, match=f"^{re.escape(NO_BF16)}"):
            call()


def test_all_reasons_are_told_if_no_engine_is_left(engines):
    engines(NoBF16("first"), Engine("second", WRONG))
    prepared = prepare(mlp(), LOW, example_inputs=X)
    prepared(X)
    with pytest.raises(
        VerificationError, match=f"No engine computes this model. first: {re.escape(NO_BF16)}.* second: 3 dB"
    ):
        convert(prepared)
    engines(NoBF16("first"))
    with pytest.raises(UnsupportedError, match=f"^{re.escape(NO_BF16)}"):
        prepare(mlp(), LOW, example_inputs=X)


def test_a_rule_that_matches_nothing_warns_once_whatever_engine_is_tried(engines):
    engines(NoBF16("first"), Engine("second"))
    config = copy.deepcopy(LOW).set_local("nothing", StaticQuantConfig())
    with pytest.warns(UnmatchedTypeWarning) as caught:
        prepare(mlp(), config, example_inputs=X, strict=False)
    assert [w.filename for w in caught if w.category is UnmatchedTypeWarning] == [__file__]


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ((WRONG, WRONG), VerificationError),
        ((WRONG, UNABLE), BackendError),
        ((UNABLE, UNABLE), UnsupportedError),
    ],
)
def test_none_computes_it(engines, errors, kind):
    engines(*(Engine(name, error) for name, error in zip(("first", "second"), errors, strict=True)))
    with pytest.raises(NCError) as caught:
        convert(prepared_for(MLP(), X, backend="auto"))
    assert type(caught.value) is kind
    assert str(caught.value) == f"No engine computes this model. first: {errors[0]} second: {errors[1]}"


def test_the_only_engine_raises_its_own_error(engines):
    engines(Engine("first", WRONG))
    with pytest.raises(VerificationError, match="^3 dB$"):
        convert(prepared_for(MLP(), X, backend="auto"))


def test_other_errors_are_nobody_elses_chance(engines):
    _, second = engines(Engine("first"), Engine("second"))
    with pytest.raises(StateError, match="Nothing was calibrated"):
        convert(prepare(MLP().eval(), StaticQuantConfig(), example_inputs=X))
    assert not second.graphs


def test_load_goes_on_too(engines, tmp_path):
    engines(Engine("first", WRONG), Engine("second"))
    convert(prepared_for(MLP(), X, backend="auto")).save(tmp_path / "m")
    q = load(tmp_path / "m")
    assert q.backend == "second"
    assert q.report().chosen.endswith("computes this model; first: 3 dB")
    with pytest.raises(VerificationError, match="^3 dB$"):
        load(tmp_path / "m", backend="first")


def test_warnings_name_the_callers_line(engines, tmp_path):
    """Of an engine that is only warned about, by the function that all engines share."""

    class Warns(Engine):
        def lower(self, graph, **options):
            return _lower(graph, options["verify"])

    def _lower(graph, verify):
        nc.backends.verify.verify_outputs(graph, [t + 1 for t in graph.module(*graph.example)], verify, "It")
        return ReferenceBackend().lower(graph)

    engines(Warns("first"))
    prepared = prepared_for(MLP(), X, backend="auto")
    for call in (lambda: convert(prepared, verify="warn"), lambda: load(tmp_path / "m", verify="warn")):
        with pytest.warns(NCWarning, match="It computes something else") as caught:
            q = call()
        assert caught[0].filename == __file__
        q.save(tmp_path / "m")


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return torch.matmul(self.a(x), self.b(x).transpose(0, 1))


@pytest.mark.skipif(bool(WHY_NO_NATIVE), reason=WHY_NO_NATIVE or "it can run")
def test_the_plan_is_fitted_to_the_next_engine(engines, monkeypatch):
    """A matmul is int8 in the plan of the first engine; the next has no kernel for it."""
    monkeypatch.setattr(
        "nc.backends.native.OPS",
        tuple(row for row in get_backend("native").capabilities().ops if row.kind != "matmul"),
    )
    engines(Engine("first", WRONG), order=("first", "native"))
    prepared = prepared_for(Products(), X, backend="auto")
    assert prepared.plan["matmul"].spec.quantized
    q = convert(prepared)
    assert q.backend == "native"
    assert {op.operator: op.ran for op in q.report().ops}.items() >= {
        "a": "int8",
        "b": "int8",
        "matmul": "fp32",
    }.items()
    assert q.report().chosen.endswith("first: 3 dB")
    assert worst_db(q.reference(X), q(X)) > 40


# --- the order ---


def conv():
    return nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 4)
    ).eval()


IMAGE = torch.randn(4, 4, 2, 2)


def races(cpu):
    """The second engine was faster with convolutions, the first one with linears."""
    return Race(cpu, CONVOLUTIONS, "second", "first", 2.444, ("a", "b")), Race(
        cpu, LINEARS, "first", "second", 3, ("c",)
    )


@pytest.fixture
def raced(engines, monkeypatch):
    """Registers two engines that were measured on every CPU; this one has AVX2."""

    def register(**errors):
        made = engines(
            *(Engine(name, errors.get(name)) for name in ("first", "second")), order=("first", "second")
        )
        monkeypatch.setattr(
            auto_order, "RACES", tuple(race for cpu in auto_order.CPUS for race in races(cpu))
        )
        monkeypatch.setattr("nc.kernels.cpu.machine_features", lambda: ("avx2",))
        return made

    return register


def test_what_was_measured_names_engines_that_auto_tries_once_for_each_kind():
    assert len({(race.cpu, race.model) for race in auto_order.RACES}) == len(auto_order.RACES)
    for race in auto_order.RACES:
        assert race.cpu in auto_order.CPUS
        assert race.model in (CONVOLUTIONS, LINEARS)
        assert {race.faster, race.slower} == set(AUTO)
        assert race.times >= 1
        assert race.models


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"), "AMX"),
        (("avx2", "avx512f", "avx512_vnni", "avx512_bf16"), "AVX512-VNNI"),
        (("avx2", "avx_vnni"), "AVX-VNNI"),
        (("avx2", "avx512f"), "AVX-512"),
        (("avx2",), "AVX2"),
        ((), None),
    ],
)
def test_the_kind_of_cpu_decides(features, expected, monkeypatch):
    monkeypatch.setattr(auto_order, "RACES", tuple(race for cpu in auto_order.CPUS for race in races(cpu)))
    for model in (CONVOLUTIONS, LINEARS):
        race = auto_order.race_for(features, model)
        assert (None if race is None else (race.cpu, race.model)) == (expected and (expected, model))


def test_the_kind_of_model_is_what_most_products_are():
    assert auto_order.kind_of_model(["conv2d", "conv1d", None, "linear", "add"]) == CONVOLUTIONS
    assert (
        auto_order.kind_of_model(["conv2d", "linear", "linear", "matmul"]) == LINEARS
    )  # a vision transformer
    assert auto_order.kind_of_model([]) == LINEARS


def test_the_faster_one_changes_places_with_the_slower_one():
    race = Race("AMX", LINEARS, "b", "d", 2, ("m",))
    assert auto_order.in_order("abcd", race) == tuple("abcd")
    assert auto_order.in_order("adcb", race) == tuple("abcd")
    assert auto_order.in_order("adc", race) == tuple("adc")
    assert auto_order.in_order("ad", None) == tuple("ad")


@pytest.mark.parametrize(
    ("model", "x", "chosen", "text"),
    [
        (
            conv(),
            IMAGE,
            "second",
            "second was 2.4 times as fast as first on a CPU with AVX2, for models that consist of "
            "convolutions (a, b)",
        ),
        (
            mlp(),
            X,
            "first",
            "first was 3 times as fast as second on a CPU with AVX2, for models that consist of linears (c)",
        ),
    ],
)
def test_models_of_each_kind_get_the_engine_that_was_faster_and_the_report_says_so(
    model, x, chosen, text, raced, monkeypatch, tmp_path
):
    raced()
    assert describe(model, StaticQuantConfig(), x).quantized
    prepared = prepare(model, StaticQuantConfig(), example_inputs=x)
    assert prepared.backend == chosen
    prepared(x)
    q = convert(prepared)
    q.save(tmp_path / chosen)
    other = convert(prepared_for(model, x, StaticQuantConfig(), "reference"), backend="auto")
    for found in (q, other, load(tmp_path / chosen)):
        assert found.backend == chosen
        assert (
            f"that can run here ({text.format(CONVOLUTIONS if chosen == 'second' else LINEARS)})"
            in found.report().chosen
        )
    monkeypatch.setattr("nc.kernels.cpu.machine_features", lambda: ())
    assert prepare(model, StaticQuantConfig(), example_inputs=x).backend == "first"


def test_the_faster_one_that_fails_makes_room_for_the_other(raced):
    raced(second=WRONG)
    q = quantize(conv(), StaticQuantConfig(), lambda m: m(IMAGE), example_inputs=IMAGE)
    assert q.backend == "first"
    assert q.report().chosen.endswith("; second: 3 dB")


def test_what_can_not_run_is_not_compared(raced):
    _, second = raced()
    second.why_unavailable = lambda: "not installed."
    q = quantize(conv(), StaticQuantConfig(), lambda m: m(IMAGE), example_inputs=IMAGE)
    assert q.report().chosen.startswith('"auto" takes the first of second, first, ')
    assert "times as fast" not in q.report().chosen
    assert q.report().chosen.endswith("; second: not installed.")


@pytest.mark.ipex
def test_auto_begins_with_what_was_measured_to_be_faster_here():
    for model, x, kind in ((conv(), IMAGE, CONVOLUTIONS), (mlp(), X, LINEARS)):
        race = auto_order.race_for(nc.kernels.cpu.machine_features(), kind)
        expected = AUTO[0] if race is None else race.faster
        assert prepare(model, StaticQuantConfig(), example_inputs=x).backend == expected


class Attention(nn.Module):
    """IPEX finds no kernel for it on CPUs with AVX512-VNNI and BF16."""

    def __init__(self):
        super().__init__()
        self.attention, self.fc = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)

    def forward(self, x):
        return self.fc(self.attention(x, x, x)[0])


@pytest.mark.ipex
@pytest.mark.parametrize("isolate", [pytest.param("always", marks=pytest.mark.exhaustive), "never"])
def test_multi_head_attention_is_computed_on_every_cpu(isolate, monkeypatch):
    monkeypatch.setattr(nc.backends, "AUTO", ("ipex", "native"))
    monkeypatch.setattr(auto_order, "RACES", ())
    x = torch.randn(2, 16, 32)
    prepared = prepared_for(Attention(), x, backend="auto")
    q = convert(prepared, isolate=isolate)
    assert worst_db(q.reference(x), q(x)) > 40
    if q.backend != "ipex":
        assert q.backend == "native"
        assert "computes this model; ipex: IPEX failed on this graph" in q.report().chosen
        with pytest.raises(BackendError, match="IPEX failed on this graph"):
            convert(prepared, backend="ipex", isolate=isolate)


def test_outputs_of_other_shapes_can_not_be_verified():
    graph = prepared_for(MLP(), X, backend="reference").quantized_graph()
    outputs = [t[:1] for t in graph.module(*graph.example)]
    with pytest.raises(VerificationError, match="other shapes than the quantized graph"):
        nc.backends.verify.verify_outputs(graph, outputs, "warn", "The engine")

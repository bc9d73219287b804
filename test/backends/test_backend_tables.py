"""What backends declare.

Their options, the formats that they write, and passes that say why they leave something alone.
"""

import contextlib
import dataclasses

import pytest
import torch
from models import MLP, quantized
from torch import fx, nn

import nc
from nc import ConfigError, UnsupportedError
from nc.backends import engine_options, export_formats, get_backend
from nc.backends.base import Exporter, Option
from nc.backends.passes import Pass, Rewrite, run_passes
from nc.backends.reference import ReferenceBackend


class Own(ReferenceBackend):
    """The reference with an option and two formats."""

    name = "own"
    options = {"level": Option((1, 2))}
    exports = {
        "numbers": Exporter(lambda graph, engine, file: file.write_bytes(b"own"), from_graph=True),
        "secret": Exporter(lambda graph, engine, file: file.write_bytes(b"secret")),
    }

    def lower(self, graph, **options):
        self.given = options
        return super().lower(graph)


@pytest.fixture
def own(monkeypatch):
    backend = Own()
    monkeypatch.setattr("nc.backends._REGISTERED", {"own": backend})
    return backend


def test_a_backend_gets_its_own_options_only(own):
    assert engine_options(own, isolate="auto", compile=False, level=2) == {"level": 2}
    assert engine_options(get_backend("native"), isolate="never", compile=True) == {"compile": True}
    assert engine_options(get_backend("ipex"), isolate="always", compile=False) == {"isolate": "always"}
    with pytest.raises(ConfigError, match="level=2 is for backend=\"own\"; 'native' has no such option"):
        engine_options(get_backend("native"), level=2)
    with pytest.raises(ConfigError, match="compile=True is for backend=\"native\"; 'own' has no such option"):
        engine_options(own, compile=True)
    with pytest.raises(ConfigError, match="nothing=1 is for no backend that is known here"):
        engine_options(own, nothing=1)


@pytest.mark.parametrize("name", ["own", "ipex", "native"])
def test_a_value_that_nobody_takes_is_refused_by_every_backend(own, name):
    with pytest.raises(
        ConfigError, match="Expected isolate to be one of 'auto', 'always', 'never', but got 'sometimes'"
    ):
        engine_options(get_backend(name), isolate="sometimes")


def test_lower_is_called_with_what_was_declared(own):
    quantized(MLP().eval(), torch.randn(2, 16), None, "own", isolate="never")
    assert own.given == {"verify": "raise"}


def test_a_format_is_looked_up_in_the_tables(own, tmp_path):
    q = quantized(MLP().eval(), torch.randn(2, 16), None, "reference")
    nc.export_model(q, tmp_path / "a", "numbers")  # from_graph: a model of any backend
    assert (tmp_path / "a").read_bytes() == b"own"
    assert set(export_formats()) == {"torchscript", "pt2", "runner", "openvino", "onnx", "numbers", "secret"}
    with pytest.raises(
        UnsupportedError,
        match="Backend 'reference' has no form 'secret'; load or convert with backend=\"own\"",
    ):
        nc.export_model(q, tmp_path / "b", "secret")
    with pytest.raises(
        UnsupportedError,
        match="No backend writes the format 'tflite'; there are 'torchscript', 'pt2', 'runner', 'openvino', 'numbers', 'secret', 'onnx'",
    ):
        nc.export_model(q, tmp_path / "b", "tflite")
    assert not (tmp_path / "b").exists()
    nc.export_model(quantized(MLP().eval(), torch.randn(2, 16), None, "own"), tmp_path / "b", "secret")
    assert (tmp_path / "b").read_bytes() == b"secret"


def test_passes_run_in_order_and_the_first_refusal_counts():
    module = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    for node in module.graph.nodes:
        if node.op == "call_module":
            node.meta["operator"] = node.target
    seen = []

    def named(name, found):
        return lambda graph: seen.append(name) or found

    first = Pass(
        "first", named("first", ["0"]), lambda node: "too small" if node.target == "0" else "", "int8"
    )
    second = Pass("second", named("second", None), lambda node: "no kernel", "int8")
    low = dataclasses.replace(second, name="low", gives="bf16")
    outcome = run_passes(module, (first, second, low))
    assert seen == ["first", "second", "second"]
    assert outcome.rewrites == (Rewrite("first", "0"),)
    refused = {
        ("0", "int8"): "too small",
        ("1", "int8"): "no kernel",
        ("0", "bf16"): "no kernel",
        ("1", "bf16"): "no kernel",
    }
    assert outcome.refused == refused


# ---- what an engine needs of capture ----


class Careful(Own):
    """Changes torch in the whole process, so to say."""

    def __init__(self):
        self.seen = []
        self.capture_passes = (Pass("note", lambda module: self.seen.append("graph")),)

    @contextlib.contextmanager
    def around_model(self, model):
        self.seen.append(type(model))
        yield


@pytest.mark.parametrize("backend", ["reference", "own", "auto"])
def test_every_capture_takes_the_precautions_of_all_engines(monkeypatch, backend):
    careful, model, x = Careful(), MLP().eval(), torch.randn(2, 16)
    monkeypatch.setattr("nc.backends._REGISTERED", {"own": careful})
    for call in (
        lambda: nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x, backend=backend),
        lambda: nc.describe(model, nc.StaticQuantConfig(), x, backend=backend),
        lambda: nc.export.export(model, x),
    ):
        careful.seen.clear()
        call()
        # the model runs on the example, on another batch, and on a batch of 1
        assert careful.seen == [MLP, "graph", MLP, MLP]


def test_graphs_are_alike_whether_ipex_is_installed_or_not():
    model = nn.Sequential(nn.LayerNorm([4, 8]), nn.Linear(8, 8)).eval()
    graph = nc.export.export(model, torch.randn(2, 5, 4, 8)).graph.module.graph
    norm = next(n for n in graph.nodes if n.target is torch.ops.aten.layer_norm.default)
    assert norm.args[1] == [32]

"""What a new engine needs: one file, and one row of a table, or one call.

It is then everywhere where engines are.
"""

import json
import sys
import types
from collections import OrderedDict

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from models import ResidualCNN, prepared_for, quantized
from suites.reports import said
from suites.toy_engine import ToyEngine
from torch import nn

import nc
import nc.backends
from nc import ConfigError, UnknownBackendError, UnsupportedError
from nc.backends import backend_names, export_formats, get_backend
from nc.backends.base import Backend, Exporter
from nc.cli.main import main


@pytest.fixture(params=["row", "call"])
def toy(request, monkeypatch):
    """The engine, known as one of nc is, or as one of a user is."""
    monkeypatch.setattr(nc.backends, "_REGISTERED", {})
    if request.param == "row":
        monkeypatch.setitem(nc.backends.ENGINES, "toy", "suites.toy_engine:ToyEngine")
    else:
        nc.register_backend(ToyEngine())
    return "toy"


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(up=nn.Linear(8, 16), relu=nn.ReLU(), down=nn.Linear(16, 4))).eval()


def converted(backend):
    return quantized(mlp(), torch.randn(4, 8), None, backend)


def test_it_is_listed(toy):
    assert nc.available_backends()[toy] == ""
    assert toy in backend_names()
    assert "names" in export_formats()
    with pytest.raises(UnknownBackendError, match=r"known: auto, .*\btoy\b"):
        get_backend("toys")


def test_models_are_prepared_converted_and_reported_for_it(toy):
    q = quantized(ResidualCNN().eval(), torch.randn(2, 3, 8, 8), None, toy)
    kinds = {decision.operator: decision.kind for decision in q.graph.plan.quantized}
    assert set(kinds.values()) == {"linear"}, "its capabilities decide"
    report = q.report()
    assert report.backend == toy
    assert report.details["isolate"] == "never"
    assert "toys compute in fp32" in said(report)
    assert "backend toy: 0 of 1 operators asked to run int8 do" in said(report)
    with pytest.raises(ConfigError, match="Expected isolate to be one of 'auto', 'never', but got 'always'"):
        nc.convert(prepared_for(mlp(), torch.randn(4, 8), backend=toy), isolate="always")


def test_artefacts_have_its_name_and_are_loaded_for_it(toy, tmp_path):
    q, x = converted(toy), torch.randn(3, 8)
    nc.save(q, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "model.json").read_text())["backend"] == toy
    loaded = nc.load(tmp_path / "m", backend=toy)
    assert loaded.backend == toy
    assert torch.equal(loaded(x), q(x))


@pytest.mark.parametrize("backend", ["toy", "reference"])
def test_its_format_is_written_for_models_of_any_backend(toy, tmp_path, backend):
    q = converted(backend)
    nc.export_model(q, tmp_path / "new" / "m.names", "names", upper=True)
    nc.export_model(q, tmp_path / "new" / "n.names", "names", verify="off")
    content = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert content == {
        "m.names": "UP\nDOWN",
        "n.names": "up\ndown",
        "m.size": str(8 * 16 + 16 * 4),
        "n.size": str(8 * 16 + 16 * 4),
    }
    for name, options, message in (
        ("m.txt", {}, r"Expected a path that ends in '\.names', but got"),
        ("m.names", {"lower": True}, "The format 'names' has no option 'lower'; it has verify, upper"),
        (
            "m.names",
            {"verify": "maybe"},
            "Expected verify to be one of 'raise', 'warn', 'off', but got 'maybe'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            nc.export_model(q, tmp_path / name, "names", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_command_line_takes_and_shows_it(toy, tmp_path, monkeypatch):
    def run(*words):
        return CliRunner().invoke(main, [str(word) for word in words])

    monkeypatch.setitem(sys.modules, "nets_of_toy", types.SimpleNamespace(mlp=mlp))
    np.savez(tmp_path / "x.npz", np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32))
    assert f"auto, {', '.join(backend_names()[:-1])} or {backend_names()[-1]}." in " ".join(
        run("quantize", "--help").stdout.split()
    )
    done = run(
        "quantize",
        "nets_of_toy:mlp",
        "--calib",
        tmp_path / "x.npz",
        "--out",
        tmp_path / "m",
        "--backend",
        toy,
    )
    assert done.exit_code == 0, done.output
    # "auto" may leave one of both in float: toys are no slower then
    assert "Sequential on toy: nothing runs in int8: " in done.stdout
    assert "no dynamic int8 kernel" not in done.stdout
    assert toy in run("inspect", tmp_path / "m").stdout
    timed = json.loads(run("bench", tmp_path / "m", "--backend", toy, "--rounds", 1, "--json").stdout)
    assert timed["median_ms"]["engine"]["what"] == "int8 on toy"
    found = json.loads(run("doctor", "--json").stdout)
    assert found["backends"][toy] == {"can_run": True, "remark": "a toy"}
    assert "click" in found["machine"]


# ---- what a class leaves out ----


def test_an_engine_that_declares_nothing_has_defaults(monkeypatch, tmp_path):
    class Silent(Backend):
        name = "silent"

    silent = Silent()
    monkeypatch.setattr(nc.backends, "_REGISTERED", {})
    nc.register_backend(silent)
    assert (silent.options, silent.exports, silent.low_bit_kernels(), silent.why_unavailable()) == (
        {},
        {},
        (),
        "",
    )
    assert silent.capabilities().ops == ()
    with pytest.raises(UnsupportedError, match="Backend 'silent' runs no models: its class has no `lower`"):
        quantized(mlp(), torch.randn(4, 8), None, "silent")
    with pytest.raises(UnsupportedError, match="Backend 'silent' has no kernel for low-bit weights"):
        nc.prepare(mlp(), nc.WeightOnlyConfig("int4"), backend="silent")


def test_what_is_no_backend_is_refused():
    with pytest.raises(
        ConfigError, match=r"derives from nc\.backends\.base\.Backend, but got a SimpleNamespace"
    ):
        nc.register_backend(types.SimpleNamespace(name="mine"))


@pytest.mark.parametrize("name", ["onnx", "only_writes"])
def test_an_engine_that_runs_no_models_is_no_backend_for_models(monkeypatch, tmp_path, name):
    class OnlyWrites(Backend):
        name = "only_writes"
        runs_models = False
        exports = {"empty": Exporter(lambda graph, engine, file: file.write_text(""), from_graph=True)}

    monkeypatch.setattr(nc.backends, "_REGISTERED", {})
    nc.register_backend(OnlyWrites())
    assert name not in nc.available_backends()
    assert name not in nc.backends.candidates()
    with pytest.raises(UnknownBackendError, match=f"No backend is called '{name}'"):
        quantized(mlp(), torch.randn(4, 8), None, name)
    with pytest.raises(ConfigError, match=f"A backend named '{name}' exists already"):
        nc.register_backend(type("Same", (Backend,), {"name": name})())
    nc.export_model(converted("reference"), tmp_path / "m", "empty")
    assert (tmp_path / "m").read_text() == ""

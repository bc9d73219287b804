"""What `load` does not do again, and where the codes of a loaded model are.

In the file, until somebody wants them.
"""

import contextlib
import dataclasses
import errno
import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from models import WHY_NO_PLANS, Function, quantized
from torch import nn

from nc import ArtefactCorruptError, NCWarning, VerificationError, load
from nc.backends import available_backends, verify
from nc.backends.native import fuse
from nc.backends.native import planned as planning
from nc.backends.native.plans.recorder import PackedWeights
from nc.graph.qdq import expected_outputs
from nc.process.unavailable import Unavailable
from nc.storage import mapped

native = pytest.mark.skipif(
    bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
)


class Attention(nn.Module):
    """Three linears that become one, and one behind them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return self.o(scores @ self.v(x))


@pytest.fixture(scope="module")
def q_model():
    torch.manual_seed(0)
    return quantized(Attention(), torch.randn(2, 8, 64), backend="native")


@pytest.fixture
def folder(q_model, tmp_path):
    q_model.save(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def runs(monkeypatch):
    """The graphs that were run as a reference."""
    found = []
    run = verify.reference_outputs
    for module in (verify, __import__("nc.backends.native.references", fromlist=["judge"])):
        monkeypatch.setattr(module, "reference_outputs", lambda graph: found.append(graph) or run(graph))
    return found


def pages(path):
    """kB of a file that are in this process's memory, for each mapping of it."""
    text = Path("/proc/self/smaps").read_text()
    return [int(kb) for kb in re.findall(rf" {re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text)]


def same(a, b):
    assert torch.equal(a, b)


# --- the outputs that are expected ---


def test_the_graph_keeps_what_it_gives_for_its_example_and_so_does_the_artefact(q_model, folder):
    graph = q_model.graph
    with torch.no_grad():
        same(graph.expected[0], graph.module(*graph.example)[0])
    loaded = load(folder, backend="reference")
    assert len(loaded.graph.expected) == 1
    same(loaded.graph.expected[0], graph.expected[0])


def test_large_outputs_are_not_kept():
    small, large = torch.zeros(1 << 18), torch.zeros((1 << 18) + 1)
    assert expected_outputs([small], 0) is not None
    assert expected_outputs([large], 0) is None
    assert expected_outputs([large, None, 3], 1 << 23)[1:] == (None, 3)


@native
def test_an_engine_that_gives_what_is_expected_is_right_and_the_graph_is_not_run(q_model, folder, runs):
    loaded = load(folder, backend="native")
    assert runs == []
    reports = [each.report().to_dict() | {"verdict": None} for each in (loaded, q_model)]
    kernels = [report["details"].pop("kernels compared") for report in reports]
    assert "tensors at a few places each, codes within" in kernels[0]
    assert "codes within" in kernels[1]
    assert reports[0] == reports[1]


@native
def test_a_kernel_that_computes_something_else_is_found_when_the_model_is_loaded(folder, runs, monkeypatch):
    right = fuse.weight_of
    monkeypatch.setattr(fuse, "weight_of", lambda *args: (right(*args)[0], right(*args)[1] * 1.2))
    with pytest.raises(VerificationError, match="The first operator that differs is 'q'"):
        load(folder, backend="native")
    assert runs  # it says how far it is from what the graph gives here


@native
def test_outputs_that_another_machine_rounded_otherwise_make_the_graph_decide(q_model, tmp_path, runs):
    far = tuple(value * 1.5 for value in q_model.graph.expected)
    other = quantized(Attention(), torch.randn(2, 8, 64), backend="native")
    other.graph = dataclasses.replace(q_model.graph, expected=far)
    other.save(tmp_path / "far")
    runs.clear()
    loaded = load(tmp_path / "far", backend="native")
    assert len(runs) == 1
    assert loaded.report().sqnr_db == q_model.report().sqnr_db


@native
def test_an_artefact_without_them_is_compared_with_the_graph(q_model, tmp_path, runs):
    other = quantized(Attention(), torch.randn(2, 8, 64), backend="native")
    other.graph = dataclasses.replace(q_model.graph, expected=None)
    other.save(tmp_path / "old")
    runs.clear()
    load(tmp_path / "old", backend="native")
    assert len(runs) == 1


def test_outputs_that_are_no_tensors_are_not_stored(tmp_path):
    model = Function(lambda self, x: {"y": self.layer(x), "none": None}, layer=nn.Linear(8, 8))
    q = quantized(model, torch.randn(2, 8), backend="reference")
    q.save(tmp_path / "m")
    assert load(tmp_path / "m", backend="reference")(torch.zeros(2, 8))["none"] is None


# --- the codes in the file ---


@native
def test_a_loaded_model_has_its_codes_once(q_model, folder):
    loaded = load(folder, backend="native")
    assert pages(folder / "weights.safetensors") == [0] * len(pages(folder / "weights.safetensors"))
    assert pages(folder / "weights.safetensors")
    x = torch.randn(2, 8, 64)
    same(loaded(x), q_model(x))
    assert not any(pages(folder / "weights.safetensors"))
    same(loaded.reference(x), q_model.reference(x))  # reads them from the file
    assert any(pages(folder / "weights.safetensors"))


@native
@pytest.mark.needs_plans
def test_codes_come_back_for_kernels_that_want_another_layout(folder, q_model, monkeypatch):
    loaded = load(folder, backend="native")
    asked = []
    monkeypatch.setattr(PackedWeights, "known", lambda self, weight, desc: asked.append(weight) or [])
    monkeypatch.setattr(
        PackedWeights, "formed", lambda self, weight, form, make: asked.append(weight) or make()
    )
    x = torch.randn(3, 5, 64)
    same(loaded(x), q_model(x))
    assert asked
    assert all(weight.tensor.is_meta for weight in asked)


@native
def test_sizes_that_can_not_be_planned_get_the_codes_too(folder, q_model, monkeypatch):
    loaded = load(folder, backend="native")
    monkeypatch.setattr(planning.PlannedModel, "_record", lambda self, inputs: (Unavailable("no plan"), None))
    x = torch.randn(3, 5, 64)
    torch.testing.assert_close(loaded(x), q_model.reference(x), rtol=0.05, atol=0.05)


@native
@pytest.mark.parametrize("how", ["delete", "replace", "append", "cut"])
def test_what_happens_to_the_file_of_a_loaded_model(folder, q_model, how, tmp_path):
    loaded, path = load(folder, backend="native"), folder / "weights.safetensors"
    x, y = torch.randn(2, 8, 64), torch.randn(1, 3, 64)
    if how == "delete":
        path.unlink()
    elif how == "replace":
        (tmp_path / "other").write_bytes(b"\xff" * path.stat().st_size)
        (tmp_path / "other").rename(path)
    else:
        with path.open("r+b") as file:
            file.truncate(10 if how == "cut" else path.stat().st_size + 1)
    same(loaded(x), q_model(x))
    is_compared = how in ("append", "cut") and not WHY_NO_PLANS
    with (
        pytest.warns(NCWarning, match="can't be compared any more")
        if is_compared
        else contextlib.nullcontext()
    ):
        same(loaded(y), q_model(y))  # new sizes
    if how in ("delete", "replace"):
        same(loaded.reference(x), q_model.reference(x))
        loaded.save(tmp_path / "again")
        q_model.save(tmp_path / "before")
        assert (tmp_path / "again" / "weights.safetensors").read_bytes() == (
            tmp_path / "before" / "weights.safetensors"
        ).read_bytes()
        return
    for use in (lambda: loaded.reference(x), lambda: loaded.save(tmp_path / "again"), lambda: loaded.graph):
        with pytest.raises(
            ArtefactCorruptError, match="was changed while a model that was loaded from it is in use"
        ):
            use()


@native
@pytest.mark.needs_plans
def test_a_file_that_was_written_into_is_not_packed_again(folder, monkeypatch):
    loaded = load(folder, backend="native")
    with (folder / "weights.safetensors").open("r+b") as file:
        file.truncate(10)
    monkeypatch.setattr(PackedWeights, "known", lambda self, weight, desc: [])
    monkeypatch.setattr(PackedWeights, "formed", lambda self, weight, form, make: make())
    with pytest.raises(ArtefactCorruptError, match="Load it again"):
        loaded(torch.randn(3, 5, 64))


def test_the_reference_has_codes_of_its_own(folder):
    loaded = load(folder, backend="reference")
    x = torch.randn(2, 8, 64)
    before = loaded(x)
    (folder / "weights.safetensors").write_bytes(b"")
    same(loaded(x), before)
    same(loaded.reference(x), before)


def test_file_systems_that_map_nothing(folder, q_model, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    x = torch.randn(2, 8, 64)
    monkeypatch.setattr(mapped.mmap, "mmap", type("Failing", (mmap.mmap,), {"__new__": fail}))
    same(load(folder, backend="reference")(x), q_model.reference(x))

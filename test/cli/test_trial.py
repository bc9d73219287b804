"""`doctor --run`: something is computed, and what does not run in int8 is a problem."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

import nc
from nc.backends import available_backends
from nc.cli import trial
from nc.cli.main import main

pytestmark = pytest.mark.skipif(bool(available_backends()["native"]), reason="needs the native engine")


def test_a_model_is_quantized_and_proved():
    done = CliRunner().invoke(main, ["doctor", "--run", "--json"])
    found = json.loads(done.stdout)["trial"]
    assert (
        found["asked"] == found["ran"] >= 8
    )  # two layers of four linears; attention where it is as accurate
    assert found["error"] > 20
    assert found["proof"] is None or found["proof"] > 30
    assert " fp32" in found["speed"]
    assert done.exit_code == (0 if json.loads(done.stdout)["healthy"] else 1)


def test_the_text_and_the_exit_code(monkeypatch):
    made = trial.SmallModelRun("native", 12, 12, 90.0, 31.0, "2.00 times as fast as fp32", 3.2)
    monkeypatch.setattr(trial, "tried", lambda: made)
    done = CliRunner().invoke(main, ["doctor", "--run"])
    assert (
        "a small encoder: 12 of 12 products run in int8 on native, 90 dB to a simulation of the same integers; "
        "31 dB to fp32\n2.00 times as fast as fp32\nthat took 3.2 s"
    ) in done.stdout
    monkeypatch.setattr(trial, "tried", lambda: dataclasses.replace(made, ran=11))
    assert CliRunner().invoke(main, ["doctor", "--run"]).exit_code == 1


def test_an_engine_that_is_not_timed(monkeypatch):
    """The reference is never timed: where no other engine can run, the command says so and does not end."""
    quantize = nc.quantize
    monkeypatch.setattr(
        nc, "quantize", lambda *args, **options: quantize(*args, **options, backend="reference")
    )
    found = trial.tried()
    assert (found.backend, found.speed) == ("reference", "its speed was not measured")

"""Artefacts of earlier releases: they load, and give the answers that they gave."""

import pytest
from models import TEST
from safetensors.torch import load_file

import nc
from nc.numerics.metrics import sqnr_db

RELEASES = sorted(path for path in (TEST / "data").glob("release-*/*") if path.is_dir())
#: dB: another CPU or torch sums in another order, which changes single codes.
LEAST = 35


def test_there_are_some():
    assert {path.parent.name for path in RELEASES} >= {"release-0.2.0"}


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("folder", RELEASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_artefact_of_a_release(folder, backend):
    model = nc.load(folder, backend=backend)
    expected = load_file(folder.with_name(f"{folder.name}.outputs.safetensors"))["output"]
    assert sqnr_db(expected, model(*model.graph.example)) > LEAST
    assert model.report().asked_int8 > 0

"""A graph that asks for more memory than any model has is refused before anything is allocated."""

import json

import pytest
import torch
from models import Function, quantized
from suites.artefacts import forge
from torch import nn
from torch.nn import functional as F

import nc

X = torch.randn(3, 8)
#: What a model does, and the number in its graph that is made large.
CASES = {
    "zeros": (lambda self, x: self.fc(x) + torch.zeros(3, 8), "zeros", 3),
    "full": (lambda self, x: self.fc(x) + torch.full((3, 8), 2.0), "full", 3),
    "ones like a size": (lambda self, x: self.fc(x) + x.new_ones(3, 8), "new_ones", 3),
    "arange": (lambda self, x: self.fc(x) + torch.arange(8), "arange", 8),
    "linspace": (lambda self, x: self.fc(x) + torch.linspace(0, 1, 8), "linspace", 8),
    "eye": (lambda self, x: self.fc(x) + torch.eye(3, 8), "eye", 8),
    "expand": (lambda self, x: self.fc(x)[:, None].expand(3, 5, 8).sum(1), "expand", 5),
    "repeat": (lambda self, x: self.fc(x).repeat(1, 7).sum(1), "repeat", 7),
    "pad": (lambda self, x: F.pad(self.fc(x), (0, 7)).sum(1), "pad", 7),
    "upsampling": (
        lambda self, x: F.interpolate(self.fc(x)[None], size=(9,), mode="nearest").sum(2),
        "upsample",
        9,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_asks_for_too_much(name, tmp_path):
    forward, operator, number = CASES[name]
    q = quantized(Function(forward, fc=nn.Linear(8, 8)).eval(), X, None, "reference")
    nc.save(q, tmp_path / "m")
    assert torch.equal(nc.load(tmp_path / "m", backend="reference")(X), q(X))
    changed = []

    def change(document):
        for node in document["nodes"]:
            if operator in node["target"]:
                text = json.dumps(node.get("args", []))
                changed.append(text)
                node["args"] = json.loads(text.replace(str(number), str(10**10)))
        assert any(str(number) in text for text in changed)

    forge(tmp_path / "m", change)
    with pytest.raises(nc.ArtefactCorruptError, match=f"{operator}.* asks for .* values"):
        nc.load(tmp_path / "m", backend="reference")


@pytest.mark.parametrize("large", [10**10, 2**62])
def test_a_constant_that_asks_for_too_much(large, tmp_path):
    model = Function(lambda self, x: self.fc(x).sum() + F.one_hot(self.index, 8), fc=nn.Linear(8, 8))
    model.register_buffer("index", torch.tensor([large]))
    model.index = torch.tensor([3])
    q = quantized(model.eval(), X, None, "reference")
    nc.save(q, tmp_path / "m")
    weights = (tmp_path / "m" / "weights.safetensors").read_bytes()
    three, more = ((n).to_bytes(8, "little") for n in (3, large))
    at = weights.rindex(three)
    forge(tmp_path / "m", weights_safetensors=weights[:at] + more + weights[at + 8 :])
    with pytest.raises(nc.ArtefactError):
        nc.load(tmp_path / "m", backend="reference")

"""Names in any script, and complex numbers: what converts can be saved, and what is saved can be loaded."""

import pytest
import torch
from models import Function, quantized
from torch import nn

import nc

X = torch.randn(4, 8)


def _parameters(values):
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})


class Argument(nn.Module):
    """An argument and a module with names of their own script."""

    def __init__(self):
        super().__init__()
        self.größe = nn.Linear(8, 8)

    def forward(self, вход, 入力=None):  # noqa: PLC2401
        return {"ausgabe ü": self.größe(вход), "и": вход if 入力 is None else 入力}


def _buffered(name):
    model = Function(lambda self, x: self.fc(x) * getattr(self, name), fc=nn.Linear(8, 8))
    model.register_buffer(name, torch.rand(8))
    return model


MODELS = {
    "module": lambda: Function(lambda self, x: self.größe(x), größe=nn.Linear(8, 8)),
    "buffer": lambda: _buffered("fuß"),
    "buffer that Python would write otherwise": lambda: _buffered("ﬁt"),
    "two that differ in such letters": lambda: Function(
        lambda self, x: self.ä(x) + self.ö(x), ä=nn.Linear(8, 8), ö=nn.Linear(8, 8)
    ),
    "batch norm": lambda: Function(
        lambda self, x: self.ñ(self.ł(x[None].mT)), ł=nn.Conv1d(8, 8, 1), ñ=nn.BatchNorm1d(8)
    ),
    "key": lambda: Function(
        lambda self, x: self.fc(x) * self.p["ключ"] + self.p["a b"],
        fc=nn.Linear(8, 8),
        p=_parameters({"ключ": torch.rand(8), "a b": torch.rand(8)}),
    ),
    "argument": Argument,
}


def _equal(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[name], other[name]) for name in one)
    return torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_names_beyond_ascii_come_back(name, tmp_path):
    torch.manual_seed(0)
    q = quantized(MODELS[name]().eval(), X, None, "reference")
    nc.save(q, tmp_path / "größe")
    loaded = nc.load(tmp_path / "größe", backend="reference")
    assert _equal(loaded(X), q(X))
    assert [op.operator for op in loaded.report().ops] == [op.operator for op in q.report().ops]
    nc.save(loaded, tmp_path / "again")
    for file in ("model.json", "weights.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "größe" / file).read_bytes()


def test_low_bit_weights_with_such_names(tmp_path):
    config = nc.WeightOnlyConfig("int8", group_size=8)
    q = nc.quantize(MODELS["module"]().eval(), config, measure=False)
    nc.save(q, tmp_path / "m")
    assert torch.equal(nc.load(tmp_path / "m", model=MODELS["module"]())(X), q(X))


@pytest.mark.parametrize("config", [nc.DynamicQuantConfig(), nc.WeightOnlyConfig("int8", group_size=8)])
def test_half_a_surrogate_pair_is_refused_before_a_file_is_begun(config, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    model.add_module("a\ud800b", nn.Linear(8, 8))
    q = nc.quantize(model.eval(), config, example_inputs=X, measure=False)
    with pytest.raises(nc.InputError, match=r"The name 'a\\ud800b.*' holds half a surrogate pair"):
        nc.save(q, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_half_a_surrogate_pair_in_calls_is_refused_too(tmp_path):
    model, x = nn.Sequential(nn.Linear(128, 128)), torch.randn(4, 128)
    model.add_module("a\ud800b", nn.Linear(128, 8))
    prepared = nc.prepare(model.eval(), nc.WeightOnlyConfig("int8", solver=nc.GPTQ()))
    prepared(x)
    with pytest.raises(nc.InputError, match="half a surrogate pair"):
        prepared.statistics.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


NUMBERS = {
    "factor": lambda self, x: torch.exp(1j * self.fc(x)).real,
    "term": lambda self, x: (self.fc(x) + (2 - 3j)).abs(),
    "quotient": lambda self, x: (self.fc(x) / 2j).imag,
    "power": lambda self, x: ((self.fc(x).abs() + 1) ** (0.5 + 1j)).real,
    "base": lambda self, x: torch.pow(0.5 + 1j, self.fc(x)).real,
    "filled": lambda self, x: (torch.full((8,), 1 + 2j) * self.fc(x)).real,
    "chosen": lambda self, x: torch.where(x > 0, self.fc(x).to(torch.complex64), 1j).imag,
    "subtracted from": lambda self, x: (1j - self.fc(x)).real,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_complex_number_beside_a_tensor(name, tmp_path):
    torch.manual_seed(0)
    q = quantized(Function(NUMBERS[name], fc=nn.Linear(8, 8)).eval(), X, None, "reference")
    nc.save(q, tmp_path / "m")
    assert torch.equal(nc.load(tmp_path / "m", backend="reference")(X), q(X))

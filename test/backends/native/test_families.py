"""A small model of each family, converted and run: once for each instruction set, see isas.py."""

import pytest
import torch
from models import Attention, Conv1dNet, ResidualCNN, quantized, worst_db
from torch import nn

import nc
from nc import DynamicQuantConfig, StaticQuantConfig
from nc.backends import available_backends

pytestmark = [
    pytest.mark.isas,
    pytest.mark.needs_plans,
    pytest.mark.skipif(bool(available_backends()["native"]), reason="needs the native engine"),
]


class Tagger(nn.Module):
    """Recurrent layers, then a class for each step."""

    def __init__(self):
        super().__init__()
        self.cells, self.classes = nn.LSTM(12, 20, batch_first=True, bidirectional=True), nn.Linear(40, 5)

    def forward(self, x):
        return self.classes(self.cells(x)[0])


class Block(nn.Module):
    """A block of an encoder."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(64, 4), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return x + self.down(nn.functional.gelu(self.up(x)))


PER_ROW = DynamicQuantConfig(act_granularity="per_token")
FAMILIES = {
    "pictures": (ResidualCNN, (3, 16, 16), StaticQuantConfig()),
    "sounds": (Conv1dNet, (4, 40), StaticQuantConfig()),
    "encoders": (Block, (19, 64), StaticQuantConfig()),
    "encoders with ranges of rows": (Block, (19, 64), PER_ROW),
    "recurrent layers": (Tagger, (9, 12), PER_ROW),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_its_reference_does(family):
    build, sizes, config = FAMILIES[family]
    q = quantized(build().eval(), torch.randn(2, *sizes), config, "native")
    for batch in (2, 5):
        x = torch.randn(batch, *sizes)
        assert worst_db([q.reference(x)], [q(x)]) > 30


@pytest.mark.parametrize("act", ["fp32", "int8"])
def test_low_bit_weights_of_a_block(act):
    model, x = Block().eval(), torch.randn(3, 19, 64)
    config = nc.WeightOnlyConfig("int4", group_size=32, act_dtype=act)
    q, exact = (nc.quantize(Block().eval(), config, backend=name) for name in ("native", "reference"))
    for each in (q, exact):
        each.load_state_dict(nc.quantize(model, config, backend="reference").state_dict())
    assert worst_db([exact(x)], [q(x)]) > 30

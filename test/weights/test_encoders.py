"""Encoders of torch with padding.

Low-bit ones give what the float ones give, and other threads keep their path.
"""

import threading

import pytest
import torch
from torch import nn

import nc
from nc.numerics.metrics import sqnr_db

X = torch.randn(3, 10, 32)
PADDING = torch.zeros(3, 10, dtype=torch.bool)
PADDING[1, 6:] = True


def encoder(**options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, **options).eval()


def run(model):
    with torch.no_grad():
        return model(X, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(32)])
@pytest.mark.parametrize("solver", [nc.RTN(), nc.GPTQ()])
def test_a_low_bit_encoder_gives_what_the_float_one_gives_at_padding(norm, solver, tmp_path):
    model = encoder(norm=norm)
    config = nc.WeightOnlyConfig("int8", group_size=16, solver=solver)
    q = nc.quantize(model, config, run, measure=False)
    expected = run(model)
    assert sqnr_db(expected, run(q)) > 35
    assert torch.equal(run(q)[PADDING], expected[PADDING])
    nc.save(q, tmp_path / "q")
    assert torch.equal(run(nc.load(tmp_path / "q", model=encoder(norm=norm))), run(q))
    with torch.enable_grad():  # no fast path here either: the float encoder gives values at padding
        assert q(X, src_key_padding_mask=PADDING)[PADDING].any()


def test_a_low_bit_encoder_gives_the_same_while_another_thread_captures():
    """torch.export has a flag for all threads, with which encoders leave their fast path."""
    model, found, inside, done = encoder(), [], threading.Event(), threading.Event()
    q = nc.quantize(model, nc.WeightOnlyConfig("int8", group_size=16), measure=False)
    expected = run(q)
    assert not expected[PADDING].any()

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(32, 32), 0

        def forward(self, x):
            if torch.compiler.is_exporting() or type(self.linear.weight) is not nn.Parameter:
                inside.set()
                done.wait(60)
            return self.linear(x)

    def other():
        inside.wait(60)
        found.append((torch.backends.mha.get_fastpath_enabled(), run(q)))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    nc.prepare(Waits().eval(), nc.StaticQuantConfig(), example_inputs=X, backend="reference")
    inside.set()
    thread.join()
    [(enabled, got)] = found
    assert enabled
    assert not got[PADDING].any()
    torch.testing.assert_close(got, expected)

"""Codes of weights that conversions share."""

import weakref

import torch

from nc.formats import TensorFormat
from nc.graph import known_codes
from nc.graph.known_codes import KnownCodes
from nc.numerics.weights import quantize_weight

SPEC = TensorFormat(dtype="int8", symmetric=True, granularity="per_channel", narrow=True)


def test_a_weight_is_quantized_once_for_each_way(monkeypatch):
    asked = []
    monkeypatch.setattr(
        known_codes, "quantize_weight", lambda *given: asked.append(given) or quantize_weight(*given)
    )
    known, weight, other = KnownCodes(), torch.randn(4, 6), torch.randn(4, 6)
    for given in ((weight, SPEC, 0), (weight, SPEC, 0), (other, SPEC, 0), (weight, SPEC, None)):
        codes, scale = known.of(*given)
        expected = quantize_weight(*given)
        assert torch.equal(codes, expected[0])
        assert torch.equal(scale, expected[1])
    assert len(asked) == 3


def test_nobody_sees_what_another_does_to_its_codes():
    known, weight = KnownCodes(), torch.randn(4, 6)
    first = known.of(weight, SPEC, 0)
    first[0].zero_()
    first[1].zero_()
    assert bool(known.of(weight, SPEC, 0)[0].any())
    assert bool(known.of(weight, SPEC, 0)[1].all())


def test_a_weight_stays_so_that_no_other_tensor_gets_its_id():
    known, weight = KnownCodes(), torch.randn(4, 6)
    known.of(weight, SPEC, 0)
    alive = weakref.ref(weight)
    del weight
    assert alive() is not None

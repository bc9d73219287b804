"""Every int8 pattern in a network of its own.

It runs int8, the numbers are the reference's, and other batch sizes work.
"""

import pytest
import torch
from nets import NETS

import nc
from nc.backends.ipex.patterns import patterns
from nc.backends.ipex.tested_patterns import TESTED
from nc.kernels import cpu
from nc.numerics.metrics import sqnr_db

pytestmark = pytest.mark.ipex


@pytest.mark.parametrize("name", NETS)
def test_pattern(name):
    torch.manual_seed(0)
    net, shape, lints = NETS[name]
    net.eval()
    example = torch.randn(shape)
    prepared = nc.prepare(net, nc.StaticQuantConfig(), example_inputs=example, backend="ipex")
    batches = [example] if name == "matmul_2d" else [example, torch.cat([torch.randn(shape)] * 3)]
    for batch in batches:
        prepared(batch)
    quantized = nc.convert(prepared, isolate="never")
    report = quantized.report()
    assert {op.operator for op in report.not_int8} == set()
    assert report.ran_int8 > 0
    if name == "same_twice_matmul" and not cpu.accumulates_wide():
        lints = ()  # the second input takes 7 bits there, so the two differ
    assert {rewrite.split(":")[0] for rewrite in report.rewrites} == set(lints)
    for batch in batches:
        assert sqnr_db(quantized.reference(batch), quantized(batch)) > 30
        assert sqnr_db(net(batch), quantized(batch)) > 22
    assert patterns(quantized.graph.module) <= TESTED, "run python test/tested_patterns.py"

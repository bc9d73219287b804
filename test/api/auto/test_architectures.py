"""`"auto"` over small architectures: it ends in a model or in an NCError, and what it delivers is accurate.

Each as it is, with one channel, with tiny outputs and with one bad operator; on a quiet machine, on a busy one
and without times; with the instructions of this CPU and with those of AVX2.
"""

import copy
import zlib

import pytest
import torch
from nets import IMAGE, NETS
from torch import nn

import nc
from nc.api.auto import prepared as module_under_test
from nc.api.preparation import finish
from nc.backends.verdict import Verdict
from nc.profiling.load import Load

FLOOR = 20.0
ROWS = 4


def with_one_channel(model, shape):
    """A first convolution over one channel, on waves."""
    dims = len(shape) - 2
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return nn.Sequential(conv(1, shape[1], 9 if dims == 1 else 3, padding="same"), model), (1, 1, *shape[2:])


def with_tiny_outputs(model, shape):
    """The last layer with weights is 1e-24 times as large."""
    last = [module for module in model.modules() if getattr(module, "weight", None) is not None][-1]
    with torch.no_grad():
        for value in last.parameters():
            value.mul_(1e-24)
    return model, shape


class BadOperator(nn.Module):
    """A branch whose last linear has a few weights that are 500 times as large as the others, and no use."""

    def __init__(self, model, features):
        super().__init__()
        self.model, self.a, self.b = model, nn.Linear(features, 512), nn.Linear(512, 2)
        with torch.no_grad():
            self.b.weight.mul_(0.1)
            self.b.weight[:, :5] = torch.tensor([53.0, 23, -30, 40, -29])
            self.a.weight[:5], self.a.bias[:5] = 0, 1e-4

    def forward(self, x):
        return self.model(x), self.b(self.a(x.flatten(1)).tanh())


def with_a_bad_operator(model, shape):
    return BadOperator(model, torch.Size(shape[1:]).numel()), shape


VARIANTS = {
    "as it is": lambda model, shape: (model, shape),
    "one channel": with_one_channel,
    "tiny outputs": with_tiny_outputs,
    "bad operator": with_a_bad_operator,
}
TIMES = ("quiet", "busy", "none")
CONVOLUTIONS = {name for name, (_, shape, _) in NETS.items() if shape == IMAGE or name.startswith("conv")}
#: Of all, what the short suite runs.
SHORT = {
    ("conv1d", "one channel", "none"),
    ("classifier", "one channel", "busy"),
    ("mlp", "tiny outputs", "none"),
    ("residual", "bad operator", "busy"),
    ("encoder_layer", "bad operator", "none"),
    ("matmul_2d", "as it is", "quiet"),
}


def cases():
    for name in NETS:
        for variant in VARIANTS:
            if variant == "one channel" and name not in CONVOLUTIONS:
                continue
            for times in TIMES:
                is_short = (name, variant, times) in SHORT
                marks = () if is_short else pytest.mark.exhaustive
                yield pytest.param(name, variant, times, marks=marks, id=f"{name}, {variant}, {times}")


def waves(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    slope = 0.05 + 0.3 * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator)
    time = torch.arange(shape[-1]) + 7 * torch.rand(*shape[:-1], 1, generator=generator)
    return torch.sin(slope * time) + 0.1 * torch.randn(*shape, generator=generator)


def decibels(expected, got):
    """Of each output over all batches, in float64, by its definition; the worst."""
    found = []
    for references, values in zip(zip(*expected, strict=True), zip(*got, strict=True), strict=True):
        reference, value = (torch.cat([t.flatten() for t in each]).double() for each in (references, values))
        noise = float((reference - value).square().sum())
        found.append(
            10 * torch.tensor(float(reference.square().sum()) / noise).log10() if noise else torch.inf
        )
    return float(min(found))


@pytest.mark.parametrize(("name", "variant", "times"), cases())
def test_a_model_that_is_accurate_or_in_float(name, variant, times, monkeypatch):
    if variant == "one channel" or zlib.crc32(name.encode()) % 2:
        monkeypatch.setenv("NC_MAX_ISA", "avx2")
    load = Load(seconds=1.0, share=0.3 if times == "busy" else 1.0)
    monkeypatch.setattr(
        module_under_test, "timed_rounds", lambda calls, *_: ([dict.fromkeys(calls, 1.0)], 1, load)
    )
    verdict = Verdict(fp32_ms=2.0, engine_ms=1.0, calls=1, threads=1, doubt=load.disturbed())
    monkeypatch.setattr(finish, "speed_verdict", lambda *_, **__: verdict)
    torch.manual_seed(0)
    net, shape, _ = NETS[name]
    model, shape = VARIANTS[variant](copy.deepcopy(net).eval(), shape)
    model.eval()
    batches = [waves(ROWS, *shape[1:], seed=seed) for seed in range(4)]
    prepared = nc.prepare(model, "auto", example_inputs=batches[0], backend="native")
    for batch in batches:
        prepared(batch)
    q_model = nc.convert(prepared, measure=times != "none")

    held = [batch for (batch,) in prepared.held.batches]
    assert held
    expected, got = ([outputs(m, batch) for batch in held] for m in (model, q_model))
    report = q_model.report()
    lossy = [op.operator for op in report.ops if op.asked in ("int8", "bf16") and op.ran != "fp32"]
    assert decibels(expected, got) >= FLOOR or not lossy
    first = str(report).splitlines()[0]
    is_floored = any(applied.algorithm == "accuracy floor" for applied in report.algorithms)
    assert is_floored == (f"less than {FLOOR:g}" in " ".join(str(report).split()))
    assert is_floored == (" dB on " in first and not first.startswith(("LOW", "HOPELESS")))
    if variant == "bad operator":
        ran = {op.operator: op.ran for op in report.ops}
        assert (
            ran["b"] != "int8"
            or {d.operator: d.spec.mode for d in q_model.graph.plan.quantized}["b"] == "dynamic"
        )


def outputs(model, batch):
    with torch.no_grad():
        found = model(batch)
    return found if isinstance(found, tuple) else (found,)

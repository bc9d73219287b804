"""What an int8 kernel computes along with its own operator is reported as that, and what runs in fp32 is not."""

import pytest
import torch
from torch import nn

import nc


class Net(nn.Module):
    """Activations, a pool, a norm and additions, behind convolutions and linears."""

    def __init__(self):
        super().__init__()
        self.c1, self.norm, self.c2 = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 16, 3, padding=1),
        )
        self.relu, self.pool, self.mean = nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
        self.fc, self.gelu, self.fc2, self.last = (
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
            nn.LayerNorm(16),
        )

    def forward(self, x):
        x = self.pool(self.relu(self.norm(self.c1(x))))
        x = self.mean(self.relu(self.c2(x) + x)).flatten(1)
        return self.last(x + self.fc2(self.gelu(self.fc(x))))


def report_of(config, backend="native"):
    x = torch.randn(2, 3, 16, 16)
    return nc.quantize(
        Net().eval(), config, lambda p: p(x), example_inputs=x, backend=backend, measure=False
    ).report()


def test_native_names_the_kernel_that_computes_an_operator_along():
    report = report_of(nc.StaticQuantConfig())
    found = {op.operator: (op.asked, op.ran, op.reason) for op in report.ops}
    assert found["relu"] == ("fp32", "int8", "fused into c1")
    assert found["relu@1"] == ("fp32", "int8", "fused into c2")
    assert found["gelu"] == ("fp32", "int8", "fused into fc")
    assert found["add_1"] == ("fp32", "int8", "fused into fc2")
    assert found["pool"] == ("fp32", "int8", "computed on codes")
    assert found["last"][1] == "fp32"
    assert report.ran_int8 == report.asked_int8
    assert not report.not_int8


@pytest.mark.parametrize("excluded", ["c1", "c2", "fc"])
def test_what_stands_behind_a_fp32_operator_is_fp32(excluded):
    report = report_of(nc.StaticQuantConfig().exclude(excluded))
    behind = {"c1": "relu", "c2": "relu@1", "fc": "gelu"}[excluded]
    found = {op.operator: (op.ran, op.reason) for op in report.ops}
    assert found[excluded][0] == found[behind][0] == "fp32"
    assert (
        "fused" not in found[behind][1]
        or found[behind][1] == "no int8 operator reads the sum; it is fused in fp32"
    )


def test_the_reference_fuses_nothing():
    assert {op.ran for op in report_of(nc.StaticQuantConfig(), "reference").ops} == {"fp32"}

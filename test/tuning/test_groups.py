"""What gets one decision."""

import torch
from torch import nn

import nc
from nc.tuning.groups import groups_of


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 4
        return self.out(scores.softmax(-1) @ self.v(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.two(self.one(x).relu())


def found(model, x, fused=()):
    prepared = nc.prepare(model.eval(), nc.StaticQuantConfig(), example_inputs=x, backend="reference")
    names = {operator.name for operator in prepared.graph.operators if operator.quantizable}
    return [g.operators for g in groups_of(prepared.graph.module, names, fused)]


def test_linears_of_one_tensor_and_both_products_of_an_attention():
    assert found(Attention(), torch.randn(2, 5, 16)) == [("q", "k", "v"), ("matmul", "matmul_1"), ("out",)]


def test_products_without_a_softmax_between_them_are_apart():
    class Products(nn.Module):
        def forward(self, x):
            return (x @ x.transpose(-1, -2)) @ x

    assert found(Products(), torch.randn(2, 5, 16)) == [("matmul",), ("matmul_1",)]


def test_a_sum_with_the_convolution_that_it_adds():
    assert found(Residual(), torch.randn(1, 4, 8, 8)) == [("one",), ("two", "add")]


def test_what_an_engine_computes_in_one_step():
    linears = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fused = [("0", "relu", "2"), ("4",), ("other",)]
    assert found(linears, torch.randn(2, 8), fused) == [("0", "2"), ("4",)]


def test_calls_of_one_module():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.fc(x).relu())

    assert found(Twice(), torch.randn(2, 8)) == [("fc", "fc@1")]


def test_equal_blocks_have_the_same_pattern():
    model = nn.Sequential(Attention(), Attention()).eval()
    x = torch.randn(2, 5, 16)
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x, backend="reference")
    groups = groups_of(prepared.graph.module, {d.operator for d in prepared.plan.quantized})
    assert [g.pattern for g in groups[:3]] == [g.pattern for g in groups[3:]]
    assert str(groups[0]) == "0.q + 0.k + 0.v"

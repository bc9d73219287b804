"""Equal calls of a graph are computed once, where their values are equal whenever they are computed."""

import torch
from torch import fx

from nc.capture.rewrites import share_equal

aten = torch.ops.aten


def shared(function, *inputs):
    """Return the names of the calls that are left, and whether the results stay the same."""
    module = fx.symbolic_trace(function)
    expected = function(*(x.clone() for x in inputs))
    share_equal(module)
    module.recompile()
    got = module(*(x.clone() for x in inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return [n.target._opname for n in module.graph.nodes if n.op == "call_function"]


def test_chains_of_equal_calls():
    def function(x, y):
        return [aten.add.Tensor(aten.mul.Tensor(x, y), 1) for _ in range(3)]

    assert shared(function, torch.randn(3), torch.randn(3)) == ["mul", "add"]


def test_other_arguments_are_other_calls():
    def function(x):
        return aten.mean.dim(x, [0]), aten.mean.dim(x, [1]), aten.mean.dim(x, [0], True)

    assert shared(function, torch.randn(3, 3)) == ["mean"] * 3


def test_memory_that_changes_is_read_each_time():
    """Also by way of a view, before and after the change."""

    def function(x, y):
        view = aten.select.int(x, 0, 0)
        before = aten.mul.Tensor(view, 2)
        aten.add_.Tensor(x, y)
        return before, aten.mul.Tensor(aten.select.int(x, 0, 0), 2), aten.neg.default(y), aten.neg.default(y)

    names = shared(function, torch.randn(2, 3), torch.randn(2, 3))
    assert (names.count("mul"), names.count("neg")) == (2, 1)


def test_random_numbers_are_drawn_each_time():
    module = fx.symbolic_trace(lambda x: (aten.rand_like.default(x), aten.rand_like.default(x)))
    share_equal(module)
    assert sum(n.op == "call_function" for n in module.graph.nodes) == 2

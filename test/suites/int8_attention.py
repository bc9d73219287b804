"""Attention of int8 codes, and the same codes in float64."""

import pytest
import torch
from models import library
from torch import fx, nn

from nc.backends.native import planned as model
from nc.backends.native.operators import int8_attention
from nc.backends.native.operators.matmul import product
from nc.backends.native.plans.execution_plan import FunctionCall
from nc.backends.native.qdq_rewrites import quantize
from nc.graph.fx_utils import call_function
from nc.kernels import cpu
from nc.kernels.onednn.runner import runner

#: Scales of q, k, v and the result.
SCALES = 0.05, 0.04, 0.02, 0.003


class Case:
    """Codes, and a graph of the two products with a softmax between them, whose own operators compute in fp32."""

    def __init__(
        self,
        q,
        k,
        v,
        before=(),
        behind=(),
        zeros=(128, 0, 0, 120),
        scale=1 / 255,
        dtype=torch.uint8,
        dim=-1,
        in_rows=True,
    ):
        self.codes, self.before, self.behind = (q, k if in_rows else k.mT, v), before, behind
        self.zeros, self.scale, self.dtype, self.factor = zeros, scale, dtype, q.shape[-1] ** -0.5
        graph = fx.Graph()
        names = (
            "q",
            "k",
            "v",
            *(f"b{i}" for i in range(len(before))),
            *(f"a{i}" for i in range(len(behind))),
        )
        nodes = [graph.placeholder(name) for name in names]
        others = nodes[3 : 3 + len(before)], nodes[3 + len(before) :]
        s, zq, zk, zv, zy = SCALES, *zeros
        columns = (
            call_function(graph, torch.ops.aten.transpose.int, (nodes[1], -1, -2)) if in_rows else nodes[1]
        )
        given_ = (others[0], [how for how, _ in before], 1.0, 0, torch.float32)
        scores = call_function(
            graph, product(), (nodes[0], s[0], zq, columns, s[1], zk, self.factor, *given_)
        )
        softmax = call_function(graph, torch.ops.aten.softmax.int, (scores, dim))
        codes = call_function(graph, quantize, (softmax, scale, 0))
        given_ = (others[1], [how for how, _ in behind], s[3], zy, dtype)
        result = call_function(graph, product(), (codes, scale, 0, nodes[2], s[2], zv, 1.0, *given_))
        graph.output((result,))
        self.module = fx.GraphModule(nn.Module(), graph)
        self.inputs = (q, k, v, *(other for _, other in (*before, *behind)))
        for node, value in zip(nodes, self.inputs, strict=True):
            node.meta["val"] = value

        class Noted(fx.Interpreter):
            def run_node(self, n):
                n.meta["val"] = super().run_node(n)
                return n.meta["val"]

        Noted(self.module).run(*self.inputs)

    def exact(self):
        """In float64: the result of the codes of probabilities that are nearest, in multiples of its scale."""
        (q, k, v), (zq, zk, zv, zy) = (x.double() for x in self.codes), self.zeros
        scores = (q - zq) @ (k - zk).mT * SCALES[0] * SCALES[1] * self.factor
        for how, other in self.before:
            scores = scores + other.double() if how == "add" else scores * other.double()
        values = (torch.softmax(scores, -1) / torch.tensor(self.scale).double()).clamp(max=255).nan_to_num(0)
        result = values.round() @ (v - zv) * self.scale * SCALES[2]
        for how, other in self.behind:
            result = result + other.double() if how == "add" else result * other.double()
        return result if self.dtype is torch.float32 else (result / SCALES[3] + zy).clamp(0, 255)

    def planned(self):
        source = library()
        return model.PlannedModel(
            self.module, source, runner(source.maker.library)[0], lambda: pytest.fail("no plan")
        )

    def check(self, whole=True):
        """The plan's result, twice.

        Probabilities whose codes are a tie within rounding to fp32 may have the other one. Where oneDNN sums in
        16 bits its parts saturate with these codes (`nc.graph.saturation` keeps models from that), so their
        values are not compared.
        """
        call = self.planned()
        expected = self.exact()
        near = SCALES[2] * self.scale * 255 * (1 if self.dtype is torch.float32 else 1 / SCALES[3])
        for _ in range(2):
            (got,) = call(*self.inputs)
            assert got.shape == expected.shape
            assert got.dtype is self.dtype
            if not whole and not cpu.accumulates_wide():
                continue
            error = (got.double() - expected).abs()
            rounding = 0.5001 if self.dtype is torch.uint8 else 1e-5 * expected.abs().max().item()
            assert (error <= rounding + 2 * near).all()
            assert (error <= rounding).double().mean() > 0.97
        (plan,) = call._plans.values()
        assert (
            any(isinstance(e, FunctionCall) and e.function.name == int8_attention.NAME for e in plan.entries)
            is whole
        )
        return got


def codes(*sizes, dtype=torch.int8):
    low, high = (0, 256) if dtype is torch.uint8 else (-128, 128)
    return torch.randint(low, high, sizes, dtype=dtype)


def heads(batch, rows, count, width, dtype=torch.int8):
    """As a linear gives them: heads side by side."""
    return codes(batch, rows, count * width, dtype=dtype).view(batch, rows, count, width).transpose(1, 2)


def case(batch=2, count=3, rows=9, keys=11, width=8, wide=8, **options):
    q, k, v = (
        heads(batch, rows, count, width, torch.uint8),
        heads(batch, keys, count, width),
        heads(batch, keys, count, wide),
    )
    return Case(q, k, v, **options)

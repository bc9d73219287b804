"""Products of two activations in int8 on native.

Attention in its forms, as plans compute it, against the quantized graph.
"""

import itertools

import pytest
import torch
from models import Function, assert_all_int8, assert_planned, quantized, worst_db
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig, available_backends, compare, load
from nc.backends.native import passes
from nc.backends.native.operators import int8_attention, matmul
from nc.kernels import cpu

WHY = available_backends()["native"]
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(WHY), reason=WHY or "it can run")]

LOWEST = torch.finfo(torch.float32).min


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attention(self, x, context=None, bias=None, *, groups=4, factor=0.35, causal=False, window=0):
    """Written out, so that nothing of it depends on how torch decomposes its own."""
    context = x if context is None else context
    q, k, v = heads(self.q(x), 4), heads(self.k(context), groups), heads(self.v(context), groups)
    if groups != 4:
        k, v = (y.repeat_interleave(4 // groups, 1) for y in (k, v))
    scores = q @ k.transpose(-1, -2) * factor
    if causal or window:
        rows = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
        hidden = (rows < 0) | (rows > window if window else rows < 0)
        scores = scores + torch.zeros(scores.shape[-2:]).masked_fill(hidden, LOWEST)
    if bias is not None:
        scores = scores + bias
    return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def layers(groups=4):
    return {
        "q": nn.Linear(32, 32),
        "k": nn.Linear(32, 8 * groups),
        "v": nn.Linear(32, 8 * groups, bias=False),
        "out": nn.Linear(32, 32),
    }


def padding(rows):
    mask = torch.zeros(3, 1, 1, rows)
    mask[1, ..., rows // 2 :] = LOWEST
    return mask


def sdpa(self, x, mask):
    q, k, v = (heads(layer(x), 4) for layer in (self.q, self.k, self.v))
    return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def with_hidden_row(rows):
    mask = torch.ones(3, 1, rows, rows, dtype=torch.bool)
    mask[:, :, 2] = False  # this row attends to nothing: its result is 0
    return mask


X = (3, 6, 32)
#: Forward, heads of keys and values, inputs.
FORMS = {
    "plain": (attention, 4, lambda: (torch.randn(X),)),
    "causal": (lambda self, x: attention(self, x, causal=True), 4, lambda: (torch.randn(X),)),
    "sliding window": (lambda self, x: attention(self, x, window=2), 4, lambda: (torch.randn(X),)),
    "grouped queries": (lambda self, x: attention(self, x, groups=2), 2, lambda: (torch.randn(X),)),
    "one key for all queries": (lambda self, x: attention(self, x, groups=1), 1, lambda: (torch.randn(X),)),
    "cross": (attention, 4, lambda: (torch.randn(X), torch.randn(3, 9, 32))),
    "padding": (lambda self, x, m: attention(self, x, bias=m), 4, lambda: (torch.randn(X), padding(6))),
    "position biases": (
        lambda self, x, b: attention(self, x, bias=b, factor=1.0),
        4,
        lambda: (torch.randn(X), torch.randn(1, 4, 6, 6)),
    ),
    "biases of each head": (
        lambda self, x, b: attention(self, x, bias=b),
        4,
        lambda: (torch.randn(X), torch.randn(4, 1, 6)),
    ),
    "hidden rows": (sdpa, 4, lambda: (torch.randn(X), with_hidden_row(6))),
}


@pytest.mark.parametrize(
    "config", [StaticQuantConfig(), StaticQuantConfig(act_dtype="int8", act_sym=True)], ids=["uint8", "int8"]
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample(10)
def test_attention_is_int8(form, config):
    forward, groups, make = FORMS[form]
    inputs = make()
    q = quantized(Function(forward, **layers(groups)).eval(), inputs, config, "native")
    report = q.report()
    assert_all_int8(report)
    assert {op.operator for op in report.ops if op.kind == "matmul"} == {"matmul", "matmul_1"}
    assert worst_db([q.reference(*inputs)], [q(*inputs)]) > 40
    others = make()
    assert worst_db([q.reference(*others)], [q(*others)]) > 25  # codes at a tie, and what they do behind
    assert not compare(q, "reference").disagreements


@pytest.mark.parametrize(
    ("forward", "shapes"),
    [
        (lambda self, x: self.out(self.a(x) @ self.b(x).transpose(-1, -2)), [(7, 16)]),
        (lambda self, x: self.out(torch.bmm(self.a(x), self.b(x).transpose(-1, -2))), [(3, 7, 16)]),
        (lambda self, x: self.out(self.a(x).unsqueeze(0) @ self.b(x).transpose(-1, -2)), [(3, 7, 16)]),
        (lambda self, x, y: self.out(self.a(x) @ self.b(y).transpose(-1, -2)), [(2, 3, 7, 16), (7, 16)]),
        (lambda self, x: self.out((y := self.a(x)) @ y.transpose(-1, -2)), [(3, 7, 16)]),
        (lambda self, x: self.b((y := self.a(x)) @ y), [(3, 16, 16)]),
        (lambda self, x: self.out(((y := self.a(x)) @ y.transpose(-1, -2) / 3.0).softmax(-1)), [(3, 7, 16)]),
    ],
    ids=[
        "of two dimensions",
        "bmm",
        "broadcast left",
        "broadcast right",
        "with its transpose",
        "with itself",
        "a quotient",
    ],
)
def test_products_of_all_dimensions(forward, shapes):
    model = Function(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16), out=nn.Linear(7, 4)).eval()
    inputs = tuple(map(torch.randn, shapes))
    q = quantized(model, inputs, None, "native")
    assert_all_int8(q.report())
    assert worst_db([q.reference(*inputs)], [q(*inputs)]) > 40
    assert not compare(q, "reference").disagreements


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_any_number_of_rows(rows):
    q = quantized(Function(attention, **layers()).eval(), torch.randn(X), None, "native")
    for batch in (1, 3):
        x = torch.randn(batch, rows, 32)
        expected, got = q.reference(x), q(x)
        assert got.shape == expected.shape == (batch, rows, 32)
        assert not rows or worst_db([expected], [got]) > 25


@pytest.mark.parametrize("how", ["add", "mul"])
@pytest.mark.parametrize("sizes", list(itertools.product((1, 3), (1, 4), (1, 5), (1, 8))))
@pytest.mark.parametrize("codes", [True, False])
@pytest.mark.sample(16)
def test_what_follows_a_product_whose_result_lies_transposed(how, sizes, codes):
    def forward(self, a, b, other):
        result = getattr(torch, how)(a @ b, other).transpose(1, 2)
        return self.out(result.flatten(2)) if codes else result

    inputs = torch.rand(3, 4, 5, 6), torch.rand(3, 4, 6, 8) - 0.5, torch.rand(sizes) + 0.2
    q = quantized(Function(forward, out=nn.Linear(32, 16)).eval(), inputs, None, "native")
    assert_planned(q.report())
    assert worst_db([q.reference(*inputs)], [q(*inputs)]) > 40


def test_a_bias_that_lies_transposed():
    inputs = torch.randn(X), torch.randn(6, 6, 4).permute(2, 0, 1)[None]
    q = quantized(Function(sdpa, **layers()).eval(), inputs, None, "native")

    def of_distances(self, x):
        return sdpa(self, x, self.table(torch.arange(36).reshape(6, 6)).permute(2, 0, 1))

    of_a_table = quantized(
        Function(of_distances, table=nn.Embedding(36, 4), **layers()).eval(), inputs[0], None, "native"
    )
    for model, given in ((q, inputs), (of_a_table, inputs[:1])):
        assert_planned(model.report())
        assert worst_db([model.reference(*given)], [model(*given)]) > 25


@pytest.mark.parametrize("sizes", [(3, 1, 1, 6), (3, 1, 6, 6), (3, 4, 6, 6), (1, 4, 6, 6), (6, 6)])
def test_masks_of_any_size(sizes):
    mask = torch.rand(sizes) > 0.4
    mask[..., 0] = True
    inputs = torch.randn(X), mask
    q = quantized(Function(sdpa, **layers()).eval(), inputs, None, "native")
    assert_planned(q.report())
    assert worst_db([q.reference(*inputs)], [q(*inputs)]) > 25


def test_values_are_those_of_exact_arithmetic():
    """The codes, multiplied in int64 and rescaled in float64."""
    model = Function(lambda self, x, y: x @ y.transpose(-1, -2) * 0.5).eval()
    x, y = torch.rand(2, 3, 40, 33) * 3 - 1, torch.rand(2, 3, 50, 33) * 2
    q = quantized(model, (x, y), None, "native")

    def values(z, steps):
        low, high = z.min().clamp(max=0), z.max()
        scale = (high - low) / steps
        zero_point = torch.round(-low / scale)
        return ((z / scale).round() + zero_point).clamp(0, steps).long() - zero_point.long(), scale

    (a, s), (b, t) = (
        values(x.double(), 255),
        values(y.double(), 255 if cpu.accumulates_wide() else 127),
    )  # else sums are of 16 bits
    expected = (a @ b.transpose(-1, -2)).double() * s * t * 0.5
    assert worst_db([expected], [q(x, y).double()]) > 80
    assert_all_int8(q.report())


@pytest.mark.skipif(not cpu.accumulates_wide(), reason="7 bits are a conversion of their own")
@pytest.mark.needs_plans
def test_the_parts_of_attention_write_codes_themselves():
    """No conversion but that of the input, no copy: values go from kernel to kernel as codes."""
    model = Function(lambda self, x: attention(self, self.norm(x)), norm=nn.LayerNorm(32), **layers())
    x = torch.randn(X)
    q = quantized(model.eval(), x, None, "native")
    names = [(step.name, str(step.kernels[0])) for step in q.report(profile_inputs=x).profile.steps]
    linear, product = "onednn::qlinear_pointwise", "nc_native::qmatmul"
    whole = not int8_attention.why_not_batches()
    parts = [product] if whole else [product, "aten::softmax", product]
    assert [name for name, _ in names] == ["aten::layer_norm", linear, linear, *parts, linear]
    ends = [kernel.rpartition("-> ")[2].partition(")")[0] for _, kernel in names]
    assert ends == ["u8", "u8", "s8", *(["u8"] if whole else ["f32", "u8", "u8"]), "f32"]
    operators = {op.operator: op.kernel for op in q.report(profile_inputs=x).ops}
    assert operators["v"] == "in the kernel of k"


@pytest.mark.needs_plans
def test_a_wrong_product_is_noticed(monkeypatch):
    real = matmul.fuse_products

    def wrong(module):
        real(module)
        for node in module.graph.nodes:
            if "qmatmul" in str(node.target):
                node.update_arg(4, node.args[4] * 1.5)

    monkeypatch.setattr(passes, "fuse_products", wrong)
    q = quantized(Function(attention, **layers()).eval(), torch.randn(X), None, "native")
    report = q.report()
    assert report.details["run by"].startswith("TorchScript: oneDNN primitives compute something else")
    assert {op.operator for op in report.not_int8} == {"matmul", "matmul_1"}


def test_without_plans_products_are_computed_in_fp32_and_the_report_says_so(monkeypatch):
    monkeypatch.setenv("NC_ONEDNN", "none")
    x = torch.randn(X)
    q = quantized(Function(attention, **layers()).eval(), x, None, "native")
    assert {op.operator for op in q.report().ops if op.kind == "matmul" and op.ran != "int8"} == {
        "matmul",
        "matmul_1",
    }
    assert worst_db([q.reference(x)], [q(x)]) > 40


def test_saved_and_loaded(tmp_path):
    x = torch.randn(X)
    q = quantized(Function(attention, **layers()).eval(), x, None, "native")
    q.save(tmp_path / "a")
    again = load(tmp_path / "a", backend="native")
    assert torch.equal(q(x), again(x))
    assert_all_int8(again.report())

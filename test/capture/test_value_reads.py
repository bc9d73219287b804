"""Models that read values of their inputs in Python: the captured path, and its check at each call."""

import pytest
import torch
from models import Function, graph_of
from torch import nn
from torch.nn import functional as F

import nc
from nc.graph.signature import ValueRead


class Branching(nn.Module):
    """Doubles its input where the mask hides something, as models do that skip work for batches without padding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask):
        if not mask.all():
            x = x * mask[..., None] * 2
        return F.relu(self.layer(x))


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
FULL, PADDED = torch.ones(2, 5, dtype=torch.long), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])


def quantized(model, *inputs, backend="reference"):
    with pytest.warns(nc.NCWarning, match="reads values of its inputs in Python"):
        prepared = nc.prepare(model.eval(), nc.StaticQuantConfig(), example_inputs=inputs, backend=backend)
    prepared(*inputs)
    return nc.convert(prepared)


@pytest.mark.parametrize("mask", [FULL, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_the_examples_path_is_captured_and_the_other_one_refused(mask, backend, tmp_path):
    model = Branching().eval()
    q = quantized(model, X, mask, backend=backend)
    other = PADDED if mask is FULL else FULL
    with torch.no_grad():
        torch.testing.assert_close(q(X, mask), model(X, mask), rtol=0, atol=0.05)
    with pytest.raises(
        nc.InputError, match=r"at test_value_reads.py:\d+, in forward.*captured with (True|False)"
    ):
        q(X, other)
    # a longer batch of the same kind is the same path
    assert q(torch.cat([X, X]), torch.cat([mask, mask])).shape == (4, 5, 8)
    q.save(tmp_path / "saved")
    loaded = nc.load(tmp_path / "saved", backend=backend)
    assert torch.equal(loaded(X, mask), q(X, mask))
    assert loaded.graph.signature.reads == q.graph.signature.reads
    with pytest.raises(nc.InputError, match="captured with"):
        loaded(X, other)


def test_a_batch_of_another_path_does_not_count_in_calibration():
    with pytest.warns(nc.NCWarning):
        prepared = nc.prepare(
            Branching().eval(), nc.StaticQuantConfig(), example_inputs=(X, FULL), backend="reference"
        )
    prepared(X, FULL)
    before = {key: observer.seen for key, observer in prepared.observers.items()}
    with pytest.raises(nc.InputError):
        prepared(100 * X, PADDED)
    assert {key: observer.seen for key, observer in prepared.observers.items()} == before


def test_every_way_to_read_is_noted():
    def forward(self, x, n):
        x = x[:, : n.sum()]  # a slice
        x = F.pad(x, (0, 8 - n.sum()))  # a size
        x = x.view(-1, n.max() * 4)  # a size among numbers
        for _ in range(n.max()):  # __index__
            x = x + 1
        return self.layer(x) * int(n[0]) + n[1].item() + float(n.tolist()[0])

    n = torch.tensor([1, 2])
    q = quantized(Function(forward, layer=nn.Linear(8, 8)), X[0], n)
    values = [read.value for read in q.graph.signature.reads]
    assert values == [3, 5, 8, 2, 1, 2, 1, 2]
    with pytest.raises(nc.InputError, match="captured with 3"):
        q(X[0], torch.tensor([2, 2]))


def test_a_truth_value_is_compared_as_one():
    def forward(self, x, mask):
        return self.layer(x) if mask.sum() else x

    q = quantized(Function(forward, layer=nn.Linear(8, 8)), X, PADDED)
    assert [read.value for read in q.graph.signature.reads] == [True]
    assert q(torch.cat([X, X]), torch.cat([FULL, PADDED])).shape == (4, 5, 8)
    with pytest.raises(nc.InputError, match="captured with True and is False"):
        q(X, 0 * PADDED)


def test_a_bound_of_a_slice_that_is_assigned_to_is_read():
    def forward(self, x, n):
        y = self.layer(x).clone()
        y[:, : n.sum()] = 0
        return y + float(n.max())

    model, n = Function(forward, layer=nn.Linear(8, 8)), torch.tensor([1, 2])
    q = quantized(model, X[0], n)
    assert sorted(read.value for read in q.graph.signature.reads) == [2, 3]
    assert (q(X[0], n)[:, :3] == 2).all()


def test_inputs_out_of_range_are_input_errors():
    model = Function(
        lambda self, ids: self.layer(self.table(ids)), table=nn.Embedding(4, 8), layer=nn.Linear(8, 8)
    ).eval()
    ids = torch.tensor([[0, 1, 2]])
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=ids, backend="native")
    with pytest.raises(nc.InputError, match="fails on these inputs"):
        prepared(ids + 4)
    prepared(ids)
    q = nc.convert(prepared)
    for broken in (q, q.reference):
        with pytest.raises(nc.InputError, match="fails on these inputs"):
            broken(ids + 4)


def test_what_is_changed_after_it_was_read_is_checked_as_it_was():
    def forward(self, x, n):
        count = n.sum()
        size = int(count)
        count -= 1
        return self.layer(x)[:, :size] if size > 1 else x

    n = torch.tensor([1, 2])
    q = quantized(Function(forward, layer=nn.Linear(8, 8)), X[0], n)
    assert q(X[0], n).shape == (5, 3)
    assert [read.value for read in q.graph.signature.reads] == [3]


def test_values_that_can_not_change_are_not_checked():
    def forward(self, x):
        if self.limit > 3 and torch.tensor(x.shape[-1]) == 8:
            x = x * 2
        return self.layer(x)

    model = Function(forward, layer=nn.Linear(8, 8))
    model.register_buffer("limit", torch.tensor(4))
    graph = graph_of(model.eval(), X)
    assert graph.signature.reads == ()


def by_chance(self, ids):
    x = self.table(ids)
    return self.layer(x) if torch.randint(0, 2, (1,)).item() else self.layer(x) * 3


def by_layer(self, ids):
    y = self.layer(self.table(ids))
    return y * 2 if (y > 0).any() else y


def by_attention(self, ids):
    x = self.table(ids)
    y = F.scaled_dot_product_attention(x, x, x)
    return self.layer(y) if (y + 1).sum() > 0 else y


def by_fraction(self, ids):
    return self.layer(self.table(ids)) * (2 if (ids / 2).sum().item() > 0 else 3)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (by_chance, "reads a random value"),
        (by_layer, "reads a value that its layers compute"),
        (by_attention, "reads a value that its layers compute"),
        (by_fraction, "reads a floating-point value"),
    ],
)
def test_values_of_data_are_refused(forward, why):
    model = Function(forward, table=nn.Embedding(4, 8), layer=nn.Linear(8, 8)).eval()
    with pytest.raises(
        nc.CaptureError, match=rf"depends on tensor values(.|\n)*{why}, at test_value_reads.py:\d+"
    ):
        nc.prepare(
            model, nc.StaticQuantConfig(), example_inputs=torch.tensor([[0, 1, 2]]), backend="reference"
        )


def test_a_path_that_depends_on_floating_point_inputs_is_refused():
    model = Function(
        lambda self, x: self.layer(x) * 2 if x.sum() > 0 else self.layer(x), layer=nn.Linear(8, 8)
    ).eval()
    with pytest.raises(nc.CaptureError, match="depends on floating-point inputs"):
        nc.prepare(model, nc.StaticQuantConfig(), example_inputs=X, backend="reference")


def test_no_other_format_holds_a_model_that_reads_values(tmp_path):
    q = quantized(Branching(), X, FULL, backend="native")
    with pytest.raises(nc.UnsupportedError, match=r"test_value_reads.py:\d+"):
        nc.export_pt2(q, tmp_path / "model.pt2")
    with pytest.raises(nc.UnsupportedError, match=r"test_value_reads.py:\d+"):
        nc.export_onnx(q, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_stored_value_that_is_no_number_is_refused(tmp_path):
    from nc.storage.graph_json import _decode_read

    assert _decode_read({"value": True, "where": "a.py:1"}) == ValueRead(True, "a.py:1")
    with pytest.raises(TypeError, match="expected a bool or an int"):
        _decode_read({"value": "1", "where": "a.py:1"})


def test_a_model_that_picks_among_nearly_equal_values_says_so():
    def forward(self, x):
        # batch norm is folded into the convolution: the last bit of equal values changes, and with it their
        # order
        return self.norm(self.layer(x)).flatten(1).topk(8).indices

    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean.fill_(0.3)
    norm.running_var.fill_(0.7)
    model = Function(forward, layer=nn.Conv2d(1, 4, 1), norm=norm).eval()
    x = torch.full((2, 1, 8, 8), 0.1) + torch.randn(2, 1, 8, 8) * 1e-8
    with pytest.raises(nc.CaptureError, match="picks among its values .topk.") as caught:
        nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x, backend="reference")
    assert "model.backbone" in str(caught.value)

"""The verdict on accuracy: on calibration data of several batches, by what tasks read of outputs."""

import warnings

import pytest
import torch
from models import MLP, Conv1dNet
from torch import nn

import nc
from nc.calibration import accuracy as module_under_test
from nc.calibration.accuracy import Spread, accuracy_of, rows_of, some_of
from nc.calibration.costly import trouble
from nc.capture.capture import capture
from nc.graph.accuracy import Accuracy
from nc.numerics.metrics import sqnr_db


class Silence(nn.Module):
    """A detector of loud parts: of silence it gives nearly nothing, and static ranges are those of sound."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 16, 5, bias=False), nn.Linear(16, 1, bias=False)

    def forward(self, x):
        return self.head(self.conv(x).abs().mean(-1))


def sound(rows, loud, seed):
    return loud * torch.randn(rows, 1, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize("config", [nc.StaticQuantConfig(), nc.StaticQuantConfig(post=()), "auto"])
def test_a_first_batch_of_silence_is_no_verdict(config, rows):
    """Whether samples are kept for algorithms or not, and however many the first batch fills."""
    torch.manual_seed(0)
    model = Silence().eval()
    batches = [sound(rows, 0.002, 0), *(sound(rows, 1.0, seed) for seed in range(1, 5))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        q = nc.quantize(
            model, config, lambda p: [p(b) for b in batches], example_inputs=batches[0], measure=False,
            backend="reference",
        )  # fmt: skip
    if config != "auto":
        assert sqnr_db(model(batches[0]), q(batches[0])) < 15
    report = q.report()
    assert report.accuracy.sqnr_db > 20
    assert "calibration data" in report.accuracy.data
    assert not report.summary().startswith(("HOPELESS", "LOW"))


def test_a_model_that_loses_much_without_being_hopeless_has_a_word(tmp_path):
    """The worst inputs are not the example's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 12)).eval()
    with torch.no_grad():
        model[0].weight[0] *= 600  # the range of what it reads is that of one column
        model[0].weight[0, 1:] = 0
        model[0].weight[1:, 0] = 0
    batches = [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for batch in batches:
        batch[:, 0] *= 24
    config = nc.StaticQuantConfig(w_granularity="per_tensor", post=())
    with pytest.warns(nc.NCWarning, match=r"LOW accuracy: 1\d\.\d dB against fp32 on 4 batches") as caught:
        q = nc.quantize(
            model, config, lambda p: [p(b) for b in batches], example_inputs=batches[0], measure=False,
            backend="reference",
        )  # fmt: skip
    assert "% of the largest entries are others" in str(caught[0].message)
    report = q.report()
    assert 10 < report.accuracy.sqnr_db < 20
    x = torch.cat(batches)
    others = float((model(x).argmax(-1) != q(x).argmax(-1)).float().mean())
    assert report.accuracy.changed == pytest.approx(others)
    assert "\nLOW accuracy: 1" in str(report)
    assert "config.exclude(" in str(report).split("what to do next")[1]
    nc.save(q, tmp_path / "q")
    assert nc.load(tmp_path / "q").report().accuracy == report.accuracy


@pytest.mark.parametrize(
    ("accuracy", "word"),
    [
        ({"sqnr_db": 20.0}, ""),
        ({"sqnr_db": 19.9}, "LOW"),
        ({"sqnr_db": 10.0}, "LOW"),
        ({"sqnr_db": 9.9}, "HOPELESS"),
        ({"sqnr_db": float("-inf")}, "HOPELESS"),
        ({"sqnr_db": 9.9, "changed": 0.0, "places": 1000}, "LOW"),  # the task reads the same
        ({"sqnr_db": 9.9, "changed": 0.0, "places": 99}, "HOPELESS"),  # which so few places do not show
        ({"sqnr_db": 9.9, "changed": 0.01, "places": 1000}, "HOPELESS"),
    ],
)
def test_the_words(accuracy, word):
    assert trouble(Accuracy(**accuracy)) == word


def test_powers_of_all_batches_are_added_and_the_worst_one_is_named():
    class Wrong(nn.Module):
        def forward(self, x):
            return x + 0.1 * (x.abs().amax() < 2), x.argmax(-1)

    class Right(nn.Module):
        def forward(self, x):
            return x + 0, x.argmax(-1)

    x = [torch.full((1, 4), value) for value in (10.0, 1.0, 10.0)]
    fp32, other = (capture(m, (x[0],), None).module for m in (Right(), Wrong()))
    found, worst = accuracy_of(fp32, other, [(each,) for each in x], "three")
    assert found.sqnr_db == pytest.approx(sqnr_db(torch.cat(x), torch.cat([x[0], x[1] + 0.1, x[2]])))
    assert torch.equal(worst[0], x[1])
    assert (found.changed, found.places) == (0.0, 3)


@pytest.mark.parametrize("calls", [1, 4, 5, 8, 9, 33, 100])
def test_batches_are_evenly_spaced(calls):
    x = torch.randn(16, 16)
    spread = Spread(capture(MLP().eval(), (x,), None).signature)
    for call in range(calls):
        spread.keep((torch.full((16, 16), float(call)),))
    kept = [float(batch[0, 0]) for (batch,) in spread.batches]
    assert 1 <= len(kept) <= module_under_test.KEPT
    steps = {b - a for a, b in zip(kept, kept[1:], strict=False)}
    assert kept[0] == 0
    assert len(steps) <= 1
    assert calls - kept[-1] <= 2 * max(steps, default=1)
    assert {len(batch) for (batch,) in spread.batches} == {8}


def test_at_least_two_batches_are_kept_whatever_their_size(monkeypatch):
    monkeypatch.setattr(module_under_test, "_BYTES", 1)
    spread = Spread(capture(MLP().eval(), (torch.randn(4, 16),), None).signature)
    for _ in range(9):
        spread.keep((torch.randn(4, 16),))
    assert len(spread.batches) == 2


def test_rows_where_their_number_is_free():
    free = capture(Conv1dNet().eval(), (torch.randn(2, 4, 20),), None).signature
    x = torch.randn(9, 4, 20)
    assert torch.equal(rows_of((x,), 3, free)[0], x[::3])
    assert rows_of((x,), 9, free)[0] is x

    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(9, 4, 20) * torch.arange(9.0)[:, None, None]

    assert rows_of((x,), 3, capture(Fixed(), (x,), None).signature)[0] is x


def test_what_is_run_is_bounded_and_two_batches_at_least():
    signature = capture(MLP().eval(), (torch.randn(2, 16),), None).signature
    batches = [(torch.randn(8, 16),) for _ in range(4)]
    sizes = [len(x) for (x,) in some_of(batches, (torch.randn(2, 16),), 2.0, signature, most=16.0)]
    assert sizes == [4, 4, 4, 4]
    assert [len(x) for (x,) in some_of(batches, (torch.randn(2, 16),), 2.0, signature, most=1e9)] == [8] * 4
    assert len(some_of(batches, (torch.randn(2, 16),), 1e9, signature, most=1.0)) == 2


@pytest.mark.parametrize(
    "damage", [{"changed": 2.0}, {"changed": "0"}, {"places": 1.5}, {"data": 5}, {"sqnr_db": None}]
)
def test_what_is_read_is_checked(damage):
    good = Accuracy(sqnr_db=float("inf"), changed=0.5, places=4).to_dict()
    assert Accuracy.from_dict(good) == Accuracy(sqnr_db=float("inf"), changed=0.5, places=4)
    with pytest.raises((TypeError, ValueError)):
        Accuracy.from_dict({**good, **damage})

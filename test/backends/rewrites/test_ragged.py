"""Graphs over rows of tokens: which models have one, and that it gives what the one over padded texts gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suites.padded_texts import encoder, masked, texts
from torch import nn
from torch.nn import functional as F

import nc
from nc.backends.rewrites.ragged.padding import rows_of
from nc.backends.rewrites.ragged.rewrite import Ragged, ragged
from nc.errors import InputError
from nc.process.unavailable import Unavailable

_SAME = 2e-6  # sums of values over tokens are in another order


def quantized_graph(model, example=None, config=None):
    """Return the quantized graph of a model over texts."""
    example = texts(24, 10, 17, 3) if example is None else example
    prepared = nc.prepare(
        model.eval(), config or nc.StaticQuantConfig(), example_inputs=example, backend="reference"
    )
    prepared(**example)
    return nc.convert(prepared, measure=False).graph


def form_of(model, example=None, config=None):
    """Return the quantized graph, and the one over rows or why there is none."""
    graph = quantized_graph(model, example, config)
    return graph, ragged(graph.module, graph.signature)


def assert_same(graph, form, inputs):
    """Assert that both graphs give the same for real tokens, and zeros for others."""
    flat = list(inputs.values())
    rows = rows_of(form, flat)
    assert rows is not None
    with torch.no_grad():
        got = rows.outputs(form, form.module(*rows.inputs))
        expected = graph.module(*flat)
        if form.padded is not None:
            expected = form.padded(*flat)
    real = inputs["attention_mask"].bool()
    for a, b, of_tokens in zip(got, expected, form.of_tokens, strict=True):
        assert a.shape == b.shape
        if of_tokens:
            assert not a[~real].any()
            a, b = a[real], b[real]
        assert (a - b).abs().max() <= _SAME * b.abs().max()


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "roberta", "distilbert", "mpnet", "modernbert", "t5"),
        *(
            "bert-classes",
            "bert-tags",
            "bert-answers",
            "xlm-roberta",
            "electra",
            "albert",
            "bart",
            "m2m100",
            "clip",
            "deberta",
            "deberta-plain",
            "deberta-v2",
            "deberta-v2-tags",
        ),
    ],
)
def test_encoders_have_a_graph_over_rows(name):
    graph, form = form_of(encoder(name))
    assert isinstance(form, Ragged), form
    assert_same(graph, form, texts(33, 1, 20, 7, 33))
    assert_same(graph, form, texts(50, 31))
    assert_same(graph, form, texts(12, 12))


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "mpnet"])
def test_models_that_are_given_no_mask(name):
    """They make one of ones."""
    example = {"input_ids": texts(24, 24, 24)["input_ids"]}
    graph, form = form_of(encoder(name), example)
    assert isinstance(form, Ragged), form
    for inputs in (texts(12, 12), texts(40)):
        flat = [inputs["input_ids"]]
        with torch.no_grad():
            rows = rows_of(form, flat)
            got = rows.outputs(form, form.module(*rows.inputs))
            for a, b in zip(got, (form.padded or graph.module)(*flat), strict=True):
                assert (a - b).abs().max() <= _SAME * b.abs().max()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("convbert", "conv1d"),
        ("fnet", "no attention over tokens"),
        ("mobilebert", "reads some of the tokens"),
    ],
)
def test_why_a_model_has_none(name, why):
    example = texts(24, 10, 17, 3)
    if name == "fnet":  # it knows of no mask
        del example["attention_mask"]
    _, form = form_of(encoder(name), example)
    assert isinstance(form, Unavailable)
    assert why in form.reason


class Small(nn.Module):
    """One layer of attention over embedded tokens; subclasses change a part."""

    heads, width = 2, 16

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(100, self.width), nn.Embedding(64, self.width)
        self.q, self.k, self.v, self.out = (nn.Linear(self.width, self.width) for _ in range(4))

    def bias(self, attention_mask):
        return (1 - attention_mask[:, None, None, :].float()) * -1e9

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def embed(self, input_ids):
        return self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))

    def attend(self, x, attention_mask):
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) * 0.3 + self.bias(attention_mask)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x

    def result(self, x, attention_mask):
        return x

    def forward(self, input_ids, attention_mask):
        return self.result(self.attend(self.embed(input_ids), attention_mask), attention_mask)


class Causal(Small):
    def bias(self, attention_mask):
        n = attention_mask.shape[1]
        seen = torch.ones(n, n).tril().bool() & attention_mask[:, None, None, :].bool()
        return torch.zeros(()).where(seen, -1e9)


class Filled(Small):
    def attend(self, x, attention_mask):
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / 4).masked_fill(attention_mask[:, None, None, :] == 0, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x


class Mean(Small):
    def result(self, x, attention_mask):
        weights = attention_mask[..., None].float()
        return F.normalize((x * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=-1)


class First(Small):
    def result(self, x, attention_mask):
        return self.out(x[:, 0]).tanh(), x


@pytest.mark.parametrize("kind", [Small, Causal, Filled, Mean, First])
def test_ways_to_write_attention_and_what_follows_it(kind):
    graph, form = form_of(kind())
    assert isinstance(form, Ragged), form
    assert_same(graph, form, texts(30, 1, 9, 30))
    assert_same(graph, form, texts(5, 4))
    assert form.firsts == (kind is First)
    assert form.together == (kind is Causal)


class MeanOfAll(Small):
    def result(self, x, attention_mask):
        return x.mean(1)


class Last(Small):
    def result(self, x, attention_mask):
        return x[:, -1]


class Neighbours(Small):
    def result(self, x, attention_mask):
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Soft(Small):
    """Masked keys count a little."""

    def bias(self, attention_mask):
        return (1 - attention_mask[:, None, None, :].float()) * -3


class ByCount(Small):
    """What is added depends on how many tokens are masked."""

    def bias(self, attention_mask):
        return super().bias(attention_mask) + attention_mask.sum(1)[:, None, None, None] * 0.1


class Blind(Small):
    """A token does not see itself."""

    def bias(self, attention_mask):
        return super().bias(attention_mask) - torch.eye(attention_mask.shape[1]) * 1e9


class AcrossTexts(Small):
    def result(self, x, attention_mask):
        return x - x.mean(0, keepdim=True)


class Spread(Small):
    """The mean of a text goes to each of its tokens."""

    def result(self, x, attention_mask):
        return x + (x * attention_mask[..., None]).sum(1, keepdim=True)


class Weak(Small):
    """Masked scores are not hidden."""

    def attend(self, x, attention_mask):
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1)).masked_fill(attention_mask[:, None, None, :] == 0, -0.01)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x


class Scaled(Small):
    """A factor follows what is added to scores."""

    def attend(self, x, attention_mask):
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        n = x.shape[1]
        near = torch.eye(64)[:n, :n]
        scores = (q @ k.transpose(-2, -1) + near) / 8 + self.bias(attention_mask)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x


class ByLength(Small):
    def result(self, x, attention_mask):
        return x * x.shape[1]


class ByTexts(Small):
    def result(self, x, attention_mask):
        return x * x.shape[0]


class ShareOfText(Small):
    def embed(self, input_ids):
        n = input_ids.shape[1]
        return self.words(input_ids) + (torch.arange(n) / n)[None, :, None]


class FromOne(Small):
    def embed(self, input_ids):
        return self.words(input_ids) + self.places(torch.arange(1, input_ids.shape[1] + 1))


class HalfWeighted(Small):
    """Only a part of what is summed is zero for padding."""

    def result(self, x, attention_mask):
        return torch.cat([x * attention_mask[..., None], x], -1).sum(1)


class MaskOfTokens(Small):
    def forward(self, input_ids):
        mask = (input_ids != 1).long()
        return self.attend(self.embed(input_ids), mask)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Weak, "masked_fill) is between the scores and the softmax"),
        (Scaled, "a factor follows add"),
        (ByLength, "computes with a size of the inputs"),
        (ByTexts, "computes with a size of the inputs"),
        (ShareOfText, "computes with a size of the inputs"),
        (FromOne, "gives other places than 0, 1, 2"),
        (HalfWeighted, "reads several tokens"),
        (MaskOfTokens, "masks are computed from input_ids, which holds tokens"),
        (MeanOfAll, "reads several tokens"),
        (Last, "reads some of the tokens"),
        (Neighbours, "over tokens"),
        (Soft, "do not just hide"),
        (ByCount, "masks of"),
        (Blind, "does not see itself"),
        (AcrossTexts, "reads several tokens"),
        (Spread, "reads a value of a text for each of its tokens"),
    ],
)
def test_what_mixes_tokens_has_none(kind, why):
    example = {"input_ids": texts(24, 10)["input_ids"]} if kind is MaskOfTokens else None
    _, form = form_of(kind(), example)
    assert isinstance(form, Unavailable)
    assert why in form.reason


class Best(Small):
    """The number of the largest element of each token."""

    def result(self, x, attention_mask):
        return x, x.argmax(-1)


def test_integers_of_tokens_are_computed_of_their_rows():
    graph, form = form_of(Best())
    assert isinstance(form, Ragged), form
    assert not form.beforehand([*texts(9, 4).values()])
    assert_same(graph, form, texts(9, 4))


def test_a_range_of_all_tokens_depends_on_the_other_texts():
    _, form = form_of(Small(), config=nc.DynamicQuantConfig(act_granularity="per_tensor"))
    assert isinstance(form, Unavailable)
    assert "one range for all tokens" in form.reason


def test_models_of_other_things_than_texts_are_not_asked():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    prepared = nc.prepare(
        model, nc.StaticQuantConfig(), example_inputs=torch.randn(4, 8), backend="reference"
    )
    prepared(torch.randn(4, 8))
    graph = nc.convert(prepared, measure=False).graph
    assert ragged(graph.module, graph.signature) is None


@pytest.fixture(scope="module")
def small():
    return form_of(Small())


@pytest.fixture(scope="module")
def causal():
    return form_of(Causal())


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_any_mask(small, real, seed):
    graph, form = small
    mask = torch.tensor(real)
    ids = torch.randint(5, 90, mask.shape, generator=torch.Generator().manual_seed(seed))
    inputs = masked(ids, mask)
    if mask.any(1).all():
        assert_same(graph, form, inputs)
    else:  # a text without tokens
        assert rows_of(form, list(inputs.values())) is None


@pytest.mark.parametrize(
    ("row", "taken"),
    [([0, 0, 1, 1, 1], True), ([1, 1, 1, 0, 0], True), ([0, 1, 1, 1, 0], True), ([1, 1, 0, 1, 1], False)],
)
def test_places_that_count_follow_each_other(causal, row, taken):
    graph, form = causal
    mask = torch.tensor([row, [1] * 5]).bool()
    inputs = masked(torch.randint(5, 90, mask.shape), mask)
    if taken:
        assert_same(graph, form, inputs)
    else:
        assert rows_of(form, list(inputs.values())) is None


def test_a_first_token_that_is_padding_is_not_left_out():
    _, form = form_of(First())
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    assert rows_of(form, list(masked(torch.randint(5, 90, mask.shape), mask).values())) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda mask: mask * 2, r"mask has values other than 0 and 1, as 2\."),
        (lambda mask: mask - 1, r"mask has values other than 0 and 1, as -1\."),
        (lambda mask: mask[:1], r"mask has the sizes \(1, 9\), and the tokens \(2, 9\)"),
    ],
)
def test_other_masks(small, change, says):
    inputs = texts(9, 4)
    with pytest.raises(InputError, match=says):
        rows_of(small[1], [inputs["input_ids"], change(inputs["attention_mask"])])


def test_more_tokens_than_positions():
    _, form = form_of(encoder("bert"))
    inputs = texts(513)
    with pytest.raises(
        InputError, match=r"input_ids: texts of 513 tokens; the model has positions for 512\."
    ):
        rows_of(form, list(inputs.values()), ["input_ids", "attention_mask"])


class SlicedPlaces(Small):
    """Reads its places from a buffer, as older releases of transformers write it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("all_places", torch.arange(64)[None])

    def embed(self, input_ids):
        return self.words(input_ids) + self.places(self.all_places[:, : input_ids.shape[1]])


@pytest.mark.parametrize("kind", [Small, SlicedPlaces])
def test_the_most_tokens_are_those_that_have_positions(kind):
    graph, form = form_of(kind(), texts(24, 10))
    assert form.longest == 64
    assert_same(graph, form, texts(64, 9, 64))
    with pytest.raises(InputError, match="the model has positions for 64"):
        rows_of(form, list(texts(65).values()))


def test_a_picked_token_is_a_real_one():
    """CLIP reads the first end of a text, wherever the mask hides it."""
    graph, form = form_of(encoder("clip"))
    inputs = texts(20, 7, 12)
    assert form.picked == 1
    rows = rows_of(form, list(inputs.values()))
    assert rows.inputs[-4].tolist() == [19, 26, 38]
    holes = dict(inputs)
    holes["attention_mask"] = inputs["attention_mask"].clone()
    holes["attention_mask"][0, 3:9] = 0
    assert rows_of(form, list(holes.values())) is None or assert_same(graph, form, holes) is None
    hidden = dict(inputs)
    hidden["attention_mask"] = inputs["attention_mask"].clone()
    hidden["attention_mask"][1, 6] = 0
    assert rows_of(form, list(hidden.values())) is None


class LastPicked(Small):
    """Takes the last token that is no padding, as decoders that classify texts do."""

    def result(self, x, attention_mask):
        last = (torch.arange(attention_mask.shape[1]) * attention_mask).argmax(-1)
        return x[torch.arange(x.shape[0]), last]


class NumberedTexts(Small):
    def result(self, x, attention_mask):
        return x + torch.arange(x.shape[0])[:, None, None]


class PlacesOfTexts(Small):
    def result(self, x, attention_mask):
        return x[:, 0] + attention_mask.argmax(-1)[:, None]


class TurnedPick(Small):
    def result(self, x, attention_mask):
        return x.transpose(0, 1)[attention_mask.argmax(-1), torch.arange(x.shape[0])]


def test_the_last_token_is_picked():
    graph, form = form_of(LastPicked(), texts(24, 10, 17))
    assert_same(graph, form, texts(33, 1, 20))
    left = {name: value.flip(1) for name, value in texts(33, 1, 20).items()}
    assert_same(graph, form, left)


@pytest.mark.parametrize("kind", [NumberedTexts, PlacesOfTexts, TurnedPick])
def test_numbers_and_places_of_texts_are_in_no_values(kind):
    _, form = form_of(kind(), texts(24, 10, 17))
    assert isinstance(form, Unavailable)


class Disentangled(Small):
    """Attention with scores by distance, as DeBERTa has it; subclasses change which."""

    def __init__(self):
        super().__init__()
        self.far = nn.Embedding(15, self.width)

    def columns(self, n):
        places = torch.arange(n)
        return (places[:, None] - places[None, :] + 7).clamp(0, 14)

    def attend(self, x, attention_mask):
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        far = self.split(self.far.weight[None]).mT
        column = self.columns(x.shape[1]).expand(x.shape[0], self.heads, -1, -1)
        scores = q @ k.mT + torch.gather(q @ far, -1, column) * 0.5
        scores = scores + torch.gather(k @ far, -1, column).mT + self.bias(attention_mask)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x


class OfLength(Disentangled):
    def columns(self, n):
        return (super().columns(n) + n // 32).clamp(0, 14)


class OfPlaces(Disentangled):
    def columns(self, n):
        return (torch.arange(n)[:, None] + torch.arange(n)[None, :]).clamp(0, 14)


class FarApart(Disentangled):
    def columns(self, n):
        return (super().columns(n) * 2).clamp(0, 14)


class Twice(Disentangled):
    def attend(self, x, attention_mask):
        far = self.split(self.far.weight[None]).mT
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        column = self.columns(x.shape[1]).expand(x.shape[0], self.heads, -1, -1)
        scores = q @ k.mT + torch.gather(q @ far, -1, column) + torch.gather(q @ far, -1, column)
        return self.out(((scores + self.bias(attention_mask)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfOthers(Disentangled):
    def attend(self, x, attention_mask):
        far = self.split(self.far.weight[None]).mT
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        column = self.columns(x.shape[1]).expand(x.shape[0], self.heads, -1, -1)
        scores = q @ k.mT + torch.gather(v @ far, -1, column)
        return self.out(((scores + self.bias(attention_mask)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfTheFirstHead(Disentangled):
    def attend(self, x, attention_mask):
        far = self.split(self.far.weight[None]).mT
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        column = self.columns(x.shape[1]).expand(x.shape[0], 1, -1, -1)
        scores = q @ k.mT + torch.gather(q @ far, -1, column)
        return self.out(((scores + self.bias(attention_mask)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfTexts(Disentangled):
    """Vectors of a head are those of another one where there are several texts."""

    def attend(self, x, attention_mask):
        n = x.shape[1]
        far = self.split(self.far.weight[None])[0].mT.repeat_interleave(x.shape[0], 0)
        q, k, v = (self.split(linear(x)).flatten(0, 1) for linear in (self.q, self.k, self.v))
        column = self.columns(n).expand(q.shape[0], -1, -1)
        scores = (torch.bmm(q, k.mT) + torch.gather(torch.bmm(q, far), -1, column)).view(-1, 2, n, n)
        weights = (scores + self.bias(attention_mask)).softmax(-1).view(-1, n, n)
        return self.out(torch.bmm(weights, v).view(-1, 2, n, self.width // 2).transpose(1, 2).flatten(2))


class RoundedDown(Disentangled):
    def attend(self, x, attention_mask):
        far = self.split(self.far.weight[None]).mT
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        column = self.columns(x.shape[1]).expand(x.shape[0], self.heads, -1, -1)
        added = torch.gather(q @ far, -1, column).div(0.25, rounding_mode="floor")
        scores = q @ k.mT + added + self.bias(attention_mask)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ScoresRoundedDown(Disentangled):
    def attend(self, x, attention_mask):
        far = self.split(self.far.weight[None]).mT
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        column = self.columns(x.shape[1]).expand(x.shape[0], self.heads, -1, -1)
        scores = (q @ k.mT).div(0.25, rounding_mode="floor") + torch.gather(q @ far, -1, column)
        return self.out(((scores + self.bias(attention_mask)).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (OfTheFirstHead, "(gather) is between the scores and the softmax"),
        (OfTexts, "depends on the length of the texts, or their number"),
        (ScoresRoundedDown, "(div) is between the scores and the softmax"),
        (RoundedDown, "(div) is between the scores and the softmax"),
        (OfLength, "depends on the length of the texts"),
        (OfPlaces, "depends on more than the distance"),
        (FarApart, "not next to each other"),
        (Twice, "two products of queries"),
        (OfOthers, "other than its queries and keys"),
    ],
)
def test_scores_that_are_of_more_than_distances(model, why):
    _, form = form_of(model())
    assert isinstance(form, Unavailable)
    assert why in form.reason


def test_scores_by_distance():
    graph, form = form_of(Disentangled())
    assert isinstance(form, Ragged), form
    for lengths in ((33, 1, 20, 7, 33), (50, 31), (64, 2)):
        assert_same(graph, form, texts(*lengths))

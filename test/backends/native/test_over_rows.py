"""Encoders on native: real tokens only, one plan for any mix of lengths, and the same bits in any batch."""

import concurrent.futures
import contextlib
import functools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suites.padded_texts import encoder, masked, texts
from torch import nn
from torch.nn import functional as F

import nc
from nc.backends.native.plans import any_sizes, row_linears
from nc.backends.native.plans.affine import Affine, Unfit, fitted, placed
from nc.backends.native.plans.family import on_line
from nc.backends.rewrites.ragged import rewrite
from nc.errors import InputError
from nc.kernels import cpu
from nc.kernels.onednn import primitives

pytestmark = [pytest.mark.needs_plans, pytest.mark.isas]


@contextlib.contextmanager
def on_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CONFIGS = {
    "static": nc.StaticQuantConfig,
    "dynamic": nc.DynamicQuantConfig,
    "bf16": functools.partial(nc.StaticQuantConfig, w_dtype="bf16", act_dtype="bf16"),
}
if row_linears.why_unavailable(row_linears.BF16) or cpu.machine_lacks([cpu.BF16]):
    del CONFIGS["bf16"]


def converted(name, config, **options):
    example = texts(24, 10, 17, 3)
    prepared = nc.prepare(encoder(name), CONFIGS[config](), example_inputs=example, backend="native")
    for seed in range(3):
        prepared(**texts(30, 12, seed=seed))
    return nc.convert(prepared, measure=False, **options)


@pytest.fixture(scope="module", params=CONFIGS)
def both(request):
    """A model that leaves padding out, and the same one that computes it."""
    rows = converted("bert", request.param)
    if rows.engine.texts is None:
        pytest.skip(rows.engine.report().details["padding"])
    return rows, converted("bert", request.param, padding="computed")


def tensors(outputs):
    return [value for value in outputs.values() if isinstance(value, torch.Tensor)]


def assert_same(both, inputs):
    """Assert that real tokens and texts have the same bits, and padding zeros."""
    rows, padded = both
    got, expected = tensors(rows(**inputs)), tensors(padded(**inputs))
    real = inputs["attention_mask"].bool()
    for a, b in zip(got, expected, strict=True):
        if a.dim() == 3:
            assert not a[~real].any()
            a, b = a[real], b[real]
        assert_alike(a, b)


def assert_alike(a, b, noise=1e-4):
    """Assert equality, but for sums of attention in fp32, which are in another order than with padding."""
    torch.testing.assert_close(a, b, rtol=0, atol=5e-2 if a.dim() < 2 else 0.2)
    assert (a - b).pow(2).mean() <= noise * b.pow(2).mean()


@pytest.mark.parametrize("config", CONFIGS)
def test_memory_is_for_all_rows(config):
    """Functions in C keep rows up to the next multiple of 16, and memory is for little more than a call needs."""
    rows, padded = (converted("bert", config, padding=padding) for padding in ("skipped", "computed"))
    if rows.engine.texts is None:
        pytest.skip("no kernel for attention over texts")
    for count in (1, 15, 17, 20, 24, 33, 40, 49, 56):
        found = []
        thread = threading.Thread(target=lambda n=count, f=found: f.append(tensors(rows(**texts(n)))))
        thread.start()  # a thread has memory of its own, which grows with its calls
        thread.join()
        for a, b in zip(found[0], tensors(padded(**texts(count))), strict=True):
            assert_alike(a, b)


def test_inputs_with_gaps(both):
    rows, _ = both
    ids = torch.randint(5, 90, (4, 40))[:, ::2]
    mask = torch.ones(1, 1, dtype=torch.long).expand(4, 20)
    for some in (ids, ids[:1]):
        wanted = rows(some.contiguous(), mask[: len(some)].contiguous())
        got = rows(some, mask[: len(some)])
        pairs = zip(tensors(got), tensors(wanted), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_graph_over_rows_that_computes_something_else_is_not_used(monkeypatch):
    real = rewrite._take_first

    def second(graph, node, firsts):
        real(graph, node, firsts)
        (chosen,) = (
            n for n in graph.nodes if n.target is torch.ops.aten.index_select.default and n.args[2] is firsts
        )
        with graph.inserting_before(chosen):
            other = graph.call_function(torch.ops.aten.clamp.default, (firsts,), {"min": 1})
        other.meta.update(firsts.meta, operator_name="clamp")
        chosen.args = (*chosen.args[:2], other)

    monkeypatch.setattr(rewrite, "_take_first", second)
    q = converted("bert", "static")
    assert "computes something else" in q.engine.report().details["padding"]
    assert q.engine.texts is None


def test_the_report_says_so(both):
    rows, padded = both
    assert rows.engine.report().details["padding"].startswith("not computed")
    assert "padding" not in padded.engine.report().details
    ran = [{op.operator: op.ran for op in model.engine.report().ops} for model in both]
    assert ran[0] == ran[1]
    assert "fp32" not in {how for operator, how in ran[0].items() if operator.endswith("dense")}


def test_lengths(both):
    for lengths in ((24, 10, 17, 3), (1,), (1, 1, 40), (100, 3), (7, 7, 7)):
        assert_same(both, texts(*lengths))


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_any_mask(both, real, seed):
    mask = torch.tensor(real)
    ids = torch.randint(5, 90, mask.shape, generator=torch.Generator().manual_seed(seed))
    rows, padded = both
    inputs = masked(ids, mask)
    if mask[:, 0].all():
        assert_same(both, inputs)
    else:  # padded as a whole: a first token that is padding has a value there
        for a, b in zip(tensors(rows(**inputs)), tensors(padded(**inputs)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_text_has_the_same_bits_in_any_batch(both, threads):
    rows, _ = both
    inputs = texts(40, 13, 1, 29, 40, 2)
    with on_threads(threads):
        together = rows(**inputs)
        for text, length in enumerate((40, 13, 1, 29, 40, 2)):
            alone = rows(**{name: value[text : text + 1, :length] for name, value in inputs.items()})
            assert torch.equal(alone.last_hidden_state[0], together.last_hidden_state[text, :length])
            assert torch.equal(alone.pooler_output[0], together.pooler_output[text])


@pytest.mark.parametrize("name", ["deberta-v2", "deberta-v2-tags", "bert-tags", "bert-classes"])
@pytest.mark.parametrize("mixed", [False, True], ids=["all", "a layer in fp32"])
@pytest.mark.parametrize("config", ["static", "dynamic"])
def test_kernels_are_the_same_for_any_number_of_rows(name, mixed, config):
    """Few outputs, few rows, and products in fp32 have other kernels of oneDNN, which round in another order."""
    chosen = CONFIGS[config]()
    if mixed:
        chosen.set_local(r".*layer\.1\..*", nc.StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    model, example = encoder(name), texts(24, 10, 17, 3)
    prepared = nc.prepare(model, chosen, example_inputs=example, backend="native")
    prepared(**example)
    rows = nc.convert(prepared, measure=False)
    if rows.engine.texts is None:
        pytest.skip(rows.engine.report().details["padding"])
    lengths = (40, 13, 1, 29, 40, 2, *[5] * 40)
    inputs = texts(*lengths)
    together = tensors(rows(**inputs))
    for text, length in enumerate(lengths[:6]):
        alone = tensors(rows(**{name: value[text : text + 1, :length] for name, value in inputs.items()}))
        for a, b in zip(alone, together, strict=True):
            b = b[text]
            assert torch.equal(a[0], b[:length] if b.shape[0] == 40 else b)


def test_threads_do_not_change_bits(both):
    rows, _ = both
    inputs = texts(60, 13, 1, 29)
    with on_threads(1):
        one = tensors(rows(**inputs))
    with on_threads(2):
        two = tensors(rows(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_no_size_makes_a_plan(both, monkeypatch):
    rows, _ = both
    rows(**texts(500, 500, 3))
    monkeypatch.setattr(any_sizes, "family_of", lambda *_: pytest.fail("a plan is made"))
    from nc.backends.native.plans import recorder

    monkeypatch.setattr(recorder.Recorder, "record", lambda *_: pytest.fail("a plan is recorded"))
    monkeypatch.setattr(primitives.Maker, "_primitive", lambda *_, **__: pytest.fail("a kernel is made"))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(
            1, 60, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator
        )
        rows(**texts(*lengths.tolist(), seed=seed))


def test_results_are_the_callers_own(both):
    rows, _ = both
    first = tensors(rows(**texts(9, 9)))
    kept = [value.clone() for value in first]
    rows(**texts(9, 4, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_from_several_threads(both):
    rows, _ = both
    mixes = [
        texts(*lengths, seed=seed) for seed, lengths in enumerate([(5, 30), (17,), (2, 2, 2, 50), (33, 1)])
    ]
    expected = [tensors(rows(**inputs)) for inputs in mixes]
    start = threading.Barrier(4)

    def run(index):
        start.wait()
        return [tensors(rows(**mixes[(index + i) % 4])) for i in range(8)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for index, found in enumerate(pool.map(run, range(4))):
            for i, outputs in enumerate(found):
                wanted = expected[(index + i) % 4]
                assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))


def test_a_saved_model(both, tmp_path):
    rows, _ = both
    nc.save(rows, tmp_path / "model")
    inputs = texts(9, 30, 2)
    again = nc.load(tmp_path / "model", backend="native")
    assert again.engine.report().details["padding"].startswith("not computed")
    pairs = zip(tensors(rows(**inputs)), tensors(again(**inputs)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    whole = nc.load(tmp_path / "model", backend="native", padding="computed")
    assert whole(**inputs).last_hidden_state[0, 9:].any()


def test_texts_in_one_row(both):
    rows, padded = both
    inputs = texts(9, 30, 2)
    real = inputs["attention_mask"].bool()
    starts = torch.tensor([0, 9, 39, 41], dtype=torch.int32)
    row = {"input_ids": inputs["input_ids"][real][None], "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    row |= {"max_length_q": 30, "max_length_k": 30}
    places = torch.cat([torch.arange(n) for n in (9, 30, 2)])[None]
    expected = rows(**inputs)
    got = rows(**row, position_ids=places)
    assert torch.equal(got.last_hidden_state[0], expected.last_hidden_state[real])
    assert torch.equal(got.pooler_output, expected.pooler_output)
    assert padded(**row).last_hidden_state.shape == got.last_hidden_state.shape


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"cu_seq_lens_q": torch.tensor([0, 5, 3, 11])},
            r"cu_seq_lens_q is \[0, 5, 3, 11\]: .* rise from 0 to 11",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 10])}, "cu_seq_lens_q .* rise from 0 to 11"),
        ({"cu_seq_lens_q": torch.tensor([1, 11])}, "cu_seq_lens_q .* rise from 0 to 11"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 11.0])}, "cu_seq_lens_q: expected integers"),
        ({"cu_seq_lens_k": torch.tensor([0, 4, 11])}, "cu_seq_lens_k differs from cu_seq_lens_q"),
        ({"position_ids": torch.arange(11)[None]}, "position_ids: the model counts them from 0"),
        ({"input_ids": torch.ones(11, dtype=torch.long)}, r"input_ids: .* one row, \[1, tokens\]"),
    ],
)
def test_other_rows(both, change, says):
    row = {"input_ids": torch.ones(1, 11, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 5, 11])}
    with pytest.raises(InputError, match=says):
        both[0](**row | change)


def test_other_masks(both):
    inputs = texts(9, 4)
    with pytest.raises(InputError, match="attention_mask has values other than 0 and 1"):
        both[0](inputs["input_ids"], inputs["attention_mask"] * 3)
    with pytest.raises(InputError, match="input_ids: texts of 513 tokens"):
        both[0](**texts(513))


@pytest.mark.sample(4)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "name",
    ["roberta", "mpnet", "modernbert", "distilbert", "t5", "albert", "bert-answers", "bert-tags", "clip"]
    + ["deberta", "deberta-plain", "deberta-v2", "deberta-v2-tags"],
)
def test_architectures(name, config):
    rows, padded = converted(name, config), converted(name, config, padding="computed")
    said = rows.engine.report().details["padding"]
    assert rows.engine.texts is not None, said
    # over rows, attention with scores by distance is in fp32
    noise = 1e-2 if name.startswith("deberta") and config == "static" else 1e-4
    for lengths in ((24, 10, 17, 3), (1,), (70, 3)):
        inputs = texts(*lengths)
        real = inputs["attention_mask"].bool()
        for a, b in zip(tensors(rows(**inputs)), tensors(padded(**inputs)), strict=True):
            if a.shape[:2] == real.shape:
                a, b = a[real], b[real]
            assert_alike(a, b, noise)


def test_what_is_in_fp32_says_why():
    rows = converted("deberta-v2", "static")
    ran = {op.operator: op for op in rows.engine.report().ops if op.ran == "fp32" and "matmul" in op.operator}
    reasons = {op.reason for name, op in ran.items() if name.endswith(("self.matmul", "self.matmul_3"))}
    assert reasons == {"scores by distance are added: one function computes this attention in fp32"}


class Attention(nn.Module):
    """One layer of attention over tokens; subclasses change scores and what follows."""

    heads = 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(100, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def scores(self, q, k):
        return q @ k.transpose(-2, -1)

    def result(self, x):
        return x

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids)
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        scores = self.scores(q, k) + (1 - attention_mask[:, None, None, :].float()) * -1e9
        return self.result((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SharedVectors(Attention):
    """All heads have the same vectors of distances."""

    def __init__(self):
        super().__init__()
        self.far = nn.Parameter(torch.randn(1, 1, 16 // self.heads, 15))

    def scores(self, q, k):
        places = torch.arange(q.shape[2])
        column = (places[:, None] - places[None, :] + 7).clamp(0, 14)
        return super().scores(q, k) + torch.gather(q @ self.far, -1, column.expand(*q.shape[:2], -1, -1))


class GappyWeight(Attention):
    """The rows of a weight in fp32 are not next to each other."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 24)
        self.out.weight = nn.Parameter(torch.randn(16, 24).t())

    def result(self, x):
        return self.out(x)


class VectorWeight(Attention):
    """A weight in fp32 has one dimension."""

    def __init__(self):
        super().__init__()
        self.out = nn.Parameter(torch.randn(16))

    def result(self, x):
        return F.linear(x, self.out)


@pytest.mark.parametrize("kind", [SharedVectors, GappyWeight, VectorWeight])
def test_forms_of_constants(kind):
    """A layer is in int8, all else in fp32."""
    model, example = kind().eval(), texts(24, 10, 17, 3)
    config = nc.StaticQuantConfig(w_dtype="fp32", act_dtype="fp32").set_local("q", nc.StaticQuantConfig())
    rows = nc.quantize(model, config, example_inputs=example, run_fn=lambda m: m(**example), backend="native")
    said = rows.engine.report().details["padding"]
    # oneDNN's product with a vector sums in another order for other numbers of rows on AVX2
    refusals = "no kernel", "something else for fewer texts"
    assert said.startswith("not computed") or any(refusal in said for refusal in refusals)
    inputs = texts(50, 31, 1)
    real = inputs["attention_mask"].bool()
    assert_alike(rows(**inputs)[real], model(**inputs)[real], 1e-3)


def test_padding_is_in_no_statistics():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bert = encoder("bert")

        def forward(self, input_ids, attention_mask):
            return self.bert(input_ids, attention_mask).last_hidden_state

    model = Loud()
    table = model.bert.embeddings.word_embeddings.weight
    before = table[1].clone()
    try:
        with torch.no_grad():
            table[1] = 50 * torch.randn(table.shape[1])  # what padding is embedded as
        found = []
        for width in (0, 40):
            prepared = nc.prepare(
                model, nc.StaticQuantConfig(), example_inputs=texts(24, 24), backend="reference"
            )
            batch = texts(12, 12, width=40)
            prepared(**{name: value[:, : width or 12] for name, value in batch.items()})
            found.append({key: observer.state for key, observer in prepared.observers.items()})
    finally:
        with torch.no_grad():
            table[1] = before
    alone, beside = found
    assert alone.keys() == beside.keys()
    assert any("layer_norm" in key[0] for key in alone)
    for key, state in alone.items():
        if "softmax" not in key[0]:
            assert repr(state)[:300] == repr(beside[key])[:300], key


# ---- numbers that sizes give ----


@pytest.mark.parametrize(
    ("count", "line"), [(1, 16), (16, 16), (17, 20), (24, 24), (25, 28), (32, 32), (33, 40)]
)
def test_lines(count, line):
    assert on_line(count) == line


@given(st.integers(1, 1 << 14), st.sampled_from([4, 8]))
@settings(deadline=None)
def test_a_line_is_not_far(count, parts):
    line = on_line(count, parts)
    assert count <= line <= max(16, (1 + 1 / parts) * count + 1)
    assert on_line(line, parts) == line


SIZES = ((64, 16), (128, 16), (64, 32), (192, 48))


@given(*[st.integers(-9, 99)] * 3)
@settings(deadline=None)
def test_numbers_are_found(base, of_row, of_text):
    values = [[base + rows * of_row + texts * of_text, "a"] for rows, texts in SIZES]
    found = fitted(values, SIZES)
    assert placed(found, 7, 3) == [base + 7 * of_row + 3 * of_text, "a"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([rows * texts for rows, texts in SIZES], "of x is 1024, 2048, 2048, 9216 for"),
        ([rows // 48 for rows, _ in SIZES], "of x is"),
        (["a", "a", "b", "a"], "of x is a or b"),
        ([1, 1, "1", 1], "of x is int or str"),
        ([[1], [1], [1, 1], [1]], "of x has other parts"),
        ([torch.ones(rows) for rows, _ in SIZES], "a constant is another one"),
    ],
)
def test_other_numbers(values, says):
    with pytest.raises(Unfit, match=says):
        fitted(values, SIZES, "of x")


def test_affine():
    assert Affine(1, 2, 3).at(10, 100) == 321

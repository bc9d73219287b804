"""The surface of transformers models: outputs of all kinds, for texts of any length."""

import importlib
import pickle

import pytest
import torch

import nc
from nc.errors import CaptureError, InputError
from nc.numerics.metrics import sqnr_db

transformers = pytest.importorskip("transformers")
nc_hf = importlib.import_module("nc.hf")

LENGTHS = (1, 5, 16, 19)


def small(kind, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=20, **sizes, **options)
    return getattr(transformers, kind)(config).eval()


def inputs(length, rows=3):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, max(1, length - 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def surface(model, **options):
    example = inputs(12)
    config = nc.StaticQuantConfig(act_algo="minmax", post=())
    prepared = nc.prepare(model, config, example_inputs=example, backend="native")
    for length in range(2, 20, 3):
        prepared(**inputs(length))
    return nc_hf.QuantizedTransformer(nc.convert(prepared, measure=False, **options), model.config)


def tensors(outputs):
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("BertModel", {}),
        ("BertForQuestionAnswering", {}),
        ("BertForTokenClassification", {"num_labels": 5}),
        ("BertForSequenceClassification", {"num_labels": 16}),  # as many as tokens that are filled up
        ("BertForMaskedLM", {}),
        ("BertModel", {"output_hidden_states": True}),
        ("BertModel", {"return_dict": False}),
        ("BertForNextSentencePrediction", {}),
    ],
)
def test_outputs_are_those_of_the_texts_alone(kind, options):
    model = small(kind, **options)
    found = surface(model)
    for length in LENGTHS:
        given = inputs(length)
        with torch.no_grad():
            expected, got = tensors(model(**given)), tensors(found(**given))
        assert [tuple(e.shape) for e in expected] == [tuple(g.shape) for g in got]
        alone = tensors(found.quantized(**given))
        kept = given["attention_mask"].bool()
        for one, other in zip(got, alone, strict=True):
            if (
                one.dim() > 1
                and tuple(one.shape[:2]) == tuple(kept.shape)
                and kind != "BertForSequenceClassification"
            ):
                one, other = one[kept], other[kept]
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_lengths_share_plans(monkeypatch):
    found = surface(small("BertModel"), padding="computed")
    asked, forward = [], type(found.quantized).forward

    def noted(self, **given):
        asked.append(given["input_ids"].shape[1])
        return forward(self, **given)

    monkeypatch.setattr(type(found.quantized), "forward", noted)
    for length in (3, 9, 16, 18):
        found(**inputs(length))
    # the first text is computed alone, too, and the model has 20 positions
    assert asked == [3, 16, 16, 16, 18]


def test_lengths_that_are_given_are_the_only_ones(monkeypatch, tmp_path):
    """They are settled at load: the first request computes nothing else, and other processes know them too."""
    surface(small("BertModel")).save_pretrained(tmp_path)
    found = nc_hf.load(tmp_path, lengths=(12, 6), warm=[(3, 6), (3, 12)], padding="computed")
    asked, forward = [], type(found.quantized).forward

    def noted(self, **given):
        asked.append(given["input_ids"].shape[1])
        return forward(self, **given)

    monkeypatch.setattr(type(found.quantized), "forward", noted)
    for length in (1, 6, 7, 12, 13, 18):
        outputs = found(**inputs(length))
        alone = found.quantized(**inputs(length))
        kept = inputs(length)["attention_mask"].bool()
        assert outputs.last_hidden_state.shape == alone["last_hidden_state"].shape
        assert sqnr_db(alone["last_hidden_state"][kept], outputs.last_hidden_state[kept]) > 60
    # 13 is filled up to 16; 18 can't be: the model has 20 positions
    assert asked[::2] == [6, 6, 12, 12, 16, 18]
    assert pickle.loads(pickle.dumps(found)).lengths == (6, 12)


@pytest.mark.parametrize("lengths", [(0,), (-4, 8), (1.5,)])
def test_lengths_are_numbers_of_tokens(lengths, tmp_path):
    surface(small("BertModel")).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="numbers of tokens"):
        nc_hf.load(tmp_path, lengths=lengths)


def test_models_that_mix_neighbouring_tokens_get_texts_alone():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ConvBertConfig(
        vocab_size=64, embedding_size=32, max_position_embeddings=20, **sizes
    )
    found = surface(transformers.ConvBertModel(config).eval())
    for length in (5, 9):
        given = {name: value[1:] for name, value in inputs(length).items()}
        alone = found.quantized(**given)["last_hidden_state"]
        assert torch.equal(found(**given)["last_hidden_state"], alone)


def test_other_arguments_are_refused():
    found = surface(small("BertModel"))
    given = inputs(4)
    with pytest.raises(InputError, match="pixel_values was not among the example inputs"):
        found(**given, pixel_values=torch.randn(1, 3, 4, 4))
    with pytest.raises(InputError, match="output_hidden_states=True"):
        found(**given, output_hidden_states=True)
    assert (found.device.type, found.dtype, found.can_generate()) == ("cpu", torch.float32, False)


def test_arguments_that_transformers_does_not_need_may_be_left_out():
    model = small("BertModel")
    given = inputs(7, rows=2)
    full = {**given, "attention_mask": torch.ones_like(given["input_ids"])}
    full["token_type_ids"] = torch.zeros_like(given["input_ids"])

    def run(prepared):
        for length in (4, 9, 14):
            ids = inputs(length)["input_ids"]
            prepared(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids))

    config = nc.StaticQuantConfig(act_algo="minmax", post=())
    quantized = nc.quantize(model, config, run, example_inputs=full, backend="native", measure=False)
    found = nc_hf.QuantizedTransformer(quantized, model.config)
    short, long = found(input_ids=given["input_ids"]), found(**full)
    assert torch.equal(short.last_hidden_state, long.last_hidden_state)
    with torch.no_grad():
        torch.testing.assert_close(
            short.last_hidden_state,
            model(input_ids=given["input_ids"]).last_hidden_state,
            rtol=0.1,
            atol=0.2,
        )


@pytest.mark.parametrize(
    ("kind", "options", "labels"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, {"labels": torch.tensor([0, 2, 1])}),
        ("BertForSequenceClassification", {"num_labels": 1}, {"labels": torch.tensor([0.5, -1.0, 2.0])}),
        ("BertForTokenClassification", {"num_labels": 5}, {"labels": torch.arange(33).view(3, 11) % 5}),
        ("BertForMaskedLM", {}, {"labels": torch.arange(33).view(3, 11) - 1}),
        (
            "BertForQuestionAnswering",
            {},
            {"start_positions": torch.tensor([1, 0, 7]), "end_positions": torch.tensor([2, 9, 10])},
        ),
    ],
)
def test_labels_give_the_loss_of_transformers(kind, options, labels):
    model = small(kind, **options)
    q = surface(model)
    if "MaskedLM" in kind:
        labels["labels"][0, 0] = -100
    given = inputs(11)
    plain, with_labels = q(**given), q(**given, **labels)
    assert list(with_labels) == ["loss", *plain]
    assert all(torch.equal(with_labels[name], plain[name]) for name in plain)
    with torch.no_grad():
        expected = model(**given, **labels).loss
    assert 0 < abs(with_labels.loss - expected) < 0.02


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("BertModel", "labels"),
        ("BertForQuestionAnswering", "labels"),
        ("BertForTokenClassification", "start_positions"),
    ],
)
def test_labels_without_a_known_loss_are_an_error(kind, labels):
    with pytest.raises(InputError, match=f"{labels}: .* for outputs of "):
        surface(small(kind))(**inputs(11), **{labels: torch.zeros(3, dtype=torch.int64)})


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 writes no buffer there")
def test_a_rope_that_changes_with_the_length_is_named():
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope |= {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.Phi3Config(
        vocab_size=64,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        num_key_value_heads=2,
        pad_token_id=0,
        rope_scaling=rope,
        **sizes,
    )
    example = {"input_ids": inputs(12)["input_ids"], "use_cache": False}
    with pytest.raises(CaptureError, match=r"rotary positions change with the length.*WeightOnlyConfig"):
        nc.prepare(
            transformers.Phi3ForCausalLM(config).eval(), nc.StaticQuantConfig(), example_inputs=example
        )

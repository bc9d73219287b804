"""Quantize a transformers model with data; what transformers' own tools make of the result."""

import importlib
import logging

import numpy as np
import pytest
import torch
from suites.real_minilm import minilm

import nc
from nc.errors import ArtefactCorruptError, ArtefactError, ConfigError, InputError
from nc.numerics.metrics import sqnr_db

transformers = pytest.importorskip("transformers")
nc_hf = importlib.import_module("nc.hf")
data = importlib.import_module("nc.hf.data")

TEXTS = [text for text in minilm.split()[0] if len(text) < 150][:24]
OTHERS = [text for text in minilm.split()[1] if len(text) < 150][:12]
PAIRS, OTHER_PAIRS = list(zip(TEXTS, TEXTS[1:], strict=False)), list(zip(OTHERS, OTHERS[1:], strict=False))


def config():
    return nc.StaticQuantConfig(act_algo="percentile", post=()) + nc.DynamicQuantConfig()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(str(minilm.model_folder()))


def real(kind, **options):
    """MiniLM's encoder, with a head that was not trained."""
    torch.manual_seed(0)
    return getattr(transformers, kind).from_pretrained(str(minilm.model_folder()), **options).float().eval()


TASKS = [
    ("AutoModel", {}, "feature-extraction"),
    ("AutoModelForSequenceClassification", {"num_labels": 3}, "text-classification"),
    ("AutoModelForTokenClassification", {"num_labels": 5}, "token-classification"),
    ("AutoModelForQuestionAnswering", {}, None),
]


#: How large the numbers of a pipeline's answer become.
FULL = {"feature-extraction": 3.0, "text-classification": 1.0, "token-classification": 1.0}


def numbers(answer):
    """Scores, or the numbers of nested lists, flat."""
    flat = np.asarray(answer, dtype=object).ravel()
    return np.array([each["score"] if isinstance(each, dict) else each for each in flat], dtype=float)


@pytest.mark.once
@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "options", "task"), TASKS, ids=[kind for kind, *_ in TASKS])
def test_models_of_all_tasks_are_int8_and_work_in_pipelines(
    tmp_path, tokenizer, caplog, monkeypatch, kind, options, task
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = real(kind, **options)
    pairs = "QuestionAnswering" in kind
    out = tmp_path / "out"
    made = nc_hf.quantize(model, PAIRS if pairs else TEXTS, out, config(), processor=tokenizer, measure=False)
    found = nc_hf.load(out)
    assert type(found).__name__ == type(model).__name__
    ran = {op.ran for op in found.quantized.report().ops if op.kind == "linear"}
    assert ran == {"int8"}
    texts = [list(pair) for pair in OTHER_PAIRS] if pairs else OTHERS
    given = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected, got, again = model(**given), found(**given), made(**given)
    assert list(expected) == list(got)
    for name in expected:
        assert got[name].shape == expected[name].shape
        assert torch.equal(got[name], again[name])
        kept = given["attention_mask"].bool()
        if tuple(expected[name].shape[:2]) == tuple(kept.shape):
            assert sqnr_db(expected[name][kept], got[name][kept]) > 15
    if task is not None:
        of_folder = transformers.AutoTokenizer.from_pretrained(str(out))
        one, other = (
            transformers.pipeline(task, model=each, tokenizer=words)
            for each, words in ((model, tokenizer), (found, of_folder))
        )
        assert abs(numbers(one(OTHERS[0])) - numbers(other(OTHERS[0]))).max() < 0.1 * FULL[task]
        assert "not supported" not in caplog.text


def test_without_nc_the_folder_is_refused(tmp_path, tokenizer):
    nc_hf.quantize(
        real("AutoModel"), TEXTS[:16], tmp_path / "out", config(), processor=tokenizer, measure=False
    )
    with pytest.raises(OSError, match="no file named"):
        transformers.AutoModel.from_pretrained(str(tmp_path / "out"))
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_opened_with_its_class_and_tokenizer(tmp_path, tokenizer):
    model = real("AutoModelForSequenceClassification", num_labels=2).to(torch.bfloat16)
    model.save_pretrained(str(tmp_path / "float"))
    tokenizer.save_pretrained(str(tmp_path / "float"))
    rows = [
        {"sentence": text, "label": 0, "idx": index} for index, text in enumerate(TEXTS)
    ]  # as a Dataset's
    found = nc_hf.quantize(tmp_path / "float", rows, tmp_path / "out", config(), measure=False)
    given = tokenizer(OTHERS, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert sqnr_db(model.float()(**given).logits, found(**given)["logits"]) > 12
        assert torch.equal(found(**given)[0], found(**given).logits)
    assert found.config.num_labels == 2


def picture_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config_ = transformers.ViTConfig(**sizes, image_size=64, patch_size=16, num_labels=4)
    return transformers.ViTForImageClassification(config_).eval()


def resized(images, return_tensors):
    """What an image processor gives; transformers' own need torchvision or pillow."""
    assert return_tensors == "pt"
    return {
        "pixel_values": torch.stack(
            [torch.as_tensor(each)[:64, :64].permute(2, 0, 1) / 255 for each in images]
        )
    }


resized.save_pretrained = lambda folder: None


def test_pictures_of_rows(tmp_path):
    model = picture_model()
    numbers = np.random.default_rng(0)
    rows = [{"image": numbers.random((80, 70, 3)).astype(np.float32) * 255, "label": 1} for _ in range(24)]
    found = nc_hf.quantize(model, rows, tmp_path / "out", config(), processor=resized, measure=False)
    given = resized([row["image"] for row in rows], "pt")
    with torch.no_grad():
        assert sqnr_db(model(**given).logits, found(**given).logits) > 25
    assert type(found).__name__ == "ViTForImageClassification"


def test_sounds_of_many_lengths(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    convolutions = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4)}
    positions = {
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    model = transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**sizes, **convolutions, **positions, vocab_size=12)
    ).eval()
    listen = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False)
    numbers = np.random.default_rng(0)
    arrays = [numbers.standard_normal(size).astype(np.float32) for size in numbers.integers(3000, 6000, 32)]
    sounds = [{"array": each, "sampling_rate": 16000} for each in arrays]
    with pytest.raises(InputError, match="8000"):
        nc_hf.quantize(model, [{**sounds[0], "sampling_rate": 8000}], tmp_path / "out", processor=listen)
    found = nc_hf.quantize(model, sounds, tmp_path / "out", config(), processor=listen, measure=False)
    given = listen(arrays[0], sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        expected, got = model(**given).logits, found(**given).logits
    assert got.shape == expected.shape
    assert sqnr_db(expected, got) > 5  # no weight was trained, and the input is noise


def test_batches_need_no_processor_and_the_users_model_stays_as_it_is(tmp_path):
    model = picture_model()
    batches = [{"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.ones(4)} for _ in range(4)]
    model.train()
    with pytest.warns(UserWarning, match="training mode"):
        found = nc_hf.quantize(model, iter(batches), tmp_path / "out", config(), measure=False)
    assert all(module.training for module in model.modules())
    model.eval()
    pictures = batches[0]["pixel_values"]
    with torch.no_grad():
        assert sqnr_db(model(pixel_values=pictures).logits, found(pixel_values=pictures).logits) > 25


def test_a_damaged_configuration_is_named(tmp_path):
    batches = [{"pixel_values": torch.randn(2, 3, 64, 64)} for _ in range(2)]
    nc_hf.quantize(picture_model(), batches, tmp_path / "out", config(), measure=False)
    (tmp_path / "out" / "config.json").write_text("{")
    with pytest.raises(ArtefactCorruptError, match=r"config\.json is not the file that was saved"):
        nc_hf.load(tmp_path / "out")
    (tmp_path / "out" / "nc_checksums.json").unlink()
    with (
        pytest.warns(UserWarning, match="has no nc_checksums"),
        pytest.raises(ArtefactCorruptError, match=r"config\.json could not be read"),
    ):
        nc_hf.load(tmp_path / "out")


def test_models_that_count_positions_from_behind_their_padding_token():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config_ = transformers.RobertaConfig(**sizes, vocab_size=64, max_position_embeddings=20, pad_token_id=1)
    assert data._positions(transformers.RobertaModel(config_)) == 18
    config_ = transformers.BertConfig(**sizes, vocab_size=64, max_position_embeddings=20)
    assert data._positions(transformers.BertModel(config_)) == 20


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "100 or more"),
        ("a text", "100 or more"),
        ([np.zeros((8, 8, 3))], "reads texts"),
        ([{"id": "1", "question": "a", "context": "b"}], r"3 columns of texts \(id, question, context\)"),
        ([{"label": 1}], "no columns of texts"),
        (["a", ("b", "c")], "one kind"),
        ([{"question": "a", "context": "b"}], r"2 columns of texts \(question, context\)"),
        ([{"input_ids": torch.ones(4, dtype=torch.int64)}], "1 dimensions"),
        ([{"input_ids": torch.ones(1, 4, dtype=torch.int64), "bbox": torch.ones(1)}], "has bbox"),
    ],
)
def test_data_that_the_model_does_not_read(tmp_path, tokenizer, given, message):
    with pytest.raises(InputError, match=message):
        nc_hf.quantize(real("AutoModel"), given, tmp_path / "out", processor=tokenizer)
    assert not list(tmp_path.iterdir())


def test_models_that_generate_and_others_are_refused(tmp_path):
    generates = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)
    )
    with pytest.raises(InputError, match="GPT2LMHeadModel is a decoder"):
        nc_hf.quantize(generates, TEXTS, tmp_path / "out")
    with pytest.raises(InputError, match="not a transformers model"):
        nc_hf.quantize(torch.nn.Linear(2, 2), TEXTS, tmp_path / "out")
    with pytest.raises(InputError, match=r"no config\.json"):
        nc_hf.quantize(tmp_path, TEXTS, tmp_path / "out")
    with pytest.raises(InputError, match=r"nowhere: .*Give processor="):
        nowhere = real("AutoModel")
        nowhere.config._name_or_path = str(tmp_path / "nowhere")
        nc_hf.quantize(nowhere, TEXTS, tmp_path / "out")


def test_weights_alone_and_other_folders_are_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="weights alone"):
        nc_hf.quantize(
            real("AutoModel"), TEXTS[:16], tmp_path / "out", nc.WeightOnlyConfig(), processor=tokenizer
        )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ArtefactError, match="not an earlier result"):
        nc_hf.quantize(real("AutoModel"), TEXTS, tmp_path / "mine", processor=tokenizer)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    with pytest.raises(ArtefactError, match=r"not a folder of nc\.hf\.quantize"):
        nc_hf.load(tmp_path / "mine")

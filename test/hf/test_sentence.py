"""A real sentence encoder in sentence-transformers: quantized, saved, loaded, and what others make of the folder."""

import importlib
import json
import pickle
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from suites.real_minilm import minilm

import nc
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactSchemaError, ConfigError, InputError

sentence_transformers = pytest.importorskip("sentence_transformers")

nc_hf = importlib.import_module("nc.hf")  # it needs transformers

TEXTS = [text for text in minilm.split()[0] if len(text) < 300][:48]
OTHERS = ["one", "two short words", *minilm.split()[1][:13]]


@pytest.fixture(scope="module")
def encoder():
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    modules = [Transformer(str(minilm.model_folder())), Pooling(384), Normalize()]
    prompts = {"query": "query: ", "passage": "passage: "}
    return sentence_transformers.SentenceTransformer(modules=modules, prompts=prompts, device="cpu")


@pytest.fixture(scope="module")
def folder(encoder, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "minilm"
    config = nc.StaticQuantConfig(act_algo="percentile") + nc.DynamicQuantConfig()
    nc_hf.quantize_sentence_transformer(encoder, TEXTS, out, config, measure=False)
    return out


@pytest.fixture(scope="module")
def quantized(folder):
    return nc_hf.load_sentence_transformer(folder)


def cosines(one, other):
    return torch.nn.functional.cosine_similarity(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("size", [1, 4, 32])
def test_embeddings_of_any_batch_and_length(encoder, quantized, size):
    found = cosines(encoder.encode(OTHERS, batch_size=size), quantized.encode(OTHERS, batch_size=size))
    assert float(found.min()) > 0.98
    assert float(found.mean()) > 0.995


def test_it_is_int8(quantized):
    report = quantized[0].model.quantized.report()
    products = [op for op in report.ops if op.kind in ("linear", "matmul")]
    assert {op.ran for op in products} == {"int8"}


def test_prompts_truncation_and_settings(encoder, quantized):
    assert quantized.prompts == encoder.prompts
    assert quantized.similarity_fn_name == encoder.similarity_fn_name
    options = {
        "prompt_name": "query",
        "truncate_dim": 64,
        "normalize_embeddings": True,
        "convert_to_tensor": True,
    }
    one, other = encoder.encode(OTHERS, **options), quantized.encode(OTHERS, **options)
    assert one.shape == other.shape == (len(OTHERS), 64)
    assert float(cosines(one, other).min()) > 0.98
    torch.testing.assert_close(other.norm(dim=1), torch.ones(len(OTHERS)))


def test_the_users_model_stays_as_it_is(encoder, folder):
    assert type(encoder[0].model).__name__ == "BertModel"


def test_without_nc_the_folder_does_not_load(folder):
    with pytest.raises(OSError, match="no file named"):
        sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def test_another_process_gives_the_same_embeddings(quantized, folder, tmp_path):
    script = (
        "import sys, torch, nc.hf; q = nc.hf.load_sentence_transformer(sys.argv[1]); "
        "torch.save(torch.as_tensor(q.encode(['one', 'two short words'])), sys.argv[2])"
    )
    file = tmp_path / "found.pt"
    subprocess.run([sys.executable, "-c", script, str(folder), str(file)], check=True)
    assert float(cosines(torch.load(file), quantized.encode(["one", "two short words"])).min()) > 0.99999


def test_an_argument_without_a_place(quantized):
    ids = torch.ones(1, 4, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": ids}
    model = quantized[0].model
    assert model(**inputs, token_type_ids=torch.zeros_like(ids))["last_hidden_state"].shape == (1, 4, 384)
    with pytest.raises(InputError, match="position_ids was not among the example inputs"):
        model(**inputs, position_ids=ids)
    with pytest.raises(InputError, match="output_attentions=True"):
        model(**inputs, output_attentions=True)


@pytest.mark.parametrize("texts", [[], "one text"])
def test_no_texts(encoder, tmp_path, texts):
    with pytest.raises(InputError, match="give a list of sentences"):
        nc_hf.quantize_sentence_transformer(encoder, texts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_alone_need_no_texts(encoder, tmp_path):
    with pytest.raises(ConfigError, match=r"nc\.hf\.QuantizationConfig"):
        nc_hf.quantize_sentence_transformer(encoder, TEXTS[:4], tmp_path / "out", nc.WeightOnlyConfig("int8"))
    assert list(tmp_path.iterdir()) == []
    assert type(encoder[0].model).__name__ == "BertModel"


def test_what_the_user_has_is_not_overwritten(encoder, folder, tmp_path):
    floats = tmp_path / "floats"
    encoder.save_pretrained(str(floats), create_model_card=False)
    before = sorted(path.name for path in floats.iterdir())
    with pytest.raises(ArtefactError, match="not an earlier result"):
        nc_hf.quantize_sentence_transformer(encoder, TEXTS, floats)
    assert sorted(path.name for path in floats.iterdir()) == before


def test_an_earlier_result_is_replaced(encoder, tmp_path):
    for _ in range(2):
        config = nc.StaticQuantConfig(post=())
        nc_hf.quantize_sentence_transformer(encoder, TEXTS[:4], tmp_path / "out", config, measure=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ArtefactCorruptError, "is not JSON"),
        ("{}", ArtefactCorruptError, "is not a JSON array"),
        ('[{"type": "os.path.join", "path": ""}]', ArtefactCorruptError, "No other code is loaded"),
        ('[{"type": "sentence_transformers.nowhere.Kind", "path": ""}]', ArtefactSchemaError, "lacks"),
        ("[3]", ArtefactCorruptError, "No other code is loaded"),
    ],
)
def test_damaged_lists_of_modules(folder, tmp_path, text, error, message):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "modules.json").write_text(text)
    with pytest.raises(ArtefactCorruptError, match=r"modules\.json is not the file"):
        nc_hf.load_sentence_transformer(copy)
    (copy / "nc_checksums.json").unlink()
    with pytest.warns(UserWarning, match="has no nc_checksums"), pytest.raises(error, match=message):
        nc_hf.load_sentence_transformer(copy)


def test_other_folders(tmp_path):
    with pytest.raises(ArtefactError, match=r"no modules\.json"):
        nc_hf.load_sentence_transformer(tmp_path)


def test_a_model_without_an_encoder(tmp_path):
    from sentence_transformers.sentence_transformer.modules import Normalize

    model = sentence_transformers.SentenceTransformer(modules=[Normalize()], device="cpu")
    with pytest.raises(InputError, match="Normalize, has no encoder"):
        nc_hf.quantize_sentence_transformer(model, TEXTS, tmp_path / "out")


def parts(name):
    """Classes that are made of modules, which older versions lack."""
    if not issubclass(getattr(sentence_transformers, name, object), torch.nn.Sequential):
        pytest.skip("needs a newer sentence-transformers")
    return getattr(sentence_transformers, name)


def recipe():
    return nc.StaticQuantConfig(act_algo="percentile", post=()) + nc.DynamicQuantConfig()


@pytest.mark.exhaustive
def test_a_cross_encoder_keeps_its_scores_and_its_function(tmp_path):
    transformers = pytest.importorskip("transformers")
    kind = parts("CrossEncoder")
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(minilm.model_folder()), num_labels=1
    ).float()
    model.save_pretrained(str(tmp_path / "float"))
    transformers.AutoTokenizer.from_pretrained(str(minilm.model_folder())).save_pretrained(
        str(tmp_path / "float")
    )
    ranker = kind(str(tmp_path / "float"), device="cpu", activation_fn=torch.nn.Tanh())
    pairs = list(zip(TEXTS, TEXTS[1:], strict=False))
    found = nc_hf.quantize_sentence_transformer(ranker, pairs, tmp_path / "out", recipe(), measure=False)
    assert type(found) is kind
    assert isinstance(found.activation_fn, torch.nn.Tanh)
    expected, got = ranker.predict(pairs), found.predict(pairs)
    spread = expected.std()
    assert abs(expected - got).mean() < 0.3 * spread
    assert len(found.rank(OTHERS[0], OTHERS[1:4])) == 3
    settings = tmp_path / "out" / "config_sentence_transformers.json"
    settings.write_text(settings.read_text().replace("torch.nn.modules.activation.Tanh", "os.system"))
    (tmp_path / "out" / "nc_checksums.json").unlink()
    with (
        pytest.warns(UserWarning, match="has no nc_checksums"),
        pytest.raises(ArtefactCorruptError, match="No other code is loaded"),
    ):
        nc_hf.load_sentence_transformer(tmp_path / "out")


@pytest.mark.exhaustive  # a vocabulary of 30,522 for each token takes minutes
def test_sparse_and_multi_vector_encoders(tmp_path):
    sparse, vectors = parts("SparseEncoder"), parts("MultiVectorEncoder")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    folder = str(minilm.model_folder())
    model = sparse(modules=[Transformer(folder, transformer_task="fill-mask"), SpladePooling()], device="cpu")
    found = nc_hf.quantize_sentence_transformer(model, TEXTS, tmp_path / "sparse", recipe(), measure=False)
    assert type(found) is sparse
    assert float(cosines(model.encode(OTHERS).to_dense(), found.encode(OTHERS).to_dense()).min()) > 0.98
    many = vectors(folder, device="cpu")
    found = nc_hf.quantize_sentence_transformer(many, TEXTS, tmp_path / "many", recipe(), measure=False)
    assert type(found) is vectors
    for one, other in zip(many.encode(OTHERS), found.encode(OTHERS), strict=True):
        assert one.shape == other.shape
        assert float(cosines(one, other).mean()) > 0.98


def test_other_processes_open_the_folder_again(quantized, tmp_path):
    """As the pools of `encode` do, which send the model to each of their processes."""
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(quantized))
    numpy.save(tmp_path / "expected.npy", quantized.encode(OTHERS))
    (tmp_path / "texts.json").write_text(json.dumps(OTHERS))
    code = (
        "import json, pickle, sys, numpy; from pathlib import Path; here = Path(sys.argv[1]); "
        "model = pickle.loads((here / 'model.pickle').read_bytes()); "
        "found = model.encode(json.loads((here / 'texts.json').read_text())); "
        "assert numpy.allclose(found, numpy.load(here / 'expected.npy'), atol=1e-5)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "model.pickle").stat().st_size < 4_000_000  # tokenizer and settings, no weights

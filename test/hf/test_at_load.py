"""Real weights, quantized while transformers loads them."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from suites.real_minilm import minilm

import nc
from nc.errors import ArtefactCorruptError, ArtefactSchemaError, ConfigError, StateError

transformers = pytest.importorskip("transformers")
nc_hf = importlib.import_module("nc.hf")

TEXTS = ["one", "two short words", *minilm.split()[1][:13]]


def loaded(weights):
    config = nc_hf.QuantizationConfig(weights)
    return transformers.AutoModel.from_pretrained(str(minilm.model_folder()), quantization_config=config)


def embeddings(model):
    return minilm.embed(model, [dict(b) for b in minilm.batches(TEXTS, minilm.load_tokenizer())])


@pytest.mark.parametrize(("weights", "least"), [("int8", 0.99), ("int4", 0.93)])
def test_the_class_stays_and_weights_are_low_bit(weights, least):
    model = loaded(weights)
    assert type(model).__name__ == "BertModel"
    assert nc.report(model).weight_shares[weights] > 0.4  # embeddings are the rest
    with torch.no_grad():
        found = torch.nn.functional.cosine_similarity(embeddings(model), embeddings(minilm.load_model()))
    assert float(found.min()) > least


def test_a_pipeline_takes_it():
    options = {"model_kwargs": {"quantization_config": nc_hf.QuantizationConfig("int8")}}
    pipe = transformers.pipeline("feature-extraction", str(minilm.model_folder()), **options)
    assert torch.as_tensor(pipe("two short words")).shape[-1] == 384
    assert nc.report(pipe.model).weight_shares["int8"] > 0.4


FIVE = int(transformers.__version__.partition(".")[0]) >= 5
five = pytest.mark.skipif(not FIVE, reason="transformers 4 does not ask a quantizer for tensors")


@pytest.mark.skipif(FIVE, reason="transformers 5 can save")
def test_saving_says_how():
    with pytest.raises(StateError, match=r"nc\.save\(model, folder\)"):
        loaded("int8").save_pretrained("anywhere")


@five
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_save_pretrained_and_from_pretrained(tmp_path, weights):
    model = loaded(weights)
    model.save_pretrained(tmp_path / "a")
    found = transformers.AutoModel.from_pretrained(str(tmp_path / "a"))
    found.save_pretrained(tmp_path / "b")
    again = transformers.AutoModel.from_pretrained(str(tmp_path / "b"))
    with torch.no_grad():
        expected = embeddings(model)
        assert torch.equal(embeddings(found), expected)
        assert torch.equal(embeddings(again), expected)
    assert nc.report(found).weight_shares[weights] > 0.4
    assert (tmp_path / "a" / "model.safetensors").stat().st_size < 0.75 * 91e6


@five
def test_sentence_transformers_saves_and_loads_it(tmp_path):
    st = pytest.importorskip("sentence_transformers")
    options = {"model_kwargs": {"quantization_config": nc_hf.QuantizationConfig("int8")}, "device": "cpu"}
    model = st.SentenceTransformer(str(minilm.model_folder()), **options)
    model.save_pretrained(str(tmp_path / "out"))
    found = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert nc.report(found[0].model).weight_shares["int8"] > 0.4
    assert (found.encode(TEXTS) == model.encode(TEXTS)).all()


@five
def test_without_nc_the_folder_fails_and_has_no_random_weights(tmp_path):
    loaded("int8").save_pretrained(tmp_path / "out")
    program = f"import transformers; transformers.AutoModel.from_pretrained({str(tmp_path / 'out')!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "query.weight" in done.stderr + done.stdout
    assert "MISMATCH" in done.stderr + done.stdout


@five
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ("a tensor is missing", ArtefactCorruptError, "have no tensor 'encoder.layer.0"),
        ("a tensor has another dtype", ConfigError, "scale: "),
        ("other layers", ArtefactSchemaError, "lists other low-bit layers"),
        ("no layers", ArtefactSchemaError, "lists other low-bit layers"),
    ],
)
def test_a_folder_that_was_changed_is_refused(tmp_path, change, error, says):
    loaded("int8").save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    name = "encoder.layer.0.output.dense.scale"
    tensors, document = load_file(file), json.loads(config.read_text())
    if change == "a tensor is missing":
        del tensors[name]
    elif change == "a tensor has another dtype":
        tensors[name] = tensors[name].half()
    elif change == "other layers":
        document["quantization_config"]["layers"].pop()
    else:
        del document["quantization_config"]["layers"]
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(document))
    with pytest.raises(error, match=says):
        transformers.AutoModel.from_pretrained(str(tmp_path))


def test_it_is_saved_and_loaded_as_other_low_bit_models(tmp_path):
    model = loaded("int8")
    nc.save(model, tmp_path / "out")
    again = nc.load(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(embeddings(again), embeddings(model))


def test_other_weights():
    with pytest.raises(ConfigError, match="it has int8, int4"):
        nc_hf.QuantizationConfig("int3")
    with pytest.raises(ConfigError, match="has no group_size"):
        nc_hf.QuantizationConfig("int4", group_size=64)

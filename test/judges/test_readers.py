"""Folders of nc.hf.export in the tools that load them, without nc's code.

`make test-judges` runs this in an environment of its own: Optimum Intel asks for an older transformers.
"""

import importlib
import json

import numpy as np
import pytest
import torch
from suites.real_minilm import minilm

import nc
from nc.errors import ArtefactError, ConfigError, StateError

optimum = pytest.importorskip("optimum.intel")
onnxruntime = importlib.import_module("onnxruntime")
sentence_transformers = importlib.import_module("sentence_transformers")
transformers = importlib.import_module("transformers")
nc_hf = importlib.import_module("nc.hf")

TEXTS = [text for text in minilm.split()[0] if len(text) < 300][:48]
OTHERS = [text for text in minilm.split()[1] if len(text) < 300][:24]
PAIRS, OTHER_PAIRS = list(zip(TEXTS, TEXTS[1:], strict=False)), list(zip(OTHERS, OTHERS[1:], strict=False))


def least_cosine(a, b):
    """Of rows."""
    return torch.nn.functional.cosine_similarity(torch.as_tensor(a), torch.as_tensor(b)).min().item()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """(Folder of quantized MiniLM, its embeddings, those of fp32)."""
    out = tmp_path_factory.mktemp("encoder") / "q"
    model = sentence_transformers.SentenceTransformer(str(minilm.model_folder()), device="cpu")
    config = nc.StaticQuantConfig(act_algo="percentile")
    q = nc_hf.quantize_sentence_transformer(model, TEXTS, out, config, measure=False)
    return out, q.encode(OTHERS), model.encode(OTHERS)


@pytest.fixture(scope="module")
def exported(encoder, tmp_path_factory):
    """Format → (folder, what export told)."""
    place = tmp_path_factory.mktemp("exported")
    return {
        format: (place / format, nc_hf.export(encoder[0], place / format, format))
        for format in ("onnx", "openvino")
    }


def check(encoder, got):
    """Embeddings are as near to fp32 as nc's own, and near to nc's."""
    _, own, fp32 = encoder
    assert np.abs(got - fp32).max() > 1e-3  # they are none of a float model
    assert least_cosine(got, own) > 0.97
    assert least_cosine(got, fp32) > least_cosine(own, fp32) - 0.02


def test_sentence_transformers_loads_the_openvino_folder(encoder, exported):
    folder, told = exported["openvino"]
    assert len(told.int8) >= 37
    model = sentence_transformers.SentenceTransformer(str(folder), backend="openvino", device="cpu")
    check(encoder, model.encode(OTHERS))


def test_optimum_intel_loads_the_openvino_folder(encoder, exported):
    folder, _ = exported["openvino"]
    model = optimum.OVModelForFeatureExtraction.from_pretrained(str(folder), subfolder="openvino")
    given = transformers.AutoTokenizer.from_pretrained(str(folder))(OTHERS, padding=True, return_tensors="pt")
    mask = given["attention_mask"][..., None]
    hidden = model(**given).last_hidden_state
    check(encoder, torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy())


def test_fastembed_loads_the_onnx_folder(encoder, exported):
    fastembed = importlib.import_module("fastembed")
    described = importlib.import_module("fastembed.common.model_description")
    fastembed.TextEmbedding.add_custom_model(
        "nc/minilm",
        described.PoolingType.MEAN,
        True,
        described.ModelSource(hf="nc/minilm"),
        dim=384,
        model_file="onnx/model.onnx",
    )
    model = fastembed.TextEmbedding("nc/minilm", specific_model_path=str(exported["onnx"][0]))
    check(encoder, np.stack(list(model.embed(OTHERS))))


def test_the_onnx_folder_is_what_text_embeddings_inference_looks_for(encoder, exported):
    # backends/ort/src/lib.rs of that server: names of files, of inputs, and the first output that it knows
    folder, told = exported["onnx"]
    assert len(told.int8) == 49
    assert not told.others
    for name in ("config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "onnx/model.onnx"):
        assert (folder / name).is_file()
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"))
    names = {value.name for value in session.get_inputs()}
    assert {"input_ids", "attention_mask"} <= names
    assert names <= {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
    assert {value.type for value in session.get_inputs()} == {"tensor(int64)"}
    assert session.get_outputs()[0].name == "last_hidden_state"
    given = transformers.AutoTokenizer.from_pretrained(str(folder))(OTHERS, padding=True, return_tensors="np")
    (hidden,) = session.run(["last_hidden_state"], dict(given))
    mask = given["attention_mask"][..., None]
    pooled = torch.nn.functional.normalize(torch.as_tensor((hidden * mask).sum(1) / mask.sum(1)))
    check(encoder, pooled.numpy())


def test_the_openvino_folder_is_what_openvino_model_server_looks_for(exported):
    # demos/embeddings of that server: a folder with the model and the tokenizer, which gives the model's inputs
    openvino = importlib.import_module("openvino")
    importlib.import_module("openvino_tokenizers")
    folder = exported["openvino"][0] / "openvino"
    core = openvino.Core()
    tokenize = core.compile_model(folder / "openvino_tokenizer.xml", "CPU")
    model = core.compile_model(folder / "openvino_model.xml", "CPU")
    ids = tokenize(OTHERS[:4])
    found = model({port.get_any_name(): ids[port.get_any_name()] for port in model.inputs})
    assert found["last_hidden_state"].shape[:2] == ids["input_ids"].shape
    expected = transformers.AutoTokenizer.from_pretrained(str(folder.parent))(OTHERS[:4], padding=True)
    assert ids["input_ids"].tolist() == expected["input_ids"]


def test_classifiers_have_logits_in_all_readers(tmp_path):
    torch.manual_seed(0)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(str(minilm.model_folder()), num_labels=3).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(minilm.model_folder()))
    config = nc.StaticQuantConfig(act_algo="percentile")
    q = nc_hf.quantize(model, PAIRS, tmp_path / "q", config, processor=tokenizer, measure=False)
    given = tokenizer([list(pair) for pair in OTHER_PAIRS], padding=True, return_tensors="pt")
    own = q(**given).logits
    spread = own.std(0).max().item()
    nc_hf.export(q, tmp_path / "openvino", "openvino")
    reader = optimum.OVModelForSequenceClassification.from_pretrained(
        str(tmp_path / "openvino"), subfolder="openvino"
    )
    assert (reader(**given).logits - own).abs().max().item() < 0.5 * spread
    nc_hf.export(q, tmp_path / "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "onnx" / "model.onnx"))
    (logits,) = session.run(["logits"], {name: value.numpy() for name, value in given.items()})
    assert (torch.as_tensor(logits) - own).abs().max().item() < 0.5 * spread


def test_a_cross_encoder_is_loaded_with_the_openvino_backend(tmp_path):
    torch.manual_seed(0)
    model = sentence_transformers.CrossEncoder(str(minilm.model_folder()), num_labels=1, device="cpu")
    config = nc.StaticQuantConfig(act_algo="percentile")
    q = nc_hf.quantize_sentence_transformer(model, PAIRS, tmp_path / "q", config, measure=False)
    nc_hf.export(q, tmp_path / "openvino", "openvino")
    reader = sentence_transformers.CrossEncoder(str(tmp_path / "openvino"), backend="openvino", device="cpu")
    own, got = q.predict(OTHER_PAIRS), reader.predict(OTHER_PAIRS)
    assert np.abs(got - own).max() < max(0.5 * own.std(), 5e-3)


def test_what_is_exported_is_told_and_recorded(exported, encoder):
    folder, told = exported["openvino"]
    record = json.loads((folder / "nc_export.json").read_text())
    assert record["int8"] == list(told.int8)
    assert set(record["others"]) == set(told.others)
    assert all(told.others.values())
    assert "in int8 on OpenVINO 2026" in str(told)
    assert not (folder / "nc").exists()
    assert not list(folder.rglob("*.safetensors"))


def test_earlier_exports_are_replaced_and_nothing_else(encoder, exported, tmp_path):
    nc_hf.export(encoder[0], tmp_path / "out", "onnx", verify="off")
    again = nc_hf.export(encoder[0], tmp_path / "out", "onnx", verify="off")
    assert again.runtime == ""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(ArtefactError, match="not an earlier result"):
        nc_hf.export(encoder[0], tmp_path / "mine")
    with pytest.raises(ArtefactError, match="not an earlier result"):
        nc_hf.export(encoder[0], encoder[0])
    (tmp_path / "out" / "notes.txt").write_text("x")
    with pytest.raises(ArtefactError, match=r"no export wrote \(notes.txt\)"):
        nc_hf.export(encoder[0], tmp_path / "out", "onnx", verify="off")
    assert (tmp_path / "out" / "notes.txt").read_text() == "x"
    assert (tmp_path / "mine" / "notes.txt").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_what_can_not_be_exported_is_refused_with_the_way_out(encoder, tmp_path):
    with pytest.raises(ConfigError, match="onnx, openvino, compressed-tensors"):
        nc_hf.export(encoder[0], tmp_path / "out", "tflite")
    with pytest.raises(ConfigError, match="reads"):
        nc_hf.export(encoder[0], tmp_path / "out", "onnx", target="vllm-cpu")
    with pytest.raises(StateError, match=r"folder that nc\.hf\.quantize"):
        nc_hf.export(minilm.model_folder(), tmp_path / "out")
    with pytest.raises(StateError, match="low-bit weights"):
        nc_hf.export(encoder[0], tmp_path / "out", "compressed-tensors")
    assert list(tmp_path.iterdir()) == []

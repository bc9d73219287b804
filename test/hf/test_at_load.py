"""Real weights, quantized while transformers loads them."""

import importlib

import pytest
import torch
from suites.real_minilm import minilm

import nc
from nc.errors import ConfigError, StateError

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


def test_saving_says_how():
    with pytest.raises(StateError, match=r"nc\.save\(model, folder\)"):
        loaded("int8").save_pretrained("anywhere")


def test_it_is_saved_and_loaded_as_other_low_bit_models(tmp_path):
    model = loaded("int8")
    nc.save(model, tmp_path / "out")
    again = nc.load(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(embeddings(again), embeddings(model))


def test_a_folder_that_claims_to_be_quantized_is_refused(tmp_path):
    model = minilm.load_model()
    model.config.quantization_config = {"quant_method": "nc", "weights": "int8"}
    model.save_pretrained(tmp_path)
    # transformers 4 asks for accelerate first, where that is missing
    with pytest.raises((StateError, ImportError), match="loads weights in float only|accelerate"):
        transformers.AutoModel.from_pretrained(str(tmp_path))


def test_other_weights():
    with pytest.raises(ConfigError, match="it has int8, int4"):
        nc_hf.QuantizationConfig("int3")
    with pytest.raises(ConfigError, match="has no group_size"):
        nc_hf.QuantizationConfig("int4", group_size=64)

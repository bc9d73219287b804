"""No way out of the library gives random weights: each is right, or says the way out."""

import copy
import importlib
import json
import pickle

import pytest
import torch
from suites import at_load_models as models

import nc
from nc import WeightOnlyConfig
from nc.errors import ArtefactCorruptError, ArtefactSchemaError, NCError, StateError, UnsupportedError

transformers = pytest.importorskip("transformers")
nc_hf = importlib.import_module("nc.hf")

FIVE = int(transformers.__version__.partition(".")[0]) >= 5
five = pytest.mark.skipif(not FIVE, reason="transformers 4 does not ask a quantizer for tensors")
#: One for each way in which transformers stores tensors, and initializes and builds layers.
SHORT = (
    "BertForSequenceClassification",
    "GPT2LMHeadModel",
    "ViTForImageClassification",
    "PatchTSTForPrediction",
    "Wav2Vec2ForCTC",
    "Mamba2ForCausalLM",
    "Qwen2ForCausalLM",
    "MixtralForCausalLM",
)
#: Their experts are stacked.
STACKED = ("Qwen2MoeForCausalLM", "MixtralForCausalLM")


def at_load(name, folder, weights="int8"):
    model = models.build(name)
    model.save_pretrained(folder)
    config = nc_hf.QuantizationConfig(weights)
    return type(model).from_pretrained(str(folder), quantization_config=config)


def same(a, b):
    return bool(a) and len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@five
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.exhaustive) for name in models.MODELS],
)
def test_what_is_quantized_at_load_is_saved_and_loaded_exactly(name, tmp_path):
    model = at_load(name, tmp_path / "float")
    expected = models.outputs(model, name)
    if name in STACKED:
        with pytest.raises(StateError, match=r"nc\.save\(model, folder\) and load with nc\.load"):
            model.save_pretrained(tmp_path / "a")
        nc.save(model, tmp_path / "b")
        assert same(models.outputs(nc.load(tmp_path / "b"), name), expected)
        return
    found = model
    for step in "ab":  # what was loaded is saved again
        found.save_pretrained(tmp_path / step)
        found = type(model).from_pretrained(str(tmp_path / step))
        assert same(models.outputs(found, name), expected)
    assert nc.report(found).weight_shares["int8"] > 0


@five
def test_files_have_the_names_in_memory_and_those_of_older_versions_load(tmp_path):
    name = "ViTForImageClassification"
    model = at_load(name, tmp_path / "float")
    del model._weight_conversions  # transformers saves the names of its version 4 then
    model.save_pretrained(tmp_path / "old")
    found = type(model).from_pretrained(str(tmp_path / "old"))
    assert same(models.outputs(found, name), models.outputs(model, name))


@five
def test_another_head_is_refused_before_it_gets_random_codes(tmp_path):
    model = at_load("BertForSequenceClassification", tmp_path / "float")
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(ArtefactCorruptError, match=r"'classifier\.[a-z]*' has shape .* for another head"):
        type(model).from_pretrained(str(tmp_path / "out"), num_labels=7, ignore_mismatched_sizes=True)


@five
def test_another_class_is_named(tmp_path):
    at_load("BertForSequenceClassification", tmp_path / "float").save_pretrained(tmp_path / "out")
    says = "holds a BertForSequenceClassification .* can't be loaded as a BertModel"
    with pytest.raises(ArtefactSchemaError, match=says):
        transformers.AutoModel.from_pretrained(str(tmp_path / "out"))


@five
def test_a_state_dict_without_files_is_refused(tmp_path):
    model = at_load("BertForSequenceClassification", tmp_path / "float")
    model.save_pretrained(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(str(tmp_path / "out"))
    with pytest.raises(StateError, match="give from_pretrained the folder"):
        type(model).from_pretrained(None, config=config, state_dict=model.state_dict())


def low_bit(**fields):
    model = models.build("Qwen2ForCausalLM")
    return nc.quantize(model, WeightOnlyConfig("int4", group_size=32, **fields))


def test_save_pretrained_of_low_bit_models_says_the_ways_out(tmp_path):
    model = low_bit()
    for each in (model, model.model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(StateError, match=r"nc\.save\(model, folder\)"):
            each.save_pretrained(tmp_path / "out")
        with pytest.raises(StateError, match=r"nc\.hf\.export"):
            each.push_to_hub("somebody/something")
    nc.save(model, tmp_path / "saved")
    again = nc.load(tmp_path / "saved")
    with pytest.raises(StateError, match=r"nc\.save\(model, folder\)"):
        again.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    nc.export_weights(model, tmp_path / "weights")
    imported = nc.import_weights(tmp_path / "weights", models.build("Qwen2ForCausalLM"))
    with pytest.raises(StateError, match=r"nc\.save\(model, folder\)"):
        imported.save_pretrained(tmp_path / "out")


def test_float_models_and_float_parts_save_as_ever(tmp_path):
    model = models.build("Qwen2ForCausalLM")
    nc.quantize(model, WeightOnlyConfig("int4", group_size=32))  # a copy
    model.save_pretrained(tmp_path / "out")
    found = type(model).from_pretrained(str(tmp_path / "out"))
    assert same(models.outputs(found, "Qwen2ForCausalLM"), models.outputs(model, "Qwen2ForCausalLM"))


def test_copies_pickles_and_state_dicts_are_the_same_model(tmp_path):
    name, model = "Qwen2ForCausalLM", low_bit()
    expected = models.outputs(model, name)
    assert same(models.outputs(copy.deepcopy(model), name), expected)
    assert same(models.outputs(pickle.loads(pickle.dumps(model)), name), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = low_bit(w_sym=True)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same(models.outputs(other, name), expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        models.build(name).load_state_dict(torch.load(tmp_path / "state.pt"))


def test_models_quantized_at_load_do_not_become_float_again(tmp_path):
    model = at_load("BertForSequenceClassification", tmp_path)
    with pytest.raises(UnsupportedError, match="load the float model"):
        model.dequantize()
    if FIVE:
        with pytest.raises(StateError, match=r"nc\.save"):
            model.bert.save_pretrained(tmp_path / "part")


def test_trainer_evaluates_a_model_quantized_at_load(tmp_path):
    pytest.importorskip("accelerate")
    model = at_load("BertForSequenceClassification", tmp_path)
    rows = [{"input_ids": [5, 6, 7, 8], "labels": 1}] * 4
    arguments = transformers.TrainingArguments(str(tmp_path / "t"), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model=model, args=arguments, eval_dataset=rows)
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([1])).loss
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_transformers_takes_the_model_for_evaluation(tmp_path):
    utils = pytest.importorskip("transformers.trainer_utils")
    check = getattr(utils, "validate_quantization_for_training", None)
    if check is None:
        pytest.skip("this transformers checks in Trainer itself")
    check(at_load("BertForSequenceClassification", tmp_path))


@five
def test_a_model_from_the_configuration_of_a_low_bit_folder_is_not_taken_for_one(tmp_path):
    """It has random float weights, as from any configuration; its folder is refused."""
    at_load("BertForSequenceClassification", tmp_path / "float").save_pretrained(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(str(tmp_path / "out"))
    made = transformers.AutoModelForSequenceClassification.from_config(config)
    made.save_pretrained(tmp_path / "made")
    assert "quantization_config" in json.loads((tmp_path / "made" / "config.json").read_text())
    with pytest.raises(NCError):
        type(made).from_pretrained(str(tmp_path / "made"))

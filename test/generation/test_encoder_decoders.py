"""Decoders that read an encoder: tokens by plans are the tokens of the model."""

import copy
import warnings

import pytest
import torch
import transformers
from suites.encoder_decoders import MODELS, OLD, source, translated, translator
from suites.generation import by_plan, same

import nc
from nc.backends import available_backends
from nc.backends.native.plans import c_functions
from nc.errors import InputError, NCWarning, UnsupportedError
from nc.generation import status
from nc.generation.names import cache_argument, cache_field

pytestmark = [
    pytest.mark.skipif(
        bool(available_backends()["native"] or c_functions.why_unavailable()),
        reason=available_backends()["native"] or c_functions.why_unavailable(),
    ),
    pytest.mark.needs_plans,
]
#: transformers 4 reads positions of M2M100 as numbers, so that its step can't be captured.
CAPTURED = [
    pytest.param(n, marks=pytest.mark.skipif(OLD and n.startswith("M2M"), reason="can't be captured"))
    for n in MODELS
]


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.sample(4)
def test_texts_are_those_of_the_model(name):
    """One text, texts of different lengths, and beams, which reorder both caches."""
    model = translator(name)
    calls = [
        lambda: translated(model, source(model)),
        lambda: translated(model, source(model, 3)),
        lambda: translated(model, source(model, 2), num_beams=3),
        lambda: translated(model, source(model, 1, 80)),
    ]
    expected = [call() for call in calls]
    assert nc.accelerate_generation(model) is model
    tokens = by_plan(model)
    for call, own in zip(calls, expected, strict=True):
        before = len(tokens)
        same(call(), own)
        assert len(tokens) - before >= 18
    assert status(model).count("by a plan") == 2


def test_samples_and_long_texts_are_those_of_the_model():
    """The memory of tokens grows beyond its first places."""
    model = translator()
    inputs = source(model, 2)

    def sampled():
        torch.manual_seed(5)
        return translated(model, inputs, 30, do_sample=True, top_k=5)

    expected = sampled(), translated(model, inputs, 280)
    nc.accelerate_generation(model)
    for got, own in zip((sampled(), translated(model, inputs, 280)), expected, strict=True):
        same(got, own)


@pytest.mark.parametrize("act_dtype", ["int8", "bf16"])
@pytest.mark.sample(1)
def test_rounded_activations(act_dtype):
    model = translator(act_dtype=act_dtype)
    expected = translated(model, source(model))
    nc.accelerate_generation(model)
    got = translated(model, source(model))
    assert torch.equal(got.sequences[:, :3], expected.sequences[:, :3])
    assert "by a plan" in status(model)


def test_the_next_text_has_keys_of_its_own():
    """Of the same length, with another mask, and again the first one."""
    model = translator()
    inputs = [source(model, 2), source(model, 2, 10), source(model, 2)]
    inputs[1] = {name: value[:, :9].contiguous() for name, value in inputs[1].items()}
    expected = [translated(model, each) for each in inputs]
    assert not torch.allclose(expected[0].logits[1], expected[1].logits[1], atol=1e-3)
    nc.accelerate_generation(model)
    for each, own in zip(inputs, expected, strict=True):
        same(translated(model, each), own)


def test_a_cache_whose_source_was_changed_is_read_again():
    model = translator()
    nc.accelerate_generation(model)
    inputs = source(model)
    encoded = model.get_encoder()(**inputs)

    def begin():
        ids = torch.tensor([[2]])
        out = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True)
        return getattr(out, cache_field(type(out)))

    def step(cache):
        with torch.no_grad():
            given = {"encoder_outputs": encoded, "decoder_input_ids": torch.tensor([[7]])}
            return model(**given, **{cache_argument(model): cache}, use_cache=True).logits

    with torch.no_grad():
        cache = begin()
        for _ in range(5):
            step(cache)
        for layer in cache.cross_attention_cache.layers:
            layer.values = layer.values * 2
        same_cache = copy.deepcopy(cache)
        got = step(cache)
        nc.generation.own_forward(model)
        torch.testing.assert_close(got, step(same_cache), rtol=0, atol=1e-4)


def test_a_text_of_which_all_is_hidden_is_the_models():
    """It gets the mean of all places, of which a plan has more."""
    model = translator()
    inputs = source(model, 2)
    inputs["attention_mask"][1] = 0
    expected = translated(model, inputs)
    nc.accelerate_generation(model)
    same(translated(model, source(model, 2)), translated(model, source(model, 2)))
    same(translated(model, inputs), expected)


def test_random_numbers_stay_as_they_are():
    model = translator()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    nc.accelerate_generation(model)
    assert torch.equal(torch.rand(4), expected)


def test_a_mask_of_a_prefix_of_the_decoder_hides_it():
    model = translator("BartForConditionalGeneration")
    inputs = source(model, 2)
    prefix = {
        "decoder_input_ids": torch.tensor([[2, 0, 0, 5], [2, 7, 8, 9]]),
        "decoder_attention_mask": torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]]),
    }
    expected = translated(model, inputs, **prefix)
    nc.accelerate_generation(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NCWarning)
        same(translated(model, inputs, **prefix), expected)


def low_bit(model):
    model.generation_config.decoder_start_token_id = 2
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return nc.quantize(model.eval(), nc.WeightOnlyConfig("int8", group_size=-1))


SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}


def test_an_encoder_of_pictures_and_a_decoder_that_were_put_together():
    vit = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    gpt = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, add_cross_attention=True)
    parts = transformers.ViTModel(vit), transformers.GPT2LMHeadModel(gpt)
    model = low_bit(transformers.VisionEncoderDecoderModel(encoder=parts[0], decoder=parts[1]))
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    expected = translated(model, pixels)
    nc.accelerate_generation(model)
    same(translated(model, pixels), expected)
    assert "by a plan" in status(model)


def test_what_has_no_plan_is_a_typed_error_and_stays_as_it_was():
    config = transformers.ProphetNetConfig(
        **{"vocab_size": 96, "hidden_size": 64, "num_encoder_layers": 1, "num_decoder_layers": 1},
        **{"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
        **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 2},
    )
    model = low_bit(transformers.ProphetNetForConditionalGeneration(config))
    expected = translated(model, source(model))
    with pytest.raises(UnsupportedError, match="logits_ngram"):
        nc.accelerate_generation(model)
    same(translated(model, source(model)), expected)


def test_a_model_that_fails_for_the_example_is_a_typed_error(monkeypatch):
    model = translator()
    monkeypatch.setattr(model, "forward", lambda **_: {}["missing"])
    with pytest.raises(UnsupportedError, match="can't be run on an example"):
        nc.accelerate_generation(model)


def test_a_model_that_is_not_quantized_is_an_error():
    config = transformers.T5Config(**MODELS["T5ForConditionalGeneration"])
    with pytest.raises(InputError, match="no low-bit linear"):
        nc.accelerate_generation(transformers.T5ForConditionalGeneration(config).eval())

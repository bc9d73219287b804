"""Models with encoder and decoder: generate with both quantized."""

import importlib

import pytest
import torch

import nc
from nc.errors import ArtefactError, ConfigError, InputError
from nc.numerics.metrics import sqnr_db

transformers = pytest.importorskip("transformers")
nc_hf = importlib.import_module("nc.hf")

SIZES = {
    "vocab_size": 200,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}


def t5():
    config = transformers.T5Config(
        vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(**SIZES, **TOKENS, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config)


def whisper():
    config = transformers.WhisperConfig(
        **SIZES,
        **TOKENS,
        max_source_positions=100,
        num_mel_bins=16,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def texts():
    lengths = (7, 12, 20, 33)
    return [
        {"input_ids": torch.randint(4, 200, (4, n)), "attention_mask": torch.ones(4, n, dtype=torch.long)}
        for n in lengths
    ]


def sounds():
    return [{"input_features": torch.randn(2, 16, 200)} for _ in range(4)]


def config():
    return nc.StaticQuantConfig(act_algo="percentile", post=())


@pytest.mark.once
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [t5, bart, whisper])
def test_generate_with_cache_and_beams(make, tmp_path):
    torch.manual_seed(0)
    model, data = make().eval(), sounds() if make is whisper else texts()
    q = nc_hf.quantize(model, data, tmp_path / "out", config(), measure=False)
    assert type(q) is type(model)
    encoder = q.get_encoder()
    assert {op.ran for op in encoder.quantized.report().ops if op.kind == "linear"} == {"int8"}
    assert nc.report(q.get_decoder()).weight_shares["int8"] > 0.6
    given = dict(data[1])
    if make is not whisper:
        given["attention_mask"][0, 5:] = 0  # texts of different lengths
    calls = []
    hook = encoder.register_forward_hook(lambda *_: calls.append(1))
    for options in ({}, {"num_beams": 3}, {"do_sample": False, "use_cache": False}):
        asked = model.generate(**given, max_new_tokens=8, **options)
        got = q.generate(**given, max_new_tokens=8, **options)
        assert asked.shape[0] == got.shape[0]
        calls.append(0)
    hook.remove()
    assert calls == [1, 0, 1, 0, 1, 0]  # generate runs the encoder once
    start = {"decoder_input_ids": model.generate(**given, max_new_tokens=8)[:, :6]}
    with torch.no_grad():
        assert float(sqnr_db(model(**given, **start).logits, q(**given, **start).logits)) > 25
    q.save_pretrained(tmp_path / "out")  # it is there
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(ArtefactError, match="not an earlier result"):
        q.save_pretrained(tmp_path / "mine")
    q.save_pretrained(tmp_path / "copy")
    again = nc_hf.load(tmp_path / "copy", warm=[data[0]])
    assert torch.equal(again.generate(**given, max_new_tokens=8), q.generate(**given, max_new_tokens=8))
    expected = again.generate(**given, max_new_tokens=8)
    nc.accelerate_generation(again)
    assert torch.equal(again.generate(**given, max_new_tokens=8), expected)
    assert "by a plan" in nc.generation.status(again)


@pytest.mark.once
def test_what_the_encoder_can_not_take_is_an_error(tmp_path):
    torch.manual_seed(0)
    q = nc_hf.quantize(bart().eval(), texts(), tmp_path / "out", config(), measure=False)
    with pytest.raises(InputError, match="inputs_embeds"):
        q(inputs_embeds=torch.randn(1, 4, 64), decoder_input_ids=torch.ones(1, 2, dtype=torch.long))
    (tmp_path / "out" / "nc-encoder" / "weights.safetensors").unlink()
    with pytest.raises(ArtefactError):
        nc_hf.load(tmp_path / "out")


def test_a_configuration_for_weights_alone_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="quantizes weights alone"):
        nc_hf.quantize(bart().eval(), texts(), tmp_path / "out", nc.WeightOnlyConfig("int4", group_size=32))
    assert list(tmp_path.iterdir()) == []

"""Models with an encoder and a decoder of random weights, and what they read."""

import warnings

import torch
import transformers

import nc
from nc.errors import NCWarning

_SIZES = {
    **{"vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "max_position_embeddings": 512},
}
_T5 = {
    **{"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2},
}
_SOUND = {"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 448}
_NO_TOKENS = {"suppress_tokens": None, "begin_suppress_tokens": None, "bos_token_id": 1}

#: Class → its configuration.
MODELS = {
    "T5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": {**_T5, "feed_forward_proj": "gated-gelu"},
    "UMT5ForConditionalGeneration": {**_T5, "feed_forward_proj": "gated-gelu"},
    "BartForConditionalGeneration": _SIZES,
    "MBartForConditionalGeneration": _SIZES,
    "MarianMTModel": _SIZES,
    "M2M100ForConditionalGeneration": _SIZES,
    "PegasusForConditionalGeneration": _SIZES,
    "BlenderbotForConditionalGeneration": _SIZES,
    "BlenderbotSmallForConditionalGeneration": _SIZES,
    "WhisperForConditionalGeneration": {**_SIZES, **_SOUND, **_NO_TOKENS},
    "MoonshineForConditionalGeneration": {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96},
        **{"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2},
        **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
        **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2},
    },
}
OLD = transformers.__version__.startswith("4")


def translator(name="T5ForConditionalGeneration", act_dtype="fp32", **more):
    """One of random weights, in int8."""
    torch.manual_seed(0)
    made = getattr(transformers, name)
    model = made(made.config_class(**{**MODELS[name], **more})).eval()
    head = model.get_output_embeddings()  # of its own: tied ones repeat the token that they read
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.suppress_tokens = generation.begin_suppress_tokens = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NCWarning)
        return nc.quantize(model, nc.WeightOnlyConfig("int8", group_size=-1, act_dtype=act_dtype))


def source(model, batch=1, length=9):
    """What the encoder reads; of texts in a batch, the last tokens of each but the first are padding."""
    generator = torch.Generator().manual_seed(length)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(batch, 16, 100, generator=generator)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(batch, 400 * length, generator=generator)}
    ids = torch.randint(3, 96, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for text in range(1, batch):
        mask[text, -text:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def translated(model, inputs, count=20, **options):
    """The result of `generate`: sequences and logits."""
    given = {
        "max_new_tokens": count,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if model.main_input_name == "input_features":  # Whisper's own loop has another result
        return transformers.GenerationMixin.generate(model, **inputs, **{**given, **options})
    return model.generate(**inputs, **{**given, **options})

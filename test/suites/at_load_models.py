"""Small random models of transformers' classes, for what is quantized while it is loaded, and their inputs."""

import numpy as np
import torch

WORDS = 96
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHORT = {**SIZES, **TEXT, "max_position_embeddings": 64}
DECODER = {**SHORT, "num_key_value_heads": 2, "head_dim": 16}
PICTURE = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 3}
WAVES = {
    **SIZES,
    "vocab_size": 40,
    "conv_dim": (64, 64),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
}
SEQ2SEQ = {
    **TEXT,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
EXPERTS = {**DECODER, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}

#: Class → (settings of its configuration, what it reads).
MODELS = {
    "BertForSequenceClassification": (SHORT, "text"),
    "BertForMultipleChoice": (SHORT, "choices"),
    "BertLMHeadModel": ({**SHORT, "is_decoder": True}, "text"),
    "RobertaForMaskedLM": (SHORT, "text"),
    "DistilBertModel": ({**TEXT, "n_layers": 2, "dim": 64, "n_heads": 4, "hidden_dim": 64}, "text"),
    "ElectraForTokenClassification": ({**SHORT, "embedding_size": 64}, "text"),
    "AlbertModel": ({**SHORT, "embedding_size": 64}, "text"),
    "DebertaV2ForSequenceClassification": (
        {**SHORT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        "text",
    ),
    "MPNetModel": (SHORT, "text"),
    "XLMRobertaModel": (SHORT, "text"),
    "ModernBertForMaskedLM": ({**SHORT, "cls_token_id": 1, "sep_token_id": 2}, "text"),
    "FunnelModel": (
        {**TEXT, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 64, "block_sizes": [1, 1]},
        "text",
    ),
    "GPT2LMHeadModel": ({**TEXT, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}, "text"),
    "GPTNeoXForCausalLM": (SHORT, "text"),
    "GPTJForCausalLM": (
        {**TEXT, "n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
        "text",
    ),
    "BloomForCausalLM": ({**TEXT, "n_layer": 2, "hidden_size": 64, "n_head": 4}, "text"),
    "OPTForCausalLM": (
        {
            **TEXT,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 64,
        },
        "text",
    ),
    "LlamaForCausalLM": (DECODER, "text"),
    "LlamaForSequenceClassification": (DECODER, "text"),
    "MistralForCausalLM": (DECODER, "text"),
    "Qwen2ForCausalLM": ({**DECODER, "tie_word_embeddings": True}, "text"),
    "Qwen3ForCausalLM": (DECODER, "text"),
    "GemmaForCausalLM": (DECODER, "text"),
    "PhiForCausalLM": (SHORT, "text"),
    "Phi3ForCausalLM": (DECODER, "text"),
    "FalconForCausalLM": (
        {**TEXT, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        "text",
    ),
    "StableLmForCausalLM": (DECODER, "text"),
    "MambaForCausalLM": ({**TEXT, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, "text"),
    "Mamba2ForCausalLM": (
        {
            **TEXT,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "head_dim": 16,
            "num_heads": 8,
            "n_groups": 1,
        },
        "text",
    ),
    "Qwen2MoeForCausalLM": ({**EXPERTS, "shared_expert_intermediate_size": 64}, "text"),
    "MixtralForCausalLM": ({**DECODER, "num_local_experts": 4}, "text"),
    "T5ForConditionalGeneration": (
        {
            **TEXT,
            "num_layers": 2,
            "d_model": 64,
            "num_heads": 4,
            "d_ff": 64,
            "d_kv": 16,
            "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    "BartForConditionalGeneration": (SEQ2SEQ, "seq2seq"),
    "MarianMTModel": (SEQ2SEQ, "seq2seq"),
    "PegasusForConditionalGeneration": (SEQ2SEQ, "seq2seq"),
    "WhisperForConditionalGeneration": (
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64},
        "mel",
    ),
    "ViTForImageClassification": (PICTURE, "picture"),
    "DeiTForImageClassification": (PICTURE, "picture"),
    "BeitForImageClassification": (PICTURE, "picture"),
    "Dinov2Model": (PICTURE, "picture"),
    "SwinForImageClassification": (
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 3,
        },
        "picture",
    ),
    "SegformerForSemanticSegmentation": (
        {
            "hidden_sizes": [32, 32, 64, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 64,
            "num_labels": 3,
        },
        "picture",
    ),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
        "picture",
    ),
    "CLIPModel": (
        {
            "text_config": SHORT,
            "vision_config": {**SIZES, "image_size": 32, "patch_size": 8},
            "projection_dim": 64,
        },
        "pair",
    ),
    "Wav2Vec2ForCTC": (WAVES, "wave"),
    "HubertModel": (WAVES, "wave"),
    "ASTForAudioClassification": (
        {**SIZES, "patch_size": 8, "max_length": 32, "num_mel_bins": 16, "num_labels": 3},
        "spectrum",
    ),
    "PatchTSTForPrediction": (
        {
            "d_model": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "prediction_length": 8,
        },
        "series",
    ),
}


def build(name):
    """The model, whose values depend on nothing but the name."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**MODELS[name][0])).eval()


def inputs(name):
    """Two samples, by the names of the model's arguments."""
    numbers = np.random.default_rng(0)
    ids = torch.from_numpy(numbers.integers(3, WORDS, (2, 12)))
    floats = lambda *shape: torch.from_numpy(numbers.standard_normal(shape)).float()  # noqa: E731
    return {
        "text": lambda: {"input_ids": ids},
        "choices": lambda: {"input_ids": ids.reshape(1, 2, 12)},
        "seq2seq": lambda: {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
        "mel": lambda: {"input_features": floats(2, 16, 40), "decoder_input_ids": ids[:, :5]},
        "picture": lambda: {"pixel_values": floats(2, 3, 32, 32)},
        "pair": lambda: {"input_ids": ids, "pixel_values": floats(2, 3, 32, 32)},
        "wave": lambda: {"input_values": floats(2, 400)},
        "spectrum": lambda: {"input_values": floats(2, 32, 16)},
        "series": lambda: {"past_values": floats(2, 32, 1)},
    }[MODELS[name][1]]()


def outputs(model, name):
    """The tensors that a model returns, in their order."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(**inputs(name))
    return [value for value in found.to_tuple() if isinstance(value, torch.Tensor)]

"""Padded texts, and small encoders that read them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_BART = {
    "d_model": 64,
    **{
        f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 96))
    },
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}

_DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    **_SMALL,
}

#: Name → configuration's class, model's class, and what the configuration is made with.
ENCODERS = {
    "bert": ("BertConfig", "BertModel", _SMALL),
    "bert-classes": ("BertConfig", "BertForSequenceClassification", _SMALL),
    "bert-tags": ("BertConfig", "BertForTokenClassification", _SMALL),
    "bert-answers": ("BertConfig", "BertForQuestionAnswering", _SMALL),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", _SMALL),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel", _SMALL),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "electra": ("ElectraConfig", "ElectraModel", {"embedding_size": 32, **_SMALL}),
    "albert": ("AlbertConfig", "AlbertModel", {"embedding_size": 32, **_SMALL}),
    "mpnet": ("MPNetConfig", "MPNetModel", _SMALL),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {"pad_token_id": 0, "local_attention": 16, "max_position_embeddings": 256, **_SMALL},
    ),
    "t5": (
        "T5Config",
        "T5EncoderModel",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    ),
    "bart": ("BartConfig", "BartModel", _BART),
    "m2m100": ("M2M100Config", "M2M100Model", _BART),
    "clip": (
        "CLIPTextConfig",
        "CLIPTextModelWithProjection",
        {"projection_dim": 32, "vocab_size": 100, "eos_token_id": 99, **_SMALL},
    ),
    "deberta": ("DebertaConfig", "DebertaModel", _DISENTANGLED),
    # nothing by distance: a 0 is added to scores
    "deberta-plain": ("DebertaConfig", "DebertaModel", _SMALL),
    "deberta-v2": (
        "DebertaV2Config",
        "DebertaV2Model",
        {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm", **_DISENTANGLED},
    ),
    # a table of its own for keys, token types, and places besides
    "deberta-v2-tags": (
        "DebertaV2Config",
        "DebertaV2ForTokenClassification",
        {
            **_DISENTANGLED,
            "position_buckets": 256,
            "pos_att_type": ["c2p"],
            "type_vocab_size": 2,
            "position_biased_input": True,
        },
    ),
    # what is not computed by rows
    "fnet": ("FNetConfig", "FNetModel", {k: v for k, v in _SMALL.items() if k != "num_attention_heads"}),
    "convbert": ("ConvBertConfig", "ConvBertModel", _SMALL),
    "mobilebert": (
        "MobileBertConfig",
        "MobileBertModel",
        {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32, **_SMALL},
    ),
}


@functools.lru_cache(2)
def encoder(name: str) -> nn.Module:
    """Return an encoder of transformers with random weights."""
    hf = pytest.importorskip("transformers")
    of_config, of_model, options = ENCODERS[name]
    if not hasattr(hf, of_model):
        pytest.skip(f"transformers {hf.__version__} has no {of_model}")
    if name.startswith("deberta") and "v2" not in name and int(hf.__version__.split(".")[0]) < 5:
        pytest.skip(f"the DeBERTa of transformers {hf.__version__} is captured for one length")
    torch.manual_seed(0)
    model = getattr(hf, of_model)(getattr(hf, of_config)(**options)).eval()
    return model.get_encoder() if name in ("bart", "m2m100") else model


def texts(*lengths: int, width: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return texts of these lengths, padded to the longest one or to `width`; the last tokens are 99."""
    generator = torch.Generator().manual_seed(seed)
    width = max(width, *lengths)
    ids = torch.randint(5, 90, (len(lengths), width), generator=generator)
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 99
    return masked(ids, torch.arange(width)[None, :] < torch.tensor(lengths)[:, None])


def masked(ids: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return inputs with 1, which most models take for padding, where tokens are not real."""
    return {"input_ids": ids.where(real, 1), "attention_mask": real.long()}

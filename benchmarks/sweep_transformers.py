"""Models of transformers' auto-model tables, made small, and inputs that their `forward` accepts.

The models are made from their configurations alone. Nothing here knows a single architecture: sizes are found
by the names of the configuration's attributes, inputs by the names of `forward`'s parameters. A model that
none of the ways fits raises `NotBuilt` with the reason of the first way.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sweep_building import Inputs, NotBuilt, settled

#: Parameters that a model of the sweep may have.
MOST_PARAMETERS = 120_000_000
SEQUENCE, VOCABULARY, IMAGE = 16, 128, 64

#: Attribute names → what they are set to where they are larger. The first pattern that matches the whole name
#: counts.
SIZES = (
    (r"(\w+_)?vocab_size(_\w+)?|num_embeddings", VOCABULARY),
    (
        r"(num_(hidden_|encoder_|decoder_|local_|text_|vision_|transformer_)?layers|n_layers?|depth|(encoder|decoder|vision|text)_layers)",
        2,
    ),
    (r"num_hidden_groups", 1),
    (r"num_key_value_heads|num_kv_heads|n_head_kv", 2),
    (r"(\w+_)?(attention_heads|num_heads)|num_attention_heads|n_heads?|heads|num_heads", 4),
    (r"head_dim|d_kv|qk_nope_head_dim|v_head_dim|kv_channels|(attention_)?head_size", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"(q|kv|o)_lora_rank", 32),
    (
        r"hidden_size|d_model|n_embd|(encoder_|decoder_)?(embed|hidden)_dim|dim|embedding_size|word_embed_proj_dim|n_embed",
        64,
    ),
    (
        r"(\w+_)?intermediate_size|(encoder_|decoder_)?ffn_dim|d_ff|n_inner|(\w+_)?ffn_hidden_size|hidden_dim|mlp_dim|ff_dim",
        128,
    ),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_k|num_experts_per_token", 2),
    (r"n_group|topk_group|first_k_dense_replace|n_shared_experts|num_shared_experts", 1),
    (r"image_size|img_size|input_size", IMAGE),
    (r"projection_dim|(\w+_)?proj(ection)?_(size|dim)|out_hidden_size", 64),
    (r"num_queries|num_query_tokens|num_latents", 8),
    (r"sliding_window|attention_window", 8),
)
#: What a configuration leaves open and its model needs.
MISSING = {"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "prediction_length": 8, "pad_token_id": 1}
#: The same for lists of one number per stage.
DEPTHS = re.compile(
    r"depths|layers|num_blocks|block_depths|decoder_depths|layer_depths|stage_num_blocks|encoder_block_nums"
)


def base_models() -> list[tuple[str, str]]:
    """(model type, class) of the table of base models, each class once."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return _distinct([MODEL_MAPPING_NAMES], set())


def task_models() -> list[tuple[str, str]]:
    """Return (model type, class) of the tables of models with a head.

    Those that are in the table of base models are left out.
    """
    from transformers.models.auto import modeling_auto as auto

    wanted = (
        "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION",
        "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION", "UNIVERSAL_SEGMENTATION",
        "AUDIO_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ", "VIDEO_CLASSIFICATION", "IMAGE_TO_IMAGE",
        "KEYPOINT_DETECTION", "POSE_ESTIMATION", "BACKBONE", "TEXT_TO_SPECTROGRAM",
        "TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION",
        "IMAGE_TEXT_TO_TEXT", "TEXT_RECOGNITION", "INSTANCE_SEGMENTATION",
    )  # fmt: skip
    base = {name for _, name in base_models()}
    return _distinct([getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in wanted], base)


def _distinct(tables: list[Any], seen: set[str]) -> list[tuple[str, str]]:
    """Each class once, with the model type that its name begins with where several have it."""
    found: dict[str, str] = {}
    for table in tables:
        for family, names in table.items():
            for name in (names,) if isinstance(names, str) else names:
                named_after = name.lower().startswith(re.sub(r"[-_]", "", family))
                if name not in seen and (name not in found or named_after):
                    found[name] = family
    return [(family, name) for name, family in found.items()]


def build(class_name: str, family: str) -> tuple[torch.nn.Module, Inputs, str]:
    """Return the first way to make the model small in which it also runs; inputs; and which way it was.

    Raises:
        NotBuilt: no way works.
    """
    import transformers

    model_class = getattr(transformers, class_name)
    reasons: list[str] = []
    for way, make_config in _configs(family, model_class):
        try:
            config = make_config()
            model = _model(model_class, config)
        except Exception as error:  # configurations and constructors check sizes in many ways
            reasons.append(f"{way}: {type(error).__name__}: {error}")
            continue
        make = _inputs(model, config, reasons, way)
        if make is not None:
            return model, make, way
    raise NotBuilt(
        " | ".join(reason[:160] for reason in list(dict.fromkeys(reasons))[:4]) or "no configuration"
    )


def _configs(family: str, model_class: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    own = getattr(model_class, "config_class", None)
    config_class = CONFIG_MAPPING[family] if family in CONFIG_MAPPING_NAMES else own
    yield "small", lambda: _constructed(config_class, _wanted(config_class(), layers_only=False))
    yield (
        "small, four layers",
        lambda: _constructed(config_class, _wanted(config_class(), layers_only=False, layers=4)),
    )
    yield "small, set afterwards", lambda: _assigned(config_class())
    yield "few layers", lambda: _constructed(config_class, _wanted(config_class(), layers_only=True))
    yield "as it comes", config_class


def _size(name: str, value: int, layers_only: bool, layers: int) -> int:
    """Return what an attribute becomes."""
    if re.fullmatch(r"\w*_token_id|\w*token_index|\w*token_ids", name):
        return value
    for i, (pattern, size) in enumerate(SIZES):
        if re.fullmatch(pattern, name):
            return min(value, layers if i == 1 else size) if i < 3 or not layers_only else value
    return value


def _wanted(config: Any, layers_only: bool, layers: int = 2) -> dict[str, Any]:
    """Attributes that change, with nested configurations as dicts."""
    values = config.to_dict()
    changed: dict[str, Any] = {}
    small = (
        _size("vocab_size", values["vocab_size"], layers_only, layers)
        if isinstance(values.get("vocab_size"), int)
        else 10**9
    )
    for name, value in values.items():
        if hasattr(getattr(config, name, None), "to_dict"):
            nested = getattr(config, name)
            changed[name] = {**nested.to_dict(), **_wanted(nested, layers_only, layers)}
        elif value is None and name in MISSING:
            changed[name] = MISSING[name]
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            size = (
                _token(value, small)
                if name.endswith(("_token_id", "_token_index"))
                else _size(name, value, layers_only, layers)
            )
            if size != value:
                changed[name] = size
        elif (
            isinstance(value, (list, tuple))
            and value
            and DEPTHS.fullmatch(name)
            and all(type(v) is int for v in value)
        ):
            changed[name] = [min(v, 1) for v in value]
    if (
        values.get("num_key_value_heads") == values.get("num_attention_heads")
        and "num_attention_heads" in changed
    ):
        changed["num_key_value_heads"] = changed["num_attention_heads"]
    return changed


def _token(value: int, vocabulary: int) -> int:
    """Move special tokens to the end of a vocabulary that became smaller.

    They stay different from each other.
    """
    return value if value < vocabulary else vocabulary - 1 - value % 8


def _constructed(config_class: Any, changed: dict[str, Any]) -> Any:
    """Return a configuration from arguments, so that it derives the others from them."""
    accepted = inspect.signature(config_class.__init__).parameters
    own = {name: value for name, value in changed.items() if name in accepted or "kwargs" in accepted}
    for value in own.values():
        if isinstance(value, dict):
            value.pop("layer_types", None)
            value.pop("_name_or_path", None)
    return config_class(**own)


def _assigned(config: Any) -> Any:
    for name, value in _wanted(config, layers_only=False).items():
        nested = getattr(config, name)
        if isinstance(value, dict) and hasattr(nested, "to_dict"):
            _assigned(nested)
        else:
            setattr(config, name, value)
    return config


def _model(model_class: Any, config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        msg = f"{size / 1e6:.0f} million parameters"
        raise NotBuilt(msg)
    return settled(model_class._from_config(config).float())


def _inputs(model: torch.nn.Module, config: Any, reasons: list[str], way: str) -> Inputs | None:
    """Return the first set of inputs that the model runs on and gives finite numbers for."""
    for make in _candidates(model, config):
        try:
            with torch.no_grad():
                outputs = model(**make(2))
        except Exception as error:  # models refuse inputs in many ways
            reasons.append(f"{way}: {type(error).__name__}: {error}")
            continue
        values = (
            outputs.values()
            if hasattr(outputs, "values")
            else outputs
            if isinstance(outputs, tuple)
            else (outputs,)
        )
        if any(torch.isnan(t).any() for t in values if isinstance(t, torch.Tensor)):
            reasons.append(f"{way}: NaN with random weights")
            continue
        return make
    return None


def _candidates(model: torch.nn.Module, config: Any) -> Iterator[Inputs]:
    """Return sets of inputs, the model's main input first."""
    parameters = inspect.signature(model.forward).parameters
    required = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    main = [model.main_input_name] if model.main_input_name in parameters else []
    text = ["input_ids", "attention_mask"]
    pictures = [
        n
        for n in ("pixel_values", "pixel_values_videos", "input_features", "input_values")
        if n in parameters
    ]
    sets = [
        [*required, *main, *pictures[:1], *text],
        [*required, *main, "attention_mask"],
        [*required, *main],
        [*required, *main, "attention_mask", "decoder_input_ids"],
        [*required, *main, "decoder_input_ids"],
        text,
        ["input_ids"],
        [*text, "decoder_input_ids"],
        [*text, "bbox"],
        [*text, *pictures[:1], "bbox"],
        *([[name], [name, "decoder_input_ids"]] for name in pictures),
    ]
    flat = [s for group in sets for s in (group if group and isinstance(group[0], list) else [group])]
    tried: list[frozenset[str]] = []
    for names in flat:
        kept = frozenset(n for n in names if n in parameters)
        if not any(n.startswith("input") for n in kept):
            kept -= {"attention_mask"}  # a mask over tokens
        if not kept or kept in tried:
            continue
        tried.append(kept)
        yield from _variants(kept, config)


def _variants(names: frozenset[str], config: Any) -> Iterator[Inputs]:
    """Return the shapes that the inputs of these names may have."""
    for size in (
        dict.fromkeys((_image_size(config), IMAGE, 224))
        if any(n.startswith("pixel") for n in names)
        else (0,)
    ):
        for form in range(
            3
            if names
            & {"pixel_values", "input_features", "input_values", "pixel_values_videos", "past_values"}
            else 1
        ):

            def make(batch: int, size: int = size, form: int = form) -> dict[str, torch.Tensor]:
                made = {name: _tensor(name, batch, config, size, form) for name in sorted(names)}
                if (
                    "attention_mask" in names and "input_features" in names and "input_ids" not in names
                ):  # a mask over frames
                    frames = made["input_features"].shape[-1 if form == 0 else -2]
                    made["attention_mask"] = torch.ones(batch, frames, dtype=torch.long)
                return made

            yield make


def _find(config: Any, *names: str) -> Any:
    """Return the first of these attributes, in the configuration or in a nested one."""
    for owner in [config, *[v for v in vars(config).values() if hasattr(v, "to_dict")]]:
        for name in names:
            if getattr(owner, name, None) is not None:
                return getattr(owner, name)
    return None


def _image_size(config: Any) -> int:
    size = _find(config, "image_size", "img_size", "input_size")
    size = (
        max(size)
        if isinstance(size, (list, tuple))
        else max(size.values())
        if isinstance(size, dict)
        else size
    )
    return size if isinstance(size, int) and 16 <= size <= 256 else IMAGE


def _tensor(name: str, batch: int, config: Any, size: int, form: int) -> torch.Tensor:
    channels = _find(config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    mels = (
        _find(
            config,
            "feature_projection_input_dim",
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_size",
            "n_mels",
            "input_dim",
        )
        or 80
    )
    frames = _find(config, "num_frames", "frames_per_clip") or 4
    length = _find(config, "max_source_positions") or 40
    match name:
        case "pixel_values" | "pixel_values_videos":
            shapes = (
                (batch, channels, size, size),
                (batch, frames, channels, size, size),
                (batch, 1, channels, size, size),
            )
            return torch.randn(shapes[form])
        case "input_features":
            return torch.randn(
                ((batch, mels, 2 * length), (batch, 2 * length, mels), (batch, 1, 2 * length, mels))[form]
            )
        case "input_values" | "audio_values":
            return torch.randn(
                ((batch, 4000), (batch, _find(config, "max_length") or 64, mels), (batch, 1, 4000))[form]
            )
        case "past_values" | "series":
            context = _find(config, "context_length", "prompt_length") or 32
            return torch.randn(
                (
                    (batch, context, _find(config, "num_input_channels", "input_size") or 1),
                    (batch, context),
                    (batch, 64),
                )[form]
            )
        case "attention_mask" | "decoder_attention_mask":
            return torch.ones(batch, SEQUENCE, dtype=torch.long)
        case "bbox":
            return torch.tensor([1, 2, 30, 40]).expand(batch, SEQUENCE, 4).contiguous()
        case "token_type_ids":
            return torch.zeros(batch, SEQUENCE, dtype=torch.long)
        case _ if name.endswith("ids"):
            vocabulary = _find(config, "vocab_size")
            high = vocabulary if isinstance(vocabulary, int) else VOCABULARY
            return torch.randint(min(5, high // 2), max(min(high - 9, 500), 2), (batch, SEQUENCE))
        case _ if name.endswith(("embeds", "hidden_states", "hidden_state")):
            return torch.randn(batch, SEQUENCE, _find(config, "hidden_size", "d_model") or 64)
        case _ if name.endswith("mask"):
            return torch.ones(batch, SEQUENCE, dtype=torch.long)
    msg = f"no rule for the input {name!r}"
    raise NotBuilt(msg)

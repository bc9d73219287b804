"""Folders of transformers models with low-bit weights in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nc.errors import ConfigError, StateError, UnsupportedError
from nc.interchange import export_weights
from nc.interchange.layer import StoredLayer
from nc.interchange.model import contents_of

#: Readers that are known not to run all that a format holds.
TARGETS = ("vllm-cpu",)


def check_target(target: str, format: str) -> None:
    """Raise ConfigError for a target that is not known, or that does not read the format."""
    if target and target not in TARGETS:
        msg = f"There is no target {target!r}; there are {', '.join(TARGETS)}."
        raise ConfigError(msg)
    if target and format not in ("compressed-tensors", "awq", "gptq"):
        msg = f'target={target!r} reads "compressed-tensors", "awq" and "gptq", not {format!r}.'
        raise ConfigError(msg)


def write_low_bit(
    model: Any, folder: Path, format: str, target: str, processor: Any, trust_remote_code: bool = False
) -> tuple[str, ...]:
    """Write weights, configuration and tokenizer of a transformers model; returns the layers' names.

    Raises:
        StateError: the model has no low-bit weights, or is none of transformers.
        UnsupportedError: the format cannot hold a layer, or the target not run it.
    """
    if not hasattr(model, "config") or not hasattr(model, "named_modules"):
        msg = (
            f"format={format!r} is for transformers models with low-bit weights; this is a "
            f"{type(model).__name__}. from_pretrained(…, quantization_config=nc.hf.QuantizationConfig(…)) "
            "gives one, and so does nc.quantize(model, nc.WeightOnlyConfig(…))."
        )
        raise StateError(msg)
    layers, _, _ = contents_of(model)
    if target:
        for name, layer in layers.items():
            _check_runs(name, layer)
    export_weights(model, folder, format)
    if processor is None:
        processor = _processor(model, trust_remote_code)
    if processor is not None:
        processor.save_pretrained(str(folder))
    return tuple(layers)


def _check_runs(name: str, layer: StoredLayer) -> None:
    """Raise UnsupportedError for a weight for which vLLM has no kernel on CPUs."""
    form = layer.weight.form
    reason = ""
    if layer.act_dtype != "fp32" and not (form.bits == 8 and form.group_size == -1 and form.symmetric):
        reason = (
            "int8 activations with symmetric weights of 8 bits alone, one scale for each row: group_size=-1"
        )
    elif layer.act_dtype == "fp32" and form.bits != 4:
        reason = (
            f'fp32 activations with weights of 4 bits alone, not {form.bits}; 8 bits need act_dtype="int8"'
        )
    elif form.bits == 4 and any(size % 32 for size in layer.weight.shape):
        reason = f"4 bits in sizes that are multiples of 32, and this weight has {tuple(layer.weight.shape)}"
    if reason:
        msg = f"Layer {name!r}: on CPUs vLLM runs {reason}."
        raise UnsupportedError(msg)


def _processor(model: Any, trust_remote_code: bool) -> Any:
    """Return the tokenizer beside a model's weights; None where there is none."""
    import transformers

    place = str(getattr(model.config, "_name_or_path", ""))
    try:
        of = transformers.AutoTokenizer
        return of.from_pretrained(place, trust_remote_code=trust_remote_code) if place else None
    except (OSError, ValueError):
        return None

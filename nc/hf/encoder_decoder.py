"""Models with an encoder and a decoder: the encoder is a quantized graph, the decoder keeps its cache.

The decoder's linears have int8 weights and round their inputs row by row, which needs no graph, so `generate`
works as ever: batches, beams, streaming.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.artefact import load, save
from nc.api.quantized import QuantizedModel
from nc.api.warm import warm_up
from nc.api.workflow import quantize
from nc.config import WeightOnlyConfig
from nc.errors import ArtefactError, ConfigError, InputError
from nc.hf.at_load import FORMATS
from nc.hf.folder import ARTEFACT, CONFIG, ENCODER, replaceable, written
from nc.hf.model import QuantizedTransformer, refuse_push, sorted_lengths
from nc.storage.atomic import resolved

#: By which a folder with both is known.
MARKS = (CONFIG, ARTEFACT, ENCODER)


class QuantizedEncoder(QuantizedTransformer):
    """A quantized encoder in the place of a model's own.

    Attributes:
        replaced: the model's own, whose settings `generate` of some models reads.
    """

    def __init__(
        self, quantized: QuantizedModel, config: Any, replaced: torch.nn.Module, lengths: Sequence[int] = ()
    ) -> None:
        super().__init__(quantized, config, lengths=lengths)
        self.replaced = replaced

    def forward(  # type: ignore[override] # models give the main input by position
        self,
        first: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> Any:
        """As `QuantizedTransformer`; arguments without a value are left out.

        Some models give the main input by position: it is `first`, whatever its name.

        Raises:
            InputError: an argument that the example inputs lacked, and that would change the result.
        """
        given = next((name for name, value in others.items() if isinstance(value, torch.Tensor)), None)
        if given is not None:
            msg = f"{given}: the quantized encoder has no such input."
            raise InputError(msg)
        if "attention_mask" not in self._names():  # Whisper's encoder takes one, and does not read it
            attention_mask = None
        inputs = {
            "input_ids": input_ids,
            "input_features": input_features,
            "input_values": input_values,
            "pixel_values": pixel_values,
        }
        if first is not None:
            inputs[self.main_input_name] = first
        arguments: Any = inputs
        return super().forward(
            **arguments,
            attention_mask=attention_mask,
            return_dict=return_dict,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def __getattr__(self, name: str) -> Any:
        """Return a part of the encoder that it replaces, where it has none of that name itself."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            replaced = self.__dict__.get("_modules", {}).get("replaced")
            if replaced is None:
                raise
            return getattr(replaced, name)


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a model of transformers has an encoder whose result its decoder reads."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and hasattr(model, "get_encoder")


def quantize_parts(
    model: Any, batches: Sequence[Mapping[str, torch.Tensor]], config: Any, folder: Path, **options: Any
) -> None:
    """Quantize encoder and decoder, and write both artefacts into a folder.

    Args:
        model: fp32; it stays as it is.
        batches: inputs of the model.
        config: of the encoder.
        folder: gets two folders.
        options: of `nc.quantize`, for the encoder.

    Raises:
        InputError: the batches have nothing that the encoder reads.
        ConfigError: a configuration for weights alone.
    """
    encoder = model.get_encoder()
    known = inspect.signature(encoder.forward).parameters
    inputs = [
        {name: value for name, value in batch.items() if name in known and not name.startswith("decoder_")}
        for batch in batches
    ]
    if not inputs or not inputs[0]:
        msg = f"data has nothing that the encoder reads: {', '.join(list(known)[:4])}."
        raise InputError(msg)

    def run(prepared: torch.nn.Module) -> None:
        for batch in inputs:
            prepared(**batch)

    quantized = quantize(encoder, config, run, example_inputs=inputs[len(inputs) // 2], **options)
    if not isinstance(quantized, QuantizedModel):
        msg = f'{config!r} quantizes weights alone: from_pretrained takes nc.hf.QuantizationConfig("int8").'
        raise ConfigError(msg)
    weights = WeightOnlyConfig(**FORMATS["int8"], lm_head="int8")  # the head is most of a small decoder
    low_bit = quantize(copy.deepcopy(model), weights, inplace=True)
    save(quantized, folder / ENCODER)
    save(low_bit, folder / ARTEFACT)


def load_parts(folder: Path, warm: Sequence[Any] = (), lengths: Sequence[int] = (), **options: Any) -> Any:
    """Return the model of a folder with both artefacts, with its class; `options` are those of `nc.load`.

    Raises:
        ArtefactError: the model of the folder has no encoder; or as `nc.load`.
    """
    lengths = sorted_lengths(lengths)
    model, quantized = load(folder / ARTEFACT, **options), load(folder / ENCODER, **options)
    owner, name = _place(model)
    if owner is None:
        msg = f"{folder} has an encoder's artefact, and its model no encoder."
        raise ArtefactError(msg)
    encoder = QuantizedEncoder(quantized, model.config, getattr(owner, name), lengths)
    warm_up(encoder, warm, quantized.graph)
    setattr(owner, name, encoder)
    model.save_pretrained = functools.partial(_copied, str(folder.resolve()))
    return model


def _place(model: Any) -> tuple[Any, str]:
    """Return the module that holds the encoder, and its name there."""
    encoder = model.get_encoder()
    for owner in model.modules():
        for name, child in owner.named_children():
            if child is encoder:
                return owner, name
    return None, ""


def _copied(folder: str, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **_: Any) -> None:
    """Write the folder that a model was loaded from, as its `save_pretrained`.

    Raises:
        ArtefactError: something else than an earlier result is there.
        StateError: it is to be pushed.
    """
    if push_to_hub:
        refuse_push()
    target = resolved(save_directory)
    if target != Path(folder):
        with written(replaceable(target, *MARKS), *MARKS) as staged:
            shutil.copytree(folder, staged)

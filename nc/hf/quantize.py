"""Quantize a transformers model with a user's data, and open the result as a transformers model."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.quantized import QuantizedModel
from nc.api.workflow import quantize as quantize_model
from nc.errors import ArtefactError, ConfigError, InputError
from nc.formats.checks import checked_path
from nc.hf import checksums
from nc.hf.data import batches_of
from nc.hf.encoder_decoder import is_encoder_decoder, load_parts, quantize_parts
from nc.hf.folder import ARTEFACT, CONFIG, ENCODER, is_result, read_by_others, replaceable, written
from nc.hf.model import QuantizedTransformer, load_model
from nc.storage.atomic import resolved


def quantize(
    model: Any,
    data: Iterable[Any],
    out: str | os.PathLike[str],
    config: Any = "auto",
    *,
    processor: Any = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Quantize a transformers model with data, and save it with its configuration and tokenizer as a folder.

    Args:
        model: an encoder, a classifier, or another model that gives its outputs in one call; a model with
            encoder and decoder, whose decoder gets int8 weights and keeps its cache; or a folder of one. It
            stays as it is.
        data: as users send it, 100 or more; a part is held out. Texts, pairs of texts, pictures, sounds
            (arrays, or dicts with "array" and "sampling_rate"), rows of a `datasets.Dataset`, or batches,
            dicts of tensors.
        out: the folder.
        config: as for `nc.quantize`.
        processor: tokenizer, image processor or feature extractor, which is saved beside the model; None: the
            one in the model's folder. Batches need none.
        trust_remote_code: run Python code in the model's folder, if transformers has no class for the model.
        options: of `nc.quantize`.

    Returns:
        The quantized model, loaded from the folder; with a decoder it has its own class.

    Raises:
        InputError: the model has a decoder alone, or does not read what data has.
        ConfigError: a configuration for weights alone.
        ArtefactError: `out` exists and is not an earlier result, or the folder of the model needs code that
            is not trusted.
    """
    target = replaceable(resolved(checked_path("out", out)), CONFIG, ARTEFACT)
    if isinstance(model, (str, os.PathLike)):
        model = _opened(checked_path("model", model), trust_remote_code)
    _check_kind(model)
    why_none = ""
    if processor is None:
        processor, why_none = _processor(model, trust_remote_code)
    batches = batches_of(model, processor, data, why_none)
    # transformers 5 loads weights as they are stored, often in bf16
    floats = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    described = copy.deepcopy(model.config)
    described.architectures = [type(model).__name__]
    if is_encoder_decoder(model):
        with written(target, CONFIG, ARTEFACT) as staged:
            quantize_parts(floats, batches, config, staged, **options)
            described.save_pretrained(staged)
            if processor is not None:
                processor.save_pretrained(str(staged))
        return load(target, trust_remote_code=trust_remote_code)

    def run(prepared: torch.nn.Module) -> None:
        for batch in batches:
            prepared(**batch)

    # the batch of middle length is what times are measured with
    example = batches[len(batches) // 2]
    quantized = quantize_model(floats, config, run, example_inputs=example, **options)
    if not isinstance(quantized, QuantizedModel):
        msg = (
            f"{config!r} quantizes weights alone, without data: give from_pretrained "
            'quantization_config=nc.hf.QuantizationConfig("int8").'
        )
        raise ConfigError(msg)
    with written(target, CONFIG, ARTEFACT) as staged:
        QuantizedTransformer(quantized, described).save_pretrained(staged)
        if processor is not None:
            processor.save_pretrained(str(staged))
    return load(target, trust_remote_code=trust_remote_code)


def load(
    folder: str | os.PathLike[str],
    *,
    warm: Sequence[Any] = (),
    lengths: Sequence[int] = (),
    verify: str = "raise",
    verify_sizes: bool = True,
    padding: str = "skipped",
    trust_remote_code: bool = False,
) -> Any:
    """Return the model of a folder that `quantize` wrote.

    All files are compared with the checksums in `nc_checksums.json` first; other files, and folders without
    it, are not.

    Args:
        folder: the folder that was written.
        warm: as for `nc.load`: sizes for which kernels are made now, e.g. `[(1, 128), (8, 64)]`.
        lengths: where padding is computed, texts are filled up to the next one of these numbers of tokens, so
            that those of any length have sizes that are warm; longer ones, and all without it, to a multiple
            of 16.
        verify: as for `nc.load`.
        verify_sizes: as for `nc.load`.
        padding: as for `nc.load`.
        trust_remote_code: run Python code in the folder, if transformers has no configuration for the model.

    Raises:
        ArtefactError: it is not such a folder, a file is damaged or missing, or it needs code that is not
            trusted.
        InputError: an entry of `warm` does not fit the model, or `lengths` are not numbers of tokens.
        VerificationError, BackendError: as for `nc.load`.
    """
    place = checked_path("folder", folder)
    if not is_result(place, CONFIG, ARTEFACT):
        msg = (
            f"{folder} is not a folder of nc.hf.quantize: it has no {CONFIG}, or no folder {ARTEFACT!r}. "
            "transformers loads folders of float models."
        )
        raise ArtefactError(msg)
    checksums.check(place)
    options: dict[str, Any] = {"verify": verify, "verify_sizes": verify_sizes, "padding": padding}
    if (place / ENCODER).is_dir():
        return load_parts(place, warm, lengths, **options)
    return load_model(folder, warm, lengths, trust_remote_code=trust_remote_code, **options)


def _opened(folder: Path, trust_remote_code: bool) -> Any:
    """Return the float model of a folder, of the class that it names."""
    import transformers

    if not (folder / CONFIG).is_file():
        msg = f"{folder} is not a folder of a transformers model: it has no {CONFIG}."
        raise InputError(msg)
    with read_by_others(folder, trust_remote_code):
        trust = {"trust_remote_code": trust_remote_code}
        config = transformers.AutoConfig.from_pretrained(str(folder), **trust)
        name = (config.architectures or ["AutoModel"])[0]
        own = getattr(config, "auto_map", None) or {} if trust_remote_code else {}
        auto = next((each for each, code in own.items() if code.rpartition(".")[2] == name), name)
        kind = getattr(transformers, auto, None)
        if kind is None:
            msg = f"{folder / CONFIG} names {name}, which the installed transformers lacks; give the model."
            raise InputError(msg)
        return kind.from_pretrained(str(folder), **(trust if auto.startswith("Auto") else {}))


def _check_kind(model: Any) -> None:
    """Raise InputError for objects other than transformers models, and for decoders without an encoder."""
    if not hasattr(model, "config") or not hasattr(model, "main_input_name"):
        msg = f"{type(model).__name__} is not a transformers model: nc.quantize takes any nn.Module."
        raise InputError(msg)
    if model.can_generate() and not is_encoder_decoder(model):
        msg = (
            f"{type(model).__name__} is a decoder, and a quantized graph has no cache of keys and values. "
            'Give from_pretrained quantization_config=nc.hf.QuantizationConfig("int8"), or use '
            "nc.quantize(model, nc.WeightOnlyConfig(…)) with data."
        )
        raise InputError(msg)


def _processor(model: Any, trust_remote_code: bool) -> tuple[Any, str]:
    """Return the processor saved beside a model's weights, and ""; or None, and why."""
    import transformers

    place = str(getattr(model.config, "_name_or_path", ""))
    if not place:
        return None, ""
    of: Any = transformers.AutoProcessor
    try:
        return of.from_pretrained(place, trust_remote_code=trust_remote_code), ""
    except (OSError, ValueError, ImportError) as error:
        return None, f" ({place}: {error})"

"""Low-bit weights in files of other tools: `export_weights`, `import_weights`, `read_weights`.

One file per format: its layout, its writer and its reader. The table `FORMATS` is all that this module knows
of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nc.errors import (
    ArtefactCorruptError,
    ArtefactError,
    ArtefactSchemaError,
    ConfigError,
    NCError,
    StateError,
    UnsupportedError,
)
from nc.formats.checks import checked_path
from nc.interchange import auto_round, awq, compressed_tensors, folder, gguf, gptq, quark
from nc.interchange.gguf_writer import write as write_gguf
from nc.interchange.layer import INT8, StoredLayer
from nc.interchange.model import contents_of, put, settings_of
from nc.numerics.packed_weight import PackedWeight

Write = Callable[[Mapping[str, StoredLayer], Sequence[str]], tuple[dict[str, torch.Tensor], dict[str, Any]]]
Read = Callable[[dict[str, torch.Tensor], Mapping[str, Any]], dict[str, StoredLayer]]

#: Formats of folders, by the `quant_method` in config.json: writer and reader.
FORMATS: dict[str, tuple[Write, Read]] = {
    "compressed-tensors": (compressed_tensors.write, compressed_tensors.read),
    "gptq": (gptq.write, gptq.read),
    "awq": (awq.write, awq.read),
    "quark": (quark.write, quark.read),
}
GGUF, GGUF_FILE = "gguf", "model.gguf"


@dataclass(frozen=True, slots=True)
class ForeignWeights:
    """What another tool's files hold.

    Attributes:
        format: a key of `FORMATS`, or "gguf".
        layers: linears and tables with low-bit weights, by name.
        tensors: all others, by name.
    """

    format: str
    layers: dict[str, StoredLayer]
    tensors: dict[str, torch.Tensor]


def export_weights(
    model: torch.nn.Module | Mapping[str, PackedWeight],
    path: str | os.PathLike[str],
    format: str = "compressed-tensors",
) -> None:
    """Write a model with low-bit weights, or single weights, for other tools.

    Every weight keeps its value bit for bit, or is refused.

    Scales are stored as they are, so for a tool that computes in fp16 quantize with scale_dtype="fp16". A
    negative scale is turned with its codes and zero point, except in "compressed-tensors".

    Args:
        model: a module that holds `nc.nn.QuantLinear`, or packed weights by the names of their layers.
        path: a folder; created with its parents. It gets `model.safetensors` and `config.json` (of a
            transformers model: its own, and `generation_config.json`), or for "gguf" `model.gguf`, whose
            tensors have the names that they have in the model. For "gguf" it may also be a file that ends in
            ".gguf".
        format: "compressed-tensors" (read by vLLM and transformers), "gptq" (version 2 where a zero point is
            0, with an `NCWarning`), "awq" (version GEMM), "quark", or "gguf" (Q4_0, Q4_1, Q8_0).

    Raises:
        ConfigError: no such format; the message has the names.
        StateError: the model holds no low-bit weight.
        UnsupportedError: the format cannot hold a layer; the message has its name, the reason and the way
            out.
        ArtefactError: the folder holds other weights.
    """
    if format not in (*FORMATS, GGUF):
        msg = f"There is no format {format!r}; there are {', '.join((*FORMATS, GGUF))}."
        raise ConfigError(msg)
    where = checked_path("path", path)
    layers, floats, tensors = contents_of(model)
    if not layers:
        msg = (
            "export_weights() expects a model with low-bit weights; make one with quantize(model, "
            "WeightOnlyConfig())."
        )
        raise StateError(msg)
    if format == GGUF:
        dropped = next((name for name, layer in layers.items() if layer.act_dtype in INT8), None)
        if dropped is not None:
            msg = (
                f"Layer {dropped!r}: GGUF says nothing about activations, and this layer's are int8. Use "
                'format="compressed-tensors".'
            )
            raise UnsupportedError(msg)
        is_file = where.suffix == f".{GGUF}" and not where.is_dir()
        file = where if is_file else folder.alone(where, GGUF_FILE) / GGUF_FILE
        write_gguf(file, {**{f"{name}.weight": layer.weight for name, layer in layers.items()}, **tensors})
        return
    stored, config = FORMATS[format][0](layers, floats)
    files = settings_of(model, config)
    if format == "gptq":
        files["quantize_config.json"] = config  # for readers that do not know config.json
    folder.write(where, {**tensors, **stored}, files)


def read_weights(path: str | os.PathLike[str]) -> ForeignWeights:
    """Read low-bit weights that another tool wrote, or `export_weights`, as they are stored.

    Nothing is unpickled or executed.

    Args:
        path: a folder of safetensors with `config.json`, a GGUF file, or a folder with one GGUF file and no
            safetensors.

    Raises:
        ArtefactMissingError: nothing to read is there.
        ArtefactCorruptError: a file is truncated or altered, or contradicts itself.
        ArtefactSchemaError: it is of no known format.
        UnsupportedError: it holds what no weight of nc is, e.g. groups of input channels that are not
            neighbours.
    """
    where = checked_path("path", path)
    file = _gguf_in(where)
    if file is not None:
        return _read_gguf(file)
    tensors, config = folder.read(where)
    name, config = _format_of(config, where)
    try:
        layers = FORMATS[name][1](tensors, config)
    except (NCError, Warning):
        raise
    except Exception as error:  # a value of another type than the format has there
        msg = (
            f"{str(where)!r}: quantization_config is not what {name} writes ({type(error).__name__}: "
            f"{error})."
        )
        raise ArtefactCorruptError(msg) from error
    return ForeignWeights(name, layers, tensors)


def import_weights(path: str | os.PathLike[str], model: torch.nn.Module) -> torch.nn.Module:
    """Put low-bit weights that another tool wrote into a model of the same architecture.

    Linears (also transformers' `Conv1D`) become `nc.nn.QuantLinear`, embeddings `nc.nn.QuantEmbedding`; all
    other parameters are read from the files too. Every check is made before the model changes.

    Args:
        path: as for `read_weights`.
        model: in any state; it is changed in place. Its names must be those of the files.

    Returns:
        The model, in eval mode.

    Raises:
        NCError: as for `read_weights`.
        ArtefactError: the files do not fit the model; the message has the first name that does not.
    """
    found = read_weights(path)
    if not found.layers:
        msg = f"{str(path)!r} holds no low-bit weight."
        raise ArtefactError(msg)
    return put(model, found.layers, found.tensors, str(path))


def _format_of(config: dict[str, Any], where: Path) -> tuple[str, dict[str, Any]]:
    """Return a key of `FORMATS`, and the settings of its reader."""
    method = str(config.get("quant_method", "")).lower()
    if method == "auto-round":
        method, config = auto_round.settings(config)
    if method not in FORMATS:
        msg = (
            f"{str(where)!r} is of quant_method {method!r}, which nc does not read; it reads "
            f"{', '.join((*FORMATS, GGUF))}."
        )
        raise ArtefactSchemaError(msg)
    return method, config


def _gguf_in(where: Path) -> Path | None:
    if where.suffix == f".{GGUF}" and not where.is_dir():
        return where
    files = sorted(where.glob(f"*.{GGUF}"))
    return files[0] if len(files) == 1 and not any(where.glob("*.safetensors")) else None


def _read_gguf(path: Path) -> ForeignWeights:
    file = gguf.read(path)
    layers, tensors = {}, {}
    for name, info in file.tensors.items():
        if info.type in gguf.TYPES and gguf.TYPES[info.type].form is not None and len(info.shape) == 2:
            layers[name.removesuffix(".weight")] = StoredLayer(file.packed(name))
        else:
            tensors[name] = file.float(name)
    return ForeignWeights(GGUF, layers, tensors)

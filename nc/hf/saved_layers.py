"""Low-bit layers in the files of `save_pretrained`.

The file has the tensors of `nc.nn.QuantLinear` under the names that they have in memory, which transformers
loads like any others. Without `nc` transformers knows nothing of them, warns, and would give the layers
random weights. So the file also has, under the name of each float weight, a tensor without elements:
transformers finds that its size is not the layer's, and raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc.backends.low_bit.engine import set_backend
from nc.config import WeightOnlyConfig
from nc.errors import ArtefactCorruptError, ArtefactSchemaError, StateError
from nc.modules.layers import layers_of
from nc.nn import QuantLinear
from nc.nn.origin import QuantizationRun
from nc.numerics.packed_weight import check_parts, empty
from nc.planning.layer_rules import plan_layers
from nc.storage.tensor_file import StoredTensor, stored_in
from nc.weights.experts import Experts, stacked_names
from nc.weights.files.transformers_files import sources_of
from nc.weights.history import note
from nc.weights.swap import SAVERS, replace

#: End of the name of a float weight.
_WEIGHT = ".weight"


def low_bit_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of low-bit linears."""
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


def put_empty_layers(
    model: Any,
    rules: WeightOnlyConfig,
    saved: Sequence[str] | None,
    files: Sequence[str] | None,
) -> None:
    """Replace the float linears of a model without values by low-bit ones without values, in place.

    Args:
        model: of transformers.
        rules: which layers are low-bit, and how.
        saved: names of low-bit layers of the folder.
        files: with its tensors.

    Raises:
        ArtefactSchemaError: the rules give other layers than were saved.
        ArtefactCorruptError: a tensor is missing or has another shape, which transformers would fill with
            random numbers.
        StateError: there are no files.
    """
    if files is None:
        msg = "Low-bit weights are read from files: give from_pretrained the folder."
        raise StateError(msg)
    plan = plan_layers(rules, model)
    names = [decision.operator for decision in plan.quantized]
    if sorted(names) != sorted(saved or ()):
        raise ArtefactSchemaError(_other_layers(model))
    layers = {layer.name: layer for layer in layers_of(model)}
    for decision in plan.quantized:
        assert decision.form is not None
        layer = layers[decision.operator]
        replace(model, layer, decision, empty(decision.form, decision.shape, layer.weight.device), None)
        new: Any = model.get_submodule(decision.operator)
        new._is_hf_initialized = True  # transformers has nothing to initialize in it
    note(model, QuantizationRun(plan=plan.to_dict(), applied=(), config=rules.to_dict()))
    _check_complete(model, names, files)
    # tensors that only tell readers without nc
    model._keys_to_ignore_on_load_unexpected = {
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        *(rf"(^|[.]){re.escape(name + _WEIGHT)}$" for name in names),
    }


def _other_layers(model: Any) -> str:
    """Return why a folder's list of layers is not that of the model."""
    saved = list(getattr(model.config, "architectures", None) or ())
    if saved and type(model).__name__ not in saved:
        return (
            f"The folder holds a {saved[0]} with low-bit weights, which can't be loaded as a "
            f"{type(model).__name__}. Load it as a {saved[0]}, or quantize the float model again with "
            "nc.hf.QuantizationConfig."
        )
    return (
        f"The folder's quantization_config lists other low-bit layers than this version of nc gives a "
        f"{type(model).__name__}: config.json was changed, or another version wrote it. Quantize the float "
        "model again with nc.hf.QuantizationConfig."
    )


def _check_complete(model: torch.nn.Module, names: Sequence[str], files: Sequence[str]) -> None:
    stored = {key: tensor for file in files for key, tensor in stored_in(Path(file)).items()}
    found = sources_of(model, stored)
    for name in names:
        for part, tensor in model.get_submodule(name).state_dict().items():
            key = f"{name}.{part}"
            if key not in found:
                msg = f"{files[0]!r} and its other parts have no tensor {key!r}. Get them again."
                raise ArtefactCorruptError(msg)
            if tuple(found[key].shape) != tuple(tensor.shape):
                msg = (
                    f"Tensor {key!r} has shape {tuple(found[key].shape)} in the files, and config.json makes "
                    f"it {tuple(tensor.shape)}. Load the model as it was saved; for another head load and "
                    "quantize the float model."
                )
                raise ArtefactCorruptError(msg)


def check_layers(model: torch.nn.Module) -> None:
    """Check what was loaded, and let kernels compute it.

    Raises:
        ConfigError: a tensor is not that of its layer's format.
    """
    for module in model.modules():
        if isinstance(module, QuantLinear):
            check_parts(module.packed)
    set_backend(model)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a file holds of a model."""
    guards = {f"{name}{_WEIGHT}": torch.empty(0, dtype=torch.float32) for name in low_bit_layers(model)}
    return {**model.state_dict(), **guards}


def let_save(model: Any) -> None:
    """Give a model its class's `SAVERS` again, if files of transformers can hold all low-bit layers.

    They can't hold stacked experts, nor tensors that transformers renames or joins when it reads the names
    that they have in memory.
    """
    stacked = stacked_names(model) or any(isinstance(module, Experts) for module in model.modules())
    named = {key: StoredTensor(Path(key), torch.float32, (), 0) for key in model.state_dict()}
    found = sources_of(model, named)
    if not stacked and all(found.get(key) is tensor for key, tensor in named.items()):
        model._weight_conversions = []  # transformers would save tensors under other names
        for way in SAVERS:
            vars(model).pop(way, None)

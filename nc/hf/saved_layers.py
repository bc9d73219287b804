"""Low-bit layers in the files of `save_pretrained`.

The file has the tensors of `nc.nn.QuantLinear` under their names, which transformers loads like any others.
Without `nc` transformers knows nothing of them, warns, and would give the layers random weights. So the file
also has, under the name of each float weight, a tensor without elements: transformers finds that its size is
not the layer's, and raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nc.algorithms.inputs.layers import layers_of
from nc.backends.low_bit.engine import set_backend
from nc.config import WeightOnlyConfig
from nc.errors import ArtefactCorruptError, ArtefactSchemaError, StateError
from nc.nn import QuantLinear
from nc.nn.origin import QuantizationRun
from nc.numerics.packed_weight import check_parts, empty
from nc.planning.layer_rules import plan_layers
from nc.storage.tensor_file import stored_in
from nc.weights.experts import stacked_names
from nc.weights.history import note
from nc.weights.swap import replace

#: End of the name of a float weight.
_WEIGHT = ".weight"


def low_bit_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of low-bit linears."""
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


def put_empty_layers(
    model: Any, rules: WeightOnlyConfig, saved: Sequence[str] | None, files: Sequence[str] | None
) -> None:
    """Replace the float linears of a model without values by low-bit ones without values, in place.

    Args:
        model: of transformers.
        rules: which layers are low-bit, and how.
        saved: names of low-bit layers of the folder.
        files: with its tensors; None: not known.

    Raises:
        ArtefactSchemaError: the rules give other layers than were saved.
        ArtefactCorruptError: a tensor is missing, which transformers would fill with random numbers.
    """
    plan = plan_layers(rules, model)
    names = [decision.operator for decision in plan.quantized]
    if sorted(names) != sorted(saved or ()):
        msg = (
            f"The folder's quantization_config lists other low-bit layers than this version of nc gives a "
            f"{type(model).__name__}. Load the class that was saved, or quantize the float model again with "
            "nc.hf.QuantizationConfig."
        )
        raise ArtefactSchemaError(msg)
    layers = {layer.name: layer for layer in layers_of(model)}
    for decision in plan.quantized:
        assert decision.form is not None
        layer = layers[decision.operator]
        replace(model, layer, decision, empty(decision.form, decision.shape, layer.weight.device), None)
        new: Any = model.get_submodule(decision.operator)
        new._is_hf_initialized = True  # transformers has nothing to initialize in it
    if files is not None:
        _check_complete(model, names, files)
    # tensors that only tell readers without nc
    model._keys_to_ignore_on_load_unexpected = {
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        *(rf"(^|[.]){re.escape(name + _WEIGHT)}$" for name in names),
    }


def _check_complete(model: torch.nn.Module, names: Sequence[str], files: Sequence[str]) -> None:
    stored = {key for file in files for key in stored_in(Path(file))}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name in names:
        for part in model.get_submodule(name).state_dict():
            key = f"{name}.{part}"
            if not {key, prefix + key, key.removeprefix(prefix)} & stored:
                msg = f"{files[0]!r} and its other parts have no tensor {key!r}. Save the model again."
                raise ArtefactCorruptError(msg)


def check_layers(model: torch.nn.Module, rules: WeightOnlyConfig) -> None:
    """Check what was loaded, and let kernels compute it.

    Raises:
        ConfigError: a tensor is not that of its layer's format.
    """
    for module in model.modules():
        if isinstance(module, QuantLinear):
            check_parts(module.packed)
    note(model, QuantizationRun(plan=plan_layers(rules, model).to_dict(), applied=(), config=rules.to_dict()))
    set_backend(model)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a file holds of a model.

    Raises:
        StateError: it has stacked experts, which are no low-bit linears under names of their own.
    """
    if stacked_names(model):
        msg = "A model with stacked experts is saved with nc.save(model, folder): nc.load(folder) loads it."
        raise StateError(msg)
    guards = {f"{name}{_WEIGHT}": torch.empty(0, dtype=torch.float32) for name in low_bit_layers(model)}
    return {**model.state_dict(), **guards}

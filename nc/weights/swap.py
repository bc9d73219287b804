"""Modules with packed weights put into a model."""

from __future__ import annotations

from typing import Any

import torch

from nc.errors import StateError
from nc.modules.layers import Layer
from nc.nn import QuantEmbedding, QuantLinear
from nc.nn.result import LayerResult
from nc.numerics.packed_weight import PackedWeight
from nc.planning.layer_plan import LayerDecision

#: Methods that write what `from_pretrained` reads.
SAVERS = ("save_pretrained", "push_to_hub")
#: Where torch keeps the hooks of calls: of the forward and the backward pass, and which of them want keywords
#: or run after errors.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def replace(
    model: torch.nn.Module,
    layer: Layer,
    decision: LayerDecision,
    packed: PackedWeight,
    result: LayerResult | None,
) -> None:
    """Put a module with a packed weight in the place of a layer, under all its names."""
    module = layer.module
    new: torch.nn.Module
    if layer.kind == "embedding":
        assert isinstance(module, torch.nn.Embedding)
        new = QuantEmbedding(packed, module.padding_idx, module.weight.dtype, result)
    else:
        new = QuantLinear(packed, module.bias, decision.act_dtype, result, layer.weight.dtype)  # type: ignore[arg-type]
    new.train(module.training)
    _keep_hooks(module, new)
    for name in (layer.name, *layer.others):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
        refuse_save_pretrained(model, name)


def refuse_save_pretrained(model: torch.nn.Module, name: str) -> None:
    """Let all parts of a model that hold a low-bit layer refuse `save_pretrained` and `push_to_hub`.

    `from_pretrained` would give the layer random float weights. Adapters of peft are saved without it.
    """
    parts = name.split(".")
    for end in range(len(parts)):
        owner: Any = model.get_submodule(".".join(parts[:end]))
        for way in SAVERS if not type(owner).__module__.startswith("peft.") else ():
            if hasattr(owner, way):
                setattr(owner, way, _refused)


def _refused(*_: Any, **__: Any) -> None:
    """Take the place of those in `SAVERS`.

    Raises:
        StateError: always.
    """
    msg = (
        "save_pretrained does not write how low-bit weights are read, and from_pretrained would take random "
        "ones. Save with nc.save(model, folder) and load with nc.load(folder); for other tools use "
        'nc.hf.export(model, folder, "compressed-tensors"). Only a model that transformers 5 quantized while '
        "it loaded it, without stacked experts, has its own save_pretrained."
    )
    raise StateError(msg)


def _keep_hooks(module: torch.nn.Module, new: torch.nn.Module) -> None:
    """Give a module the hooks of the one that it replaces.

    They share the tables, so that handles of `register_…_hook` still remove.
    """
    for table in _HOOKS:
        setattr(new, table, getattr(module, table))
    new._is_full_backward_hook = module._is_full_backward_hook  # what kind those of the backward pass are

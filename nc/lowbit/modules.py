"""Modules with packed weights put into a model, and models that share weights, or have their own."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nc.lowbit.layers import Layer
from nc.lowbit.plan import LayerDecision
from nc.lowbit.result import LayerResult
from nc.nn import QuantEmbedding, QuantLinear
from nc.numerics.packed_weight import PackedWeight


def replace(model: torch.nn.Module, layer: Layer, decision: LayerDecision, packed: PackedWeight, result: LayerResult | None) -> None:
    """Put a module with a packed weight in the place of a layer, under all its names."""
    module = layer.module
    new: torch.nn.Module
    if layer.kind == "embedding":
        assert isinstance(module, torch.nn.Embedding)
        new = QuantEmbedding(packed, module.padding_idx, module.weight.dtype, result)
    else:
        new = QuantLinear(packed, module.bias, decision.act_dtype, result, layer.weight.dtype)  # type: ignore[arg-type]
    new.train(module.training)
    for name in (layer.name, *layer.others):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def own_weights(module: torch.nn.Module) -> None:
    """Give a module parameters of its own, in place of those that it shares with the user's model; ties inside it stay."""
    copies: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():  # noqa: SLF001 - named_parameters leaves out ties
            if parameter is not None:
                fresh = copies.setdefault(id(parameter), torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                part._parameters[name] = fresh  # noqa: SLF001


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model that shares its parameters and buffers."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)

"""Modules with packed weights put into a model, and models that share weights, or have their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from nc.lowbit.layers import Layer
from nc.lowbit.plan import LayerDecision
from nc.lowbit.result import LayerResult
from nc.nn import QuantEmbedding, QuantLinear
from nc.numerics.packed_weight import PackedWeight

#: Where torch keeps the hooks of calls: of the forward and the backward pass, and which of them want keywords or run after errors.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
#: Hooks that compute the float weight from other parameters at each call: the packed weight holds what they computed.
_OF_WEIGHTS = (prune.BasePruningMethod, SpectralNorm, WeightNorm)


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
    _keep_hooks(module, new)
    for name in (layer.name, *layer.others):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def _keep_hooks(module: torch.nn.Module, new: torch.nn.Module) -> None:
    """Give a module the hooks of the one that it replaces. They share the tables, so that handles of `register_…_hook` still remove."""
    pre_hooks = module._forward_pre_hooks  # noqa: SLF001
    for key in [key for key, hook in pre_hooks.items() if isinstance(hook, _OF_WEIGHTS)]:
        del pre_hooks[key]
    for table in _HOOKS:
        setattr(new, table, getattr(module, table))
    new._is_full_backward_hook = module._is_full_backward_hook  # noqa: SLF001 - what kind those of the backward pass are


def own_weights(module: torch.nn.Module) -> None:
    """Give a module parameters of its own, in place of those that it shares with the user's model; ties inside it stay."""
    copies: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():  # noqa: SLF001 - named_parameters leaves out ties
            if parameter is not None:
                fresh = copies.setdefault(id(parameter), torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                part._parameters[name] = fresh  # noqa: SLF001


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model that shares its parameters, its buffers, and the weights that hooks compute from them (pruning, weight_norm)."""
    computed = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Tensor) and not v.is_leaf]
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers(), *computed)}
    return copy.deepcopy(model, memo)

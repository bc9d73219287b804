"""Weights that are computed from other tensors at each call.

They are computed by hooks (weight_norm, spectral_norm, pruning) and by parametrizations.

What such a module shows as `weight` is the result of its last call, or nothing before the first. Here the
weight is computed from what the module holds, and becomes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

#: Hooks of torch that compute a tensor from others. They read no input.
_OF_TORCH = (prune.BasePruningMethod, SpectralNorm, WeightNorm)
_NAMES = ("weight", "bias")


def is_computed(module: torch.nn.Module) -> bool:
    """Return whether the weight or bias of a linear or embedding is not its own parameter or buffer."""
    if parametrize.is_parametrized(module):
        return True
    return any(
        not _is_held(module, name)
        for name in _NAMES
        if name == "weight" or not isinstance(module, torch.nn.Embedding)
    )


def weight_is_known(module: torch.nn.Module) -> bool:
    """Return whether the weight of a module is a parameter or buffer."""
    return _is_held(module, "weight")


def settle(modules: Iterable[torch.nn.Module]) -> None:
    """Compute the weights and biases of linears and embeddings, as in eval mode, and make parameters of them.

    The parametrizations and hooks that computed them go. A module whose weight is computed by something else,
    such as the forward of the module around it, keeps what it has.

    Args:
        modules: they are changed; tensors that they share with other modules are not.
    """
    for module in modules:
        if is_computed(module):
            flags = [(part, part.training) for part in module.modules()]
            for part, _ in flags:
                part.training = False  # spectral norms change their buffers in training mode
            with torch.no_grad():
                _end_parametrizations(module)
                _end_hooks(module)
            for part, flag in flags:
                part.training = flag


def _end_parametrizations(module: torch.nn.Module) -> None:
    if not parametrize.is_parametrized(module):
        return
    values = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module._modules["parametrizations"]  # `del module.parametrizations` is the same
    for name, value in values.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def _end_hooks(module: torch.nn.Module) -> None:
    hooks = module._forward_pre_hooks  # torch has no other way to them
    wanted = [name for name in _NAMES if not _is_held(module, name)]
    given: set[str] = set()
    for key, hook in list(hooks.items()):
        computed = _computed_by(
            hook, module, wanted, with_kwargs=key in module._forward_pre_hooks_with_kwargs
        )
        if computed:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            given |= computed
    for name in given:
        _hold(module, name)


def _computed_by(hook: Any, module: torch.nn.Module, names: list[str], *, with_kwargs: bool) -> set[str]:
    """Which of some tensors a hook gives a module, found by a call with a row of zeros."""
    before = {name: getattr(module, name, None) for name in names}
    try:
        if names:
            hook(
                module,
                () if isinstance(hook, _OF_TORCH) else (_zeros(module),),
                *([{}] if with_kwargs else []),
            )
    except (
        Exception
    ):  # it wants other inputs; a weight that nothing gives is left alone, with a reason in the plan
        return set()
    return {name for name in names if getattr(module, name, None) is not before[name]}


def _zeros(module: torch.nn.Module) -> torch.Tensor:
    if isinstance(module, torch.nn.Embedding):
        return torch.zeros(1, dtype=torch.int64)
    own = next((p for p in module.parameters(recurse=False) if p.is_floating_point()), None)
    size: Any = getattr(module, "in_features", None) or getattr(
        module, "nx", 1
    )  # transformers' Conv1D has nx
    return torch.zeros(1, size, dtype=torch.float32 if own is None else own.dtype)


def _hold(module: torch.nn.Module, name: str) -> None:
    value = vars(module).get(name)
    if isinstance(value, torch.Tensor):
        del module.__dict__[name]
        module.register_parameter(name, torch.nn.Parameter(value.detach().clone(), requires_grad=False))


def _is_held(module: torch.nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers  # an attribute of that name may be anything

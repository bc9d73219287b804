"""What a model consists of, to see later whether it is still the same."""

from __future__ import annotations

import torch
from torch.nn.modules import module as of_all

from nc.nn import QuantLinear


class Snapshot:
    """A model's modules, tensors, engines and hooks.

    Not seen: changes that torch does not count (in place by `.data`), which plans read anyway, but for codes
    and scales; and settings of modules.

    Args:
        model: any module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parts = _parts(model)
        self.layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        inside = [module for module in model.modules() if module is not model]
        own = [hooks for module in inside for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks = [*own, of_all._global_forward_hooks, of_all._global_forward_pre_hooks]

    @property
    def hooked(self) -> bool:
        """Whether modules in the model have hooks.

        The hooks of transformers, which collect hidden states, do not count.
        """
        return any(self._hooks) and any(
            not _of_transformers(hook) for hooks in self._hooks for hook in hooks.values()
        )

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether the model still has the same modules, and the same tensors, unchanged."""
        now = _parts(model)
        return len(now) == len(self._parts) and all(
            x is y and a == b for (x, a), (y, b) in zip(now, self._parts, strict=True)
        )


def _parts(model: torch.nn.Module) -> list[tuple[object, object]]:
    """Objects, each with what else tells whether it is the same."""
    found: list[tuple[object, object]] = []
    for module in model.modules():
        found.append((module, None))
        if module is not model:
            found.append((vars(module).get("forward"), None))  # somebody's own
        if isinstance(module, QuantLinear):
            found.append((module.engine, module.act_dtype))
        tensors = (*module._parameters.values(), *module._buffers.values())
        found += [(tensor, _memory_of(tensor)) for tensor in tensors if tensor is not None]
    return found


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address, and torch's counter of changes in place."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return tensor.data_ptr() if plain else 0, -1 if tensor.is_inference() else tensor._version


def _of_transformers(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")

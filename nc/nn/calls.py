"""Low-bit linears under `torch.compile`.

An operator calls a layer, so that its engine computes it and nothing is compiled in it.

Arguments of operators are tensors and numbers, but kernels need what was packed for them. So each layer has a
number, valid in its process. Programs that leave the process (`torch.export`) hold `nc::quant_linear`, which
needs stored tensors only.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from nc.errors import StateError

#: All layers that exist: the operator finds them here by their number.
_LAYERS: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number(layer: torch.nn.Module) -> int:
    """Return a number for a layer, which no other layer of this process ever gets."""
    found = next(_NUMBERS)
    _LAYERS[found] = layer
    return found


def _call(x: torch.Tensor, layer: int, outputs: int) -> torch.Tensor:  # `_like` reads it
    found = _LAYERS.get(layer)
    if found is None:
        msg = (
            "A compiled program calls a low-bit layer that does not exist any more. Compile the model again."
        )
        raise StateError(msg)
    result: torch.Tensor = found.forward(x)
    return result


def _like(x: torch.Tensor, layer: int, outputs: int) -> torch.Tensor:  # the names of the schema
    return x.new_empty((*x.shape[:-1], outputs))


_LIBRARY = torch.library.Library("nc_layers", "DEF")  # type: ignore[no-untyped-call] # torch annotates it in part only
_LIBRARY.define("call(Tensor x, int layer, int outputs) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
_LIBRARY.impl("call", _call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("nc_layers::call", _like, lib=_LIBRARY)
call_layer: torch._ops.OpOverload = torch.ops.nc_layers.call.default

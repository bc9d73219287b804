"""Recurrent layers with any number of steps.

torch traces an LSTM, GRU or RNN step by step to know the sizes of its results, and so the number of steps
becomes that of the example. Here the traced program calls operators with the same arguments, which know the
sizes of their results from those of their inputs. `steps_as_one` puts torch's own operators back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from nc.errors import CaptureError
from nc.graph.fx_utils import retarget

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_NAMESPACE = "nc_capture"
_PACKED = (
    "The model packs sequences (torch.nn.utils.rnn). Sizes of packed data depend on the values of the "
    "lengths, which no graph holds. Run the layer on padded sequences of (batch, steps): outputs up to the "
    "length of each row are the same in the forward direction. Take each row's last state with gather at its "
    "length minus 1. Or quantize the modules before and after it one by one."
)


class AnyNumberOfSteps(TorchFunctionMode):
    """While it is on, recurrent layers are traced as calls of the operators of this module."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call another operator where `func` computes a recurrent layer on a tensor.

        Raises:
            CaptureError: `func` packs or unpacks sequences.
        """
        if func in _packing():
            raise CaptureError(_PACKED)
        operator = _operators().get(func)
        if (
            operator is None
            or len(args) != len(operator._schema.arguments)
            or not isinstance(args[2], (list, tuple))
        ):
            return func(*args, **(kwargs or {}))
        return operator(*_with_fixed_sizes(*args[:3], batch_first=args[-1]), *args[2:])


def steps_as_one(module: fx.GraphModule) -> None:
    """Operators of this module become those of ATen that they stand for."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == _NAMESPACE:
            retarget(node, getattr(torch.ops.aten, node.target._opname).input)


def _with_fixed_sizes(
    x: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    *,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | list[torch.Tensor]]:
    """Input and states with the sizes that the weights need.

    Torch's kernels do not ask, and read beyond tensors that are smaller.
    """
    fixed = _fixed(x, (-1, -1, params[0].shape[1]))
    states = [
        _fixed(state, (int(state.shape[0]), -1, int(state.shape[2])))
        for state in ([hx] if isinstance(hx, torch.Tensor) else hx)
    ]
    for state in states:
        torch._check(state.shape[1] == x.shape[0 if batch_first else 1])  # type: ignore[no-untyped-call] # torch annotates it in part only
    return fixed, states[0] if isinstance(hx, torch.Tensor) else states


def _fixed(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a view that exists for these sizes only; -1 stands for any.

    The tensor itself where its sizes can be no others.
    """
    if all(size < 0 or isinstance(own, int) for own, size in zip(tensor.shape, sizes, strict=True)):
        return tensor
    return tensor.expand(sizes)


@functools.cache
def _operators() -> dict[Any, torch._ops.OpOverload]:
    """Return torch's function for each recurrent layer → the operator that is traced in its place.

    They are registered when needed first.
    """
    library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call] # torch annotates it in part only
    found: dict[Any, torch._ops.OpOverload] = {}
    for name in _NAMES:
        schema = str(getattr(torch.ops.aten, name).input._schema).partition("(")[2]
        library.define(f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call] # as above
        torch.library.register_fake(f"{_NAMESPACE}::{name}", _results, lib=library)
        found[getattr(torch._VF, name)] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _LIBRARIES.append(library)
    return found


#: torch forgets the operators of a library that nothing holds.
_LIBRARIES: list[torch.library.Library] = []


@functools.cache
def _packing() -> frozenset[Any]:
    return frozenset({torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence})


def _results(
    x: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,  # names and order of the schema
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Output and last states, without values.

    The recurrent matrix has a column for each element of the output.
    """
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    features = params[1].shape[1] * (1 + bidirectional)
    first, second = x.shape[:2]
    output = x.new_empty(
        (second, first, features) if batch_first else (first, second, features)
    )  # in memory the steps come first
    return output.transpose(0, 1) if batch_first else output, *(torch.empty_like(state) for state in states)

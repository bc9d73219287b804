"""What calls reach the blocks of a model: recorded once, so that blocks can be run one after the other without the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Stands for the first output of the block in front.
HIDDEN = type("Hidden", (), {"__repr__": lambda _: "HIDDEN"})()

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """The calls of one sample, one per block.

    Attributes:
        calls: (args, kwargs) of each block, in the order of the list. Tensors that are the output of the block in front are `HIDDEN`.
        keep: which positions of [batch, length] are no padding; None where nothing says so.
    """

    calls: tuple[Call, ...]
    keep: torch.Tensor | None = None


def block_lists(model: torch.nn.Module, layers: Collection[str]) -> list[list[str]]:
    """Names of the model's stacks of blocks that hold layers to quantize, in the order of `named_modules`; outermost stacks only.

    Args:
        model: the model.
        layers: names of the layers.
    """
    stacks: list[list[str]] = []
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2 or name.startswith(taken or ("\0",)):
            continue
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        if sum(any(layer.startswith(f"{child}.") for layer in layers) for child in children) < 2:
            continue
        stacks.append(children)
        taken += (f"{name}.",)
    return stacks


@contextlib.contextmanager
def recording(blocks: Sequence[torch.nn.Module]) -> Iterator[list[tuple[int, Call]]]:
    """Record each call of a block as (index of the block, its arguments) while a model runs."""
    calls: list[tuple[int, Call]] = []
    last: list[Any] = [None]

    def before(index: int) -> Any:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            def part(value: Any) -> Any:
                if value is last[0] and value is not None:
                    return HIDDEN
                if isinstance(value, torch.Tensor):
                    return value.detach()
                return None if type(value).__name__.endswith("Cache") else value  # a cache grows with each call

            calls.append(
                (index, (tuple(map(part, args)), {k: pytree.tree_map(part, v) if v is not None else None for k, v in kwargs.items()}))
            )

        return hook

    def after(_: torch.nn.Module, __: Any, output: Any) -> None:
        last[0] = first_tensor(output)

    handles = [block.register_forward_pre_hook(before(i), with_kwargs=True) for i, block in enumerate(blocks)]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Any:
    """A block's output, or the first part of it."""
    return output[0] if isinstance(output, (tuple, list)) else output


def in_order(calls: Sequence[tuple[int, Call]], count: int) -> tuple[Call, ...] | None:
    """The arguments of each block, if each was called exactly once and in order; else None."""
    return tuple(call for _, call in calls) if [index for index, _ in calls] == list(range(count)) else None


def filled(call: Call, hidden: torch.Tensor | None) -> Call:
    """The arguments with the output of the block in front in its place."""

    def part(value: Any) -> Any:
        return hidden if value is HIDDEN else value

    args, kwargs = call
    return tuple(map(part, args)), {k: pytree.tree_map(part, v) for k, v in kwargs.items()}


def run(module: torch.nn.Module, call: Call) -> Any:
    """Call a module without gradients; the result is its first output tensor."""
    with torch.no_grad():
        return first_tensor(module(*call[0], **call[1]))

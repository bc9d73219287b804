"""Record the calls that reach the blocks of a model.

They are recorded once, so that blocks can be run in sequence without the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Stands for the first output of the block in front.
HIDDEN = type("Hidden", (), {"__repr__": lambda _: "HIDDEN"})()

BlockCall = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(slots=True)
class Sample:
    """One call of the model, as the user made it.

    Attributes:
        call: (args, kwargs).
        keep: positions of [batch, length] that are not padding; None if unknown.
    """

    call: BlockCall
    keep: torch.Tensor | None = None


class _Stop(Exception):  # not an error
    """The last block was reached: later modules need not run."""


def block_lists(model: torch.nn.Module, layers: Collection[str]) -> list[list[str]]:
    """Names of the model's stacks of blocks that hold layers to quantize, in the order of `named_modules`.

    Only outermost stacks count.

    Args:
        model: the model.
        layers: names of the layers.
    """
    stacks: list[list[str]] = []
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if (
            not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
            or len(module) < 2
            or name.startswith(taken or ("\0",))
        ):
            continue
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        if sum(any(layer.startswith(f"{child}.") for layer in layers) for child in children) < 2:
            continue
        stacks.append(children)
        taken += (f"{name}.",)
    return stacks


def record(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    samples: Sequence[Sample],
    first: Callable[[int, torch.Tensor], None] | None = None,
) -> list[tuple[BlockCall, ...]] | None:
    """For each sample the arguments of each block, or None if blocks are not called once each and in order.

    Where a block only passes a hidden state on, blocks are not computed while arguments are recorded: the
    first two are, for one sample, to see that this changes no argument.

    Args:
        model: the model; modules before `blocks` are computed.
        blocks: one stack.
        samples: calls of the model.
        first: gets the number of each sample and the first tensor that its first block is called with; the
            calls then have `HIDDEN` there too. Without it these tensors of all samples are in the result.

    Returns:
        (args, kwargs) of each block. Tensors that the previous block returned are `HIDDEN`.
    """
    if not samples:
        return []
    seen: list[Any] = []
    true = _calls(model, blocks, samples[0], real=2, shape=seen.append)
    passes_on = bool(seen) and not any(isinstance(part, torch.Tensor) for part in _rest(seen[0]))
    if passes_on and true is not None:

        def like(hidden: torch.Tensor) -> Any:
            return hidden if isinstance(seen[0], torch.Tensor) else type(seen[0])((hidden, *seen[0][1:]))

        skipped = _calls(model, blocks, samples[0], real=0, like=like)
        if skipped is not None and _same(true, skipped):
            return _all((_calls(model, blocks, sample, real=0, like=like) for sample in samples), first)
    return _all((_calls(model, blocks, sample, real=len(blocks)) for sample in samples), first)


def _all(
    found: Iterator[tuple[BlockCall, ...] | None], first: Callable[[int, torch.Tensor], None] | None
) -> list[tuple[BlockCall, ...]] | None:
    result = []
    kept: dict[Any, torch.Tensor] = {}
    for index, calls in enumerate(found):
        if calls is None:
            return None
        hidden = next((v for v in (*calls[0][0], *calls[0][1].values()) if isinstance(v, torch.Tensor)), None)
        if first is not None and hidden is not None:
            first(index, hidden)
            calls = (_replaced(calls[0], hidden, HIDDEN), *calls[1:])
            calls = _without_copies(calls, kept)
        result.append(calls)
    return result


def _without_copies(calls: tuple[BlockCall, ...], kept: dict[Any, torch.Tensor]) -> tuple[BlockCall, ...]:
    """Return calls in which tensors that equal an earlier one are that one.

    So masks and positions of samples of one size are shared.

    Args:
        calls: of one sample.
        kept: those so far; grows.
    """
    seen: dict[int, torch.Tensor] = {}

    def part(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return value
        if id(value) not in seen:
            content = hashlib.blake2b(
                value.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            ).digest()
            seen[id(value)] = kept.setdefault((value.shape, value.stride(), value.dtype, content), value)
        return seen[id(value)]

    return tuple(
        (pytree.tree_map(part, args), {k: pytree.tree_map(part, v) for k, v in kwargs.items()})
        for args, kwargs in calls
    )


def _rest(output: Any) -> Sequence[Any]:
    if isinstance(output, torch.Tensor):
        return ()
    return tuple(output)[1:] if isinstance(output, (tuple, list)) else (torch.empty(0, dtype=torch.float32),)


def _same(one: Sequence[BlockCall], other: Sequence[BlockCall]) -> bool:
    """Return whether all tensors but hidden states are the same."""
    left, right = (pytree.tree_leaves([call for call in calls]) for calls in (one, other))

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return a is b or type(a) is type(b)

    return len(left) == len(right) and all(map(equal, left, right))


def _calls(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    sample: Sample,
    *,
    real: int,
    like: Callable[[torch.Tensor], Any] = lambda hidden: hidden,
    shape: Callable[[Any], None] = lambda _: None,
) -> tuple[BlockCall, ...] | None:
    """Return the arguments of each block.

    Args:
        model: as for `record`.
        blocks: as for `record`.
        sample: the call.
        real: the first so many blocks are computed; the others return their input.
        like: hidden state → what a block returns.
        shape: is told what the first block returns.
    """
    calls: list[tuple[int, BlockCall]] = []
    last: list[Any] = [None]

    def part(value: Any) -> Any:
        if value is last[0] and value is not None:
            return HIDDEN
        if isinstance(value, torch.Tensor):
            return value.detach()
        return None if is_cache(value) else value

    def replaced(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = args, kwargs
            calls.append((index, pytree.tree_map(part, call, is_leaf=is_cache)))
            if index < real:
                args, kwargs = fresh(call)
                output = original(*args, **kwargs)
                if index == 0:
                    shape(output)
            elif index == len(blocks) - 1:
                raise _Stop
            else:
                hidden = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
                output = like(hidden)
            last[0] = first_tensor(output)
            return output

        return forward

    with torch.no_grad(), contextlib.suppress(_Stop), with_forwards(blocks, replaced):
        args, kwargs = fresh(sample.call)
        model(*args, **kwargs)
    return (
        tuple(call for _, call in calls)
        if [index for index, _ in calls] == list(range(len(blocks)))
        else None
    )


@contextlib.contextmanager
def with_forwards(
    blocks: Sequence[torch.nn.Module], made: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace forwards for a while; an instance's own forward is restored afterwards."""
    own = [block.__dict__.get("forward") for block in blocks]
    for i, block in enumerate(blocks):
        block.__dict__["forward"] = made(i, block.forward)
    try:
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            del block.__dict__["forward"]
            if before is not None:
                block.__dict__["forward"] = before


def is_cache(value: Any) -> bool:
    """Keys and values of earlier calls: they grow with each call.

    Once something was captured, they are containers for pytree.
    """
    return type(value).__name__.endswith("Cache")


def first_tensor(output: Any) -> Any:
    """Return a module's output, or the first tensor of at least one dimension in it (a loss has none)."""
    if isinstance(output, Mapping):
        return next((v for v in output.values() if isinstance(v, torch.Tensor) and v.dim()), output)
    return output[0] if isinstance(output, (tuple, list)) else output


def filled(call: BlockCall, hidden: torch.Tensor | None) -> BlockCall:
    """Return the arguments with the output of the block in front in its place."""
    return _replaced(call, HIDDEN, hidden)


def _replaced(call: BlockCall, old: Any, new: Any) -> BlockCall:
    def part(value: Any) -> Any:
        return new if value is old else value

    args, kwargs = call
    return pytree.tree_map(part, args), {k: pytree.tree_map(part, v) for k, v in kwargs.items()}


def fresh(call: BlockCall) -> BlockCall:
    """Return the arguments as copies.

    A module may change its own in place (`x += …`), and calls are made several times.
    """

    def part(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    args, kwargs = call
    return pytree.tree_map(part, args, is_leaf=is_cache), {
        k: pytree.tree_map(part, v, is_leaf=is_cache) for k, v in kwargs.items()
    }


def called(module: torch.nn.Module, call: BlockCall) -> Any:
    """Call a module; the result is its first output tensor."""
    args, kwargs = fresh(call)
    return first_tensor(module(*args, **kwargs))


def run(module: torch.nn.Module, call: BlockCall) -> Any:
    """As `called`, without gradients."""
    with torch.no_grad():
        return called(module, call)

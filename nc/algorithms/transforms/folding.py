"""Folding factors into weights, and the check that a module computes what it did before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nc.algorithms.transforms.float64 import BOUNDS, WideCopy, computing_in, in_dtype
from nc.algorithms.transforms.structure import Link, difference
from nc.modules.block_calls import BlockCall, run
from nc.modules.layers import layers_of

#: Samples among which the smallest is chosen.
LOOKED_AT = 8


class NotEquivalentError(Exception):
    """A change that would alter what the module computes; it was not made."""


def fold(module: torch.nn.Module, link: Link, scale: torch.Tensor) -> None:
    """Divide the output channels of a producer by a scale in place.

    The columns of its readers are multiplied by it.

    Args:
        module: a `WideCopy` of the block.
        link: the producer and its readers.
        scale: above 0, shape [output channels of the producer].

    Raises:
        NotEquivalentError: the producer is a norm whose gain is neither its weight nor 1 + its weight.
    """
    scale = torch.where(link.read, scale.double(), 1.0)
    producer = module.get_submodule(link.producer)
    weights = {layer.name: layer.weight for layer in layers_of(module)}
    with torch.no_grad():
        if link.norm:
            offset = gain_offset(producer, link.call)
            gain = producer._parameters["weight"]
            assert gain is not None
            gain.copy_((gain + offset) / scale - offset)
        else:
            weights[link.producer].div_(scale.unsqueeze(1))
        bias = producer._parameters.get("bias")
        if bias is not None:
            bias.div_(scale)
        for index, name in enumerate(link.consumers):
            weights[name].mul_(link.spread(scale, index))


def gain_offset(norm: torch.nn.Module, call: BlockCall) -> float:
    """0 for a norm that multiplies by its weight, 1 for one that multiplies by 1 + weight (Gemma).

    Args:
        norm: of a `WideCopy`; it is as before afterwards.
        call: arguments that it gets; a norm may have others beside its input, such as a gate.

    Raises:
        NotEquivalentError: it does neither.
    """
    weight, bias = norm._parameters["weight"], norm._parameters.get("bias")
    assert weight is not None
    kept = weight.detach().clone(), None if bias is None else bias.detach().clone()
    with computing_in(weight.dtype), torch.no_grad():
        given = in_dtype(call, weight.dtype)
        before = run(norm, given)
        try:
            for offset in (0.0, 1.0):
                weight.copy_((kept[0] + offset) * 2 - offset)
                if bias is not None and kept[1] is not None:
                    bias.copy_(kept[1] * 2)
                if difference(before * 2, run(norm, given)) < BOUNDS[weight.dtype]:
                    return offset
        finally:
            weight.copy_(kept[0])
            if bias is not None and kept[1] is not None:
                bias.copy_(kept[1])
    msg = f"the gain of {type(norm).__name__} is neither its weight nor 1 + its weight"
    raise NotEquivalentError(msg)


@dataclass(frozen=True, slots=True)
class Checked:
    """A change that was made.

    Attributes:
        error: difference of the output before and after, relative to its largest magnitude.
        dtype: in which it was measured: torch.float64, or torch.float32 where the module cannot run in
            float64.
    """

    error: float = 0.0
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        """For the report."""
        where = "float64" if self.dtype == torch.float64 else "fp32 (no float64 kernels)"
        return f"output the same within {self.error:.0e} in {where}"

    def worst(self, other: Checked) -> Checked:
        """Return the larger error."""
        return self if self.error >= other.error else other


def rewrite(module: torch.nn.Module, call: BlockCall, change: Callable[[torch.nn.Module], None]) -> Checked:
    """Change the weights of a module, if it then computes what it did before.

    The change is made on a float64 copy, which is run before and after. Then the new weights, rounded once,
    replace the module's own (new parameters; the old ones are not written into), and the module itself is
    run.

    Args:
        module: the block or model.
        call: a sample.
        change: changes the copy in place.

    Raises:
        NotEquivalentError: the output is another one. The module is as before.
    """
    wide = WideCopy(module, call)
    own = run(module, call)
    change(wide.module)
    error = difference(wide.output, wide.run(call))
    if not error <= wide.bound:
        msg = f"the output would change by {error:.1e} of its largest magnitude"
        raise NotEquivalentError(msg)
    undo = _take_over(module, wide.module)
    rounding = difference(own, run(module, call))
    if not rounding <= torch.finfo(own.dtype).eps ** 0.5:
        undo()
        msg = (
            f"rounded to {own.dtype} the new weights would change the output by {rounding:.1e} of its "
            "largest magnitude"
        )
        raise NotEquivalentError(msg)
    return Checked(error, wide.dtype)


def _take_over(module: torch.nn.Module, wide: torch.nn.Module) -> Callable[[], None]:
    """Give a module the changed parameters of its float64 copy, in its own dtype; the result undoes that."""
    old: list[tuple[torch.nn.Module, str, torch.nn.Parameter | None]] = []
    made: dict[int, torch.nn.Parameter] = {}
    for name, part in wide.named_modules():
        mine = module.get_submodule(name)
        if isinstance(mine, torch.jit.ScriptModule):
            continue
        for key, value in part._parameters.items():  # named_parameters leaves out ties
            own = mine._parameters.get(key)
            if value is None or (
                own is not None and torch.equal(own.detach().double(), value.detach().double())
            ):
                continue
            like = own if own is not None else mine._parameters["weight"]
            assert like is not None
            new = made.setdefault(
                id(value), torch.nn.Parameter(value.detach().to(like.dtype), requires_grad=like.requires_grad)
            )
            old.append((mine, key, own))
            mine._parameters[key] = new

    def undo() -> None:
        for part, key, parameter in old:
            part._parameters[key] = parameter

    return undo


def smallest(samples: Sequence[BlockCall]) -> BlockCall:
    """Return the sample with the fewest elements, of the first `LOOKED_AT`.

    Others may have to be read from a file.
    """

    def elements(call: BlockCall) -> int:
        return sum(v.numel() for v in (*call[0], *call[1].values()) if isinstance(v, torch.Tensor))

    return min(samples[:LOOKED_AT], key=elements)

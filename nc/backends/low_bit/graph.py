"""Low-bit linears of a captured graph → calls of an operator that computes them by kernels.

Packed weights become constants of the lowered graph, which is never stored: artefacts and programs are made
from the graph before lowering.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends import get_backend
from nc.backends.low_bit.choose import FLOATS, able, choice, compute, computed_as, used
from nc.graph.catalogue import op_name, schema_arguments
from nc.graph.fx_utils import call_function, constant_of, free_name, take_over
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.nn import KernelChoice
from nc.numerics.low_bit import linear as reference
from nc.numerics.low_bit import stored_weight
from nc.numerics.packed_weight import PARTS, PackedWeight
from nc.ops import quant_linear

#: Of the operator.
NAME = "nc_low_bit::linear"
#: Where a node has its `KernelChoice`.
_CHOICE = "kernels"
_PART_TYPES = ", ".join(f"Tensor{'' if part in ('codes', 'scale') else '?'} {part}" for part in PARTS)


@functools.cache
def library() -> torch.library.Library:
    """Return the namespace `nc_low_bit` with `linear`, registered at the first call.

    The arguments are those of `nc::quant_linear`, then `backend`, its `kernels` in order of preference,
    `layouts` (the tensors that all kernels packed, in one list) and `counts` (tensors of each kernel). The
    operator packs nothing and keeps nothing.
    """
    own = torch.library.Library("nc_low_bit", "DEF")  # type: ignore[no-untyped-call] # torch annotates it in part only
    how = (
        "str dtype, int in_features, str act_dtype, str backend, str[] kernels, Tensor?[] layouts, int[] "
        "counts"
    )
    schema = f"linear(Tensor x, {_PART_TYPES}, Tensor? bias, {how}) -> Tensor"
    own.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call] # as above
    own.impl("linear", _linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake(
        NAME, lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[0])), lib=own
    )
    return own


def operator() -> torch._ops.OpOverload:
    """Return what a lowered graph calls."""
    library()
    found: torch._ops.OpOverload = torch.ops.nc_low_bit.linear.default
    return found


#: (kernel, weight) → what the kernel packs of it.
Pack = Callable[[LowBitKernel, PackedWeight], PackedLayout]


def replace_low_bit(
    module: fx.GraphModule,
    backend: str,
    refused: tuple[LowBitKernel, ...] = (),
    pack: Pack = lambda kernel, weight: kernel.pack(weight),
) -> None:
    """Let kernels compute the linears with constant low-bit weights.

    What no kernel can compute stays as it is.

    Args:
        module: flat graph.
        backend: its rows are used.
        refused: further rows, which would be preferred if they were not refused.
        pack: packs a weight, or finds what was packed of it before.
    """
    kernels, layouts = get_backend(backend).low_bit_kernels(), _Layouts(module, pack)
    for node in [n for n in module.graph.nodes if n.target is quant_linear]:
        arguments = schema_arguments(node)
        x, weight = arguments["x"].meta["val"], constant_weight(module, arguments)
        if weight is None or x.dtype not in FLOATS:
            continue
        activations = computed_as(arguments["act_dtype"], x.dtype)
        rows = math.prod(x.shape[:-1]) if all(isinstance(size, int) for size in x.shape[:-1]) else None
        node.meta[_CHOICE] = choice((*refused, *kernels), weight.form, weight.shape, activations, rows)
        found = used(able(kernels, weight.form, weight.shape, activations), rows)
        if not found:
            continue
        with module.graph.inserting_before(node):
            packed = [layouts.of(kernel, weight, arguments["codes"]) for kernel in found]
            flat, counts = (
                [tensor for layout in packed for tensor in layout],
                [len(layout) for layout in packed],
            )
            names = [kernel.name for kernel in found]
            new = call_function(module.graph, operator(), (*arguments.values(), backend, names, flat, counts))
        take_over(new, node)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


def kernel_choices(module: fx.GraphModule) -> dict[str, KernelChoice]:
    """Return what computes each low-bit linear of a lowered graph, by the name of the operator."""
    nodes = [
        node
        for node in module.graph.nodes
        if op_name(node) in ("quant_linear", NAME) and "operator" in node.meta
    ]
    return {node.meta["operator"]: node.meta.get(_CHOICE, KernelChoice(())) for node in nodes}


class _Layouts:
    """Constants with what kernels packed; layers that share a weight share these."""

    def __init__(self, module: fx.GraphModule, pack: Pack) -> None:
        self._module, self._pack = module, pack
        self._names: dict[tuple[object, str], tuple[str | None, ...]] = {}

    def of(self, kernel: LowBitKernel, weight: PackedWeight, codes: fx.Node) -> list[fx.Node | None]:
        """Nodes that read what a kernel packs, inserted where the graph inserts."""
        key = (codes.target, kernel.name)
        if key not in self._names:
            self._names[key] = tuple(self._constant(tensor) for tensor in self._pack(kernel, weight))
        return [None if name is None else self._module.graph.get_attr(name) for name in self._names[key]]

    def _constant(self, tensor: torch.Tensor | None) -> str | None:
        if tensor is None:
            return None
        name = free_name(self._module, "low_bit_layout")
        self._module.register_buffer(name, tensor)
        return name


def constant_weight(module: fx.GraphModule, arguments: dict[str, Any]) -> PackedWeight | None:
    """Return the weight of a call; None where it is computed."""
    parts = {name: arguments[name] for name in PARTS}
    if any(part is not None and part.op != "get_attr" for part in parts.values()):
        return None
    tensors: dict[str, Any] = {
        name: None if part is None else constant_of(module, part) for name, part in parts.items()
    }
    return stored_weight(**tensors, dtype=arguments["dtype"], features=arguments["in_features"])


def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    outer_scale: torch.Tensor | None,
    outer_minimum: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: str,
    in_features: int,
    act_dtype: str,
    backend: str,
    kernels: Sequence[str],
    layouts: Sequence[torch.Tensor | None],
    counts: Sequence[int],
) -> torch.Tensor:
    parts = (codes, scale, zero, minimum, outer_scale, outer_minimum)
    if x.shape[-1] != in_features:  # kernels compute addresses from it
        msg = f"a low-bit linear of {in_features} input features can't take {tuple(x.shape)}"
        raise ValueError(msg)
    rows, start = x.numel() // in_features, 0
    known = {kernel.name: kernel for kernel in get_backend(backend).low_bit_kernels()}
    for name, count in zip(kernels, counts, strict=True):
        if 0 < rows <= known[name].max_rows:
            layout: PackedLayout = tuple(layouts[start : start + count])
            return compute(x, stored_weight(*parts, dtype, in_features), bias, act_dtype, known[name], layout)
        start += count
    return reference(x, *parts, bias, dtype, in_features, act_dtype)

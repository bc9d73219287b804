"""Which kernels compute a layer, and how one computes it: the same for modules and for captured graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nc.formats.tensor_format import TensorFormat
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.nn import KernelChoice
from nc.numerics.low_bit import round_activations
from nc.numerics.packed_weight import PackedWeight

#: Dtypes of activations that kernels are for.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def computed_as(act_dtype: str, dtype: torch.dtype) -> str:
    """Return what activations of a dtype are multiplied as: "fp32", "bf16", "int8" or "int8_block32"."""
    return "bf16" if act_dtype == "fp32" and dtype == torch.bfloat16 else act_dtype


def able(
    kernels: Sequence[LowBitKernel], form: TensorFormat, shape: tuple[int, int], activations: str
) -> tuple[LowBitKernel, ...]:
    """Return the kernels that can compute a layer.

    For a number of rows the first whose `max_rows` is not less is used.

    Args:
        kernels: in the order of preference.
        form: of the weight.
        shape: its (N, K).
        activations: what they are multiplied as, see `computed_as`.
    """
    return tuple(kernel for kernel in kernels if kernel.why_not(form, shape, activations) is None)


def used(found: Sequence[LowBitKernel], rows: int | None = None) -> tuple[LowBitKernel, ...]:
    """Return the kernels of a layer that are used for some number of rows.

    With `rows`, return only the one for this number.
    """
    if rows is not None:
        return tuple(kernel for kernel in found if rows <= kernel.max_rows)[:1]
    return tuple(
        kernel
        for i, kernel in enumerate(found)
        if all(kernel.max_rows > other.max_rows for other in found[:i])
    )


def choice(
    kernels: Sequence[LowBitKernel],
    form: TensorFormat,
    shape: tuple[int, int],
    activations: str,
    rows: int | None = None,
) -> KernelChoice:
    """Return the kernels of a layer for reports: those used, and why no preferred one is.

    Args:
        kernels: as for `able`, and so are the next three.
        form: likewise.
        shape: likewise.
        activations: likewise.
        rows: the number of rows, where it is the same in every call.
    """
    found = able(kernels, form, shape, activations)
    before = kernels[: kernels.index(found[0])] if found else kernels
    reasons = tuple(
        (kernel.name, str(kernel.why_not(form, shape, activations)))
        for kernel in before
        if kernel.takes(form)
    )
    return KernelChoice(tuple((kernel.name, kernel.rows) for kernel in used(found, rows)), reasons)


def compute(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    act_dtype: str,
    kernel: LowBitKernel,
    layout: PackedLayout,
) -> torch.Tensor:
    """Compute `x @ W.T + bias` with a low-bit kernel.

    Args:
        x: a dtype of `FLOATS`, shape [..., K].
        weight: W, shape [N, K].
        bias: shape [N].
        act_dtype: what `x` is rounded to first, see `nc.nn.QuantLinear`.
        kernel: a kernel that can compute this layer.
        layout: the weight as the kernel packed it.

    Returns:
        Shape [..., N], in the dtype of `x`.
    """
    if torch.is_autocast_enabled("cpu"):  # the kernel says what is multiplied in which precision
        with torch.autocast("cpu", enabled=False):
            return compute(x, weight, bias, act_dtype, kernel, layout)
    # `to` and `reshape` cost as much as a small kernel, also where they change nothing
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    activations = computed_as(act_dtype, x.dtype)
    if activations not in ("fp32", "bf16", *kernel.activations):
        flat = round_activations(flat.float(), activations)
    multiplied = torch.bfloat16 if activations == "bf16" else torch.float32
    if flat.dtype != multiplied:
        flat = flat.to(multiplied)
    assert kernel.linear is not None, "kernels that are refused are never chosen"
    result = kernel.linear(flat.contiguous(), layout, weight, *((bias,) if kernel.adds_bias else ()))
    if bias is not None and not kernel.adds_bias:
        result = result.to(torch.promote_types(result.dtype, x.dtype)).add_(bias)
    if result.dtype != x.dtype:
        result = result.to(x.dtype)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])

"""Codes and scales of constant weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nc.formats import TensorFormat
from nc.numerics import affine, formats, int16_pairs, weight_mse
from nc.numerics.column_rounding import Pairs


def quantize_weight(
    weight: torch.Tensor, spec: TensorFormat, axis: int | None, groups: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of a weight.

    Args:
        weight: any float tensor.
        spec: symmetric, of any dtype.
        axis: output channel axis; None forces one scale for the whole tensor where `spec` is per channel:
            that of a transposed convolution in groups.
        groups: of a transposed convolution.

    Returns:
        Codes of the weight's shape; scale fp32: shape [] per tensor, [channels] per channel, else one number
        per block, of the shape of the grid of blocks. Floating-point formats have that shape per channel too.

    Raises:
        ConfigError: groups or blocks do not cover the weight.
    """
    per_channel = spec.granularity.name == "per_channel" and axis is not None
    if spec.paired:
        return _paired(weight.detach().float(), spec, axis, groups, per_channel)
    block = spec.granularity.block_size(weight.shape, axis)
    low, high = _weight_range(weight.detach().float(), spec, block)
    codes, scale = _codes(weight, low, high, spec, block)
    if per_channel and spec.dtype.kind == "integer":
        return codes, scale.flatten()
    return codes, scale.reshape(()) if block == tuple(weight.shape) else scale


def _codes(
    weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, spec: TensorFormat, block: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales for given ranges of the blocks; scales of the shape of the ranges."""
    if spec.dtype.kind == "float":
        scale = formats.choose_scale(low, high, spec.dtype)
        return formats.quantize(weight.detach(), scale, spec.dtype, block), scale
    limits = spec.quant_min, spec.quant_max
    scale, zero_point = affine.choose_qparams(
        low, high, quant_min=limits[0], quant_max=limits[1], symmetric=spec.symmetric
    )
    return affine.quantize(
        weight, scale, zero_point, *limits, dtype=spec.dtype.storage, block_size=block
    ), scale


def _values(
    codes: torch.Tensor, scale: torch.Tensor, spec: TensorFormat, block: Sequence[int]
) -> torch.Tensor:
    """Return what codes of a weight stand for."""
    if spec.dtype.kind == "float":
        return formats.dequantize(codes, scale, spec.dtype, block)
    return affine.dequantize(codes, scale, 0, block)


def pairs_fit(
    codes: torch.Tensor, axis: int | None, groups: int = 1, limit: int = int16_pairs.PAIR_LIMIT
) -> bool:
    """Return whether the codes of one sign in every pair that kernels may add come to a limit at most.

    Args:
        codes: int8.
        axis: as for `quantize_weight`.
        groups: as for `quantize_weight`.
        limit: what kernels that add two products in 16 bits take, whatever the activations; more if those
            have fewer codes.
    """
    return int16_pairs.fit(
        _inputs_last(codes, axis, groups), limit // 2 if _pairs_positions(codes, axis, groups) else limit
    )


def pairs_of_columns(weight: torch.Tensor, groups: int = 1) -> Pairs:
    """Return which columns of a weight kernels may add in pairs, for `pairs_fit`.

    Args:
        weight: of a linear or a convolution, axis 0; its columns are those of `weight.flatten(1)`.
        groups: of a convolution.
    """
    inputs, window = weight.shape[1], max(1, weight[0, 0].numel())
    if _pairs_positions(weight, 0, groups):
        return Pairs(torch.arange(inputs * window), int16_pairs.PAIR_LIMIT // 2)
    partners = torch.arange(inputs) ^ 1
    partners = torch.where(partners < inputs, partners, torch.arange(inputs))
    columns = partners[:, None] * window + torch.arange(window)
    return Pairs(columns.flatten(), int16_pairs.PAIR_LIMIT)


def _inputs_last(weight: torch.Tensor, axis: int | None, groups: int) -> torch.Tensor:
    """Return the input channels of each group as the last dimension, whose neighbours are pairs."""
    # transposed: [inputs, outputs, ...], the inputs of all groups consecutively
    split = weight.reshape(groups, -1, *weight.shape[1:]) if axis != 0 else weight
    return split.movedim(1, -1)


def _pairs_positions(weight: torch.Tensor, axis: int | None, groups: int) -> bool:
    """Return whether kernels may add products of any two positions of the window.

    They may if a group has one input channel.

    oneDNN's kernels for AVX-512 without VNNI do (`brg_conv_fwd:avx512_core`, `gemm_s8u8s32`), each in its own
    order. Depthwise convolutions of one or two dimensions have kernels that sum in 32 bits.
    """
    inputs = weight.shape[1] if axis == 0 else weight.shape[0] // groups
    is_flat_depthwise = axis == 0 and weight.dim() < 5 and weight.shape[0] == groups > 1
    return inputs == 1 and weight.dim() > 2 and weight[0, 0].numel() > 1 and not is_flat_depthwise


def _paired(
    weight: torch.Tensor, spec: TensorFormat, axis: int | None, groups: int, per_channel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale whose pairs fit, as for `pairs_fit`."""
    last = _inputs_last(weight, axis, groups)
    flat = last.reshape(weight.shape[axis] if per_channel and axis is not None else 1, -1, last.shape[-1])
    times = 2 if _pairs_positions(weight, axis, groups) else 1  # a weight beside itself: two of its size fit
    shrink = weight_mse.SHRINK if spec.algo == "mse" else ()
    codes, scale = int16_pairs.quantize_pairs(
        flat.repeat_interleave(times, -1), shrink, weight_mse.NORM if shrink else 2.0
    )
    result = torch.empty(
        weight.shape, dtype=spec.dtype.storage
    )  # default strides: convolutions read those of size 1 too
    result.copy_(codes[..., ::times].reshape(last.shape).movedim(-1, 1).reshape(weight.shape))
    return result, scale if per_channel else scale[0]


def _weight_range(
    weight: torch.Tensor, spec: TensorFormat, block: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest value of each block, of the shape of the grid of blocks."""
    if spec.algo != "mse":
        return affine.block_range(weight, block)
    rows, grid = affine.block_rows(weight, block)
    row = (1, rows.shape[1])
    low, high = weight_mse.best_range(
        rows, lambda limit: _values(*_codes(rows, -limit, limit, spec, row), spec, row)
    )
    return low.reshape(grid), high.reshape(grid)

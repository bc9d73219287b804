"""Rotary embeddings as a function in C, also where the result is quantized: in single operators a tensor is read and written five times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.elementwise import dense_strides
from nc.backends.native.plans.functions import NUMBERS, bits, function, why_unavailable
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.values import Later, Traced
from nc.kernels.c_code import openmp

#: As in the C code: the longest row.
_ROW = 512


def rotate(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Traced | None:
    """`nc_native::rotation`."""
    return _rotated(recorder, node, a, torch.float32, 1.0, 0)


def rotate_to_codes(recorder: Recorder, node: fx.Node, later: Later, scale: float, zero_point: int, dtype: torch.dtype) -> Traced | None:
    """Return the same as codes."""
    return _rotated(recorder, later.node, later.named, dtype, scale, zero_point)


def _rotated(recorder: Recorder, node: fx.Node, a: Mapping[str, Any], dtype: torch.dtype, scale: float, zero_point: int) -> Traced | None:
    x, cosine, sine = (recorder.read(a[name]) for name in ("x", "cosine", "sine"))
    if why_unavailable() or x is None or cosine is None or sine is None or not 0 < x.tensor.dim() <= 4 or not x.tensor.numel():
        return None
    *sizes, width = x.tensor.shape
    given = x, cosine, sine
    if any(v.tensor.dtype is not torch.float32 or v.tensor.is_neg() or v.tensor.shape[-1] != width for v in given) or width % 2:
        return None
    if width > _ROW or any(v.tensor.stride(-1) != 1 for v in given) or any(_is_larger(v.tensor, x.tensor) for v in given):
        return None
    strides = dense_strides(x.tensor)
    if strides[-1] != 1:
        return None
    result = recorder.new(x.tensor.shape, strides, dtype)
    missing = (1,) * (3 - len(sizes))
    numbers = [NUMBERS[dtype], width // 2, *missing, *sizes, openmp.threads(), bits(1.0 / scale), zero_point]
    for value in (result, *given):
        numbers += [*(0 for _ in missing), *value.tensor.expand(x.tensor.shape).stride()[:-1]]
    recorder.call_function(function("rotary"), numbers, [result, *given], node)
    return result


def _is_larger(value: torch.Tensor, than: torch.Tensor) -> bool:
    """Whether a tensor can't be repeated to the sizes of another."""
    return value.dim() > than.dim() or any(n not in (1, m) for n, m in zip(reversed(value.shape), reversed(than.shape), strict=False))

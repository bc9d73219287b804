"""What a oneDNN primitive is made of, as values.

They are layouts of tensors, what modifies the result, and how a window moves. No library is needed.

The numbers are those of oneDNN's C headers (dnnl_types.h, version 3); names say which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

DTYPES: Mapping[torch.dtype, int] = {
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.int32: 4,
    torch.int8: 5,
    torch.uint8: 6,
}
SRC, SRC_1, DST, WEIGHTS, BIAS, SCALE, SHIFT, SCRATCHPAD, MULTIPLE_SRC = 1, 2, 17, 33, 41, 51, 52, 80, 1024
SCALES, ZERO_POINTS, POST_OP = 4096, 8192, 32768
#: A size that a primitive is told at each call (DNNL_RUNTIME_DIM_VAL).
ANY_SIZE = -(2**63)
#: dnnl_alg_kind_t
ELTWISE = {
    "relu": 32,
    "tanh": 33,
    "elu": 34,
    "abs": 36,
    "sqrt": 37,
    "linear": 38,
    "hardsigmoid": 40,
    "logistic": 41,
    "exp": 42,
    "gelu_tanh": 43,
    "swish": 44,
    "clip": 46,
    "pow": 48,
    "gelu_erf": 49,
    "mish": 51,
    "hardswish": 52,
}
BINARY = {"add": 131056, "mul": 131057, "div": 131060, "sub": 131061}
POOLING = {"max": 511, "mean_with_padding": 767, "mean": 1023}


@dataclasses.dataclass(frozen=True, slots=True)
class Desc:
    """The memory layout of a tensor.

    Attributes:
        sizes: its shape.
        strides: in elements.
        dtype: of its elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Desc:
        """Return the layout of a tensor."""
        return Desc(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @staticmethod
    def dense(sizes: Sequence[int], dtype: torch.dtype) -> Desc:
        """Return a contiguous row-major layout."""
        return Desc(tuple(sizes), contiguous_strides(sizes), dtype)

    def plain(self, *, channels_last: bool = False) -> Desc:
        """Return the layout of the same memory for oneDNN.

        A dimension of size 1 gets the stride of a contiguous tensor.

        oneDNN's kernels compute addresses and choose broadcasts from all strides. Torch allows any stride for
        a size of 1: that of a slice, or 0 after `expand`.

        Args:
            channels_last: contiguous means [N, ..., C], as for convolutions and pools; else row-major.
        """
        if 1 not in self.sizes:
            return self
        dims = range(len(self.sizes))
        order = [0, *dims[2:], 1] if channels_last and len(dims) > 2 else dims
        strides, step = list(self.strides), 1
        for dim in reversed(order):
            if self.sizes[dim] == 1:
                strides[dim] = step
            step = strides[dim] * max(self.sizes[dim], 1)
        return dataclasses.replace(self, strides=tuple(strides))


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor [N, C, ...] with memory layout [N, ..., C]."""
    batch, channels, *spatial = sizes
    strides = contiguous_strides((batch, *spatial, channels))
    return strides[0], strides[-1], *strides[1:-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """The value in the destination is added: (value - zero_point) * scale."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Eltwise:
    """A function of each element; `name` is one of `ELTWISE`."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class BinaryOp:
    """An operation with another tensor, which may have size 1 where the destination has more.

    `name` is one of `BINARY`.
    """

    name: str
    other: Desc


@dataclasses.dataclass(frozen=True, slots=True)
class Prelu:
    """PReLU: multiplies values below 0 by the slope of their channel.

    `slopes` is the layout of the slopes, [1, channels, 1, ...].
    """

    slopes: Desc


PostOp = Sum | Eltwise | BinaryOp | Prelu


@dataclasses.dataclass(frozen=True, slots=True)
class Attributes:
    """What modifies a primitive.

    Attributes:
        scales: for each argument that has scales, the mask of the dimensions along which they differ.
        zero_points: likewise.
        post_ops: applied to the result in this order, before it is scaled for the destination.
    """

    scales: Mapping[int, int] = dataclasses.field(default_factory=dict)
    zero_points: Mapping[int, int] = dataclasses.field(default_factory=dict)
    post_ops: tuple[PostOp, ...] = ()

    def __hash__(self) -> int:
        """Equal for equal attributes, whose mappings are not hashable."""
        return hash((frozenset(self.scales.items()), frozenset(self.zero_points.items()), self.post_ops))


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How a window moves; one number for each spatial dimension.

    Attributes:
        strides: its steps.
        before: padding before the first element.
        after: padding after the last one.
        dilations: distance of the elements that it reads, 1 for neighbours.
        transposed: the window is written, not read.
        window: its sizes; pools are told of them otherwise.
        channels: inputs that a group reads at each place of the window, likewise.
    """

    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilations: tuple[int, ...]
    transposed: bool = False
    window: tuple[int, ...] = ()
    channels: int = 0

"""Nodes by what their arguments mean: `Linear.of(node).weight`, read by the argument names of the operator's schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from nc.graph.catalogue import schema_arguments

#: Other names that schemas have for a field.
_ALSO = {"input": ("self", "x", "codes"), "other": ("mat2",), "codes": ("x",)}
View = TypeVar("View")


class _View:
    """A dataclass whose fields are arguments of an operator."""

    __slots__ = ()

    @classmethod
    def of(cls: type[View], node: fx.Node) -> View:
        """The view of a node; KeyError where its schema has no such argument."""
        arguments = schema_arguments(node)
        values = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type] # every view is a dataclass
            found = [name for name in (field.name, *_ALSO.get(field.name, ())) if name in arguments]
            if found:
                values[field.name] = arguments[found[0]]
            elif field.default is dataclasses.MISSING:
                msg = f"{node.target} has no argument {field.name!r}"
                raise KeyError(msg)
        return cls(**values)


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an operator another argument, by its schema's name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    index = [a.name for a in node.target._schema.arguments].index(name)
    if index < len(node.args):
        node.update_arg(index, value)
    else:
        node.update_kwarg(name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Linear(_View):
    """A linear."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Conv(_View):
    """A convolution, or a transposed one; `padding` may be a word."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: Sequence[int]
    padding: Sequence[int] | str
    dilation: Sequence[int]
    groups: int
    output_padding: Sequence[int] = (0,)

    def sizes(self, dims: int) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation, each for every one of `dims` dimensions."""
        stride, padding, dilation = ([*v] * (dims if len(v) == 1 else 1) for v in (self.stride, self.padding, self.dilation))
        return stride, padding, dilation


@dataclasses.dataclass(frozen=True, slots=True)
class Weighted(_View):
    """What a linear and a convolution have in common."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Binary(_View):
    """An addition or a product of two tensors; a side may be a number."""

    input: Any
    other: Any
    alpha: float = 1


def _numbers(scale: float | fx.Node, zero_point: int | fx.Node | None) -> tuple[float, int]:
    assert not isinstance(scale, fx.Node)
    assert isinstance(zero_point, int)
    return scale, zero_point


@dataclasses.dataclass(frozen=True, slots=True)
class Quantize(_View):
    """A quantize node; `axis` and `group_size` where it has them."""

    input: fx.Node
    scale: float | fx.Node
    zero_point: int | fx.Node | None
    quant_min: int
    quant_max: int
    dtype: torch.dtype
    axis: int | None = None
    group_size: int | None = None

    @property
    def qparams(self) -> tuple[float | fx.Node, int | fx.Node | None]:
        """Scale and zero point: equal where a dequantize node reads these codes as they are meant."""
        return self.scale, self.zero_point

    @property
    def numbers(self) -> tuple[float, int]:
        """Scale and zero point of a node with one of each for the whole tensor."""
        return _numbers(self.scale, self.zero_point)


@dataclasses.dataclass(frozen=True, slots=True)
class Dequantize(_View):
    """A dequantize node; `axis` and `group_size` where it has them."""

    codes: fx.Node
    scale: float | fx.Node
    zero_point: int | fx.Node | None
    dtype: torch.dtype
    axis: int | None = None
    group_size: int | None = None

    @property
    def qparams(self) -> tuple[float | fx.Node, int | fx.Node | None]:
        """Scale and zero point."""
        return self.scale, self.zero_point

    @property
    def numbers(self) -> tuple[float, int]:
        """Scale and zero point of a node with one of each for the whole tensor."""
        return _numbers(self.scale, self.zero_point)


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicQDQ(_View):
    """A node that quantizes with a range found in each call, and dequantizes."""

    input: fx.Node
    per_token: bool
    quant_min: int
    quant_max: int
    symmetric: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrent(_View):
    """An LSTM or GRU, of ATen or of `nc`; `hx` is a list of nodes for an LSTM, one node for a GRU."""

    input: fx.Node
    hx: Any
    params: Sequence[fx.Node]
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding(_View):
    """A table look-up."""

    weight: fx.Node
    indices: fx.Node

"""Nodes by what their arguments mean.

An example is `Linear.of(node).weight`, read by the argument names of the operator's schema.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from nc.graph.catalogue import schema_arguments
from nc.graph.schemas import Argument, schema_of

#: Other names that schemas have for a field.
_ALSO = {"input": ("self", "x", "codes"), "left": ("self", "input"), "right": ("other", "mat2")}
View = TypeVar("View")


class _View:
    """A dataclass whose fields are arguments of an operator."""

    __slots__ = ()

    @classmethod
    def of(cls: type[View], node: fx.Node) -> View:
        """Return the view of a node; KeyError where its schema has no such argument."""
        args, kwargs, values = node.args, node.kwargs, {}
        for name, places, is_needed in _places(cls, node.target):  # type: ignore[arg-type] # a class is hashable
            for index, argument in places:
                if index < len(args):
                    values[name] = args[index]
                elif argument.name in kwargs:
                    values[name] = kwargs[argument.name]
                elif argument.has_default:
                    values[name] = argument.default_value
                else:
                    continue
                break
            else:
                if is_needed:
                    msg = f"{node.target} has no argument {name!r}"
                    raise KeyError(msg)
        return cls(**values)


@functools.lru_cache(4096)
def _places(view: type, target: object) -> tuple[tuple[str, tuple[tuple[int, Argument], ...], bool], ...]:
    """Return for each field its name, the arguments that give it, and whether it has no default.

    The arguments are those of an operator that may give it, with their positions.
    """
    arguments = {argument.name: (index, argument) for index, argument in enumerate(schema_of(target))}
    found = []
    for field in dataclasses.fields(view):
        names = field.name, *_ALSO.get(field.name, ())
        found.append(
            (
                field.name,
                tuple(arguments[name] for name in names if name in arguments),
                field.default is dataclasses.MISSING,
            )
        )
    return tuple(found)


def options(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of a call but the first, in the order of its schema.

    Two calls that agree in them treat their inputs alike.
    """
    return tuple(schema_arguments(node).values())[1:]


def called_with(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call by position and by name, with as many by position as possible."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument in schema_of(node.target)[len(args) :]:
        if argument.kwarg_only or argument.name not in kwargs:
            break
        args.append(kwargs.pop(argument.name))
    return tuple(args), kwargs


def returned(module: fx.GraphModule) -> tuple[Any, ...]:
    """Return what a graph returns: nodes, and other values."""
    (values,) = next(iter(reversed(module.graph.nodes))).args
    return tuple(values)


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an operator another argument, by its name in a view or in the operator's schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    index, argument = next(
        (i, a) for i, a in enumerate(schema_of(node.target)) if a.name in (name, *_ALSO.get(name, ()))
    )
    if index < len(node.args):
        node.update_arg(index, value)
    elif index == len(node.args) and not argument.kwarg_only and argument.name not in node.kwargs:
        node.args = (*node.args, value)
    else:
        node.update_kwarg(argument.name, value)


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
        stride, padding, dilation = (
            [*v] * (dims if len(v) == 1 else 1) for v in (self.stride, self.padding, self.dilation)
        )
        return stride, padding, dilation


@dataclasses.dataclass(frozen=True, slots=True)
class Weighted(_View):
    """What a linear and a convolution have in common."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Binary(_View):
    """A product, sum, difference or quotient of two tensors; a side may be a number."""

    left: Any
    right: Any
    alpha: float = 1
    rounding_mode: str | None = None

    @property
    def sides(self) -> tuple[Any, Any]:
        """Left and right."""
        return self.left, self.right


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax(_View):
    """A softmax along one dimension."""

    input: fx.Node
    dim: int
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Transpose(_View):
    """An exchange of two dimensions."""

    input: fx.Node
    dim0: int
    dim1: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Affine(_View):
    """What quantize and dequantize nodes have in common; `axis` and `group_size` where they have them."""

    scale: float | fx.Node
    zero_point: int | fx.Node | None
    dtype: torch.dtype
    axis: int | None = None
    group_size: int | None = None

    @property
    def qparams(self) -> tuple[float | fx.Node, int | fx.Node | None]:
        """Scale and zero point.

        They are equal where a dequantize node reads the codes of a quantize node as they are meant.
        """
        return self.scale, self.zero_point

    @property
    def numbers(self) -> tuple[float, int]:
        """Scale and zero point of a node with one of each for the whole tensor."""
        assert not isinstance(self.scale, fx.Node)
        assert isinstance(self.zero_point, int)
        return self.scale, self.zero_point


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(_Affine):
    """A quantize node."""

    input: fx.Node
    quant_min: int
    quant_max: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dequantize(_Affine):
    """A dequantize node."""

    codes: fx.Node


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicQDQ(_View):
    """A node that quantizes with a range found in each call, and dequantizes."""

    input: fx.Node
    per_token: bool
    quant_min: int
    quant_max: int
    symmetric: bool
    dtype: torch.dtype
    dim: int = -1
    right: fx.Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrent(_View):
    """An LSTM, GRU or RNN, of ATen or of `nc`; `hx` is a list of nodes for an LSTM, one node for others."""

    input: fx.Node
    hx: Any
    params: Sequence[fx.Node]
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    per_token: bool = False
    relu: bool = False
    float_input: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrentCell(_View):
    """One step of an LSTM, GRU or RNN, of ATen."""

    input: fx.Node
    hx: Any
    w_ih: fx.Node
    w_hh: fx.Node
    b_ih: fx.Node | None = None
    b_hh: fx.Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LowBitLinear(_View):
    """A linear with a packed weight, see `nc.numerics.low_bit.linear`."""

    input: fx.Node
    codes: fx.Node
    scale: fx.Node
    zero: fx.Node | None
    minimum: fx.Node | None
    outer_scale: fx.Node | None
    outer_minimum: fx.Node | None
    bias: fx.Node | None
    dtype: str
    in_features: int
    act_dtype: str

    @property
    def parts(self) -> dict[str, fx.Node | None]:
        """What the weight is made of, by the names of `nc.numerics.packed_weight.PARTS`."""
        names = ("codes", "scale", "zero", "minimum", "outer_scale", "outer_minimum")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding(_View):
    """A table look-up."""

    weight: fx.Node
    indices: fx.Node

"""The arguments of a stored call against the schema of its operator: a graph that could not run is refused before it is built."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

#: Types of a schema whose values JSON says by a tag.
_TAGGED: dict[str, type] = {
    "ScalarType": torch.dtype,
    "MemoryFormat": torch.memory_format,
    "Layout": torch.layout,
    "Device": torch.device,
}
_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "number": (int, float, complex),
    "complex": (int, float, complex),
    "bool": (bool,),
    "str": (str,),
}
_CODES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def check(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError when an operator does not take these arguments.

    Args:
        target: an operator of the allow-list.
        args: values and nodes.
        kwargs: the same by name.
    """
    if not isinstance(target, torch._ops.OpOverload):
        _check_python(target, args, kwargs)
        return
    arguments = target._schema.arguments
    names = {a.name for a in arguments}
    if not set(kwargs) <= names:
        msg = f"{target} has no argument {', '.join(sorted(set(kwargs) - names))}"
        raise ValueError(msg)
    positional = [a for a in arguments if not a.kwarg_only]
    if len(args) > len(positional):
        msg = f"{target} takes {len(positional)} arguments, not {len(args)}"
        raise ValueError(msg)
    given = {a.name: value for a, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys():
        msg = f"{target} has an argument twice: {', '.join(given.keys() & kwargs.keys())}"
        raise ValueError(msg)
    given.update(kwargs)
    for argument in arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                msg = f"{target} lacks its argument {argument.name!r}"
                raise ValueError(msg)
        elif not _fits(str(argument.real_type), given[argument.name], argument.N):
            msg = f"{target}: argument {argument.name!r} should be {argument.real_type}, not {given[argument.name]!r}"
            raise ValueError(msg)
    if target.namespace == "nc":
        _check_qparams(given)


def _fits(expected: str, value: Any, length: int | None = None) -> bool:
    """Whether a value is of a schema's type; `length` of a list that may be given as one number."""
    if expected.startswith("Optional["):
        return value is None or _fits(expected[9:-1], value, length)
    if expected.startswith("List["):
        if isinstance(value, (list, tuple)):
            return all(_fits(expected[5:-1], v) for v in value)
        # a node may give a list, as `split` does
        return (isinstance(value, fx.Node) and _yields(value) in ("list", "any")) or (length is not None and _fits(expected[5:-1], value))
    if isinstance(value, fx.Node):
        kind = _yields(value)
        return kind == "any" or (kind == "tensor") == (expected == "Tensor") and kind != "list"
    if expected in _TAGGED:
        return isinstance(value, _TAGGED[expected])
    if expected == "Tensor":
        # arithmetic takes a number in the place of a tensor
        return isinstance(value, (bool, int, float))
    types = _PLAIN.get(expected)
    return types is not None and isinstance(value, types)


def _yields(node: fx.Node) -> str:
    """What a node gives: "tensor", "number", "list" (several values), or "any" where only running it would tell."""
    if node.op in ("placeholder", "get_attr"):
        return "tensor"
    if node.op != "call_function":
        return "list"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "any" if node.target is operator.getitem else "number"
    returns = [str(r.type) for r in node.target._schema.returns]
    if len(returns) != 1 or returns[0].startswith("List"):
        return "list"
    return "tensor" if returns[0] == "Tensor" else "number"


def _check_python(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Arithmetic on sizes takes numbers; `getitem` one of several values."""
    try:
        expected = len([p for p in inspect.signature(target).parameters.values() if p.default is p.empty])
    except ValueError:  # math.* of some versions have no signature
        expected = len(args)
    if kwargs or len(args) != expected:
        msg = f"{target} takes {expected} arguments, not {len(args)}"
        raise ValueError(msg)
    if target is operator.getitem:
        source, index = args
        several = isinstance(source, fx.Node) and _yields(source) in ("list", "any")
        if not several or not isinstance(index, int) or isinstance(index, bool):
            msg = f"getitem takes an operator with several results and an index, not {source!r} and {index!r}"
            raise ValueError(msg)
        returns = source.target._schema.returns if isinstance(source.target, torch._ops.OpOverload) else ()
        if len(returns) > 1 and not 0 <= index < len(returns):
            msg = f"{source.target} gives {len(returns)} results, and none with index {index}"
            raise ValueError(msg)
        return
    for value in args:
        if isinstance(value, fx.Node) and _yields(value) != "list":
            continue
        if not isinstance(value, (bool, int, float)):
            msg = f"{target} takes sizes, not {value!r}"
            raise ValueError(msg)


def _check_qparams(given: Mapping[str, Any]) -> None:
    """Raise ValueError for scales, zero points and codes that no quantization has."""
    limits = _CODES.get(given.get("dtype"))
    if "dtype" in given and limits is None:
        msg = f"codes are uint8 or int8, not {given['dtype']}"
        raise ValueError(msg)
    low, high = given.get("quant_min"), given.get("quant_max")
    if low is not None and high is not None and limits is not None and not limits[0] <= low < high <= limits[1]:
        msg = f"codes from {low} to {high} are none of {given['dtype']}"
        raise ValueError(msg)
    scale, zero_point = given.get("scale"), given.get("zero_point")
    if isinstance(scale, (int, float)) and not (math.isfinite(scale) and scale > 0):
        msg = f"{scale!r} is no scale"
        raise ValueError(msg)
    if isinstance(zero_point, int) and limits is not None and not limits[0] <= zero_point <= limits[1]:
        msg = f"{zero_point} is no zero point of {given['dtype']}"
        raise ValueError(msg)

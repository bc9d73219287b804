"""Conditions on the sizes of inputs, as text.

Where the model's Python code asks for sizes, the captured graph holds the path of the example, and fits the
sizes that take it.

The text is a small part of Python over names `in<i>_<d>`: dimension d of flat input i. It is interpreted
here, not given to `eval`, because it also comes from artefacts.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: A name in a condition.
NAME = re.compile(r"in(\d+)_(\d+)")

_Run = Callable[[Mapping[str, int]], Any]
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "abs": abs,
    "round": round,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
    "torch.sym_float": float,
    "torch._sym_sqrt": math.sqrt,
}


@dataclasses.dataclass(frozen=True, slots=True)
class SizeCondition:
    """What the sizes of all inputs have to fulfil.

    Attributes:
        text: see the module text, e.g. "in0_2 % 2 == 0".
        where: file, line and function of the model that ask; "" for what inputs or operators need to fit each
            other.
        silent: for other sizes the graph runs, and gives something else than the model.
    """

    text: str
    where: str
    silent: bool = False

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it is fulfilled; `sizes` by name.

        Sizes for which it can't be computed, such as a division by 0, do not fulfil it.
        """
        try:
            return bool(parsed(self.text)(sizes))
        except ZeroDivisionError:
            return False

    def names(self) -> list[str]:
        """Return the names in it, each once."""
        return list(dict.fromkeys(match[0] for match in NAME.finditer(self.text)))

    def described(self, paths: Sequence[str]) -> str:
        """Return the text for people; `paths` of the flat inputs, in order."""
        return NAME.sub(lambda match: f"{paths[int(match[1])]}.shape[{match[2]}]", self.text)


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> _Run:
    """Return a function that takes sizes by name and gives the value.

    Raises:
        ValueError: the text is not a condition.
    """
    try:
        return _compiled(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        msg = f"{text[:80]!r} is not a condition on sizes"
        raise ValueError(msg) from error


def _compiled(node: ast.AST) -> _Run:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return lambda sizes: value
        case ast.Name(id=name) if NAME.fullmatch(name):
            return operator.itemgetter(name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _called(_OPERATORS[type(op)], [operand])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _called(_OPERATORS[type(op)], [left, right])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _called(_OPERATORS[type(op)], [left, right])
        case ast.Call(func=function, args=[_, *_] as args, keywords=[]) if (
            ast.unparse(function) in _FUNCTIONS
        ):
            return _called(_FUNCTIONS[ast.unparse(function)], args)
        case ast.BoolOp(op=op, values=values):
            parts = [_compiled(value) for value in values]
            each = all if isinstance(op, ast.And) else any
            return lambda sizes: each(part(sizes) for part in parts)
    msg = f"{ast.unparse(node)[:80]!r} can't be part of a condition on sizes"
    raise ValueError(msg)


def _called(function: Callable[..., Any], args: Sequence[ast.AST]) -> _Run:
    parts = [_compiled(arg) for arg in args]
    if len(parts) == 2:
        left, right = parts
        return lambda sizes: function(left(sizes), right(sizes))
    return lambda sizes: function(*(part(sizes) for part in parts))

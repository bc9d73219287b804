"""Check whether two QDQ graphs are the same model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def difference(a: fx.GraphModule, b: fx.GraphModule) -> str:
    """Tell what first differs between two graphs, in words.

    It is "" for the same operators, quantization parameters and constants.
    """
    left, right = list(a.graph.nodes), list(b.graph.nodes)
    places = [{node: i for i, node in enumerate(nodes)} for nodes in (left, right)]
    for m, n in zip(left, right, strict=False):
        where = f"{m.name!r} (operator {m.meta['operator']!r})" if "operator" in m.meta else repr(m.name)
        if m.op != n.op or (m.op != "get_attr" and m.op != "placeholder" and m.target != n.target):
            return f"{where} calls {_called(m)} in the first and {_called(n)} in the second"
        if m.op == "get_attr":
            if not _equal(getattr(a, m.target), getattr(b, n.target)):
                return f"the constant {where} has other values"
            continue
        mine, theirs = (_plain((k.args, k.kwargs), at) for k, at in zip((m, n), places, strict=True))
        if mine != theirs:
            return f"{where} has the arguments {mine} in the first and {theirs} in the second"
    if len(left) != len(right):
        return f"the first has {len(left)} nodes, the second {len(right)}"
    return ""


def _called(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _plain(value: Any, place: dict[fx.Node, int]) -> str:
    """Arguments as text, with nodes by their position."""
    if isinstance(value, fx.Node):
        return f"%{place[value]}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_plain(v, place) for v in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_plain(v, place)}' for k, v in sorted(value.items()))}}}"
    return repr(value)

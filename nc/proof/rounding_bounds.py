"""Bounds on the error of a tensor from earlier codes at a tie, for which two codes are correct.

Slack is a tensor of the value's shape: an upper bound of each element's error, to first order the sum of what
every tie can do. It starts where codes are made that nobody reads, and ends at the next tensor that is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nc.graph.catalogue import ACTIVATIONS, JOINS, MOVES, POOLS, WEIGHTED, input_node, kind_of_node, op_name
from nc.graph.views import (
    Binary,
    Dequantize,
    DynamicQDQ,
    LowBitLinear,
    Quantize,
    Softmax,
    called_with,
)
from nc.numerics import affine
from nc.numerics.dynamic import row_scales
from nc.numerics.low_bit import BLOCK, stored_weight
from nc.ops import dequantize_per_tensor, from_bf16, quantize_dequantize_dynamic, quantize_per_tensor, to_bf16
from nc.proof.intermediates import rounds_input

#: In quanta: a value at most this far from a tie may be rounded either way.
TIE = 1e-3
#: Activations change their input's error by no more than this factor; silu's and gelu's steepest slopes are
#: 1.10 and 1.13.
_STEEPEST = 1.2


def slack_of(node: fx.Node, value: Any, env: Mapping[fx.Node, Any], slacks: Mapping[fx.Node, Any]) -> Any:
    """Slack of one node's result.

    Args:
        node: the node.
        value: its result.
        env: values of its inputs.
        slacks: slack of those inputs that have some.

    Returns:
        Slack, shaped as the result, infinite where there is no bound; of quantize nodes in codes. None where
        there is no slack.
    """
    if node.target is quantize_per_tensor:
        return _rounded(node, value, env, slacks)
    if node.target is to_bf16:
        return _rounded_to_bf16(value, env[input_node(node)], slacks.get(input_node(node)))
    known = all(source not in slacks for source in node.all_input_nodes)
    if node.target is quantize_dequantize_dynamic:
        return _dynamic(node, env, slacks)
    if rounds_input(node) and known:
        return _of_low_bit(LowBitLinear.of(node), env)
    return None if known else pytree.tree_map(_no_number_is_no_bound, _through(node, value, env, slacks))


def _no_number_is_no_bound(slack: object) -> object:
    """Return slack with infinity in place of NaN: infinite slack times 0 has no bound."""
    if isinstance(slack, torch.Tensor) and slack.is_floating_point():
        return torch.nan_to_num(slack, nan=torch.inf, posinf=torch.inf)
    return slack


def position(x: torch.Tensor, codes: Quantize) -> torch.Tensor:
    """Return the real number that a quantize node rounds, clamped to the codes, as float64."""
    scale, zero_point = codes.numbers
    return (x.double() / scale + zero_point).clamp_(codes.quant_min, codes.quant_max)


def _rounded(
    node: fx.Node, codes: torch.Tensor, env: Mapping[fx.Node, Any], slacks: Mapping[fx.Node, Any]
) -> torch.Tensor | None:
    view = Quantize.of(node)
    exact = position(env[view.input], view)
    reach = slacks.get(view.input, torch.zeros((), dtype=torch.float32)).double() / view.numbers[0] + TIE
    ends = [(exact + side * reach).clamp(view.quant_min, view.quant_max).round() for side in (-1, 1)]
    slack = torch.maximum(*[(end - codes).abs() for end in ends]).float()
    return slack if bool(slack.any()) else None


def _rounded_to_bf16(value: torch.Tensor, x: torch.Tensor, slack: torch.Tensor | None) -> torch.Tensor | None:
    """In fp32, as all slack of tensors; a quantum of bf16 is 2^-7 of the power of two below a value."""
    quantum = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 8)
    reach = TIE * quantum if slack is None else TIE * quantum + slack
    ends = [(x + side * reach).to(torch.bfloat16).float() for side in (-1, 1)]
    found = torch.maximum(
        *[(end - value.float()).abs().nan_to_num(nan=0.0) for end in ends]
    )  # an infinity stays one
    return found if bool(found.any()) else None


#: How low-bit linears round each token, or each block of one.
_SYMMETRIC = functools.partial(
    DynamicQDQ, per_token=True, quant_min=-127, quant_max=127, symmetric=True, dtype=torch.int8
)


def _of_low_bit(view: LowBitLinear, env: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """Return what ties in the input of a linear with a low-bit weight do to its result."""
    x, symmetric = env[view.input].float(), _SYMMETRIC(view.input)
    if view.act_dtype == "int8":
        ties = _rounded_anew(x, torch.zeros_like(x), symmetric)
    else:
        size = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -size % BLOCK))
        blocks = padded.reshape(*x.shape[:-1], -1, BLOCK)
        ties = _rounded_anew(blocks, torch.zeros_like(blocks), symmetric).flatten(-2)[..., :size]
    if not bool(ties.any()):
        return None
    parts: dict[str, Any] = {name: None if part is None else env[part] for name, part in view.parts.items()}
    weight = stored_weight(**parts, dtype=view.dtype, features=view.in_features).dequantize()
    return torch.nn.functional.linear(ties.float(), weight.abs())


def _dynamic(node: fx.Node, env: Mapping[fx.Node, Any], slacks: Mapping[fx.Node, Any]) -> torch.Tensor:
    """Return the slack after dynamic ranges: a code may differ, and a range may move all codes."""
    view = DynamicQDQ.of(node)
    x = env[view.input]
    slack = slacks.get(view.input, torch.zeros((), dtype=torch.float32)).expand_as(x)
    if not x.numel():
        return torch.zeros_like(x)
    if view.right is None:
        return _rounded_anew(x, slack, view)
    if view.right in slacks:
        return torch.full_like(x, torch.inf)
    scales = row_scales(env[view.right]).mT
    return _rounded_anew(x * scales, slack * scales, view) / scales


def _rounded_anew(x: torch.Tensor, slack: torch.Tensor, view: DynamicQDQ) -> torch.Tensor:
    def over(reduce: Callable[..., torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        return reduce(value, view.dim, True) if view.per_token else reduce(value)

    scale, _ = affine.choose_qparams(
        over(torch.amin, x),
        over(torch.amax, x),
        quant_min=view.quant_min,
        quant_max=view.quant_max,
        symmetric=view.symmetric,
    )
    # both ends of a range may move
    moved = 2 * over(torch.amax, slack) / (view.quant_max - view.quant_min)
    steps = x.double() / scale
    drift = steps.abs() * moved
    to_tie = (steps - steps.floor() - 0.5).abs() * scale
    other = torch.where(to_tie <= TIE * scale + slack + drift, scale + slack + moved, 0.0)
    return torch.nan_to_num((drift + other).float(), nan=torch.inf, posinf=torch.inf)


def _magnitude(value: Any) -> Any:
    """Return the magnitude of a number or tensor; truth values, which have none, as they are."""
    return value if isinstance(value, torch.Tensor) and value.dtype == torch.bool else abs(value)


def _slope(name: str, rest: Any) -> float:
    """Return a bound of the slope of an activation with these arguments after the first."""
    slopes = rest[0] if name in ("prelu", "leaky_relu") and rest else 1.0
    return max(_STEEPEST, float(torch.as_tensor(slopes, dtype=torch.float32).abs().max()))


def _through(node: fx.Node, value: Any, env: Mapping[fx.Node, Any], slacks: Mapping[fx.Node, Any]) -> Any:
    """Return the slack after an operator if some of its inputs have slack."""

    def slack(source: Any) -> Any:
        """Return the slack of an argument, 0 if it has none."""
        if isinstance(source, fx.Node):
            return slacks[source] if source in slacks else pytree.tree_map(_none_of, env[source])
        return source

    target, name = node.target, op_name(node)
    assert not isinstance(target, str), "only calls of operators have slack"
    (first, *others), named = called_with(node)
    read: Any = fx.map_arg((others, named), env.__getitem__)  # values in the place of nodes
    rest, options = read
    if node.target is dequantize_per_tensor:
        return slack(first) * Dequantize.of(node).numbers[0]
    if node.target is from_bf16:
        return slack(first)
    if name in MOVES | POOLS | JOINS:
        return target(fx.map_arg(first, slack), *rest, **options)
    if name in ACTIVATIONS:
        return _slope(name, rest) * slack(first)
    if kind_of_node(node) in WEIGHTED:
        return target(slack(first), rest[0].abs(), None, *rest[2:], **options)
    if name in ("add", "sub"):
        terms = [slack(side) for side in Binary.of(node).sides if isinstance(side, fx.Node)]
        return torch.zeros_like(value) + sum(terms) * max(1.0, abs(options.get("alpha", 1)))
    if name == "mul" or kind_of_node(node) == "matmul":
        sizes = [_magnitude(value) for value in (env[input_node(node)], rest[0])]
        larger = [size + slacks.get(side, 0) for size, side in zip(sizes, Binary.of(node).sides, strict=True)]
        return target(*larger) - target(*sizes)
    if name == "div" and Binary.of(node).right not in slacks and not Binary.of(node).rounding_mode:
        return slack(first) / abs(rest[0])
    if name == "softmax":
        return value * torch.expm1(2 * slack(first).amax(Softmax.of(node).dim, keepdim=True))
    return pytree.tree_map(_no_bound, value)


def _none_of(value: object) -> object:
    """No slack, in the form of a value."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def _no_bound(value: object) -> object:
    return torch.full_like(value, torch.inf, dtype=torch.float32) if isinstance(value, torch.Tensor) else None

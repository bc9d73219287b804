"""What a kernel of oneDNN can compute at once.

It is an int8 operator, the operators after it and the quantization of its result.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from nc.graph.catalogue import computed_options, kind_of_node, op_name, schema_arguments
from nc.graph.tensor_meta import TENSORS, same_shape
from nc.graph.views import Binary, Quantize, options
from nc.ops import dequantize_per_tensor, quantize_per_tensor, to_bf16

_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
#: Activations after convolutions that only plans have kernels for.
IN_PLANS = frozenset({"relu", "gelu", "swish", "leaky_relu", "hardtanh", "hardswish", "tanh"})
#: Activations that a kernel computes on its way out.
ACTIVATIONS = {
    "linear": frozenset({"relu", "gelu", "swish", "leaky_relu", "hardtanh", "hardswish", "tanh"}),
    "conv1d": frozenset({"relu"}),
    "conv2d": frozenset({"relu", "swish", "hardtanh", "hardswish"}),
    "conv3d": frozenset(),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), IN_PLANS),
}


#: Those that a product of rounded rows computes (`rows.c`).
_BEHIND_ROWS = frozenset({"relu", "leaky_relu", "hardtanh", "hardswish", "swish", "gelu"})


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """A unary post-operation as oneDNN's operators name it."""

    name: str = "none"
    arguments: tuple[float, ...] = ()
    algorithm: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """What becomes one call.

    Attributes:
        anchor: the linear or convolution.
        other: what the addition after the anchor adds, or None.
        activation: applied last.
        nodes: everything from the anchor to the last node, in order.
        codes: scale, zero point and dtype of the result where all that reads it reads these codes; None where
            it is fp32 or bf16.
        bf16: all that reads the result reads it rounded to bf16.
        limits: lowest and highest of the codes, where these are not all that the dtype has; the activation is
            the clamp for that.
    """

    anchor: fx.Node
    other: fx.Node | None
    activation: Activation
    nodes: tuple[fx.Node, ...]
    codes: tuple[float, int, torch.dtype] | None
    bf16: bool = False
    limits: tuple[int, int] | None = None


def region_of(anchor: fx.Node, *, planned: bool = False) -> Region:
    """Return the longest region that a kernel can compute from this operator on.

    Args:
        anchor: the linear or convolution.
        planned: the kernel is a convolution that plans alone have, which knows more activations and sums than
            torch's operators do.
    """
    kind = kind_of_node(anchor) or ""
    known = IN_PLANS if planned else ACTIVATIONS[kind]
    add, other = _sum_behind(anchor)
    if not planned and kind not in ("linear", "conv2d"):
        add = other = None
    nodes = [anchor] if add is None else [anchor, add]
    known = known if add is None or planned else frozenset({"relu"})
    activation = Activation()
    user, found = _activation_behind(nodes[-1])
    if user is not None and found.name in known:
        activation = found
        nodes.append(user)
    codes, limits = codes_behind(nodes[-1]), None
    narrow = _quantized_behind(nodes[-1]) if activation.name == "none" and "hardtanh" in known else None
    if narrow is not None and not _has_all_codes(narrow):
        codes, limits = (*narrow.numbers, narrow.dtype), (narrow.quant_min, narrow.quant_max)
        activation = Activation(
            "hardtanh", tuple((limit - narrow.numbers[1]) * narrow.numbers[0] for limit in limits)
        )
    if other is not None and codes is not None and not _adds_codes(other, codes[2]):
        codes = None
    bf16 = other is None and {user.target for user in nodes[-1].users} == {to_bf16}
    return Region(anchor, other, activation, tuple(nodes), codes, bf16, limits)


def _sum_behind(anchor: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the sum that alone reads an operator, and its other side; None twice where there is none."""
    user = only_user(anchor)
    if user is None or not is_sum(user, anchor):
        return None, None
    left, right = Binary.of(user).sides
    return user, right if left is anchor else left


def _activation_behind(node: fx.Node) -> tuple[fx.Node | None, Activation]:
    """Return the activation that alone reads a node, and what it is; None and none where there is none."""
    user = only_user(node)
    found = None if user is None else activation_of(user)
    return (None, Activation()) if found is None else (user, found)


def _adds_codes(other: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether a kernel that writes codes of `dtype` can add `other`, the other side of a sum.

    Kernels add uint8 codes with one scale per tensor to uint8 results, and fp32 to fp32 results.
    """
    return other.target is dequantize_per_tensor and dtype is torch.uint8


def activation_of(node: fx.Node) -> Activation | None:
    """Return an elementwise operator as a post-operation; None when there is none like it."""
    name = op_name(node)
    if computed_options(node):
        return None
    if name in ("relu", "hardswish", "tanh"):
        return Activation(name)
    if name == "silu":
        return Activation("swish")
    if name == "gelu":
        return Activation("gelu", algorithm=schema_arguments(node)["approximate"])
    if name == "relu6":
        return Activation("hardtanh", (0.0, 6.0))
    if name == "leaky_relu":
        return Activation("leaky_relu", (float(schema_arguments(node)["negative_slope"]),))
    if name == "hardtanh":
        a = schema_arguments(node)
        return Activation("hardtanh", (float(a["min_val"]), float(a["max_val"])))
    if name == "clamp":
        a = schema_arguments(node)
        limits = a["min"], a["max"]
        return (
            Activation("hardtanh", tuple(map(float, limits)))
            if all(isinstance(v, (int, float)) for v in limits)
            else None
        )
    return None


def only_user(node: fx.Node) -> fx.Node | None:
    """Return what reads a node, where that is one other node."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_sum(node: fx.Node, side: fx.Node) -> bool:
    """Return whether a node adds another tensor of the same shape."""
    if node.target is not torch.ops.aten.add.Tensor:
        return False
    (a, b), alpha = Binary.of(node).sides, Binary.of(node).alpha
    x, y = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in (a, b))
    return alpha == 1 and a is not b and _are_alike(x, y)


def _are_alike(x: object, y: object) -> bool:
    """Return whether two values are fp32 tensors of the same shape."""
    return (
        isinstance(x, TENSORS)
        and isinstance(y, TENSORS)
        and x.dtype is y.dtype is torch.float32
        and same_shape(x.shape, y.shape)
    )


def codes_behind(node: fx.Node) -> tuple[float, int, torch.dtype] | None:
    """Scale, zero point and dtype of the codes that all users read.

    None is returned when some read fp32, other codes, or a part of the dtype's.
    """
    codes = _quantized_behind(node)
    return (*codes.numbers, codes.dtype) if codes is not None and _has_all_codes(codes) else None


def _has_all_codes(codes: Quantize) -> bool:
    """Return whether the codes are all that their dtype has."""
    return (codes.quant_min, codes.quant_max) == _LIMITS[codes.dtype]


def _quantized_behind(node: fx.Node) -> Quantize | None:
    """How all users quantize the result of a node; None when some read fp32, or other codes."""
    found = {options(user) if user.target is quantize_per_tensor else None for user in node.users}
    return None if len(found) != 1 or None in found else Quantize.of(next(iter(node.users)))


def behind(node: fx.Node, *, alone: bool = False) -> tuple[list[fx.Node], Activation, fx.Node | None]:
    """Return what becomes one call of a product of rounded rows, the activation in it, and what it adds.

    Args:
        node: the product's result.
        alone: nothing goes with it.
    """
    region, activation, other = [node], Activation(), None
    user = only_user(node)
    found = activation_of(user) if user is not None and not alone else None
    if user is not None and found is not None and found.name in _BEHIND_ROWS:
        activation = found
        region.append(user)
    user = only_user(region[-1])
    if user is not None and not alone and is_sum(user, region[-1]):
        left, right = Binary.of(user).sides
        other = right if left is region[-1] else left
        region.append(user)
    return region, activation, other

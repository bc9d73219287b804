"""torch's int8 convolutions, tried on noise before they are used.

Where their sums are wrong, they are computed in fp32.

torch's operators run the kernels of torch's oneDNN, some of which give wrong sums (see `onednn.trials`). A
plan takes another kernel instead; without one there is no choice, so the operators below ask once for each
set of sizes, also for those that come later.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from nc.backends.native.plans.products import output_sizes, post_ops_of
from nc.backends.native.torch_library import ACCUMULATOR, ACTIVATIONS, SUM, stored
from nc.graph.catalogue import first_input, input_node, schema_arguments
from nc.graph.fx_utils import constant_of, retarget
from nc.kernels import cpu
from nc.kernels.onednn import trials
from nc.kernels.onednn.descriptions import (
    BIAS,
    DST,
    SCALES,
    SRC,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    Desc,
    Geometry,
    Sum,
    channels_last_strides,
)
from nc.numerics import affine

_onednn = torch.ops.onednn
#: By the dimensions of a weight.
_UNARY: Mapping[int, torch._ops.OpOverload] = {
    3: _onednn.qconv1d_pointwise.default,
    4: _onednn.qconv2d_pointwise.default,
    5: _onednn.qconv3d_pointwise.default,
}
#: Those that are tried, and what our operators are called.
_TRIED = {**dict.fromkeys(_UNARY.values(), "qconv"), SUM: "qconv_sum"}
_FP32: Mapping[int, Callable[..., torch.Tensor]] = {
    3: functional.conv1d,
    4: functional.conv2d,
    5: functional.conv3d,
}
#: The argument that our operators have after those of torch's: the weight as it is, codes [out, in / groups,
#: ...].
_CODES = "codes"
_Arguments = Mapping[str, Any]
#: Names of torch's arguments, without and with a sum.
_NAMES, _NAMES_OF_SUM = (tuple(each.name for each in kernel._schema.arguments) for kernel in (_UNARY[4], SUM))
#: Scale of the codes that a sum adds, in a trial.
_ADDED = 0.5
#: Sizes of inputs whose verdicts are kept for a convolution.
_MOST_SIZES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What may decide which kernel torch takes, but for the sizes of the input.

    Attributes:
        weight: sizes of the weight.
        geometry: how its window moves.
        groups: of channels.
        bias: whether there is one.
        scales: the weight has one for each channel.
        zero_points: whether those of the input and the result are other numbers than 0.
        dtype: of the result.
        adds: the result is added to what another kernel gave.
        activation: name, numbers and algorithm.
    """

    weight: tuple[int, ...]
    geometry: Geometry
    groups: int
    bias: bool
    scales: bool
    zero_points: tuple[bool, bool]
    dtype: torch.dtype
    adds: bool
    activation: tuple[str, tuple[float | None, ...], str]

    @classmethod
    def of(cls, a: _Arguments, weight: torch.Size) -> _Asked:
        """Return what a call asks for; `a` may be of a node, whose tensors are nodes."""
        dims = len(weight) - 2
        stride, padding, dilation = (
            tuple(a[key]) * (dims if len(a[key]) == 1 else 1) for key in ("stride", "padding", "dilation")
        )
        prefix = "unary_" if ACCUMULATOR in a else ""
        return cls(
            weight=tuple(weight),
            geometry=Geometry(
                stride, padding, padding, dilation, window=tuple(weight[2:]), channels=weight[1]
            ),
            groups=a["groups"],
            bias=a["bias"] is not None,
            scales=weight[0] > 1,
            zero_points=(bool(a["x_zero_point"]), bool(a["output_zero_point"])),
            dtype=a["output_dtype"] or torch.uint8,
            adds=ACCUMULATOR in a,
            activation=(
                a[f"{prefix}attr"] or "none",
                tuple(a[f"{prefix}scalars"]),
                a[f"{prefix}algorithm"] or "",
            ),
        )

    def check(self, sizes: Sequence[int]) -> None:
        """Raise ValueError where an input of these sizes does not fit.

        Torch computes values of a window that is larger than its input.
        """
        channels = self.groups * self.geometry.channels
        spatial = (
            output_sizes(sizes[2:], self.geometry.window, self.geometry)
            if len(sizes) == len(self.weight)
            else [0]
        )
        if sizes[1] != channels or min(spatial) < 1:
            msg = (
                f"a convolution's input {tuple(sizes)} and weight {self.weight}, {self.groups} groups, do "
                "not fit each other"
            )
            raise ValueError(msg)

    def for_sizes(self, sizes: Sequence[int]) -> trials.Convolution:
        """Return the convolution that is asked for an input of these sizes."""
        codes = not self.dtype.is_floating_point
        result = sizes[0], self.weight[0], *output_sizes(sizes[2:], self.geometry.window, self.geometry)
        name, numbers, algorithm = self.activation
        post = post_ops_of({"attr": name, "scalars": numbers, "algorithm": algorithm}, "attr")
        assert post is not None, name
        if self.adds:
            post = (Sum(_ADDED, 0, torch.uint8) if codes else Sum(), *post)
        arguments = (SRC, *((DST,) if codes else ()))
        return trials.Convolution(
            Desc(tuple(sizes), channels_last_strides(sizes), torch.uint8),
            Desc.dense((self.weight[0],), torch.float32) if self.bias else None,
            Desc(result, channels_last_strides(result), self.dtype),
            self.geometry,
            Attributes(
                scales={
                    WEIGHTS: (3 if self.groups > 1 else 1) if self.scales else 0,
                    **dict.fromkeys(arguments, 0),
                },
                zero_points={each: 0 for each, has in zip(arguments, self.zero_points, strict=False) if has},
                post_ops=post,
            ),
        )


@functools.cache
def library() -> torch.library.Library:
    """Namespace `nc_tried` with the operators; registered when they are needed first."""
    own = torch.library.Library("nc_tried", "FRAGMENT")  # type: ignore[no-untyped-call] # torch does not annotate it
    for name, kernel, run, names in (
        ("qconv", _UNARY[4], _convolution, _NAMES),
        ("qconv_sum", SUM, _sum, _NAMES_OF_SUM),
    ):
        schema = str(kernel._schema)
        arguments = schema[schema.index("(") + 1 : schema.rindex(") ->")].replace("Tensor(a!)", "Tensor")
        own.define(f"{name}({arguments}, Tensor {_CODES}) -> Tensor")  # type: ignore[no-untyped-call] # as above
        own.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
        torch.library.register_fake(f"nc_tried::{name}", functools.partial(_like, names), lib=own)
    return own


def guard(module: fx.GraphModule) -> None:
    """Let torch's convolutions that have a window be tried before they are used.

    Args:
        module: lowered graph that packs its weights itself. Sums that added in place give a new tensor.
    """
    for node in [n for n in module.graph.nodes if n.target in _TRIED]:
        arguments = schema_arguments(node)
        codes = first_input(arguments["qw"])
        if codes is None or math.prod(constant_of(module, codes).shape[2:]) == 1:
            continue
        copy = arguments.get(ACCUMULATOR)
        if copy is not None:
            arguments[ACCUMULATOR] = input_node(copy)
        library()
        retarget(node, getattr(torch.ops.nc_tried, _TRIED[node.target]).default)
        node.args, node.kwargs = (*arguments.values(), codes), {}
        if copy is not None:
            module.graph.erase_node(copy)


def is_guarded(node: fx.Node) -> bool:
    """Return whether a node is one of torch's convolutions that is tried."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "nc_tried"


def is_wrong(module: fx.GraphModule, node: fx.Node, sizes: Sequence[int]) -> bool:
    """Return whether torch's kernel for a guarded node computes wrong sums for inputs of these sizes."""
    return not _is_right(_asked_by(module, node), sizes)


def wrong_sizes(module: fx.GraphModule, node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return the input sizes for which torch's kernel for a guarded node computes wrong sums.

    Only sizes that were seen in this process count.
    """
    found = list(_verdicts(_asked_by(module, node)).items())
    return tuple(dict.fromkeys(sizes for (_, sizes), is_right in found if not is_right))


def _asked_by(module: fx.GraphModule, node: fx.Node) -> _Asked:
    arguments = schema_arguments(node)
    return _Asked.of(arguments, constant_of(module, arguments[_CODES]).shape)


def _is_right(asked: _Asked, sizes: Sequence[int]) -> bool:
    """Return whether torch's kernel adds up right for inputs of these sizes.

    It is tried once in a process for each number of threads.

    Raises:
        ValueError: they do not fit.
    """
    verdicts, key = _verdicts(asked), (torch.get_num_threads(), tuple(sizes))
    found = verdicts.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):  # whatever the caller's are
            asked.check(sizes)
            wanted = asked.for_sizes(sizes)
            if len(verdicts) >= _MOST_SIZES:
                verdicts.clear()
            found = verdicts[key] = _adds_up(asked, wanted)
    return found


def _adds_up(asked: _Asked, wanted: trials.Convolution) -> bool:
    overruns = "amx_int8" in cpu.machine_features() and trials.overruns_with_amx(wanted)
    is_usual = not wanted.source.sizes[0] or not trials.fills_tiles_in_part(wanted)
    return not overruns and (is_usual or trials.adds_up(wanted, functools.partial(_try, asked)))


@functools.lru_cache(4096)
def _verdicts(asked: _Asked) -> dict[tuple[int, tuple[int, ...]], bool]:
    """Return what trials found, by the number of threads and the sizes of the input."""
    return {}


def _try(asked: _Asked, tensors: dict[int, torch.Tensor]) -> None:
    """Compute a trial's convolution as torch computes it; see `trials.adds_up`."""
    g, x, target = asked.geometry, tensors[SRC], tensors[DST]
    scales, codes = tensors[SCALES | WEIGHTS], tensors[WEIGHTS].reshape(asked.weight)
    scale, zero_point = _qparams(tensors, SRC)
    window = list(g.strides), list(g.before), list(g.dilations), asked.groups
    weight = _onednn.qconv_prepack(codes, scales, scale, zero_point, *window, list(x.shape))
    inputs = x, scale, zero_point, weight, scales, torch.zeros(len(scales), dtype=torch.int64)
    name, numbers, algorithm = asked.activation
    result = *_qparams(tensors, DST), asked.dtype
    if asked.adds:
        other = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype).copy_(target)
        scale = 1.0 if asked.dtype.is_floating_point else _ADDED
        post = scale, 0, "sum", 1.0, name, list(numbers), algorithm
        found = SUM(*inputs, other, tensors.get(BIAS), *window, *result, *post)
    else:
        found = _UNARY[codes.dim()](
            *inputs, tensors.get(BIAS), *window, *result, name, list(numbers), algorithm
        )
    target.copy_(found)


def _qparams(tensors: Mapping[int, torch.Tensor], argument: int) -> tuple[float, int]:
    """Scale and zero point of an argument; 1 and 0 where it has none."""
    scale, zero_point = tensors.get(SCALES | argument), tensors.get(ZERO_POINTS | argument)
    return 1.0 if scale is None else float(scale), 0 if zero_point is None else int(zero_point)


def _convolution(*arguments: Any) -> torch.Tensor:
    *own, codes = arguments
    kernel = _UNARY[codes.dim()]
    a = dict(zip(_NAMES, own, strict=True))
    if _is_right(_Asked.of(a, codes.shape), a["qx"].shape):
        result: torch.Tensor = kernel(*own)
        return result
    return _in_fp32(a, codes)


def _sum(*arguments: Any) -> torch.Tensor:
    *own, codes = arguments
    a = dict(zip(_NAMES_OF_SUM, own, strict=True))
    if _is_right(_Asked.of(a, codes.shape), a["qx"].shape):
        a[ACCUMULATOR] = a[ACCUMULATOR].clone(memory_format=torch.channels_last)
        result: torch.Tensor = SUM(*a.values())
        return result
    return _in_fp32(a, codes)


def _in_fp32(a: _Arguments, codes: torch.Tensor) -> torch.Tensor:
    """Return what a kernel should give, computed by torch's fp32 convolution on the values of the codes."""
    weight = codes.float() * a["w_scale"].view(-1, *[1] * (codes.dim() - 1))
    x = affine.dequantize(a["qx"], a["x_scale"], a["x_zero_point"])
    values = _FP32[codes.dim()](x, weight, a["bias"], a["stride"], a["padding"], a["dilation"], a["groups"])
    other, prefix = a.get(ACCUMULATOR), ""
    if other is not None:
        is_float, prefix = other.dtype.is_floating_point, "unary_"
        values = values + (
            other if is_float else affine.dequantize(other, a["accum_scale"], a["accum_zero_point"])
        )
    values = ACTIVATIONS[a[f"{prefix}attr"]](values, a[f"{prefix}scalars"], a[f"{prefix}algorithm"])
    result = stored(values, a["output_scale"], a["output_zero_point"], a["output_dtype"] or torch.uint8)
    return _channels_last(result.shape, result.dtype, result.device).copy_(result)


def _like(names: Sequence[str], *arguments: Any) -> torch.Tensor:
    *own, codes = arguments
    a = dict(zip(names, own, strict=True))
    window = a["stride"], a["padding"], a["dilation"], a["groups"]
    shape = _FP32[codes.dim()](a["qx"].float(), codes.float(), None, *window).shape
    return _channels_last(shape, a["output_dtype"] or torch.uint8, a["qx"].device)


def _channels_last(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new tensor in channels-last memory format, as torch's kernels return."""
    return torch.empty_strided(tuple(sizes), channels_last_strides(sizes), dtype=dtype, device=device)

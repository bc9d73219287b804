"""Do a convolution's kernels add up right?

Unusual ones are tried on codes whose sums are known, before a plan takes them. Some of oneDNN's kernels give
wrong sums for some windows, strides and sizes: transposed convolutions with strides (3.12, 3.13), AMX kernels
over few channels or with a result of one column (3.7 to 3.13). torch's operators run the same kernels. Which
ones are wrong depends on the release, the CPU and all sizes, so nothing is decided by version: the very
primitive is run, with its sizes and attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from nc.errors import BackendError
from nc.kernels.onednn.call_lists import Scratch, packed, run_once
from nc.kernels.onednn.descriptions import (
    BIAS,
    DST,
    POST_OP,
    SCALES,
    SCRATCHPAD,
    SRC,
    WEIGHTS,
    ZERO_POINTS,
    Attributes,
    BinaryOp,
    Desc,
    Eltwise,
    Geometry,
    Prelu,
    Sum,
)
from nc.kernels.onednn.primitives import Layout, Maker, Primitive

#: Products that a trial adds up itself for each of two images; it looks at as many places of the result as
#: that allows.
_MOST_PRODUCTS = 2**19
#: Places along each dimension of the result that it looks at in any case.
_LEAST_PLACES = 6
#: Codes of weights whose sums of two products fit 16 bits, which CPUs without VNNI have for them.
_LARGEST_WEIGHT = 63
_SOURCE_ZERO, _RESULT_ZERO = 117, 100
#: Channels of a group that fill the rows of AMX tiles, and places in a row of the result that are few.
_FULL_TILE, _NARROW = 64, 4
#: Channels up to which an AMX kernel of one dimension loses more by zero points than it gains.
_FEW_CHANNELS = 128
#: Of the largest value; kernels approximate tanh and gelu.
_TOLERANCE = 1e-3
#: Verdicts that a process keeps.
_MOST_KEPT = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Convolution:
    """What a kernel is asked for; see `Maker.convolution`."""

    source: Desc
    bias: Desc | None
    target: Desc
    geometry: Geometry
    attributes: Attributes

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return self.source.sizes[1] // self.geometry.channels

    @property
    def weights(self) -> Desc:
        """Its weights, group by group."""
        each = self.target.sizes[1] // self.groups, self.geometry.channels, *self.geometry.window
        return Desc.dense((self.groups, *each) if self.groups > 1 else each, torch.int8)


def convolution(
    maker: Maker, wanted: Convolution, weights: Desc | Layout
) -> tuple[Primitive, tuple[str, ...]]:
    """Return a primitive whose sums are right, and the names of kernels that were rejected for wrong sums.

    Raises:
        Unimplemented: no kernel is right.
    """
    wrong: tuple[str, ...] = ()
    amx = not (overruns_with_amx(wanted) or is_slow_with_amx(wanted))
    while True:
        primitive = maker.convolution(
            wanted.source,
            weights,
            wanted.bias,
            wanted.target,
            wanted.geometry,
            wanted.attributes,
            avoid=frozenset(wrong),
            amx=amx,
        )
        if not is_unusual(primitive, wanted) or _verdict(maker, primitive, wanted):
            return primitive, wrong
        wrong += (primitive.kernel,)


def overruns_with_amx(wanted: Convolution) -> bool:
    """Return whether making an AMX kernel may write past its memory, which no trial in this process survives.

    It may for a source with a zero point, dilations and pads. Seen with oneDNN 3.12 under a checking
    allocator for windows of 7, with 3.7 as an abort, and with 3.12 as a crash for a window of 3 x 3 over 64
    channels. It was never seen without a zero point, or without AMX.
    """
    g = wanted.geometry
    windows = zip(g.window, g.dilations, g.before, g.after, strict=True)
    return SRC in wanted.attributes.zero_points and any(
        size > 1 and dilation > 1 and max(before, after) > 0 for size, dilation, before, after in windows
    )


def is_slow_with_amx(wanted: Convolution) -> bool:
    """Return whether an AMX kernel sums the weights in each call, for the places with padding.

    It does for a source of one dimension with a zero point. The fewer channels, the larger is the share of
    that. Beside VNNI, 11 taps at 5,120 places take 3 times as long over 64 channels, 1.8 times over 128;
    256 channels make both alike, and 3 taps over 512 take 0.7 times as long.
    """
    g = wanted.geometry
    is_padded = len(g.window) == 1 and g.window[0] > 1 and max(*g.before, *g.after) > 0
    return SRC in wanted.attributes.zero_points and is_padded and g.channels <= _FEW_CHANNELS


def is_unusual(primitive: Primitive, wanted: Convolution) -> bool:
    """Tell whether a kernel is tried: few models have such convolutions, so few people have seen their sums.

    These are transposed ones, and those of AMX where channels or a row of the result do not fill tiles (64
    values, 16 places). Thousands of random convolutions by other kernels were right. ResNet-50 has one kernel
    to try, BERT none.
    """
    if primitive.is_reference or any(isinstance(each, BinaryOp) for each in wanted.attributes.post_ops):
        return False  # no convolution of a plan has a binary operation after it
    return wanted.geometry.transposed or ("amx" in primitive.kernel and fills_tiles_in_part(wanted))


def fills_tiles_in_part(wanted: Convolution) -> bool:
    """Tell whether a convolution fills AMX tiles only in part.

    It has a window, and too few channels of a group or places in a row of the result for whole tiles.
    """
    has_window = math.prod(wanted.geometry.window) > 1
    return has_window and (wanted.geometry.channels < _FULL_TILE or wanted.target.sizes[-1] < _NARROW)


def is_right(maker: Maker, primitive: Primitive, wanted: Convolution) -> bool:
    """Return whether a primitive's sums are right; see `adds_up`."""

    def run(tensors: dict[int, torch.Tensor]) -> None:
        tensors[WEIGHTS] = packed(
            maker, tensors[WEIGHTS], wanted.weights, primitive.layouts[WEIGHTS], Scratch()
        )
        scratchpad = primitive.layouts.get(SCRATCHPAD)
        if scratchpad is not None:
            tensors[SCRATCHPAD] = _noise(Desc.dense((scratchpad.size,), torch.uint8), 0, 255)
        run_once(maker, primitive, tensors)

    try:
        return adds_up(wanted, run)
    except BackendError:
        return False


def adds_up(wanted: Convolution, run: Callable[[dict[int, torch.Tensor]], None]) -> bool:
    """Return whether the sums of a kernel are right.

    They are sums of noise, in memory that holds noise, at places that include all edges.

    Args:
        wanted: what the kernel computes.
        run: computes it of tensors by their arguments, and writes the result into that of `DST`. The weights
            are as in `wanted.weights`.
    """
    x, target = (
        _noise(wanted.source, *_range(wanted.source.dtype)),
        _noise(wanted.target, *_range(wanted.target.dtype)),
    )
    weight = _noise(wanted.weights, -_LARGEST_WEIGHT, _LARGEST_WEIGHT)
    before = target.clone()
    numbers = _numbers(wanted)
    grid = _grid(wanted)
    values = _values(wanted, x, weight, before, numbers, grid)
    dtype = wanted.target.dtype
    if not dtype.is_floating_point:
        numbers[SCALES | DST] = (values.abs().max() / _RESULT_ZERO).float().clamp_min(1e-6).reshape(1)
        zero = float(numbers[ZERO_POINTS | DST]) if ZERO_POINTS | DST in numbers else 0.0
        limits = torch.iinfo(dtype)
        values = (values / float(numbers[SCALES | DST]) + zero).round().clamp(limits.min, limits.max)
    run({SRC: x, DST: target, WEIGHTS: weight, **numbers})
    found = _at(target, grid).double()
    most = (
        float(values.abs().max()) * max(_TOLERANCE, torch.finfo(dtype).eps)
        if dtype.is_floating_point
        else 1.0
    )
    return bool(((found - values).abs() <= most).all())


def _verdict(maker: Maker, primitive: Primitive, wanted: Convolution) -> bool:
    """`is_right`, once in a process for a kernel and all that may decide about its sums."""
    key = torch.get_num_threads(), primitive.kernel, wanted
    found = maker.verdicts.get(key)
    if found is None:
        if len(maker.verdicts) >= _MOST_KEPT:
            maker.verdicts.clear()
        found = maker.verdicts[key] = is_right(maker, primitive, wanted)
    return found


@functools.cache
def _pattern(low: int, high: int) -> torch.Tensor:
    """Random codes; their number is a prime, so that no dimension of a tensor repeats them."""
    return torch.randint(
        low, high + 1, (8191,), generator=torch.Generator().manual_seed(0), dtype=torch.int16
    )


def _noise(desc: Desc, low: int, high: int) -> torch.Tensor:
    """Return a tensor of random codes, also between its elements."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(desc.sizes, desc.strides, strict=True))
    codes = _pattern(low, high).to(desc.dtype)
    return codes.repeat(-(-size // codes.numel()))[:size].as_strided(desc.sizes, desc.strides)


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the lowest and highest code of a dtype; for floats, any range will do."""
    return (-128, 127) if dtype is torch.int8 else (0, 255)


def _numbers(wanted: Convolution) -> dict[int, torch.Tensor]:
    """Return scales, zero points and bias that make sums about 1, where activations are not linear."""
    outputs = wanted.target.sizes[1]
    scales = 0.5 + torch.arange(outputs, dtype=torch.float32) % 7 / 8
    inputs = wanted.geometry.channels * math.prod(wanted.geometry.window)
    result = {
        SCALES | SRC: torch.tensor([1 / (2000 * math.sqrt(inputs))], dtype=torch.float32),
        SCALES | WEIGHTS: scales if wanted.attributes.scales.get(WEIGHTS) else scales[:1],
    }
    result |= (
        {BIAS: torch.arange(outputs, dtype=torch.float32) % 5 / 4 - 0.5} if wanted.bias is not None else {}
    )
    for argument, zero in ((SRC, _SOURCE_ZERO), (DST, _RESULT_ZERO)):
        if argument in wanted.attributes.zero_points:
            result[ZERO_POINTS | argument] = torch.tensor([zero], dtype=torch.int32)
    for index, each in enumerate(wanted.attributes.post_ops):
        if isinstance(each, Prelu):
            result[_slopes_of(index)] = (scales - 0.75).view(each.slopes.sizes)
    return result


def _slopes_of(index: int) -> int:
    """Return the argument for the slopes of a post-operation, by its place."""
    return POST_OP * (index + 1) | WEIGHTS


def _grid(wanted: Convolution) -> list[torch.Tensor]:
    """For each spatial dimension of the result, places along it.

    They are all, or the first and last ones and some in between.
    """
    sizes = wanted.target.sizes[2:]
    left = _MOST_PRODUCTS / (wanted.source.sizes[1] * math.prod(wanted.geometry.window))
    chosen: dict[int, torch.Tensor] = {}
    for rank, dim in enumerate(
        sorted(range(len(sizes)), key=lambda dim: sizes[dim])
    ):  # short dimensions leave more for long ones
        most = max(int(left ** (1 / (len(sizes) - rank))), _LEAST_PLACES)
        chosen[dim] = _places(sizes[dim], most)
        left /= len(chosen[dim])
    return [chosen[dim] for dim in range(len(sizes))]


def _places(size: int, most: int) -> torch.Tensor:
    """At most that many places along a dimension of a size."""
    if size <= most:
        return torch.arange(size)
    edge = most // 3
    between = (
        edge + torch.randperm(size - 2 * edge, generator=torch.Generator().manual_seed(0))[: most - 2 * edge]
    )
    return torch.cat((torch.arange(edge), between, torch.arange(size - edge, size)))


def _at(tensor: torch.Tensor, grid: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first and the last image of a tensor [N, C, ...] at some places."""
    tensor = tensor[:: max(len(tensor) - 1, 1)]
    for dim, places in enumerate(grid, 2):
        tensor = tensor.index_select(dim, places)
    return tensor


def _values(
    wanted: Convolution,
    x: torch.Tensor,
    weight: torch.Tensor,
    before: torch.Tensor,
    numbers: Mapping[int, torch.Tensor],
    grid: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return what the result is at some places, before it is rounded to codes."""
    zero = float(numbers[ZERO_POINTS | SRC]) if ZERO_POINTS | SRC in numbers else 0.0
    sums = _sums(wanted, x[:: max(len(x) - 1, 1)].float() - zero, weight, grid)
    shape = -1, *[1] * len(grid)
    values = sums * (numbers[SCALES | SRC].double() * numbers[SCALES | WEIGHTS].double()).view(shape)
    values = values + numbers[BIAS].double().view(shape) if BIAS in numbers else values
    for index, each in enumerate(wanted.attributes.post_ops):
        if isinstance(each, Prelu):
            values = torch.where(values > 0, values, values * numbers[_slopes_of(index)].double().view(shape))
        elif isinstance(each, Sum):
            values = values + (_at(before, grid).double() - each.zero_point) * each.scale
        elif isinstance(each, Eltwise):
            values = FUNCTIONS[each.name](values, each)
    return values


def _sums(
    wanted: Convolution, x: torch.Tensor, weight: torch.Tensor, grid: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return sums of products at some places.

    The inputs of each place are gathered dimension by dimension, with zeros outside of x.

    Products of codes are whole numbers below 2 ** 14, so fp32 is as good as exact.
    """
    g, sizes = wanted.geometry, x.shape[2:]
    for dim, places in enumerate(grid):
        taps = torch.arange(g.window[dim]) * g.dilations[dim]
        at = (
            places[:, None] + g.before[dim] - taps
            if g.transposed
            else places[:, None] * g.strides[dim] - g.before[dim] + taps
        )
        inside = at % g.strides[dim] == 0 if g.transposed else torch.ones_like(at, dtype=torch.bool)
        at = at.div(g.strides[dim], rounding_mode="floor") if g.transposed else at
        inside &= (at >= 0) & (at < sizes[dim])
        axis = 2 + 2 * dim
        rest = x.shape[axis + 1 :]
        x = x.index_select(axis, at.clamp(0, sizes[dim] - 1).flatten()).reshape(
            *x.shape[:axis], *at.shape, *rest
        )
        x = x * inside.view(*at.shape, *[1] * (len(grid) - dim - 1))
    dims = range(len(grid))
    order = 0, *(2 + 2 * dim for dim in dims), 1, *(3 + 2 * dim for dim in dims)
    rows = x.permute(order).reshape(len(x), *map(len, grid), wanted.groups, -1)
    by_groups = weight.float().reshape(wanted.groups, wanted.target.sizes[1] // wanted.groups, -1)
    return torch.einsum("n...gi,goi->n...go", rows, by_groups).flatten(-2).movedim(-1, 1).double()


#: What may follow a convolution in a plan, of values and numbers.
FUNCTIONS: Mapping[str, Callable[[torch.Tensor, Eltwise], torch.Tensor]] = {
    "relu": lambda x, e: torch.where(x > 0, x, e.alpha * x),
    "tanh": lambda x, _: x.tanh(),
    "swish": lambda x, e: x * (e.alpha * x).sigmoid(),
    "hardswish": lambda x, e: x * (e.alpha * x + e.beta).clamp(0, 1),
    "gelu_tanh": lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": lambda x, _: torch.nn.functional.gelu(x),
    "clip": lambda x, e: x.clamp(e.alpha, e.beta),
    "linear": lambda x, e: x * e.alpha + e.beta,
}

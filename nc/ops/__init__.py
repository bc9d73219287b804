"""All that quantization adds to a graph, as operators of namespace `nc`.

On import they are registered with torch, once per process.

Each has a schema, a reference implementation that runs on any CPU (so a QDQ graph is its own reference), and
one for fake and meta tensors. Arithmetic is in `nc.numerics`; here is only what the dispatcher needs. The
dtype of codes is always said, never told from their range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.errors import InputError
from nc.formats import dtype as named
from nc.formats import per_channel, per_group
from nc.numerics import affine, dynamic, fake_quant, formats, low_bit, recurrent, segments

_LIBRARY = torch.library.Library("nc", "DEF")  # type: ignore[no-untyped-call] # torch annotates it in part only
#: Operator → the function that computes it: for compilers, which look into functions but not into operators.
REFERENCE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def _operator(schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call] # torch annotates it in part only
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # torch annotates it in part only
    torch.library.register_fake(f"nc::{name}", _on_one_device(name, fake), lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops.nc, packet), overload or "default")
    REFERENCE[operator] = compute
    return operator


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for tensors of one device.

    Torch calls it for CPU tensors too if one is on `meta`; the result would be random.
    """

    @functools.wraps(fake)
    def checked(*arguments: Any) -> Any:
        devices = {
            part.device.type for part in pytree.tree_leaves(arguments) if isinstance(part, torch.Tensor)
        }
        if len(devices) > 1:
            msg = (
                f"nc::{name} got tensors on {' and '.join(sorted(devices))}: put the model and its inputs on "
                "one device."
            )
            raise InputError(msg)
        return fake(*arguments)

    return checked


def _codes(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Like `x`, of the dtype that comes last."""
    return torch.empty_like(x, dtype=arguments[-1])


def _values(codes: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(codes, dtype=torch.float32)


def _quantize(
    x: torch.Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> torch.Tensor:
    return affine.quantize(x, scale, zero_point, quant_min, quant_max, dtype=dtype)


def _dequantize(
    codes: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype
) -> torch.Tensor:  # of the codes
    return affine.dequantize(codes, scale, zero_point)


# The operators with several scales have the same arguments but for those that say how large a block is.
def _quantize_tensor(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, *codes: Any
) -> torch.Tensor:
    return _quantize_blocks(_block_size(x, scale), x, scale, zero_point, *codes)


def _quantize_per_channel(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, axis: int, *codes: Any
) -> torch.Tensor:
    return _quantize_blocks(per_channel(axis).block_size(x.shape), x, scale, zero_point, *codes)


def _quantize_per_group(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    axis: int,
    group_size: int,
    *codes: Any,
) -> torch.Tensor:
    return _quantize_blocks(per_group(axis, group_size).block_size(x.shape), x, scale, zero_point, *codes)


def _dequantize_tensor(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, *_: Any
) -> torch.Tensor:
    return _dequantize_blocks(_block_size(codes, scale), codes, scale, zero_point)


def _dequantize_per_channel(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, axis: int, *_: Any
) -> torch.Tensor:
    return _dequantize_blocks(per_channel(axis).block_size(codes.shape), codes, scale, zero_point)


def _dequantize_per_group(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    axis: int,
    group_size: int,
    *_: Any,
) -> torch.Tensor:
    return _dequantize_blocks(per_group(axis, group_size).block_size(codes.shape), codes, scale, zero_point)


def _quantize_blocks(
    block_size: Sequence[int] | None,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if not x.numel():
        return torch.empty_like(x, dtype=dtype)  # it has no blocks
    zero_points = 0 if zero_point is None else zero_point
    return affine.quantize(x, scale, zero_points, quant_min, quant_max, dtype=dtype, block_size=block_size)


def _dequantize_blocks(
    block_size: Sequence[int] | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
) -> torch.Tensor:
    if not codes.numel():
        return _values(codes)
    return affine.dequantize(codes, scale, 0 if zero_point is None else zero_point, block_size)


def _quantize_float(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    if not x.numel():
        return torch.empty_like(x, dtype=named(dtype).storage)  # it has no blocks
    return formats.quantize(x, scale, named(dtype), _block_size(x, scale))


def _dequantize_float(codes: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    if not codes.numel():
        return _values(codes)
    return formats.dequantize(codes, scale, named(dtype), _block_size(codes, scale))


def _block_size(x: torch.Tensor, scale: torch.Tensor) -> tuple[int, ...] | None:
    """Return the size of the block in `x` that each element of a scale is for."""
    return (
        tuple(size // count for size, count in zip(x.shape, scale.shape, strict=True))
        if scale.dim()
        else None
    )


def _quantize_dequantize_dynamic(
    x: torch.Tensor,
    per_token: bool,
    quant_min: int,
    quant_max: int,
    symmetric: bool,
    dtype: torch.dtype,
    dim: int = -1,
    right: torch.Tensor | None = None,
) -> torch.Tensor:
    return dynamic.quantize_dequantize_dynamic(x, per_token, quant_min, quant_max, symmetric, dim, right)


# `options` end with the dtype of codes, which their limits say too, and whether rows have their own ranges
def _lstm(
    x: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, ...]:
    return recurrent.lstm_dynamic(x, hx, params, *_layer_options(options))


def _gru(
    x: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, ...]:
    return recurrent.gru_dynamic(x, hx, params, *_layer_options(options))


def _rnn(
    x: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, ...]:
    given = [*options, *[False] * (_LONG + 1 - len(options))]
    relu = given.pop(-2)
    return recurrent.rnn_dynamic(x, hx, params, *_layer_options(given), relu=relu)


def _layer_options(options: Sequence[Any]) -> Sequence[Any]:
    """Options of an LSTM or GRU without the dtype of its codes, with those that have defaults."""
    given = [*options, *[False] * (_LONG - len(options))]
    return [*given[:-3], *given[-2:]]


def _fake_recurrent(
    x: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    hidden, directions = params[1].shape[1], 1 + bidirectional
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    last = tuple(x.new_empty((num_layers * directions, batch, state.shape[-1])) for state in states)
    output = x.new_empty((steps, batch, hidden * directions))  # in memory the steps come first
    return output.transpose(0, 1) if batch_first else output, *last


quantize_per_tensor = _operator(
    "quantize_per_tensor(Tensor x, float scale, int zero_point, int quant_min, int quant_max, ScalarType "
    "dtype) -> Tensor",
    _quantize,
    _codes,
)
dequantize_per_tensor = _operator(
    "dequantize_per_tensor(Tensor codes, float scale, int zero_point, ScalarType dtype) -> Tensor",
    _dequantize,
    _values,
)
#: One scale for all, or one for each block: a tensor of the rank of `x`, whose sizes divide those of `x`.
quantize_tensor = _operator(
    "quantize_per_tensor.tensor(Tensor x, Tensor scale, Tensor? zero_point, int quant_min, int quant_max, "
    "ScalarType dtype) -> Tensor",
    _quantize_tensor,
    _codes,
)
dequantize_tensor = _operator(
    "dequantize_per_tensor.tensor(Tensor codes, Tensor scale, Tensor? zero_point, ScalarType dtype) -> "
    "Tensor",
    _dequantize_tensor,
    _values,
)
quantize_per_channel = _operator(
    "quantize_per_channel(Tensor x, Tensor scale, Tensor? zero_point, int axis, int quant_min, int "
    "quant_max, ScalarType dtype) -> Tensor",
    _quantize_per_channel,
    _codes,
)
dequantize_per_channel = _operator(
    "dequantize_per_channel(Tensor codes, Tensor scale, Tensor? zero_point, int axis, ScalarType dtype) -> "
    "Tensor",
    _dequantize_per_channel,
    _values,
)
quantize_per_group = _operator(
    "quantize_per_group(Tensor x, Tensor scale, Tensor? zero_point, int axis, int group_size, int quant_min, "
    "int quant_max, ScalarType dtype) -> Tensor",
    _quantize_per_group,
    _codes,
)
dequantize_per_group = _operator(
    "dequantize_per_group(Tensor codes, Tensor scale, Tensor? zero_point, int axis, int group_size, "
    "ScalarType dtype) -> Tensor",
    _dequantize_per_group,
    _values,
)
#: Floating-point formats, by the name of their `DType`. The scale is one number, or a tensor as for
#: `quantize_tensor`: so these two are for every granularity.
quantize_float = _operator(
    "quantize_float(Tensor x, Tensor scale, str dtype) -> Tensor",
    _quantize_float,
    lambda x, scale, dtype: torch.empty_like(x, dtype=named(dtype).storage),  # the names of the schema
)
dequantize_float = _operator(
    "dequantize_float(Tensor codes, Tensor scale, str dtype) -> Tensor", _dequantize_float, _values
)
quantize_dequantize_dynamic = _operator(
    "quantize_dequantize_dynamic(Tensor x, bool per_token, int quant_min, int quant_max, bool symmetric, "
    "ScalarType dtype, int dim=-1, Tensor? right=None) -> Tensor",
    _quantize_dequantize_dynamic,
    lambda x, *_: torch.empty_like(x),
)
#: fp32 values of the codes of any format, by the name of its `nc.formats.DType`: for scales as of
#: `quantize_tensor`, or the ranges of `x`.
fake_quantize = _operator(
    "fake_quantize(Tensor x, Tensor scale, Tensor? zero_point, str format, str round_method, int seed) -> "
    "Tensor",
    fake_quant.fake_quantize,
    _values,
)
fake_quantize_dynamic = _operator(
    "fake_quantize_dynamic(Tensor x, str format, str granularity, bool symmetric, str round_method, str "
    "scale_type, bool tensor_scale, int seed) -> Tensor",
    fake_quant.fake_quantize_dynamic,
    _values,
)
#: bf16 values nearest to fp32 ones, and the same values in fp32.
to_bf16 = _operator(
    "to_bf16(Tensor x) -> Tensor",
    lambda x: x.to(torch.bfloat16, copy=True),
    lambda x: torch.empty_like(x, dtype=torch.bfloat16),
)
from_bf16 = _operator(
    "from_bf16(Tensor x) -> Tensor",
    lambda x: x.to(torch.float32, copy=True),
    lambda x: torch.empty_like(x, dtype=torch.float32),
)
_OPTIONS = (
    "bool has_biases, int num_layers, bool bidirectional, bool batch_first, int quant_min, int quant_max, "
    "ScalarType dtype"
)
_ROWS = "bool per_token=False, bool float_input=False"
_LONG = len((*_OPTIONS.split(","), *_ROWS.split(",")))
lstm_dynamic = _operator(
    f"lstm_dynamic(Tensor x, Tensor[] hx, Tensor[] params, {_OPTIONS}, {_ROWS}) -> (Tensor, Tensor, Tensor)",
    _lstm,
    _fake_recurrent,
)
gru_dynamic = _operator(
    f"gru_dynamic(Tensor x, Tensor hx, Tensor[] params, {_OPTIONS}, {_ROWS}) -> (Tensor, Tensor)",
    _gru,
    _fake_recurrent,
)
rnn_dynamic = _operator(
    f"rnn_dynamic(Tensor x, Tensor hx, Tensor[] params, {_OPTIONS}, bool per_token, bool relu, bool "
    "float_input=False) -> (Tensor, Tensor)",
    _rnn,
    _fake_recurrent,
)

#: What a packed weight is stored as; see `nc.numerics.packed_weight.PackedWeight`.
_PACKED = (
    "Tensor codes, Tensor scale, Tensor? zero, Tensor? minimum, Tensor? outer_scale, Tensor? outer_minimum"
)
quant_linear = _operator(
    f"quant_linear(Tensor x, {_PACKED}, Tensor? bias, str dtype, int in_features, str act_dtype) -> Tensor",
    low_bit.linear,
    lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[0])),
)


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # torch's signature
    x, *parts, bias = inputs[:8]
    ctx.save_for_backward(*parts)
    ctx.options, ctx.kinds = inputs[8:10], (x.dtype, None if bias is None else bias.dtype)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    (kind, kind_of_bias), of_x, of_bias = ctx.kinds, None, None
    if ctx.needs_input_grad[0]:
        of_x = low_bit.linear_gradient(gradient, *ctx.saved_tensors, *ctx.options).to(kind)
    if ctx.needs_input_grad[7]:
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=torch.float32).to(kind_of_bias)
    return of_x, *[None] * 6, of_bias, *[None] * 3


# adapters before a low-bit linear are trained, and biases; its own weight never is
torch.library.register_autograd("nc::quant_linear", _gradients, setup_context=_keep_weight, lib=_LIBRARY)
quant_embedding = _operator(
    f"quant_embedding(Tensor ids, {_PACKED}, str dtype, int features, ScalarType result) -> Tensor",
    low_bit.embedding,
    lambda ids, codes, *rest: ids.new_empty(
        (*ids.shape, rest[-2]), dtype=rest[-1]
    ),  # the names of the schema
)
#: See `nc.numerics.segments`.
segment_bias = _operator(
    "segment_bias(Tensor starts, Tensor rows, Tensor? table, int longest) -> Tensor",
    lambda starts, rows, table, longest: segments.segment_bias(
        starts, rows, table
    ),  # the names of the schema
    lambda starts, rows, table, longest: rows.new_empty(
        (1, 1 if table is None else table.shape[0], rows.shape[0], rows.shape[0]), dtype=torch.float32
    ),
)
segment_sum = _operator(
    "segment_sum(Tensor x, Tensor starts, bool keepdim) -> Tensor",
    segments.segment_sum,
    lambda x, starts, keepdim: x.new_empty(
        (starts.shape[0] - 1, *((1,) if keepdim else ()), *x.shape[2:]),
        dtype=x.dtype if x.is_floating_point() else torch.int64,
    ),
)
segment_attention = _operator(
    "segment_attention(Tensor query, Tensor key, Tensor value, Tensor starts, Tensor? of_queries, "
    "Tensor? of_keys, Tensor? query_columns, Tensor? key_columns, float scale) -> Tensor",
    segments.segment_attention,
    lambda query, key, value, *rest: query.new_empty((*query.shape[:-1], value.shape[-1])),
)

#: Of integers.
QUANTIZE = frozenset({quantize_per_tensor, quantize_tensor, quantize_per_channel, quantize_per_group})
DEQUANTIZE = frozenset(
    {dequantize_per_tensor, dequantize_tensor, dequantize_per_channel, dequantize_per_group}
)
#: All operators that only convert between codes and values.
CONVERTERS = (
    QUANTIZE
    | DEQUANTIZE
    | {quantize_float, dequantize_float, quantize_dequantize_dynamic, fake_quantize, fake_quantize_dynamic}
)
#: What a node calls instead of a recurrent layer or cell of ATen, by the kind of that one without "_cell".
RECURRENT = {"lstm": lstm_dynamic, "gru": gru_dynamic, "rnn": rnn_dynamic}

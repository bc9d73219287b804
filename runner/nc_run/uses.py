"""What each function in C reads and writes, computed from its fields.

`USES` has for each function one that gives a `Use` for each of its tensors, in their order. Bytes never fall
when a size or stride rises: what fits memory for many rows fits it for fewer. A function of nc that is not
here can't be part of a plan.

test/runner/check_uses.py calls all functions with memory of exactly so many bytes, between pages without
rights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nc_run.abi import CELL, CONSTANTS, DTYPE, FUNCTIONS, MASK, NORM

#: Bytes of a dtype, by its number.
_BYTES = {"f32": 4, "bf16": 2, "bool": 1, "i64": 8, "u8": 1, "s8": 1, "f16": 2}
_SIZES = {DTYPE.number(name): size for name, size in _BYTES.items()}
_TILE, _PAIR, _DEPTH = 16, 32, 64
#: Before each memory of a thread.
_LINE = 64


class Use(NamedTuple):
    """How a function uses one of its tensors.

    Attributes:
        bytes: from the begin on.
        written: whether it writes there.
        align: of its address.
        optional: it may have no address.
        decides: its values decide about addresses, so nothing may write them during the call.
    """

    bytes: int
    written: bool = False
    align: int = 4
    optional: bool = False
    decides: bool = False


class Fields:
    """Fields of a call by name, for some numbers of rows and texts."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:  # for the type checker: all are in __dict__
        raise AttributeError(name)


def _size(dtype: int) -> int:
    if dtype not in _SIZES:
        msg = f"there is no dtype {dtype}"
        raise ValueError(msg)
    return int(_SIZES[dtype])


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of


def _positive(*counts: int) -> None:
    if min(counts, default=0) < 0:
        msg = f"one of {counts} is negative"
        raise ValueError(msg)


def _span(sizes: Sequence[int], strides: Sequence[int], last: int = 1) -> int:
    """Return the elements from the first to the last one of a tensor with `last` adjacent ones at its end."""
    _positive(*sizes, *strides, last)
    if not math.prod(sizes) * last:
        return 0
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + last


def _map(f: Fields, count: int) -> list[Use]:
    if not 1 <= f.dims <= CONSTANTS.most_dims:
        msg = f"{f.dims} dimensions"
        raise ValueError(msg)
    dims = CONSTANTS.most_dims
    strides = [f.strides[i * dims : i * dims + f.dims] for i in range(count)]
    sizes = f.sizes[: f.dims]
    _each_once(sizes, strides[0])
    spans = [_span(sizes, each) * _size(f.dtypes[i]) for i, each in enumerate(strides)]
    return [Use(span, i == 0, _size(f.dtypes[i])) for i, span in enumerate(spans)]


def _each_once(sizes: Sequence[int], strides: Sequence[int]) -> None:
    """Raise ValueError where several elements of a result share a place: there may be any number of them."""
    covered = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < covered:
                msg = "elements of a result share a place"
                raise ValueError(msg)
            covered = (size - 1) * stride + covered


def _mean(f: Fields, _: int) -> list[Use]:
    return [Use(f.rows * _size(f.to), True), Use(_span((f.rows,), (f.stride,), f.width) * _size(f.of))]


def _norm(f: Fields, _: int) -> list[Use]:
    _positive(f.rows, f.width)
    factor = Use(4 * f.width, optional=True)
    count = f.rows * f.width
    return [Use(count * _size(f.to), True), Use(count * _size(f.of)), factor, factor]


def _text_sums(f: Fields, _: int) -> list[Use]:
    x = 4 * _span((f.rows,), (f.stride,), f.width if f.step else 1)
    return [Use(4 * f.texts * f.width, True), Use(x), Use(4 * (f.texts + 1), decides=True)]


def _place(f: Fields, _: int) -> list[Use]:
    placed, plain = (f.y_stride, f.x_stride) if f.scatters else (f.x_stride, f.y_stride)
    _each_once((f.rows,), (plain // max(f.bytes, 1),))
    in_places = _span((f.rows, f.places), (placed, f.place_stride), f.bytes)
    in_rows = _span((f.rows,), (plain,), f.bytes)
    y, x = (in_places, in_rows) if f.scatters else (in_rows, in_places)
    indices = Use(8 * (min(f.rows, 1) if f.one_index else f.rows), align=8, decides=True)
    return [Use(y, True, 1), Use(x, align=1), indices]


def _codes(f: Fields, _: int) -> list[Use]:
    _positive(f.images, f.channels, f.pixels)
    count = f.images * f.channels * f.pixels
    return [Use(count, True, 1), Use(4 * count)]


def _attention(f: Fields, count: int) -> list[Use]:
    heads, of_key = (f.batch, f.heads), (f.batch, _groups(f))
    _each_once((*heads, f.rows), f.y_strides)
    sizes = [_size(n) for n in (f.y_dtype, f.q_dtype, f.k_dtype, f.v_dtype, f.mask_dtype)]
    spans = [
        _span((*heads, f.rows), f.y_strides, f.value_width),
        _span((*heads, f.rows), f.q_strides, f.width),
        _span((*of_key, f.keys), f.k_strides, f.width),
        _span((*of_key, f.keys), f.v_strides, f.value_width),
        _span((*heads, f.rows, f.keys), f.mask_strides),
    ]
    bytes_ = [span * size for span, size in zip(spans, sizes, strict=True)]
    return [Use(each, i == 0) for i, each in enumerate(bytes_[:count])]


def _groups(f: Fields) -> int:
    if f.group < 1 or f.heads % f.group:
        msg = f"{f.heads} heads in groups of {f.group}"
        raise ValueError(msg)
    return int(f.heads // f.group)


def _rotary(f: Fields, _: int) -> list[Use]:
    def of(strides: Sequence[int], size: int) -> int:
        return size * _span(f.sizes, strides, 2 * f.half)

    _each_once(f.sizes, f.y_strides)
    reads = [Use(of(strides, 4)) for strides in (f.x_strides, f.cosine_strides, f.sine_strides)]
    return [Use(of(f.y_strides, _size(f.to)), True), *reads]


def _rounded(rows: int, inputs: int, bf16: int) -> int:
    """Return the bytes of rounded rows."""
    _positive(rows, inputs)
    held = _whole(rows, _TILE)
    return held * _whole(2 * inputs, _DEPTH) if bf16 else held * (_whole(inputs, _DEPTH) + 8)


def _round_rows(f: Fields, _: int) -> list[Use]:
    x = Use(4 * _span((f.rows,), (f.stride,), f.inputs))
    ranges = [] if f.per_row else [Use(8 * f.rows, True)]
    return [Use(_rounded(f.rows, f.inputs, 0), True, _LINE), x, *ranges]


def _bf16_rows(f: Fields, _: int) -> list[Use]:
    x = Use(4 * _span((f.rows,), (f.stride,), f.inputs))
    return [Use(_rounded(f.rows, f.inputs, 1), True, _LINE), x]


def _weight(f: Fields, bf16: int) -> list[Use]:
    """Weight, its sums, scale and bias."""
    _positive(f.inputs, f.outputs)
    outputs = _whole(f.outputs, _PAIR)
    factor = Use(4 * outputs)
    weight = Use(outputs * _whole((2 if bf16 else 1) * f.inputs, _DEPTH), align=_LINE)
    of_codes = Use(0) if bf16 else factor
    return [weight, of_codes, of_codes, factor]


def _row_product(f: Fields, _: int) -> list[Use]:
    y = Use(4 * f.rows * f.outputs, True)
    rows = Use(_rounded(f.rows, f.inputs, f.bf16), align=_LINE)
    return [y, rows, *_weight(f, f.bf16), Use(y.bytes)]


def _norm_rows(f: Fields, _: int) -> list[Use]:
    rounded = Use(_rounded(f.rows, f.inputs, f.bf16), True, _LINE)
    normed = Use(4 * f.rows * f.inputs, True, optional=True)
    x, factor = Use(4 * _span((f.rows,), (f.stride,), f.inputs)), Use(4 * f.inputs)
    return [rounded, normed, x, factor, factor]


def _row_chain(f: Fields, _: int) -> list[Use]:
    rounded = Use(_rounded(f.rows, f.outputs, f.bf16), True, _LINE)
    y = Use(4 * f.rows * f.outputs, True)
    rows = Use(_rounded(f.rows, f.inputs, f.bf16), align=_LINE)
    has_norm = f.norm != NORM.number("none")
    factor = Use(4 * f.outputs if has_norm else 0, optional=not has_norm)
    normed, other = y._replace(optional=True), Use(y.bytes, optional=True)
    return [rounded, y, normed, rows, *_weight(f, f.bf16), other, factor, factor]


def _code_product(f: Fields, _: int) -> list[Use]:
    y = Use(f.rows * f.outputs * _size(f.to), True)
    x = Use(_span((f.rows,), (f.stride,), f.inputs), align=1)
    return [y, x, *_weight(f, 0), Use(4 * f.rows * f.outputs)]


def _flash(f: Fields, count: int) -> list[Use]:
    if f.most_blocks:
        msg = "there are no pages in plans"
        raise ValueError(msg)
    size, of_key = _size(f.dtype), _groups(f)
    _each_once((f.rows, f.heads), f.y_strides)
    spans = (
        _span((f.rows, f.heads), f.y_strides, f.wide),
        _span((f.rows, f.heads), f.q_strides, f.width),
        _span((f.keys, of_key), f.k_strides, f.width),
        _span((f.keys, of_key), f.v_strides, f.wide),
    )
    starts = Use(4 * (f.texts + 1), decides=True)
    found = [*(Use(size * span, i == 0) for i, span in enumerate(spans)), starts, starts, _rooms(f)]
    if f.added_places:
        found.append(Use(4 * _span((f.heads, f.added_places), f.added_strides, f.added_places)))
    for columns in (f.query_columns, f.key_columns):
        if columns:
            _positive(columns, f.distances - 1)
            panels = Use(4 * f.heads * _whole(columns, _TILE) * f.width)
            found += [panels, Use(4 * (2 * f.distances - 1), decides=True)]
    return found


def _rooms(f: Fields) -> Use:
    """Memory of all threads."""
    if f.bytes % _LINE:
        msg = f"{f.bytes} bytes for each thread are not whole lines"
        raise ValueError(msg)
    _positive(f.bytes, f.threads)
    return Use(f.bytes * f.threads, True, _LINE)


def _int8_attention(f: Fields, count: int) -> list[Use]:
    _positive(f.before, f.behind)
    rows, found = f.keys if f.texts else f.rows, _of_heads(f, f.texts, (_size(f.to), 1, 1, 1))
    for i in range(min(f.before + f.behind, CONSTANTS.most_followers)):
        last, strides = f.keys if i < f.before else f.wide, f.follower_strides[4 * i : 4 * i + 4]
        found.append(Use(4 * _span((1 if f.texts else f.batch, f.heads, rows, last), strides)))
    return [*found, *_starts(f, f.texts)]


def _dynamic_attention(f: Fields, count: int) -> list[Use]:
    return [*_of_heads(f, f.texts, (4,) * 4), *_mask(f, f.texts), *_starts(f, f.texts)]


def _float_attention(f: Fields, count: int) -> list[Use]:
    return [*_of_heads(f, 0, (4,) * 4, _groups(f)), *_mask(f, 0)]


def _of_heads(f: Fields, texts: int, sizes: Sequence[int], of_key: int | None = None) -> list[Use]:
    """Results, queries, keys and values, and memory for threads.

    Args:
        f: of the call.
        texts: whether texts follow each other: then there are as many keys as rows.
        sizes: bytes of an element of each of the four.
        of_key: heads of keys; None: as many as of queries.
    """
    _positive(f.batch)
    batch, keys = (1, f.rows) if texts else (f.batch, f.keys)
    queries, others = (batch, f.heads, f.rows), (batch, f.heads if of_key is None else of_key, keys)
    _each_once(queries, f.y_strides)
    spans = (
        _span(queries, f.y_strides, f.wide),
        _span(queries, f.q_strides, f.width),
        _span(others, f.k_strides, f.width),
        _span(others, f.v_strides, f.wide),
    )
    uses = [Use(size * span, i == 0, size) for i, (size, span) in enumerate(zip(sizes, spans, strict=True))]
    return [*uses, _rooms(f)]


def _mask(f: Fields, texts: int) -> list[Use]:
    """Nothing, or a mask, which with texts is by places in them."""
    if f.mask == MASK.number("none"):
        return []
    size = 1 if f.mask == MASK.number("bool") else 4
    batch, rows = (1, f.keys) if texts else (f.batch, f.rows)
    return [Use(size * _span((batch, f.heads, rows, f.keys), f.mask_strides), align=size)]


def _starts(f: Fields, texts: int) -> list[Use]:
    """Nothing, or where each text begins."""
    return [Use(4 * (f.batch + 1), decides=True)] if texts else []


def _recurrent(f: Fields, count: int) -> list[Use]:
    cells = CELL.members
    if not 0 <= f.cell < len(cells):
        msg = f"there is no cell {f.cell}"
        raise ValueError(msg)
    _positive(f.steps, f.rows, f.features, f.hidden, f.state)
    gates = {"lstm": 4, "gru": 3}.get(cells[f.cell], 1) * f.hidden
    _each_once((f.steps, f.rows), (f.y_step, f.y_row))
    y = Use(4 * _span((f.steps, f.rows), (f.y_step, f.y_row), f.state), True)
    x = Use(4 * _span((f.steps, f.rows), (f.x_step, f.x_row), f.features))
    h = Use(4 * f.rows * f.state, True)
    c = Use(4 * f.rows * f.hidden, True, optional=cells[f.cell] != "lstm")
    sums = Use(4 * f.steps * f.rows * gates, True)
    if f.float_input:
        nothing = Use(0, optional=True)
        first = [Use(4 * _whole(gates, _TILE) * f.features), nothing, nothing, Use(4 * gates, optional=True)]
    else:
        first = _matrix(gates, f.features)
    last = [use._replace(optional=True) for use in _matrix(f.state, f.hidden)]
    return [y, x, h, c, sums, *first, *_matrix(gates, f.state), *last]


def _matrix(outputs: int, inputs: int) -> list[Use]:
    """Codes, scale, sums and bias."""
    codes = Use(_whole(outputs, _TILE) * _whole(inputs, CONSTANTS.word))
    return [codes, Use(4 * outputs), Use(4 * outputs), Use(4 * outputs, optional=True)]


#: By the name of the function: fields and the number of its tensors → what it does with each of them.
USES: Mapping[str, Callable[[Fields, int], list[Use]]] = {
    "map": _map,
    "mean": _mean,
    "norm": _norm,
    "text_sums": _text_sums,
    "place": _place,
    "codes": _codes,
    "attention": _attention,
    "rotary": _rotary,
    "round_rows": _round_rows,
    "bf16_rows": _bf16_rows,
    "row_product": _row_product,
    "norm_rows": _norm_rows,
    "row_chain": _row_chain,
    "code_product": _code_product,
    "flash": _flash,
    "int8_attention": _int8_attention,
    "dynamic_attention": _dynamic_attention,
    "float_attention": _float_attention,
    "recurrent": _recurrent,
}


def uses(name: str, values: Mapping[str, Any], present: Sequence[bool]) -> list[Use]:
    """Return what a call does with each of its tensors.

    Args:
        name: of the function.
        values: its fields; arrays are flat.
        present: for each tensor whether it has an address.

    Raises:
        ValueError: sizes are negative, or don't fit each other; or a tensor is missing that the function
            needs.
    """
    found = USES[name](Fields(values), len(present))
    row = FUNCTIONS[name]
    if not row.least <= len(present) <= row.most or len(found) < len(present):
        msg = f"{name} does not take {len(present)} tensors"
        raise ValueError(msg)
    if name == "recurrent" and any(present[13:16]) != all(present[13:16]):
        msg = "a projection lacks a part"
        raise ValueError(msg)
    for i, (use, there) in enumerate(zip(found, present, strict=False)):
        if not there and use.bytes and not use.optional:
            msg = f"{name} needs its tensor {i}"
            raise ValueError(msg)
    return found[: len(present)]

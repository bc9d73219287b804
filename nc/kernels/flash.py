"""Attention of texts of different lengths on CPUs, in memory that is linear in the lengths.

The functions have the names and arguments of the flash-attn package (Dao et al. 2022, arXiv 2205.14135), so
that code written for it runs on CPUs. `nc/kernels/c_code/flash.c` computes them, in fp32 and bf16.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from nc.errors import BackendUnavailableError, InputError, UnsupportedError
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, call_packed, function_of
from nc.process.unavailable import Unavailable

#: Dtypes of tensors, and their numbers in C.
DTYPES = {torch.float32: abi.DTYPE.number("f32"), torch.bfloat16: abi.DTYPE.number("bf16")}
#: The widest head.
WIDEST = abi.CONSTANTS.flash_widest

#: Fields of calls without masks by places, pages, and what is added to scores.
PLAIN: Mapping[str, abi.Value] = {
    "causal": False,
    "left": -1,
    "right": -1,
    "softcap": 0.0,
    "block_size": 0,
    "most_blocks": 0,
    "block_strides": (0, 0),
    "added_places": 0,
    "added_strides": (0, 0),
    "distances": 0,
    "query_columns": 0,
    "key_columns": 0,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of the products of queries and keys before the softmax.

    Attributes:
        factor: of the products; None: 1 / sqrt(width of a head).
        causal: whether a query sees no key after its own. The last query is aligned with the last key.
        window: how many keys before and after its own a query sees; -1: all.
        softcap: c of c * tanh(score / c); 0: none.
    """

    factor: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FlashCode:
    """The attention kernel in C.

    Attributes:
        function: the C function.
        isas: dtype → number of the instruction set that the function uses for it.
    """

    function: Function
    isas: Mapping[torch.dtype, int]


@functools.cache
def code() -> FlashCode | Unavailable:
    """Return the function in C, or why there is none here."""
    library = load_on_threads("flash")
    if isinstance(library, Unavailable):
        return library
    library.nc_flash_isa.argtypes, library.nc_flash_isa.restype = (ctypes.c_int64,), ctypes.c_int64
    isas = {dtype: library.nc_flash_isa(number) for dtype, number in DTYPES.items()}
    if min(isas.values()) < 0:
        return Unavailable("the CPU has no AVX2 and FMA, or NC_MAX_ISA forbids them")
    return FlashCode(function_of(library, "flash"), isas)


def why_unavailable() -> str:
    """Why there is no such attention here; "" when there is one."""
    found = code()
    return found.reason if isinstance(found, Unavailable) else ""


def room(width: int, wide: int, *, distances: bool = False) -> int:
    """Return the bytes of memory that each thread needs, whatever the lengths are.

    Args:
        width: of the heads of queries and keys.
        wide: of the heads of values.
        distances: something is added to scores by the distance of a key from its query.
    """
    rows, keys = abi.CONSTANTS.flash_rows, abi.CONSTANTS.flash_keys
    columns = math.ceil(wide / 16) * 16
    floats = keys * (width + columns) + rows * (WIDEST + 16 + keys + 16 + columns + 17)
    floats += (rows + keys) * (rows + keys + 16) if distances else 0
    return math.ceil(4 * floats / 64) * 64


def panels(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors of distances as the function in C reads them.

    Args:
        vectors: fp32 [heads, columns, width].

    Returns:
        fp32 [heads, columns / 16 rounded up, width, 16]; 0 for columns that are not there.
    """
    heads, columns, width = vectors.shape
    filled = torch.nn.functional.pad(vectors, (0, 0, 0, -columns % 16))
    return filled.view(heads, -1, 16, width).mT.contiguous()


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of texts whose rows are consecutive.

    The result of a text has the same bits in any batch and on any number of threads.

    Args:
        q: queries [rows, heads, width], fp32 or bf16; heads may be strided, as in slices of a projection.
        k: keys [rows, heads of keys, width]; the heads of q are a multiple of them.
        v: values [rows, heads of keys, width of values].
        cu_seqlens_q: where texts begin in q, and where the last one ends: int32 [texts + 1].
        cu_seqlens_k: likewise in k and v.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        dropout_p: 0.
        softmax_scale: factor of the scores; 1 / sqrt(width) by default.
        causal: whether a query sees no key after its own; the last query of a text aligns with its last key.
        window_size: how many keys before and after its own a query sees; -1: all.
        softcap: c of c * tanh(score / c); 0: none.
        block_table: for k and v in pages [pages, page size, heads of keys, width]: int32 [texts, pages].

    Returns:
        [rows, heads, width of values], of q's dtype; 0 for a query that sees no key.

    Raises:
        InputError: an argument has another form; says which.
        UnsupportedError: a gradient is asked for.
        BackendUnavailableError: there is no C code here, or the CPU has no AVX2.
    """
    del max_seqlen_q, max_seqlen_k
    _check_dropout(dropout_p)
    scores = Scores(softmax_scale, causal, window_size, softcap)
    _check_starts("cu_seqlens_q", cu_seqlens_q)
    _check_starts("cu_seqlens_k", cu_seqlens_k)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        msg = f"cu_seqlens_k has {len(cu_seqlens_k)} numbers, cu_seqlens_q {len(cu_seqlens_q)}: give as many."
        raise InputError(msg)
    if block_table is None:
        _check_tensors({"q": q, "k": k, "v": v}, 3)
        return _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, None, scores)
    _check_tensors({"q": q}, 3)
    _check_tensors({"k": k, "v": v}, 4)
    _check_ends("cu_seqlens_k", cu_seqlens_k, None)
    return _attention(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, scores)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return the attention of texts that are equally long.

    Args:
        q: queries [texts, rows, heads, width].
        k: keys [texts, keys, heads of keys, width].
        v: values [texts, keys, heads of keys, width of values].
        dropout_p: 0.
        softmax_scale: factor of the scores; 1 / sqrt(width) by default.
        causal: whether a query sees no key after its own; the last query of a text aligns with its last key.
        window_size: how many keys before and after its own a query sees; -1: all.
        softcap: c of c * tanh(score / c); 0: none.

    Returns:
        [texts, rows, heads, width of values].

    Raises:
        InputError, UnsupportedError, BackendUnavailableError: see `flash_attn_varlen_func`.
    """
    _check_dropout(dropout_p)
    return flash_attn_with_kvcache(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return the attention of new queries with the keys and values of a cache.

    Args:
        q: queries [texts, rows, heads, width], fp32 or bf16.
        k_cache: keys [texts, most keys, heads of keys, width], or with a table of pages
            [pages, page size, heads of keys, width].
        v_cache: likewise values.
        k: keys [texts, new keys, heads of keys, width] that are first appended to those of the cache.
        v: likewise values.
        cache_seqlens: how many keys of each text are in the cache: int32 [texts], or one number for all. All
            by default.
        block_table: numbers of each text's pages: int32 [texts, most pages].
        softmax_scale: factor of the scores; 1 / sqrt(width) by default.
        causal: whether a query sees no key after its own; the last query of a text aligns with its last key.
        window_size: how many keys before and after its own a query sees; -1: all.
        softcap: c of c * tanh(score / c); 0: none.

    Returns:
        [texts, rows, heads, width of values].

    Raises:
        InputError, UnsupportedError, BackendUnavailableError: see `flash_attn_varlen_func`.
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {name: x for name, x in (("k", k), ("v", v)) if x is not None}
    _check_tensors(given, 4)
    _check_no_gradient(*given.values())
    texts, rows = q.shape[:2]
    if block_table is None:
        if len(k_cache) != texts:
            msg = f"k_cache has {len(k_cache)} texts, and q {texts}: give as many, or block_table."
            raise InputError(msg)
        block_table = torch.arange(texts, dtype=torch.int32)[:, None]
    _check_table(block_table, texts)
    most = block_table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = most
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((texts,), cache_seqlens, dtype=torch.int32)
    if cache_seqlens.dtype != torch.int32 or cache_seqlens.shape != (texts,):
        msg = f"cache_seqlens is {_form(cache_seqlens)}: give int32 [{texts}], or one number."
        raise InputError(msg)
    if (k is None) != (v is None):
        msg = "Only one of k and v is given: give both, or none."
        raise InputError(msg)
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, cache_seqlens, block_table)
        cache_seqlens = cache_seqlens + k.shape[1]
    starts = torch.arange(0, texts * rows + 1, rows, dtype=torch.int32) if rows else _zeros(texts + 1)
    scores = Scores(softmax_scale, causal, window_size, softcap)
    y = _attention(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, scores)
    return y.view(texts, rows, *y.shape[1:])


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Append new keys and values to those of the cache."""
    size, new = k_cache.shape[1], k.shape[1]
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape != (expected := (len(lengths), new, *cache.shape[2:])):
            msg = f"{name} has the shape {list(x.shape)}: give {list(expected)}, as the cache is."
            raise InputError(msg)
    most = table.shape[1] * size
    if bool((lengths < 0).any()) or bool((lengths.long() + new > most).any()):
        msg = (
            f"cache_seqlens: keys from {int(lengths.min())} to {int(lengths.max()) + new}, where the cache "
            f"has room for {most} of a text."
        )
        raise InputError(msg)
    at = lengths.long()[:, None] + torch.arange(new)
    pages = table.long().gather(1, at // size) if at.numel() else at
    if bool(((pages < 0) | (pages >= len(k_cache))).any()):
        msg = f"block_table names pages that k_cache does not have: it has {len(k_cache)}."
        raise InputError(msg)
    k_cache[pages, at % size] = k.to(k_cache.dtype)
    v_cache[pages, at % size] = v.to(v_cache.dtype)


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """Call the function in C: keys are starts, or lengths where there is a table of pages."""
    found = code()
    if isinstance(found, Unavailable):
        msg = f"This attention is a function in C: {found.reason}."
        raise BackendUnavailableError(msg)
    _check_no_gradient(q, k, v)
    _check_heads(q, k, v)
    left, right = scores.window
    if scores.softcap < 0:
        msg = f"softcap is {scores.softcap}: give 0 for none, or a positive number."
        raise InputError(msg)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (rows, heads, width), wide, threads = q.shape, v.shape[-1], openmp.threads()
    y = q.new_empty(rows, heads, wide)
    if table is not None:
        _check_table(table, len(starts) - 1)
        table = table.contiguous()
        if not table.shape[1] or not k.shape[1]:  # there is room for no key
            return y.zero_()
    fields: Mapping[str, abi.Value] = {
        **PLAIN,
        "texts": len(starts) - 1,
        "heads": heads,
        "group": heads // k.shape[-2],
        "rows": rows,
        "keys": len(k) if table is None else len(k) * k.shape[1],
        "width": width,
        "wide": wide,
        "dtype": DTYPES[q.dtype],
        "causal": scores.causal,
        "left": max(-1, int(left)),
        "right": max(-1, int(right)),
        **{f"{name}_strides": x.stride()[-3:-1] for name, x in (("q", q), ("k", k), ("v", v), ("y", y))},
        "softcap": float(scores.softcap),
        "factor": width**-0.5 if scores.factor is None else float(scores.factor),
        "block_size": 0 if table is None else k.shape[1],
        "most_blocks": 0 if table is None else table.shape[1],
        "block_strides": (0, 0) if table is None else (k.stride(0), v.stride(0)),
        "bytes": room(width, wide),
        "threads": threads,
        "isa": found.isas[q.dtype],
    }
    memory = torch.empty(threads * room(width, wide), dtype=torch.uint8)
    others = [] if table is None else [table]
    try:
        packed = _packed(tuple(fields.items()))
        call_packed(
            found.function, packed, [y, q, k, v, starts.contiguous(), keys.contiguous(), memory, *others]
        )
    except IndexError:
        _check_ends("cu_seqlens_q", starts, rows)
        if table is None:
            _check_ends("cu_seqlens_k", keys, len(k))
        most = fields["most_blocks"]
        msg = (
            f"block_table has up to {most} pages of {k.shape[1]} keys for a text, with numbers from 0 to "
            f"{len(k) - 1}: one of them has another number, or is missing. Lengths are {int(keys.min())} "
            f"to {int(keys.max())}."
        )
        raise InputError(msg) from None
    return y


def _attention(*arguments: Any) -> torch.Tensor:
    """Call `_compute`, which torch.compile leaves as a call, without a look at what calls C."""
    if torch.compiler.is_compiling():  # `disable` imports the compiler
        found: torch.Tensor = torch.compiler.disable(_compute)(*arguments)  # type: ignore[no-untyped-call]
        return found
    return _compute(*arguments)


@functools.lru_cache(maxsize=64)
def _packed(fields: tuple[tuple[str, abi.Value], ...]) -> bytes:
    """Return the first argument of the function in C: consecutive layers give the same one."""
    return abi.FUNCTIONS["flash"].packed(**dict(fields))


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def _form(x: torch.Tensor) -> str:
    """Dtype and sizes, as messages name them."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _check_dropout(dropout_p: float) -> None:
    if dropout_p:
        msg = f"dropout_p is {dropout_p}: this attention is for inference; call model.eval(), or give 0."
        raise InputError(msg)


def _check_tensors(given: Mapping[str, torch.Tensor], dims: int) -> None:
    """Check dtypes and dimensions."""
    first = next(iter(given.values())).dtype
    for name, x in given.items():
        if x.dtype not in DTYPES or x.dtype != first or x.device.type != "cpu":
            msg = f"{name} is {x.dtype} on {x.device}: give all in float32, or all in bfloat16, on the CPU."
            raise InputError(msg)
        if x.dim() != dims:
            msg = (
                f"{name} has the shape {list(x.shape)}: give {dims} dimensions, the last two heads and width."
            )
            raise InputError(msg)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that heads of queries can read those of keys and values."""
    heads, width = q.shape[-2:]
    of_keys = k.shape[-2]
    if k.shape[:-1] != v.shape[:-1]:
        msg = (
            f"v has the shape {list(v.shape)}, and k {list(k.shape)}: they differ in the width of heads only."
        )
        raise InputError(msg)
    if not of_keys or not heads or heads % of_keys:
        msg = f"q has {heads} heads, and k {of_keys}: those of q must be a multiple of those of k."
        raise InputError(msg)
    if k.shape[-1] != width:
        msg = f"k has heads of width {k.shape[-1]}, and q of {width}: give the same."
        raise InputError(msg)
    for name, x in (("q", q), ("v", v)):
        if not 0 < x.shape[-1] <= WIDEST:
            msg = f"{name} has heads of width {x.shape[-1]}: 1 to {WIDEST} are supported."
            raise InputError(msg)


def _check_no_gradient(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        msg = (
            "This attention has no gradient: call the model under torch.no_grad() or torch.inference_mode(), "
            'or train with another attention, such as attn_implementation="sdpa".'
        )
        raise UnsupportedError(msg)


def _check_starts(name: str, starts: torch.Tensor) -> None:
    """Check the form of starts; the C code checks their values."""
    if starts.dtype != torch.int32 or starts.dim() != 1 or not len(starts) or starts.device.type != "cpu":
        msg = f"{name} is {_form(starts)} on {starts.device}: give int32 [texts + 1] on the CPU."
        raise InputError(msg)


def _check_ends(name: str, starts: torch.Tensor, rows: int | None) -> None:
    """Raise InputError for starts that fall, or begin or end elsewhere."""
    steps = starts.diff()
    if int(starts[0]):
        msg = f"{name} begins with {int(starts[0])}: it must begin with 0."
    elif bool((steps < 0).any()):
        msg = f"{name} falls at index {int((steps < 0).nonzero()[0]) + 1}: it must not fall."
    elif rows is not None and int(starts[-1]) != rows:
        msg = f"{name} ends with {int(starts[-1])}: it must end with the number of rows, {rows}."
    else:
        return
    raise InputError(msg)


def _check_table(table: torch.Tensor, texts: int) -> None:
    if table.dtype != torch.int32 or table.dim() != 2 or len(table) != texts or table.device.type != "cpu":
        msg = f"block_table is {_form(table)}: give int32 [{texts}, most pages] on the CPU."
        raise InputError(msg)

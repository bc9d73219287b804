"""Random sizes for each function in C, between pages that can't be touched, against torch in float64.

    python test/c_fuzz.py [--functions map norm …] [--sources rows …] [--cases 30] [--seed 0] [--sanitize]

Each tensor lies in memory of its own, which begins behind a page without any rights or ends in front of one,
so a read or write outside of it ends this process. What no function may write is compared with what it was.
With --record the results go to a file, for isas.py. With --sanitize the C code is compiled with the address and undefined-behaviour sanitizers of gcc
(sanitizers.py), whose message is the last that this process prints.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import itertools
import math
import mmap
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

import sanitizers

if __name__ == "__main__" and "--sanitize" in sys.argv:
    sanitizers.use()  # what follows loads C code

from suites import low_bit_blocks, ragged
from suites.low_bit import exact, form, weight
from suites.low_bit_c import bound, rounded
from suites.recurrent import float64_layers

from nc.backends.native import recurrent
from nc.backends.native.operators import depthwise, dynamic_attention, float_attention, int8_attention
from nc.backends.native.plans import attention, c_functions
from nc.backends.native.plans import row_linears as row_format
from nc.kernels import cpu, flash
from nc.kernels.c_code import abi, build, limit, openmp
from nc.kernels.c_code.calls import Function, call_once
from nc.kernels.c_code.isas import ISAS, NUMBERS
from nc.kernels.low_bit import compiled, compiled_blocks
from nc.numerics import affine, int16_pairs

PAGE = mmap.PAGESIZE
FREE = 0xAB
_libc = ctypes.CDLL(None, use_errno=True)
#: What each call wrote, with the name of its case, in order.
RESULTS: list[tuple[str, list[torch.Tensor]]] = []
DTYPES = c_functions.NUMBERS
FLOATS = (torch.float32, torch.bfloat16)


class Guarded:
    """A copy of a tensor between two pages without rights.

    Where it ends in front of the second, or begins behind the first.
    """

    def __init__(self, tensor: torch.Tensor, at_end: bool) -> None:
        self.tensor = tensor
        count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.bytes = count * tensor.element_size() if tensor.numel() else 0
        self.room = -(-max(self.bytes, 1) // PAGE) * PAGE
        self.memory = mmap.mmap(-1, self.room + 2 * PAGE)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.begin, FREE, len(self.memory))
        self.address = self.begin + PAGE + (self.room - self.bytes if at_end else 0)
        ctypes.memmove(self.address, tensor.data_ptr(), self.bytes)
        self.before = self.content()
        for page in (self.begin, self.begin + PAGE + self.room):
            if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def data_ptr(self) -> int:
        """Where it lies; no address for what has no elements."""
        return self.address if self.bytes else 0

    def content(self) -> bytes:
        """Everything between the pages."""
        return ctypes.string_at(self.begin + PAGE, self.room)

    def finish(self, written: bool) -> None:
        """Check that nothing else was written, and take over what was."""
        after, start = self.content(), self.address - self.begin - PAGE
        stop = start + self.bytes
        assert after[:start] == self.before[:start], "something in front of a tensor was written"
        assert after[stop:] == self.before[stop:], "something behind a tensor was written"
        assert written or after == self.before, "an input was written"
        ctypes.memmove(self.tensor.data_ptr(), self.address, self.bytes)


def call(function: Function, fields, tensors, writes=(0,), *, at_end: bool | None = None) -> None:
    """Call a function in C with copies of tensors, and take over what it writes.

    Memory ends behind each tensor where `at_end` says so, by chance where it says nothing.
    """
    at_end = random.random() < 0.7 if at_end is None else at_end
    copies = [Guarded(tensor, at_end) for tensor in tensors]
    call_once(function, fields, copies)
    for index, copy in enumerate(copies):
        copy.finish(index in writes)
    RESULTS.append((function.name, [t.clone() for i, t in enumerate(tensors) if i in writes]))


def close(got, expected, relative, absolute=0.0):
    """Fail where a result is further from the expected one than a part of the largest number, or than a number."""
    got, expected = got.double(), expected.double()
    limit = relative * float(expected.abs().max() if expected.numel() else 0) + absolute
    worst = float((got - expected).abs().max()) if got.numel() else 0.0
    assert not got.isnan().any()
    assert worst <= limit, f"{worst} > {limit}"


def threads() -> int:
    return random.choice((1, 1, 2, 3))


def spread(values: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them, the dimensions in another order in memory."""
    order = random.sample(range(values.dim()), values.dim())
    steps, strides = random.choice((1, 1, 2)), [0] * values.dim()
    for dim in order:
        strides[dim] = steps
        steps = steps * values.shape[dim] + random.choice((0, 0, 3))
    result = torch.empty(max(steps, 1) + 8, dtype=values.dtype).as_strided(values.shape, strides)
    return result.copy_(values)


def rows_of(shape, dtype, stride_of_rows=None) -> torch.Tensor:
    """Random rows without gaps inside, which may lie apart."""
    gap = random.choice((0, 0, 5))
    return torch.randn(*shape[:-1], shape[-1] + gap).to(dtype)[..., : shape[-1]]


SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 255, 511, 512, 513, 700, 1023, 1030)
UNARY = {
    "copy": lambda a: a,
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "relu": torch.relu,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "gelu_erf": F.gelu,
    "cos": torch.cos,
    "sin": torch.sin,
    "not": lambda a: (a == 0).double(),
}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


def case_map() -> str:
    op = random.choice((*UNARY, *BINARY, "select"))
    shape = [random.choice((1, 2, 3, 5)) for _ in range(random.randrange(4))] + [random.choice(SIZES)]
    count = 1 if op in UNARY else 2 if op in BINARY else 3
    operands = []
    for _ in range(count):
        dtype = random.choice((*FLOATS, torch.bool, torch.int64))
        values = (
            torch.rand(shape) * 3 + 0.5
            if op in ("sqrt", "rsqrt", "reciprocal", "div")
            else torch.randn(shape)
        )
        values = (
            torch.ones(shape)
            if op == "div" and dtype is torch.bool
            else values.ceil()
            if dtype is torch.int64
            else values
        )
        values = (
            values.index_select(len(shape) - 1, torch.zeros(1, dtype=torch.int64))
            if random.random() < 0.2
            else values
        )
        operands.append(spread(values.to(dtype)).expand(shape))
    if op in ("rsqrt", "reciprocal"):
        operands = [torch.ones(shape, dtype=torch.bool) if x.dtype is torch.bool else x for x in operands]
    wide = [x.double() for x in operands]
    expected = (
        UNARY[op](*wide)
        if op in UNARY
        else BINARY[op](*wide)
        if op in BINARY
        else torch.where(wide[0] != 0, wide[1], wide[2])
    )
    dtype = torch.bool if op == "not" else random.choice(FLOATS)
    y = spread(torch.zeros(shape, dtype=dtype))
    given = (y, *operands)
    fields = c_functions.map_fields(op, shape, [DTYPES[x.dtype] for x in given], [x.stride() for x in given])
    call(c_functions.function("map"), fields, given)
    close(y, expected, 8e-3 if dtype is torch.bfloat16 else 3e-6)
    return f"{op} {shape} {dtype} {[x.dtype for x in operands]}"


def case_mean() -> str:
    shape, types = (random.choice((1, 2, 5)), random.choice(SIZES)), random.choices(FLOATS, k=2)
    x, y = rows_of(shape, types[1]), torch.empty(shape[0], dtype=types[0])
    fields = {
        "to": DTYPES[types[0]],
        "of": DTYPES[types[1]],
        "rows": shape[0],
        "width": shape[1],
        "stride": x.stride(0),
    }
    call(c_functions.function("mean"), fields, [y, x])
    close(y, x.double().mean(1), 8e-3 if types[0] is torch.bfloat16 else 3e-6, 1e-6)
    return f"{shape} {types}"


def codes(values, scale, zero_point, dtype):
    low = 0 if dtype is torch.uint8 else -128
    return (torch.round(values / scale) + zero_point).clamp(low, low + 255)


def case_norm() -> str:
    rows, n, layer = random.choice((0, 1, 2, 5, 40)), random.choice(SIZES), random.random() < 0.5
    to, of = random.choice((*FLOATS, torch.uint8, torch.int8)), random.choice(FLOATS)
    x, y = torch.randn(rows, n).to(of), torch.zeros(rows, n).to(to)
    factors = [torch.rand(n) + 0.5 if random.random() < 0.7 else torch.empty(0) for _ in range(2)]
    scale, zero_point = 0.05, random.randrange(-20, 20) if to is torch.int8 else random.randrange(256)
    fields = {
        "to": DTYPES[to],
        "of": DTYPES[of],
        "rows": rows,
        "width": n,
        "centred": layer,
        "epsilon": 1e-5,
        "threads": threads(),
    }
    call(
        c_functions.function("norm"),
        fields | {"inverse": 1 / scale, "zero_point": zero_point},
        [y, x, *factors],
    )
    wide = x.double() - (x.double().mean(1, keepdim=True) if layer else 0)
    wide = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt()
    wide = wide * factors[0].double() if factors[0].numel() else wide
    wide = wide + factors[1].double() if factors[1].numel() else wide
    if to in FLOATS:
        close(y, wide, 8e-3 if to is torch.bfloat16 else 5e-6, 1e-5)
    else:
        close(y, codes(wide, scale, zero_point, to), 0, 1)
    return f"{rows} x {n} {to} {of} layer={layer}"


def case_place() -> str:
    size, rows, places, scatters, one = (
        random.choice((1, 4, 6, 64, 200, 9000)),
        random.randrange(1, 6),
        random.randrange(1, 9),
        *random.choices((0, 1), k=2),
    )
    many = torch.randint(0, 256, (rows, places, size), dtype=torch.uint8)
    plain = torch.randint(0, 256, (rows, size), dtype=torch.uint8)
    indices = torch.randint(0, places, (1 if one else rows,))
    y, x = (many.clone(), plain) if scatters else (plain.clone(), many)
    apart = many.stride(0)
    fields = {
        "bytes": size,
        "rows": rows,
        "y_stride": apart if scatters else size,
        "x_stride": size if scatters else apart,
        "place_stride": size,
        "places": places,
        "scatters": scatters,
        "one_index": one,
        "threads": threads(),
    }
    call(c_functions.function("place"), fields, [y, x, indices])
    expected = (many if scatters else plain).clone()
    for row in range(rows):
        at = indices[0 if one else row]
        if scatters:
            expected[row, at] = plain[row]
        else:
            expected[row] = many[row, at]
    assert torch.equal(y, expected)
    return f"{fields}"


def case_attention() -> str:
    batch, group, shared = random.choice((1, 2)), random.choice((1, 2, 3)), random.choice((1, 2))
    heads, keys = group * shared, random.choice((1, 5, 17, 511, 512, 513, 600))
    rows = random.choice((1, 1, 2, 7))
    width, wide, kind = (
        random.choice((1, 8, 33, 64, 512)),
        random.choice((1, 8, 33, 64, 512)),
        random.randrange(3),
    )
    types = random.choices(FLOATS, k=4)
    q, k, v = (
        rows_of((batch, heads, rows, width), types[0]),
        rows_of((batch, shared, keys, width), types[1]),
        rows_of((batch, shared, keys, wide), types[2]),
    )
    y = torch.empty(batch, heads, rows, wide, dtype=types[3])
    sizes = (batch, heads, rows, keys)
    shape = (*(size if random.random() < 0.5 else 1 for size in sizes[:3]), keys)
    masks = [], [torch.rand(shape) < 0.8], [torch.randn(shape).to(random.choice(FLOATS))]
    mask = [m.expand(sizes) for m in masks[kind]]
    factor = width**-0.5
    fields = {
        "batch": batch,
        "heads": heads,
        "rows": rows,
        "group": group,
        "keys": keys,
        "width": width,
        "value_width": wide,
        "mask": kind,
        **{f"{name}_dtype": DTYPES[dtype] for name, dtype in zip("qkvy", types, strict=True)},
        "mask_dtype": DTYPES[mask[0].dtype] if mask else DTYPES[torch.float32],
        "q_strides": q.stride()[:3],
        "k_strides": k.stride()[:3],
        "v_strides": v.stride()[:3],
        "y_strides": y.stride()[:3],
        "mask_strides": mask[0].stride() if mask else (0, 0, 0, 0),
        "factor": factor,
        "threads": threads(),
    }
    call(c_functions.function("attention"), fields, [y, q, k, v, *mask])
    scores = torch.einsum("bhrw,bhkw->bhrk", q.double(), k.double().repeat_interleave(group, 1)) * factor
    if kind:
        scores = scores.masked_fill(~mask[0], -math.inf) if kind == 1 else scores + mask[0].double()
    expected = torch.einsum(
        "bhrk,bhkv->bhrv", torch.softmax(scores, -1).nan_to_num(0), v.double().repeat_interleave(group, 1)
    )
    close(y, expected, 8e-3 if types[3] is torch.bfloat16 else 2e-5, 1e-5)
    return f"{fields}"


def case_rotary() -> str:
    sizes, half, to = (
        [random.choice((1, 2, 5)) for _ in range(3)],
        random.choice((1, 4, 7, 32, 64, 256)),
        random.choice((torch.float32, torch.uint8, torch.int8)),
    )
    x = rows_of((*sizes, 2 * half), torch.float32)
    cosine, sine = (
        torch.randn([n if random.random() < 0.6 else 1 for n in sizes] + [2 * half]).expand(*sizes, -1)
        for _ in range(2)
    )
    y, scale, zero_point = torch.zeros(*sizes, 2 * half).to(to), 0.1, -3 if to is torch.int8 else 100
    tensors = {"y": y, "x": x, "cosine": cosine, "sine": sine}
    fields = {
        "to": DTYPES[to],
        "half": half,
        "sizes": sizes,
        **{f"{name}_strides": t.stride()[:3] for name, t in tensors.items()},
        "inverse": 1 / scale,
        "zero_point": zero_point,
        "threads": threads(),
    }
    call(c_functions.function("rotary"), fields, tuple(tensors.values()))
    wide = x.double()
    expected = wide * cosine.double() + torch.cat((-wide[..., half:], wide[..., :half]), -1) * sine.double()
    if to is torch.float32:
        close(y, expected, 1e-6, 1e-6)
    else:
        close(y, codes(expected, scale, zero_point, to), 0, 1)
    return f"{sizes} {half} {to}"


def case_codes() -> str:
    images, pixels = random.choice((1, 2, 3)), random.choice((1, 5, 255, 256, 257, 3000))
    channels, to = random.choice((1, 3)), random.choice((torch.uint8, torch.int8))
    scale, zero_point = 0.02, random.randrange(256) - 128 * (to is torch.int8)
    x, y = torch.randn(images, channels, pixels), torch.zeros(images, pixels, channels, dtype=to)
    fields = {
        "to": c_functions.NUMBERS[to],
        "images": images,
        "channels": channels,
        "pixels": pixels,
        "inverse": 1 / scale,
        "zero_point": zero_point,
        "threads": threads(),
    }
    call(c_functions.function("codes"), fields, [y, x])
    close(y, codes(x.double().mT, scale, zero_point, to), 0, 1)
    return f"{images} {channels} {pixels} {to}"


def case_round_images() -> str:
    images, channels, pixels = (
        random.choice(sizes) for sizes in ((0, 1, 3), (1, 3, 17, 64), (1, 5, 255, 256, 257, 1500))
    )
    last, symmetric = random.random() < 0.5, random.random() < 0.5
    x = torch.randn(images, channels, pixels) * 10.0 ** random.randrange(-3, 4)
    x = random.choice((x, x.abs(), -x.abs(), x * 0, (x * 100).round() / 2))
    count = threads()
    fields = {
        "images": images,
        "channels": channels,
        "pixels": pixels,
        "channels_last": last,
        "symmetric": symmetric,
        "threads": count,
    }
    y, found = torch.zeros(images, pixels, channels, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    given = x.mT.contiguous() if last else x
    tensors = [y, found, given, torch.zeros(count, 2)]
    call(c_functions.function("round_images"), fields, tensors, (0, 1, 3))
    if images:
        scale, zero_point = affine.choose_qparams(
            *x.aminmax(), quant_min=0, quant_max=255, symmetric=symmetric
        )
        assert found[:1].view(torch.float32) == scale
        assert found[1] == zero_point
        expected = ((x / scale).round() + zero_point).clamp(0, 255)
        assert torch.equal(y.mT.float(), expected)
    return f"{images} {channels} {pixels} {last} {symmetric}"


def case_spoil() -> str:
    elements, scale = random.choice((0, 1, 15, 16, 1000)), random.choice((0.5, math.nan))
    y = torch.randn(elements)
    expected = y * math.nan if math.isnan(scale) else y.clone()
    call(c_functions.function("spoil"), {"elements": elements}, [y, torch.tensor([scale])])
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    return f"{elements} {scale}"


def case_int8_attention() -> str:
    batch, heads, rows = random.choice((1, 2)), random.choice((1, 3)), random.choice((1, 3, 4, 7, 20))
    keys, width, wide = (
        random.choice((1, 3, 16, 17, 50, 130)),
        random.choice((1, 4, 7, 33, 64, 512)),
        random.choice((1, 4, 15, 33, 64, 100, 512)),
    )
    texts = some_texts()
    if texts is not None:
        batch, rows, keys = 1, int(texts[-1]), int(texts[-1])
    q = torch.randint(0, 256, (batch, heads, rows, width), dtype=torch.uint8)
    k, v = (torch.randint(-128, 128, (batch, heads, keys, n), dtype=torch.int8) for n in (width, wide))
    to_codes, parts, count = random.random() < 0.5, random.choice((1, max(1, min(2, rows)))), threads()
    y = torch.zeros(batch, heads, rows, wide, dtype=torch.uint8 if to_codes else torch.float32)
    zeros, factor, probability, scale = (120, 3, -5, 128), 1e-4 / width**0.5, 1 / 255, 0.05
    value = 0.02 / 255
    before = (
        [torch.randn(batch, 1, 1, keys).expand(batch, heads, rows, keys)] if random.random() < 0.5 else []
    )
    behind = [torch.rand(1, heads, rows, 1).expand(batch, heads, rows, wide)] if random.random() < 0.5 else []
    longest = keys
    if texts is not None:  # what is added is by places in a text
        longest = max(1, int(texts.diff().max())) + random.choice((0, 20))
        before = [torch.randn(1, 1, longest, longest).expand(1, heads, longest, longest)] if before else []
        behind = []
    isa = random.choice(int8_attention.isas())
    bytes_ = int8_attention._room(longest, width, wide, isa)
    room = torch.zeros(count, bytes_, dtype=torch.uint8)
    kinds, most = ["add"] * len(before) + ["mul"] * len(behind), abi.CONSTANTS.most_followers
    fields = {
        "texts": texts is not None,
        "batch": batch if texts is None else len(texts) - 1,
        "heads": heads,
        "rows": rows,
        "keys": longest,
        "width": width,
        "wide": wide,
        **{f"{name}_strides": t.stride()[:3] for name, t in zip("qkvy", (q, k, v, y), strict=True)},
        **{f"{name}_zero_point": zero for name, zero in zip("qkvy", zeros, strict=True)},
        "score": factor,
        "inverse_probability": 1 / probability,
        "value": value,
        "inverse": 1 / scale,
        "to": DTYPES[y.dtype],
        "parts": parts,
        "bytes": bytes_,
        "threads": count,
        "isa": NUMBERS[isa],
        "before": len(before),
        "behind": len(behind),
        "followers": abi.padded([abi.FOLLOWER.number(kind) for kind in kinds], most),
        "follower_strides": abi.padded([other.stride() for other in (*before, *behind)], most, [0] * 4),
    }
    starts = [] if texts is None else [texts]
    call(int8_attention._function(), fields, [y, q, k, v, room, *before, *behind, *starts], writes=(0, 4))
    parts_of = []
    for a, b in [(0, rows)] if texts is None else itertools.pairwise(texts.tolist()):
        of = slice(None) if texts is None else slice(a, b)
        added = [x if texts is None else x[:, :, : b - a, : b - a] for x in before]
        scores = (q[:, :, of].double() - zeros[0]) @ (k[:, :, of].double() - zeros[1]).mT * factor
        probabilities = torch.round(torch.softmax(scores + sum(x.double() for x in added), -1) / probability)
        parts_of.append(probabilities.clamp(0, 255) @ (v[:, :, of].double() - zeros[2]) * value)
    expected = torch.cat(parts_of, 2)
    for other in behind:
        expected = expected * other.double()
    slack = 140 * value * max(2, longest / 8)  # codes of probabilities may round otherwise
    close(
        y,
        codes(expected, scale, zeros[3], torch.uint8) if to_codes else expected,
        1e-5,
        slack / scale + 1 if to_codes else slack,
    )
    return f"{fields}"


def random_mask(batch: int, heads: int, rows: int, keys: int) -> tuple[str, torch.Tensor, Sequence[int]]:
    """Kind of a mask, the mask, and its strides as the functions take them."""
    name, shapes = random.choice(abi.MASK.members), ((batch, 1, 1, keys), (1, heads, rows, 1))
    mask = torch.randn(random.choice((*shapes, (batch, heads, rows, keys))))
    mask = mask > 0 if name == "bool" else mask
    return name, mask, (0,) * 4 if name == "none" else mask.expand(batch, heads, rows, keys).stride()


def some_texts() -> torch.Tensor | None:
    """Where texts begin whose rows follow each other, or None for rows of a batch."""
    if random.random() < 0.6:
        return None
    return starts_of([random.choice((0, 1, 3, 16, 17, 50)) for _ in range(random.choice((1, 2, 5)))])


def case_dynamic_attention() -> str:
    batch, heads, rows = random.choice((1, 2)), random.choice((1, 3)), random.choice((1, 3, 4, 7, 16, 21))
    keys, width = random.choice((1, 3, 16, 17, 50, 130)), random.choice((1, 4, 7, 33, 64, 100))
    wide, texts = random.choice((1, 4, 15, 33, 64, 100)), some_texts()
    if texts is not None:
        batch, rows, keys = 1, int(texts[-1]), int(texts[-1])
    longest = keys if texts is None else max(1, int(texts.diff().max())) + random.choice((0, 20))
    q, k, v = (torch.randn(batch, heads, *n) for n in ((rows, width), (keys, width), (keys, wide)))
    y, count = torch.zeros(batch, heads, rows, wide), threads()
    parts = random.choice((1, max(1, min(2, rows))))
    name, mask, spread = random_mask(batch, heads, *((rows, keys) if texts is None else (longest, longest)))
    bytes_ = dynamic_attention._room(longest, width, wide)
    fields = {
        **attention.fields_of(q, k, v, y),
        **({} if texts is None else {"batch": len(texts) - 1, "keys": longest}),
        "texts": texts is not None,
        **{"mask": abi.MASK.number(name), "mask_strides": spread},
        **{"factor": width**-0.5, "parts": parts, "bytes": bytes_, "threads": count},
    }
    room = torch.zeros(count, bytes_, dtype=torch.uint8)
    others = ([] if name == "none" else [mask]) + ([] if texts is None else [texts])
    call(dynamic_attention._function(), fields, [y, q, k, v, room, *others], writes=(0, 4))
    expected = []
    for a, b in [(0, rows)] if texts is None else itertools.pairwise(texts.tolist()):
        of = slice(None) if texts is None else slice(a, b)
        size = (rows, keys) if texts is None else (longest, longest)
        seen = mask.expand(batch, heads, *size) if name != "none" else mask
        seen = seen if texts is None or name == "none" else seen[:, :, : b - a, : b - a]
        scores = q[:, :, of].double() @ k[:, :, of].double().mT * width**-0.5
        if name == "bool":
            scores = scores.masked_fill(~seen, -torch.inf)
        elif name == "float":
            scores = scores + seen.double()
        expected.append(torch.softmax(scores, -1).nan_to_num() @ v[:, :, of].double())
    close(
        y, torch.cat(expected, 2), 0.05, 0.1
    )  # a few of 255 levels; test_dynamic_attention.py compares codes
    return f"{fields}"


def case_float_attention() -> str:
    batch, of_key, group = random.choice((1, 2)), random.choice((1, 3)), random.choice((1, 2))
    heads, rows, keys = (
        of_key * group,
        random.choice((1, 3, 6, 7, 20)),
        random.choice((1, 3, 16, 17, 50, 130)),
    )
    width, wide = random.choice((1, 4, 7, 33, 64)), random.choice((1, 4, 15, 33, 64, 100))
    q = torch.randn(batch, heads, rows, width)
    k, v = (torch.randn(batch, of_key, keys, n) for n in (width, wide))
    y, parts, count = torch.zeros(batch, heads, rows, wide), random.choice((1, min(2, rows))), threads()
    name, mask, spread = random_mask(batch, heads, rows, keys)
    causal, bf16 = random.random() < 0.3, random.random() < 0.3
    bytes_ = float_attention._room(keys, width, wide)
    fields = {
        **attention.fields_of(q, k, v, y),
        **{"group": group, "mask": abi.MASK.number(name), "causal": causal, "mask_strides": spread},
        "bf16": bf16,
        **{"factor": width**-0.5, "parts": parts, "bytes": bytes_, "threads": count},
    }
    room = torch.zeros(count, bytes_, dtype=torch.uint8)
    others = [] if name == "none" else [mask]
    call(float_attention._function(), fields, [y, q, k, v, room, *others], writes=(0, 4))

    def low(x: torch.Tensor) -> torch.Tensor:
        return x.float().to(torch.bfloat16).double() if bf16 else x.double()

    k, v = (low(t).repeat_interleave(group, 1) for t in (k, v))
    scores = low(low(q) @ k.mT) * width**-0.5 + (mask.double() if name == "float" else 0.0)
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1) & torch.tensor(causal)
    hidden = hidden | ~mask if name == "bool" else hidden
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num()
    expected, slack = low(low(weights) @ v), 2.0**-7 if bf16 else 2e-6  # a number near a tie goes either way
    close(y, expected, slack, slack)
    return f"{fields}"


def case_text_sums() -> str:
    starts = starts_of([random.choice((0, 1, 3, 40)) for _ in range(random.choice((1, 2, 5)))])
    rows, width = int(starts[-1]), random.choice((1, 7, 64, 100))
    x = torch.randn(rows, random.choice((1, width)) + random.choice((0, 3)))
    step = int(x.shape[1] >= width)
    y = torch.zeros(len(starts) - 1, width)
    fields = {
        **{"texts": len(y), "rows": rows, "width": width, "stride": x.stride(0), "step": step},
        "threads": threads(),
    }
    call(c_functions.function("text_sums"), fields, [y, x, starts])
    wide = x[:, :width].double() if step else x[:, :1].double().expand(rows, width)
    expected = [wide[a:b].sum(0) for a, b in itertools.pairwise(starts.tolist())]
    close(y, torch.stack(expected), 1e-5, 1e-5)
    return f"{fields}"


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    """Where texts begin, and where the last one ends."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def flash_isas() -> dict[torch.dtype, list[int]]:
    """Numbers of the instruction sets that the attention of variable lengths can use here, by dtype."""
    used = [NUMBERS[isa] for isa in limit.used(build.load("flash"))]
    return {dtype: [isa for isa in used if isa <= best] for dtype, best in flash.code().isas.items()}


def vectors_of_distances(heads: int, width: int, places: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Vectors of few or all distances, and which belongs to each of them; or none."""
    columns = random.choice((0, 1, 5, 2 * places - 1))
    if not columns:
        return None
    column = (torch.arange(2 * places - 1) - places + 1 + columns // 2).clamp(0, columns - 1).int()
    return torch.randn(heads, columns, width), column.flip(
        0
    ).contiguous() if random.random() < 0.5 else column


def case_flash() -> str:
    code, texts = flash.code(), random.choice((0, 1, 3))
    queries = [random.choice((0, 1, 2, 7, 33, 100)) for _ in range(texts)]
    lengths = [random.choice((0, 1, n, n + 3, 40, 150)) for n in queries]
    of_key, group, size = random.choice((1, 2)), random.choice((1, 2, 5)), random.choice((0, 0, 1, 5, 16))
    lengths = queries if random.random() < 0.3 else lengths
    width, wide = random.choice((1, 4, 7, 33, 64)), random.choice((1, 15, 16, 33, 64, 100))
    dtype, heads, count = random.choice(FLOATS), of_key * group, threads()
    q, y = rows_of((sum(queries), heads, width), dtype), rows_of((sum(queries), heads, wide), dtype)
    most = max([1, *(-(-n // size) for n in lengths)]) if size else 0
    shape = (texts * most + 1, size, of_key) if size else (sum(lengths), of_key)
    k, v = rows_of((*shape, width), dtype), rows_of((*shape, wide), dtype)
    table = torch.randperm(texts * most).view(texts, most).int()
    starts, keys = (
        starts_of(queries),
        torch.tensor(lengths, dtype=torch.int32) if size else starts_of(lengths),
    )
    scores = {
        **{"causal": random.random() < 0.3, "softcap": random.choice((0.0, 0.0, 3.0)), "factor": width**-0.5},
        **{name: random.choice((-1, -1, 0, 5, 60)) for name in ("left", "right")},
    }
    places = max([1, *queries, *lengths]) + random.choice((0, 5))
    added = torch.randn(random.choice((1, heads)), places, places) if random.random() < 0.3 else None
    strides = (0, 0) if added is None else added.expand(heads, places, places).stride()[:2]
    plain = added is None and not size and group == 1 and lengths == queries and dtype is torch.float32
    distances = [None, None]
    if plain and not scores["causal"] and not scores["softcap"] and scores["left"] == scores["right"] == -1:
        distances = [vectors_of_distances(heads, width, places) for _ in range(2)]
    given = [each for each in distances if each is not None]
    fields = {
        **flash.PLAIN,
        **{"distances": places if given else 0},
        **{
            f"{name}_columns": each[0].shape[1]
            for name, each in zip(("query", "key"), distances, strict=True)
            if each
        },
        **{"texts": texts, "heads": heads, "group": group, "rows": len(q), "width": width, "wide": wide},
        **{"keys": len(k) * (size or 1), "dtype": DTYPES[dtype], "block_size": size, "most_blocks": most},
        **{f"{name}_strides": x.stride()[-3:-1] for name, x in (("q", q), ("k", k), ("v", v), ("y", y))},
        **{"block_strides": (k.stride(0), v.stride(0)) if size else (0, 0), **scores},
        **{"added_places": 0 if added is None else places, "added_strides": strides},
        **{"bytes": flash.room(width, wide, distances=bool(given)), "threads": count},
        "isa": random.choice(flash_isas()[dtype]),
    }
    room = torch.zeros(count, fields["bytes"], dtype=torch.uint8)
    others = ([table] if size else []) + ([] if added is None else [added])
    others += [tensor for vectors, column in given for tensor in (flash.panels(vectors), column)]
    call(code.function, fields, [y, q, k, v, starts, keys, room, *others], writes=(0, 6))
    key, value = ragged.gathered(k, v, table, lengths) if size else (k, v)
    ends = starts_of(lengths).tolist()
    more = {"added": added, "distances": distances}
    expected = ragged.attention(q, key, value, starts.tolist(), ends, **scores, **more)
    slack = 2.0**-8 if dtype is torch.bfloat16 else 3e-6
    close(y, expected, slack, slack)
    return f"{queries} {lengths} {fields}"


def product_fields(y, added, outputs, scale, zero_point):
    return {
        "threads": threads(),
        "outputs": outputs,
        "added": abi.ADDED.number(added),
        "to": DTYPES[y.dtype],
        "activation": abi.ACTIVATION.number(random.choice(("identity", "relu"))),
        "alpha": 0.0,
        "beta": 0.0,
        "added_scale": 0.5,
        "added_zero_point": 0,
        "inverse": 1 / scale,
        "zero_point": zero_point + 128 * (y.dtype is torch.int8),
    }


def check_product(is_relu, y, exact_sums, scales, bias, old, scale, zero_point):
    expected = exact_sums * scales.double() + bias.double() + (0.5 * old.double() if old is not None else 0)
    expected = expected.relu() if is_relu else expected
    if y.dtype is torch.float32:
        close(y, expected, 1e-6, 1e-5)
    else:
        close(y, codes(expected, scale, zero_point, y.dtype), 0, 1)


def case_code_product() -> str:
    rows, outputs = random.choice((0, 1, 2, 5, 6, 33, 61, 130)), random.choice((1, 7, 8, 9, 16, 17, 33, 48))
    isa = random.choice(row_format.isas(row_format.CODES))
    inputs = random.choice((64, 128, 320)) if isa == "amx" else 4 * random.choice((1, 2, 9, 40))
    x = torch.randint(0, 256, (rows, inputs + random.choice((0, 3))), dtype=torch.uint8)[:, :inputs]
    w = torch.randint(-63, 64, (outputs, inputs), dtype=torch.int8)
    packed, sums = row_format.pack(row_format.CODES, w)
    zero, is_added, scale, zero_point = random.randrange(256), random.choice((False, False, True)), 0.1, 7
    y = torch.zeros(rows, outputs, dtype=random.choice((torch.uint8, torch.float32, torch.int8)))
    scales, bias = torch.zeros(2, len(sums))
    scales[:outputs], bias[:outputs] = torch.rand(outputs) * 1e-3, torch.randn(outputs)
    other = torch.randn(rows, outputs)
    fields = product_fields(y, "fp32_other" if is_added else "nothing", outputs, scale, zero_point)
    if y.dtype is not torch.float32 and random.random() < 0.5:  # what C makes in registers
        low = -math.inf if fields["activation"] == abi.ACTIVATION.number("identity") else fields["zero_point"]
        bounds = {"activation": abi.ACTIVATION.number("clip"), "alpha": low, "beta": 255.0}
        folded = {"inverse": 1.0, "zero_point": 0, "added_scale": fields["added_scale"] / scale}
        given, fields = (scales / scale, bias / scale + fields["zero_point"]), fields | bounds | folded
    else:
        given = scales, bias
    fields |= {"inputs": inputs, "stride": x.stride(0), "rows": rows, "isa": NUMBERS[isa]}
    more = [other] if is_added else []
    call(row_format.code(row_format.CODES).codes, fields, [y, x, packed, sums * -zero, *given, *more])
    exact_sums, old = (x.double() - zero) @ w.double().T, other if is_added else None
    is_relu = fields["activation"] != abi.ACTIVATION.number("identity") and fields["alpha"] >= 0
    check_product(is_relu, y, exact_sums, scales[:outputs], bias[:outputs], old, scale, zero_point)
    return f"{fields}"


def case_depthwise() -> str:
    images, channels = random.choice((1, 2)), random.choice((16, 17, 31, 32, 50))
    window = [random.choice((1, 2, 3, 5)) for _ in range(2)]
    steps, dilations = [random.choice((1, 2)) for _ in range(2)], [random.choice((1, 2)) for _ in range(2)]
    pads = [random.randrange(0, n) for n in window]
    sizes = [random.choice((1, 3, 9)) + d * (n - 1) for n, d in zip(window, dilations, strict=True)]
    out = [
        (n + 2 * p - d * (w - 1) - 1) // s + 1
        for n, p, d, w, s in zip(sizes, pads, dilations, window, steps, strict=True)
    ]
    x = torch.randint(0, 256, (images, *sizes, channels), dtype=torch.uint8)
    w = torch.randint(-128, 128, (channels, 1, *window), dtype=torch.int8)
    packed, sums = depthwise._by_channels(w)
    zero, written, scale, zero_point = random.randrange(256), random.randrange(3), 0.1, 7
    y = torch.zeros(images, *out, channels, dtype=(torch.uint8, torch.float32, torch.int8)[written])
    scales, bias, pixel = (
        torch.rand(channels) * 1e-3,
        torch.randn(channels),
        torch.full((channels,), zero, dtype=torch.uint8),
    )
    fields = product_fields(y, "nothing", channels, scale, zero_point)
    fields |= {
        "images": images,
        "image": sizes,
        "result": out,
        "window": window,
        "steps": steps,
        "dilations": dilations,
        "pads": pads,
    }
    call(depthwise._function(), fields, [y, x, packed, sums * -zero, scales, bias, pixel])
    wide = F.conv2d(
        x.double().permute(0, 3, 1, 2) - zero, w.double(), None, steps, pads, dilations, channels
    ).permute(0, 2, 3, 1)
    check_product(bool(fields["activation"]), y, wide, scales, bias, None, scale, zero_point)
    return f"{fields}"


def case_low_bit() -> str:
    group = random.choice((32, 64, 96, -1))
    inputs = group * random.randrange(1, 5) if group > 0 else random.choice((1, 20, 83, 128, 700))
    kinds = [
        (name, kind)
        for name in ("int4", "uint4", "int8", "uint8", "int3", "int6")
        for kind in ("symmetric", "zero point", "minimum")
    ]
    name, kind = random.choice(kinds)
    outputs, rows, isa = (
        random.choice((1, 7, 15, 16, 17, 33, 48)),
        random.choice((0, 1, 2, 3, 5, 8, 9, 17, 40)),
        random.choice(compiled.usable()),
    )
    packed = weight(form(name, group, kind), outputs, inputs)
    block = random.choice((0, -1, 32))
    found, offsets, shifts, values, sizes = compiled.pack(packed, compiled.NUMBERS[isa])
    columns = inputs if block else -(-inputs // compiled.STEP) * compiled.STEP
    x = torch.zeros(rows, columns)
    x[:, :inputs] = torch.randn(rows, inputs)
    bias = torch.randn(outputs) if random.random() < 0.5 else torch.empty(0)
    y, nothing = torch.zeros(rows, outputs), torch.empty(0)
    tensors = [y, x, sizes, found, offsets, nothing if shifts is None else shifts, values, bias]
    call(
        compiled.function(), {"rows": rows, "stride": columns, "block": block, "threads": threads()}, tensors
    )
    wide = x[:, :inputs]
    wide = rounded(wide, block) if block else wide.double()
    given = bias if bias.numel() else torch.zeros(outputs)
    assert (
        (y.double() - (wide @ exact(packed).T + given.double())).abs() <= bound(wide, packed, given)
    ).all()
    return f"{name} {group} {kind} {outputs} x {inputs}, {rows} rows, block {block}, {isa}"


def case_low_bit_blocks() -> str:
    name = random.choice((*low_bit_blocks.INTEGERS, *compiled_blocks.FLOATS))
    kind = (
        random.choice(("symmetric", "zero point", "minimum"))
        if name in low_bit_blocks.INTEGERS
        else "symmetric"
    )
    group = random.choice((1, 3, 8, 12, 16, 24, 48, 100, -1))
    inputs = (
        group * random.randrange(1, 1 + max(1, 300 // group))
        if group > 0
        else random.choice((1, 7, 8, 83, 383, 384, 385, 1030))
    )
    outputs = random.choice((1, 7, 15, 16, 17, 33, 48))
    rows, how = (
        random.choice((0, 1, 2, 3, 5, 6, 7, 8, 9, 17, 24, 33, 40, 260)),
        random.choice(("fp32", "bf16", "int8", "int8_block32")),
    )
    isa = random.choice(compiled_blocks.usable())
    packed = weight(form(name, group, kind, random.choice(("fp32", "fp16", "bf16"))), outputs, inputs)
    found, scale, offset, values, sizes = compiled_blocks.pack(packed, NUMBERS[isa])
    x = rows_of((rows, inputs), torch.float32) * random.choice(
        (1, 1, 1e-29)
    )  # AMX can't hold parts of the smallest ones
    x = x.bfloat16().float() if how == "bf16" else x
    bias = torch.randn(outputs) if random.random() < 0.5 else torch.empty(0)
    y, nothing = torch.zeros(rows, outputs), torch.empty(0)
    block = {"fp32": 0, "bf16": compiled.BF16, "int8": -1, "int8_block32": 32}[how]
    tensors = [y, x, sizes, found, scale, nothing if offset is None else offset, values, bias]
    call(
        compiled_blocks.function(),
        {"rows": rows, "stride": x.stride(0), "block": block, "threads": threads()},
        tensors,
    )
    multiplied = rounded(x, block) if block not in (0, compiled.BF16) and rows else None
    given = x.bfloat16() if how == "bf16" else x
    low_bit_blocks.check(packed, given, y, bias if bias.numel() else None, multiplied, isa)
    return f"{name} {group} {kind} {outputs} x {inputs}, {rows} rows, {how}, {isa}"


RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "rnn_relu": nn.RNN}


def laid_out(steps: int, rows: int, elements: int) -> torch.Tensor:
    """[steps, rows, elements], with steps or rows as the first dimension in memory, and perhaps something between rows."""
    first_is_steps, gap = random.random() < 0.5, random.choice((0, 0, 3))
    shape = (steps, rows) if first_is_steps else (rows, steps)
    values = torch.randn(*shape, elements + gap)[..., :elements]
    return values if first_is_steps else values.transpose(0, 1)


def case_recurrent() -> str:
    kind, rows, steps = (
        random.choice(tuple(RECURRENT)),
        random.choice((0, 1, 2, 3, 4, 5, 9)),
        random.choice((1, 2, 5, 9)),
    )
    features, hidden = random.choice((1, 3, 4, 5, 17, 64, 70)), random.choice((1, 2, 7, 8, 9, 16, 17, 40))
    projection = random.choice((0, random.randrange(1, hidden))) if kind == "lstm" and hidden > 1 else 0
    reverse, isas = (
        random.random() < 0.5,
        [name for name in recurrent._code().isas if not cpu.code_lacks(ISAS[name])],
    )
    options = (
        {"proj_size": projection} if projection else {"nonlinearity": "relu"} if kind == "rnn_relu" else {}
    )
    layer, isa = RECURRENT[kind](features, hidden, bias=random.random() < 0.7, **options), random.choice(isas)
    x, y = laid_out(steps, rows, features), laid_out(steps, rows, projection or hidden)
    states = [torch.randn(1, rows, n) for n in (projection or hidden, hidden)[: 2 if kind == "lstm" else 1]]
    first, weights, parts, nothing = [state.clone() for state in states], {}, [], torch.empty(0)
    float_input = random.random() < 0.3
    for name in ("ih", "hh", "hr"):
        parameter = getattr(layer, f"weight_{name}_l0", None)
        if parameter is None:
            parts += [nothing] * 4
            continue
        codes, scale = (
            torch.randint(-127, 128, parameter.shape, dtype=torch.int8),
            torch.rand(len(parameter)) * 0.002 + 1e-4,
        )
        weights[f"weight_{name}_l0"] = codes.double() * scale.double()[:, None]
        bias = getattr(layer, f"bias_{name}_l0").detach() if layer.bias and name != "hr" else nothing
        packed = recurrent.pack(codes, scale)
        if float_input and name == "ih":
            weights["weight_ih_l0"] = parameter.detach().double()
            packed = recurrent.pack_float(parameter), nothing, nothing
        parts += [*packed, bias]
    fields = {
        "cell": abi.CELL.number(kind),
        "isa": NUMBERS[isa],
        "threads": threads(),
        "reverse": reverse,
        "float_input": float_input,
        "steps": steps,
        "rows": rows,
        "features": features,
        "hidden": hidden,
        "state": projection or hidden,
        **{
            f"{name}_{of}": t.stride(i)
            for name, t in (("x", x), ("y", y))
            for i, of in enumerate(("step", "row"))
        },
    }
    gates, cells = torch.zeros(steps * rows, parts[5].shape[0]), states[1] if len(states) > 1 else nothing
    call(recurrent._code().function, fields, [y, x, states[0], cells, gates, *parts], writes=(0, 2, 3, 4))
    ordered = x.flip(0) if reverse else x
    with torch.no_grad():
        output, *last = float64_layers(layer, ordered, first, weights.__getitem__, float_input=float_input)
    for found, expected in zip((y, *states), (output.flip(0) if reverse else output, *last), strict=True):
        close(found, expected, 0.01, 1e-5)  # a value between two codes can go either way
    return (
        f"{kind} {features} x {hidden} ({projection}), {rows} rows, {steps} steps, reverse={reverse}, {isa}"
    )


ROW_ACTIVATIONS = {
    "identity": lambda v: v,
    "relu": torch.relu,
    "leaky_relu": lambda v: F.leaky_relu(v, 0.125),
    "clip": lambda v: v.clamp(0.125, 2.0),
    "swish": lambda v: v * torch.sigmoid(0.125 * v),
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "gelu_erf": F.gelu,
}


def random_rows() -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Rows of fp32, of which some are special, the memory of their codes, and whether these are symmetric."""
    rows, inputs = random.choice((0, 1, 2, 5, 15, 16, 17, 31, 33, 40, 65, 130)), random.choice(SIZES)
    x = rows_of((rows, inputs), torch.float32) * 10.0 ** random.choice((-30, -3, 0, 0, 0, 3, 30))
    for special in (0.0, 1e-40, 7.0, -7.0):
        if rows and random.random() < 0.3:
            x[random.randrange(rows)] = special
    memory = torch.zeros(row_format.CODES.held(rows, inputs), dtype=torch.uint8)
    return x, memory, random.random() < 0.5


def unpacked_rows(memory: torch.Tensor, rows: int, inputs: int) -> tuple[torch.Tensor, ...]:
    """Codes [rows, inputs], scales and zero points [rows, 1] of rounded rows."""
    many, depth = -(-rows // 16) * 16, -(-inputs // 64) * 64
    tiles, scale, zero_point = torch.split(memory, [many * depth, many * 4, many * 4])
    codes = tiles.view(many // 16, depth // 64, 16, 64).transpose(1, 2).reshape(many, depth)
    return (
        codes[:rows, :inputs],
        scale.view(torch.float32)[:rows, None],
        zero_point.view(torch.int32)[:rows, None],
    )


def case_round_rows() -> str:
    x, memory, symmetric = random_rows()
    rows, inputs = x.shape
    isa, per_row = random.choice(row_format.isas(row_format.CODES)), random.random() < 0.7
    fields = {
        "rows": rows,
        "inputs": inputs,
        "stride": max(x.stride(0), inputs),
        "symmetric": symmetric,
        "threads": threads(),
        "per_row": per_row,
        "isa": NUMBERS[isa],
    }
    ranges = [] if per_row else [torch.zeros(rows, 2)]
    call(row_format.code(row_format.CODES).rounds, fields, [memory, x, *ranges], (0, 2))
    codes, scale, zero_point = unpacked_rows(memory, rows, inputs)
    if rows:
        low, high = (x.amin(1, keepdim=True), x.amax(1, keepdim=True)) if per_row else x.aminmax()
        wanted = affine.choose_qparams(low, high, quant_min=0, quant_max=255, symmetric=symmetric)
        assert torch.equal(scale, wanted[0].expand(rows, 1))
        assert torch.equal(zero_point, wanted[1].expand(rows, 1))
        expected = ((x / scale).round() + zero_point).clamp(0, 255)
        assert torch.equal(codes.float(), expected)
    return f"{rows} x {inputs} {symmetric} {per_row} {isa}"


def case_row_product() -> str:
    x, memory, symmetric = random_rows()
    rows, inputs = x.shape
    outputs, count = random.choice(SIZES), threads()
    code, isa = row_format.code(row_format.CODES), random.choice(row_format.isas(row_format.CODES))
    fields = {
        "rows": rows,
        "inputs": inputs,
        "stride": max(x.stride(0), inputs),
        "symmetric": symmetric,
        "threads": count,
        "per_row": True,
        "isa": NUMBERS[isa],
    }
    call_once(code.rounds, fields, [memory, x])
    codes, scale, zero_point = unpacked_rows(memory, rows, inputs)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    if isa == "avx2":
        weight = int16_pairs.limit_pairs(weight.float()).to(torch.int8)
    packed, sums = row_format.pack(row_format.CODES, weight)
    of_weight, bias = torch.rand(len(sums)) * 0.01, torch.randn(len(sums))
    name = random.choice(tuple(ROW_ACTIVATIONS))
    other = [torch.randn(rows, outputs)] if random.random() < 0.5 else []
    y = torch.zeros(rows, outputs)
    fields = {"rows": rows, "inputs": inputs, "outputs": outputs, "threads": count, "isa": NUMBERS[isa], "bf16": False,
              "activation": abi.ACTIVATION.number(name), "alpha": 0.125, "beta": 2.0}  # fmt: skip
    call(code.product, fields, [y, memory, packed, sums, of_weight, bias, *other])
    sums_of_products = (codes.double() - zero_point) @ weight.double().T
    v = sums_of_products * scale.double() * of_weight[:outputs].double() + bias[:outputs].double()
    expected = ROW_ACTIVATIONS[name](v) + (other[0].double() if other else 0.0)
    close(y, expected, 2e-6, 1e-6)
    return f"{rows} x {inputs} x {outputs} {name} {symmetric} {isa}"


def norm_in_float64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, name: str) -> torch.Tensor:
    left = x.double() - x.double().mean(1, keepdim=True) if name == "layer" else x.double()
    return left / (left.square().mean(1, keepdim=True) + 1e-3).sqrt() * weight.double() + bias.double()


def check_rounded(memory: torch.Tensor, x: torch.Tensor, *, symmetric: bool) -> None:
    """Rows in memory are those of x, to half a code of each row."""
    codes, scale, zero_point = unpacked_rows(memory, *x.shape)
    ends = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    wanted, _ = affine.choose_qparams(*ends, quant_min=0, quant_max=255, symmetric=symmetric)
    assert torch.allclose(scale, wanted.float(), rtol=1e-3, atol=1e-6)
    assert (((codes.double() - zero_point) * scale - x).abs() <= 0.51 * scale + 1e-4).all()


def case_norm_rows() -> str:
    rows, inputs, count = random.choice(SIZES), random.choice(SIZES), threads()
    name, symmetric, keeps = random.choice(("layer", "rms")), random.random() < 0.5, random.random() < 0.5
    x, weight, bias = torch.randn(rows, inputs) + 3, torch.randn(inputs), torch.randn(inputs)
    memory = torch.zeros(row_format.CODES.held(rows, inputs), dtype=torch.uint8)
    isa, y = random.choice(row_format.isas(row_format.CODES)), torch.zeros(rows, inputs)
    fields = {"rows": rows, "inputs": inputs, "stride": inputs, "threads": count, "norm": abi.NORM.number(name),
              "epsilon": 1e-3, "symmetric": symmetric, "bf16": False, "isa": NUMBERS[isa]}  # fmt: skip
    given = [memory, y if keeps else torch.empty(0), x, weight, bias]
    call(row_format.code(row_format.CODES).norm, fields, given, (0, 1))
    expected = norm_in_float64(x, weight, bias, name)
    if keeps:
        close(y, expected, 1e-4, 1e-4)
    if rows:
        check_rounded(memory, expected, symmetric=symmetric)
    return f"{rows} x {inputs} {name} {symmetric} {keeps} {isa}"


def case_row_chain() -> str:
    rows, inputs, outputs, count = *(random.choice(SIZES) for _ in range(3)), threads()
    rows = random.choice((rows, 300 * count))  # many rows are rounded piece by piece
    code, isa = row_format.code(row_format.CODES), random.choice(row_format.isas(row_format.CODES))
    name, symmetric, keeps = random.choice(abi.NORM.members), random.random() < 0.5, random.random() < 0.5
    x, given = torch.randn(rows, inputs), torch.zeros(row_format.CODES.held(rows, inputs), dtype=torch.uint8)
    sizes = {"rows": rows, "inputs": inputs, "threads": count, "isa": NUMBERS[isa], "symmetric": symmetric}
    call_once(code.rounds, sizes | {"stride": inputs, "per_row": True}, [given, x])
    codes, scale, zero_point = unpacked_rows(given, rows, inputs)
    weight = int16_pairs.limit_pairs(torch.randint(-127, 128, (outputs, inputs)).float()).to(torch.int8)
    packed, sums = row_format.pack(row_format.CODES, weight)
    of_weight, bias = torch.rand(len(sums)) * 0.01, torch.randn(len(sums))
    other, nothing = random.choice((torch.randn(rows, outputs), None)), torch.empty(0)
    y, normed = torch.zeros(rows, outputs), torch.zeros(rows, outputs)
    memory = torch.zeros(row_format.CODES.held(rows, outputs), dtype=torch.uint8)
    fields = sizes | {"outputs": outputs, "bf16": False, "activation": abi.ACTIVATION.number("relu"),
                      "alpha": 0.0, "beta": 0.0, "norm": abi.NORM.number(name), "epsilon": 1e-3, "keeps": keeps}  # fmt: skip
    factors = [packed, sums, of_weight, bias, nothing if other is None else other]
    of_norm = torch.randn(outputs), torch.randn(outputs)
    results = [memory, y, nothing if name == "none" else normed]
    call(code.chain, fields, [*results, given, *factors, *of_norm], (0, 1, 2))
    v = (codes.double() - zero_point) @ weight.double().T * scale.double() * of_weight[:outputs].double()
    expected = (v + bias[:outputs].double()).clamp(0) + (0.0 if other is None else other.double())
    if keeps:
        close(y, expected, 2e-6, 1e-5)
    if name != "none":
        expected = norm_in_float64(expected, *of_norm, name)
        close(normed, expected, 1e-3, 1e-3)
    if rows:
        check_rounded(memory, normed.double() if name != "none" else expected, symmetric=symmetric)
    return f"{rows} x {inputs} x {outputs} {name} {symmetric} {keeps} {isa}"


def case_bf16_rows() -> str:
    rows, inputs, count = random.choice(SIZES), random.choice(SIZES), threads()
    x = torch.randn(rows, inputs) * 2.0 ** random.randint(-40, 40)
    memory = torch.zeros(row_format.BF16.held(rows, inputs), dtype=torch.bfloat16)
    fields = {"rows": rows, "inputs": inputs, "stride": inputs, "threads": count}
    call(row_format.code(row_format.BF16).rounds, fields, [memory, x])
    blocks = memory.view(-(-rows // 16), -(-inputs // 32), 16, 32).transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(blocks[:rows, :inputs], x.to(torch.bfloat16))
    return f"{rows} x {inputs}"


def case_bf16_product() -> str:
    rows, inputs, outputs, count = *(random.choice(SIZES) for _ in range(3)), threads()
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs).to(torch.bfloat16)
    code, memory = (
        row_format.code(row_format.BF16),
        torch.zeros(row_format.BF16.held(rows, inputs), dtype=torch.bfloat16),
    )
    call_once(code.rounds, {"rows": rows, "inputs": inputs, "stride": inputs, "threads": count}, [memory, x])
    packed, nothing = row_format.pack(row_format.BF16, weight)
    bias = torch.randn(packed.shape[0] * 16)
    name = random.choice(tuple(ROW_ACTIVATIONS))
    other, y = [torch.randn(rows, outputs)] if random.random() < 0.5 else [], torch.zeros(rows, outputs)
    isa = random.choice(row_format.isas(row_format.BF16))
    fields = {
        **{"rows": rows, "inputs": inputs, "outputs": outputs, "threads": count, "isa": NUMBERS[isa]},
        **{"bf16": True, "activation": abi.ACTIVATION.number(name), "alpha": 0.125, "beta": 2.0},
    }
    call(code.product, fields, [y, memory, packed, nothing, nothing, bias, *other])
    sums = x.to(torch.bfloat16).double() @ weight.double().T + bias[:outputs].double()
    expected = ROW_ACTIVATIONS[name](sums) + (other[0].double() if other else 0.0)
    slack = 2.0**-8 * (1 + (x.double().abs() @ weight.double().abs().T).max().item() * 2.0**-12)
    close(y, expected, slack * 2, slack * 3)
    return f"{rows} x {inputs} x {outputs} {name} {isa}"


CASES = {
    name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")
}


def source_of(name: str) -> str:
    """Return the C source of the function of a case."""
    return abi.FUNCTIONS[{"bf16_product": "row_product"}.get(name, name)].source


def possible(names: Sequence[str] = tuple(CASES)) -> dict[str, str]:
    """For each of some functions, why it can't run here; "" when it can. Loads their sources alone."""
    codes, bf16 = (
        functools.partial(row_format.why_unavailable, form) for form in (row_format.CODES, row_format.BF16)
    )
    why = {
        "int8_attention": int8_attention.why_unavailable,
        "float_attention": float_attention.why_unavailable,
        "dynamic_attention": dynamic_attention.why_unavailable,
        "flash": flash.why_unavailable,
        "low_bit": compiled.why_unavailable,
        "low_bit_blocks": compiled_blocks.why_unavailable,
        "recurrent": recurrent.why_unavailable,
        "round_rows": codes,
        "bf16_rows": bf16,
        "bf16_product": bf16,
        "row_product": codes,
        "norm_rows": codes,
        "row_chain": codes,
        "code_product": codes,
        "depthwise": lambda: (
            "" if "avx2" in build.loaded("depthwise").isas else "it was compiled without AVX2"
        ),
    }
    return {name: why.get(name, c_functions.why_unavailable)() for name in names}


def main() -> None:
    """Run cases, and print what they were."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sources", nargs="*", default=build.sources(), help="only functions of these in C")
    parser.add_argument("--cases", type=int, default=30, help="of each function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers of gcc"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quiet", action="store_true", help="print no case that is right")
    options = parser.parse_args()
    if not options.sanitize:  # whose messages say more
        faulthandler.enable()
    for name in options.functions:
        if source_of(name) not in options.sources:
            continue
        if why := possible([name])[name]:
            print(f"{name}: skipped: {why}", flush=True)
            continue
        for case in range(options.cases):
            random.seed(f"{name} {options.seed + case}")
            torch.manual_seed(random.randrange(2**31))
            if not options.quiet:
                print(f"{name} --seed {options.seed + case}", end=": ", flush=True)
            first = len(RESULTS)
            what = CASES[name]()
            RESULTS[first:] = [
                (f"{name} --seed {options.seed + case}, {what}: {of}", y) for of, y in RESULTS[first:]
            ]
            if not options.quiet:
                print(what, flush=True)
        print(f"{name}: {options.cases} cases", flush=True)
    if options.record:
        torch.save(RESULTS, options.record)


if __name__ == "__main__":
    openmp.threads()
    main()

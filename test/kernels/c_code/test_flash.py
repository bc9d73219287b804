"""Attention of texts of different lengths: the function in C against float64, and the functions that call it."""

import ctypes

import pytest
import torch
from suites import ragged

from nc.errors import BackendError, BackendUnavailableError, InputError, UnsupportedError
from nc.kernels import flash
from nc.kernels.c_code import abi, build, limit
from nc.kernels.c_code.calls import EXECUTE, call_once, call_packed, in_memory
from nc.kernels.c_code.isas import NUMBERS
from nc.kernels.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from nc.process.unavailable import Unavailable

_WHY = flash.why_unavailable()
pytestmark = [pytest.mark.isas, pytest.mark.skipif(bool(_WHY), reason=_WHY or "it can run")]
#: How far results may be from float64, by dtype: rounding of the result, and of sums.
SLACK = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7}


@pytest.fixture(params=() if _WHY else limit.used(build.load("flash")))
def isa(request, monkeypatch):
    """Each instruction set that there is code for; for fp32 the next best one, if it is for bf16 alone."""
    found, number = flash.code(), NUMBERS[request.param]
    if number > found.isas[torch.bfloat16]:
        pytest.skip("the CPU does not have it")
    code = flash.FlashCode(found.function, {dtype: min(number, best) for dtype, best in found.isas.items()})
    monkeypatch.setattr(flash, "code", lambda: code)
    return request.param


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_tensors(rows, keys, heads=2, group=1, width=16, wide=16, dtype=torch.float32):
    q = torch.randn(rows, heads, width)
    k, v = torch.randn(keys, heads // group, width), torch.randn(keys, heads // group, wide)
    return tuple(x.to(dtype) for x in (q, k, v))


def compared(q, k, v, queries, keys, *, window=(-1, -1), **scores):
    """Compare the attention of texts of such lengths with float64, and return it."""
    starts = starts_of(queries), starts_of(keys)
    factor = {} if "factor" not in scores else {"softmax_scale": scores["factor"]}
    others = {name: value for name, value in scores.items() if name != "factor"}
    y = flash_attn_varlen_func(q, k, v, *starts, window_size=window, **factor, **others)
    scores = {"factor": q.shape[2] ** -0.5, "left": window[0], "right": window[1], **scores}
    expected = ragged.attention(q, k, v, *(s.tolist() for s in starts), **scores)
    assert y.dtype == q.dtype
    torch.testing.assert_close(y.double(), expected, rtol=SLACK[q.dtype], atol=SLACK[q.dtype])
    return y


# --- against float64


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("width", "wide"), [(1, 1), (7, 5), (16, 33), (64, 64), (80, 80), (250, 256)])
def test_texts_of_any_lengths(isa, dtype, causal, width, wide):
    queries, keys = [0, 1, 5, 97, 200, 0, 3], [4, 1, 5, 130, 200, 0, 0]
    tensors = random_tensors(sum(queries), sum(keys), 4, 2, width, wide, dtype)
    compared(*tensors, queries, keys, causal=causal)


@pytest.mark.parametrize("window", [(0, 0), (3, -1), (-1, 3), (40, 2), (5, 1 << 40), (1 << 40, -7)])
def test_windows(isa, window):
    queries, keys = [1, 150, 20, 260], [9, 150, 300, 260]
    tensors = random_tensors(sum(queries), sum(keys))
    compared(*tensors, queries, keys, window=window)
    compared(*tensors, queries, keys, window=window, causal=True)


def test_the_last_query_is_beside_the_last_key(isa):
    q, k, v = random_tensors(5, 2)
    y = compared(q, k, v, [5], [2], causal=True)
    assert not y[:3].any()  # they see no key
    assert y[3:].all()
    torch.testing.assert_close(y[3], v[0])


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_scores(isa, softcap):
    queries = [1, 40, 130]
    q, k, v = random_tensors(sum(queries), sum(queries))
    compared(40 * q, k, v, queries, queries, softcap=softcap, causal=True)


def test_scores_far_apart(isa):
    """Neither an overflow, nor a weight of what is far below the largest score."""
    queries = [3, 200]
    q, k, v = random_tensors(sum(queries), sum(queries))
    q, k = ((2 * x).round() for x in (q, k))  # scores that fp32 has exactly
    k[:, :, 0] *= torch.arange(len(k))[:, None] // 16  # the largest scores come late
    compared(q, k, v, queries, queries, factor=8.0)


@pytest.mark.parametrize("dtype", SLACK)
def test_what_is_no_number_stays_with_its_queries(isa, dtype):
    queries = [2, 130, 7]
    q, k, v = random_tensors(sum(queries), sum(queries), dtype=dtype)
    q[1, 0, 3] = torch.nan
    k[100, 1, 3] = torch.nan
    y = flash_attn_varlen_func(q, k, v, starts_of(queries), starts_of(queries))
    wrong = torch.zeros(y.shape[:2], dtype=torch.bool)
    wrong[1, 0] = wrong[2:132, 1] = True
    assert (y.isnan().any(2) == wrong).all()
    assert (y.isnan().all(2) == wrong).all()


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(("most", "columns"), [(200, 399), (200, 40), (90, 7)])
def test_scores_by_distance(isa, which, most, columns):
    """Of all distances, of buckets of them, and of few, which the far ones share."""
    queries, heads, width = [1, 90, 0, min(most, 150), 17], 2, 24
    q, k, v = random_tensors(sum(queries), sum(queries), heads, width=width, wide=20)
    starts, distances = starts_of(queries), []
    for turn, is_given in enumerate(which):
        column = ((torch.arange(2 * most - 1) - most + 1) // 3 + columns // 2).clamp(0, columns - 1).int()
        if columns == 2 * most - 1:
            column = torch.arange(columns).int()
        column = column.flip(0).contiguous() if turn else column
        distances.append((torch.randn(heads, columns, width), column) if is_given else None)
    y = by_distance(q, k, v, starts, distances, most)
    expected = ragged.attention(q, k, v, starts.tolist(), starts.tolist(), factor=0.25, distances=distances)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("column", "number"), [(3, 40), (3, -1), (3, 9), (0, 2)], ids=["high", "low", "far", "falls"]
)
def test_columns_of_distances_that_are_none(column, number):
    q, k, v = random_tensors(4, 4)
    columns = torch.arange(7, dtype=torch.int32)
    columns[column] = number
    with pytest.raises(IndexError, match="columns of distances"):
        by_distance(q, k, v, starts_of([4]), [(torch.randn(2, 40, 16), columns), None], 4)


def by_distance(q, k, v, starts, distances, most):
    """Call the function in C with scores by distance."""
    found = flash.code()
    (rows, heads, width), wide = q.shape, v.shape[2]
    y = torch.empty(rows, heads, wide)
    fields = {
        **flash.PLAIN,
        **{"texts": len(starts) - 1, "heads": heads, "group": 1, "rows": rows, "keys": rows},
        **{"width": width, "wide": wide, "dtype": flash.DTYPES[torch.float32], "factor": 0.25},
        **{f"{name}_strides": x.stride()[:2] for name, x in (("q", q), ("k", k), ("v", v), ("y", y))},
        **{"bytes": flash.room(width, wide, distances=True), "threads": 2, "distances": most},
        "isa": found.isas[torch.float32],
    }
    others = []
    for name, given in zip(("query_columns", "key_columns"), distances, strict=True):
        if given is not None:
            fields[name] = given[0].shape[1]
            others += [flash.panels(given[0]), given[1]]
    room = torch.empty(2 * fields["bytes"], dtype=torch.uint8)
    packed = abi.FUNCTIONS["flash"].packed(**fields)
    call_packed(found.function, packed, [y, q, k, v, starts, starts, room, *others])
    return y


def test_slices_of_one_projection_are_read_where_they_are(isa):
    queries, heads, width = [3, 70, 1], 4, 24
    merged = torch.randn(sum(queries), 3 * heads * width)
    q, k, v = (x.unflatten(1, (heads, width)) for x in merged.split(heads * width, 1))
    assert not q.is_contiguous()
    compared(q, k, v, queries, queries)
    compared(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)), queries, queries)
    compared(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), queries, queries)


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("size", [1, 16, 100])
def test_pages_of_a_cache(isa, dtype, group, size):
    lengths, new, wide = [0, 1, 130, 37], 2, 48
    most = -(-(max(lengths) + new) // size)
    q, k, v = (torch.randn(len(lengths), new, heads, wide).to(dtype) for heads in (8, 8 // group, 8 // group))
    table = torch.randperm(len(lengths) * most).view(len(lengths), most).int()
    k_cache, v_cache = torch.randn(2, table.numel(), size, 8 // group, wide).to(dtype)
    k_before, v_before = ragged.gathered(k_cache, v_cache, table, lengths)
    y = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, torch.tensor(lengths, dtype=torch.int32), table, causal=True
    )
    whole = [n + new for n in lengths]
    keys, values = ragged.gathered(k_cache, v_cache, table, whole)
    for now, before, added in ((keys, k_before, k), (values, v_before, v)):
        for part, old, one in zip(now.split(whole), before.split(lengths), added, strict=True):
            assert torch.equal(part, torch.cat([old, one]))
    starts = starts_of([new] * len(lengths)), starts_of(whole)
    expected = ragged.attention(
        q.flatten(0, 1), keys, values, *(s.tolist() for s in starts), factor=wide**-0.5, causal=True
    )
    torch.testing.assert_close(y.flatten(0, 1).double(), expected, rtol=SLACK[dtype], atol=SLACK[dtype])
    again = flash_attn_varlen_func(q.flatten(0, 1), k_cache, v_cache, *starts, causal=True, block_table=table)
    assert torch.equal(again, y.flatten(0, 1))
    apart = flash_attn_varlen_func(q.flatten(0, 1), keys, values, *starts, causal=True)
    assert torch.equal(apart, y.flatten(0, 1))  # where keys are changes no bit


def test_a_cache_without_pages(isa):
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    y = flash_attn_with_kvcache(q, k, v, cache_seqlens=33, causal=True)
    of_texts = [
        ragged.attention(q[i], k[i, :33], v[i, :33], [0, 2], [0, 33], factor=0.25, causal=True)
        for i in range(3)
    ]
    torch.testing.assert_close(y.double(), torch.stack(of_texts), rtol=4e-6, atol=4e-6)
    assert torch.equal(flash_attn_func(q, k[:, :33], v[:, :33], causal=True), y)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_compute(shape):
    q = torch.randn(*shape, 2, 8)
    assert flash_attn_func(q, q, q).shape == q.shape
    keys = torch.randn(shape[0], 0, 2, 8)
    assert not flash_attn_func(torch.randn(shape[0], 3, 2, 8), keys, keys).any()


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
def test_torch_compile_leaves_it_as_a_call():
    queries = [3, 40]
    q, k, v = random_tensors(sum(queries), sum(queries))

    def attend(q):
        return flash_attn_varlen_func(q * 2, k, v, starts_of(queries), starts_of(queries)) + 1

    assert torch.equal(torch.compile(attend, backend="eager")(q), attend(q))


# --- the same bits


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("group", [1, 4])
def test_a_text_has_the_same_bits_in_any_batch_and_on_any_threads(isa, group, dtype):
    queries, keys = [1, 30, 200, 4, 97, 2], [300, 30, 250, 4, 97, 129]
    tensors = random_tensors(sum(queries), sum(keys), 4, group, 40, 40, dtype)
    parts = [[x.split(n) for x, n in zip(tensors, (queries, keys, keys), strict=True)][i] for i in range(3)]
    alone = [
        flash_attn_varlen_func(q, k, v, starts_of([len(q)]), starts_of([len(k)]), causal=True)
        for q, k, v in zip(*parts, strict=True)
    ]
    before = torch.get_num_threads()
    try:
        for count, order in enumerate([range(6), [3, 1, 5, 0, 2, 4], [5, 4, 3, 2, 1, 0]], 1):
            torch.set_num_threads(count)
            q, k, v = (torch.cat([x[i] for i in order]) for x in parts)
            starts = starts_of([queries[i] for i in order]), starts_of([keys[i] for i in order])
            together = flash_attn_varlen_func(q, k, v, *starts, causal=True)
            for y, i in zip(together.split([queries[i] for i in order]), order, strict=True):
                assert torch.equal(y, alone[i])
    finally:
        torch.set_num_threads(before)


def test_threads_share_one_long_text(isa):
    """Each computes a part of it: work is divided by its cost, not by the texts."""
    fields, tensors = recorded(*random_tensors(700, 700, 1), [700], [700])
    room = torch.zeros(3, fields["bytes"], dtype=torch.uint8)
    turns = torch.zeros(abi.TURNS.size // 8, dtype=torch.int64)
    packed = in_memory(flash.code().function.packed(fields | {"threads": 3}))
    call = abi.IN_TURN.packed(
        function=flash.code().function.address, how=ctypes.addressof(packed), turns=turns.data_ptr()
    )
    addresses = (ctypes.c_void_p * 7)(*[t.data_ptr() for t in (*tensors[:6], room)])
    assert EXECUTE(flash.code().function.in_turn)(call, None, 7, addresses) == 0
    assert room.any(1).all()


def test_memory_does_not_grow_with_the_lengths(isa):
    fields, tensors = recorded(*random_tensors(8192, 8192, 1, 1, 64, 64), [8192], [8192])
    assert tensors[6].numel() == fields["threads"] * flash.room(64, 64)
    assert flash.room(64, 64) < 8192 * 8192 * 4 / 500


def recorded(q, k, v, queries, keys):
    """Fields and tensors of the call of the function in C."""
    fields, tensors = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_packed", fields.update)
        patch.setattr(flash, "call_packed", lambda _, __, given: tensors.extend(given))
        flash_attn_varlen_func(q, k, v, starts_of(queries), starts_of(keys))
    return fields, tensors


# --- what is refused


def test_c_checks_what_it_reads_addresses_by():
    fields, tensors = recorded(*random_tensors(5, 7), [2, 3], [3, 4])
    function = flash.code().function
    for index, wrong in ((4, [1, 2, 5]), (4, [0, 6, 5]), (4, [0, 2, 4]), (5, [0, 9, 7]), (5, [0, 3, 8])):
        given = list(tensors)
        given[index] = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(IndexError, match="starts do not rise"):
            call_once(function, fields, given)
    pages = fields | {"keys": 8, "block_size": 2, "most_blocks": 2, "block_strides": (4, 4)}
    lengths, table = (
        torch.tensor([3, 4], dtype=torch.int32),
        torch.tensor([[0, 3], [1, 2]], dtype=torch.int32),
    )
    for such, numbers in (([3, 5], table), ([-1, 4], table), ([3, 4], table + 1), ([3, 4], table - 1)):
        with pytest.raises(IndexError, match="a page is none of the cache"):
            given = [*tensors[:5], torch.tensor(such, dtype=torch.int32), tensors[6], numbers.contiguous()]
            call_once(function, pages, given)
    with pytest.raises(BackendError, match="size"):
        call_once(function, pages | {"keys": 7}, [*tensors[:5], lengths, tensors[6], table])
    with pytest.raises(BackendError, match="count of tensors"):
        call_once(function, fields, [*tensors, table])


def changed(**others):
    q, k, v = random_tensors(5, 5, 4, 2)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts_of([2, 3]), "cu_seqlens_k": starts_of([2, 3])}
    return given | {name: make(given) for name, make in others.items()}


WRONG = {
    "cu_seqlens_q falls at index 2": {"cu_seqlens_q": lambda g: torch.tensor([0, 6, 5], dtype=torch.int32)},
    "cu_seqlens_q begins with 1": {"cu_seqlens_q": lambda g: torch.tensor([1, 2, 5], dtype=torch.int32)},
    "cu_seqlens_q ends with 4": {"cu_seqlens_q": lambda g: torch.tensor([0, 2, 4], dtype=torch.int32)},
    "cu_seqlens_k ends with 6": {"cu_seqlens_k": lambda g: torch.tensor([0, 2, 6], dtype=torch.int32)},
    r"cu_seqlens_k is int64 \[3\]": {"cu_seqlens_k": lambda g: torch.tensor([0, 2, 5])},
    r"cu_seqlens_q is int32 \[1, 3\]": {"cu_seqlens_q": lambda g: g["cu_seqlens_q"][None]},
    "cu_seqlens_k has 2 numbers, cu_seqlens_q 3": {"cu_seqlens_k": lambda g: starts_of([5])},
    "dropout_p is 0.1": {"dropout_p": lambda g: 0.1},
    "softcap is -1": {"softcap": lambda g: -1},
    "q has 3 heads, and k 2": {"q": lambda g: g["q"][:, :3]},
    r"v has the shape \[5, 1, 16\]": {"v": lambda g: g["v"][:, :1]},
    "k has heads of width 15": {"k": lambda g: g["k"][..., :15]},
    "q has heads of width 257": {name: lambda g: torch.randn(5, 2, 257) for name in ("q", "k", "v")},
    "v has heads of width 300": {"v": lambda g: torch.randn(5, 2, 300)},
    "k is torch.float64": {"k": lambda g: g["k"].double()},
    "v is torch.bfloat16": {"v": lambda g: g["v"].bfloat16()},
    "q is torch.float16": {"q": lambda g: g["q"].half()},
    r"q has the shape \[5, 64\]": {"q": lambda g: g["q"].flatten(1)},
    r"block_table is int32 \[1, 5\]": {
        **{name: lambda g: torch.randn(5, 1, 2, 16) for name in ("k", "v")},
        "block_table": lambda g: torch.zeros(1, 5, dtype=torch.int32),
    },
    "with numbers from 0 to 4: one of them has another number": {
        **{name: lambda g: torch.randn(5, 1, 2, 16) for name in ("k", "v")},
        "block_table": lambda g: torch.full((2, 5), 5, dtype=torch.int32),
    },
}


@pytest.mark.parametrize("why", WRONG)
def test_the_argument_that_is_wrong_is_named(why):
    with pytest.raises(InputError, match=why):
        flash_attn_varlen_func(**changed(**WRONG[why]))


def test_arguments_of_a_cache_that_are_wrong_are_named():
    q, k = torch.randn(2, 1, 2, 8), torch.randn(2, 4, 2, 8)
    lengths = torch.tensor([1, 2])
    for why, others in {
        r"cache_seqlens is int64 \[2\]": {"cache_seqlens": lengths},
        "cache_seqlens: keys from 1 to 5": {
            "cache_seqlens": (lengths + 2).int() - torch.tensor([2, 0]).int(),
            "k": q,
            "v": q,
        },
        "Only one of k and v": {"k": q},
        r"v has the shape \[2, 1, 2, 7\]": {"k": q, "v": q[..., :7], "cache_seqlens": 0},
        "Lengths are 5 to 5": {"cache_seqlens": 5},
        "block_table names pages": {
            **{"k": q, "v": q, "cache_seqlens": 0},
            "block_table": torch.tensor([[0], [2]], dtype=torch.int32),
        },
    }.items():
        with pytest.raises(InputError, match=why):
            flash_attn_with_kvcache(q, k, k, **others)
    with pytest.raises(InputError, match="k_cache has 1 texts, and q 2"):
        flash_attn_with_kvcache(q, k[:1], k[:1])


def test_a_gradient_is_refused():
    given = changed()
    given["q"].requires_grad_()
    with pytest.raises(UnsupportedError, match=r"no gradient: call the model under torch.no_grad\(\)"):
        flash_attn_varlen_func(**given)
    with torch.no_grad():
        assert not flash_attn_varlen_func(**given).requires_grad


def test_where_there_is_no_code_the_error_says_why(monkeypatch):
    monkeypatch.setattr(flash, "code", lambda: Unavailable("there is no C compiler"))
    with pytest.raises(BackendUnavailableError, match="there is no C compiler"):
        flash_attn_varlen_func(**changed())

"""Attention of int8 codes as one function in C (`nc/kernels/c_code/attention.c`), on CPUs with AVX2.

Its two products and the softmax between them have kernels of oneDNN too, which write all scores to memory in
fp32 and read them again. They do what the function can't.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.operators.matmul import matmul, product
from nc.backends.native.plans import c_functions
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.attention import parts_of_rows
from nc.backends.native.plans.operands import Later, PlanTensor, check_sizes
from nc.backends.native.plans.readers import strides_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.texts import Texts, split
from nc.backends.native.plans.ways import PlannedOperator, Refused, need, why_refused
from nc.backends.native.qdq_rewrites import quantize
from nc.backends.native.regions import only_user
from nc.graph.catalogue import first_input, op_name, schema_arguments, works_in_place
from nc.kernels import caches, cpu, tuning
from nc.kernels.c_code import abi
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, function_of
from nc.kernels.c_code.isas import ISAS, NUMBERS
from nc.kernels.c_code.limit import used
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.ops import segment_bias
from nc.process.unavailable import Unavailable

#: In profiles.
NAME = "int8_attention"
#: Instruction sets that it has code for, the best one first.
_ISAS = ("avx512_vnni", "avx_vnni", "avx2")
#: Rows of scores at once, the widest head, and how many tensors may follow the two products.
_ROWS, _WIDEST = abi.CONSTANTS.score_rows, abi.CONSTANTS.widest_head
_MOST_FOLLOWERS = abi.CONSTANTS.most_followers
_NO_ATTENTION = "its first side is not what a softmax of a product gives"
_SOFTMAX = ("softmax", "_softmax")


@dataclasses.dataclass(frozen=True, slots=True)
class _Attention:
    """Attention, `behind(softmax(before(q @ k.T * score)) @ v * value)`.

    Its tensors have four dimensions.

    Attributes:
        q: uint8 codes, [batch, heads, rows, width].
        k: int8 codes, [batch, heads, keys, width].
        v: int8 codes, [batch, heads, keys, wide].
        before: "add" or "mul", and a tensor that has the shape of the scores, with strides of 0 where it is
            repeated.
        behind: the same for the result.
        zero_points: of q, k and v.
        score: what sums of products of codes are multiplied by.
        probability: scale of the codes of the probabilities, whose zero point is 0.
        value: as `score`.
        texts: which rows are of the same text; None: rows of a batch are.
    """

    q: PlanTensor
    k: PlanTensor
    v: PlanTensor
    before: tuple[tuple[str, PlanTensor], ...]
    behind: tuple[tuple[str, PlanTensor], ...]
    zero_points: tuple[int, int, int]
    score: float
    probability: float
    value: float
    texts: Texts | None


@functools.cache
def _library() -> ctypes.CDLL | Unavailable:
    """Return the library on torch's threads, or why there is none."""
    return load_on_threads("attention")


@functools.cache
def _function() -> Function | Unavailable:
    """Return the function in C, or why there is none."""
    library = _library()
    return library if isinstance(library, Unavailable) else function_of(library, NAME)


def isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU has and the function may use, the best one first."""
    library = _library()
    names = () if isinstance(library, Unavailable) else used(library)
    return tuple(name for name in _ISAS if name in names and not cpu.code_lacks(ISAS[name]))


def why_unavailable() -> str:
    """Why there is no such function here; "" when there is one."""
    if c_functions.why_unavailable():
        return c_functions.why_unavailable()
    found = _function()
    if isinstance(found, Unavailable):
        return found.reason
    least = _ISAS[-1]
    return "" if isas() else f"there is no {', '.join(cpu.code_lacks(ISAS[least])) or f'code for {least}'}"


def why_not_batches() -> str:
    """Why attention of padded batches is computed in parts here; "" when the function computes it."""
    missing, best = why_unavailable(), next(iter(isas()), "")
    return missing or ("" if best in tuning.INT8_ATTENTION.value else f"oneDNN is faster with {best}")


def is_scores(node: fx.Node) -> bool:
    """Return whether a product gives the scores of an attention."""
    softmax = only_user(node)
    return softmax is not None and op_name(softmax) in _SOFTMAX and is_probabilities(only_user(softmax))


def is_probabilities(node: fx.Node | None) -> bool:
    """Tell whether a quantize node gives the probabilities of an attention that the function may compute."""
    return node is not None and _scores_of(node) is not None and not why_in_parts(node)


def why_in_parts(node: fx.Node) -> str:
    """Why the attention is computed in parts whose probabilities a quantize node gives.

    It is "" where the function may compute it, and for other nodes.
    """
    scores = _scores_of(node)
    return "" if scores is None else why_refused(_check, scores, node)


def _scores_of(node: fx.Node) -> fx.Node | None:
    """Return the product from whose softmax a quantize node makes codes for the left side of another one."""
    softmax = first_input(node) if node.target is quantize else None
    scores = first_input(softmax) if softmax is not None and op_name(softmax) in _SOFTMAX else None
    weigh = any(user.target is product() and schema_arguments(user)["left"] is node for user in node.users)
    return scores if weigh and scores is not None and scores.target is product() else None


def _check(scores: fx.Node, probabilities: fx.Node) -> None:
    """Raise `Refused` for an attention that the function does not compute, as far as the graph tells that."""
    missing = why_unavailable() if _is_of_texts(scores) else why_not_batches()
    need(not missing, missing)
    softmax = only_user(scores)
    weigh = only_user(probabilities)
    need(
        weigh is not None and softmax is not None and only_user(softmax) is probabilities,
        "its scores or probabilities are read elsewhere too",
    )
    between = scores
    while between is not weigh:
        need(not works_in_place(between), "something is changed in place meanwhile")
        between = between.next


def _is_of_texts(scores: fx.Node) -> bool:
    """Return whether scores are of texts whose rows follow each other, which no other kernel computes."""
    return any(
        isinstance(x, fx.Node) and x.target is segment_bias for x in schema_arguments(scores)["others"]
    )


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc_native::qmatmul` of probabilities and values, with all that gives the probabilities."""
    probabilities = schema_arguments(node)["left"]
    need(_scores_of(probabilities) is not None, _NO_ATTENTION)
    try:
        why = why_in_parts(probabilities)
        need(not why, why)
        return _at_once(recorder, node, a)
    except Refused as refused:  # the next way computes it, so that nothing else would say this
        recorder.pass_over(node, f"c:{NAME}", str(refused))
        raise


def _at_once(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """Return the result of an attention; raises `Refused` for what the function can't."""
    chain, called, missing = _chain(a["left"]), _function(), why_unavailable()
    if isinstance(called, Unavailable) or missing:
        raise Refused(missing)
    isa = isas()[0]
    need(a["output_dtype"] in (torch.uint8, torch.float32), f"its result is {a['output_dtype']}")
    found = _read(recorder, chain, a, isa)
    (batch, heads, rows, width), (keys, wide) = found.q.tensor.shape, found.v.tensor.shape[2:]
    sizes = (batch, heads, rows, wide)[4 - node.meta["val"].dim() :]
    if found.texts is not None:
        need(batch == 1, "its rows are of several texts, and it has a batch besides")
        batch, keys = found.texts.count, found.texts.longest
    strides = strides_of(node, sizes)
    result = recorder.new(
        sizes, strides if strides[-1] == 1 else contiguous_strides(sizes), a["output_dtype"]
    )
    threads = recorder.threads
    parts = 1 if found.texts is not None else parts_of_rows(batch * heads, rows, threads)
    size = _room(keys, width, wide, isa)
    room = recorder.new((threads, size), (size, 1), torch.uint8)
    followers = (*found.before, *found.behind)
    fields = {
        "texts": found.texts is not None,
        "batch": batch,
        "heads": heads,
        "rows": rows,
        "keys": keys,
        "width": width,
        "wide": wide,
        "q_strides": found.q.tensor.stride()[:3],
        "k_strides": found.k.tensor.stride()[:3],
        "v_strides": found.v.tensor.stride()[:3],
        "y_strides": _of_4_dims(result).tensor.stride()[:3],
        "q_zero_point": found.zero_points[0],
        "k_zero_point": found.zero_points[1],
        "v_zero_point": found.zero_points[2],
        "y_zero_point": a["output_zero_point"],
        "score": found.score,
        "inverse_probability": 1 / found.probability,
        "value": found.value,
        "inverse": 1 / a["output_scale"],
        "to": c_functions.NUMBERS[a["output_dtype"]],
        "parts": parts,
        "bytes": room.tensor.shape[1],
        "threads": threads,
        "isa": NUMBERS[isa],
        "before": len(found.before),
        "behind": len(found.behind),
        "followers": abi.padded([abi.FOLLOWER.number(how) for how, _ in followers], _MOST_FOLLOWERS),
        "follower_strides": abi.padded([x.tensor.stride() for _, x in followers], _MOST_FOLLOWERS, [0] * 4),
    }
    tensors = [result, found.q, found.k, found.v, room, *(other for _, other in followers)]
    tensors += [] if found.texts is None else [found.texts.starts]
    recorder.call_function(called, fields, tensors, node, factors=3, also=[chain[2].node])
    return result


def _chain(left: Any) -> tuple[Later, Later, Later]:
    """Return the deferred probabilities, softmax and scores that a product of an attention reads.

    Args:
        left: the left side of the product.

    Raises:
        Refused: one of the three is not deferred, so the function can't compute this attention.
    """
    softmax = left.named["0"] if isinstance(left, Later) and left.node.target is quantize else None
    scores = softmax.named.get("self") if isinstance(softmax, Later) else None
    if not isinstance(left, Later) or not isinstance(softmax, Later) or not isinstance(scores, Later):
        raise Refused(_NO_ATTENTION)
    return left, softmax, scores


def _read(
    recorder: Recorder, chain: tuple[Later, Later, Later], a: Mapping[str, Any], isa: str
) -> _Attention:
    """Return what is to be computed; raises `Refused` for what the function can't."""
    probabilities, softmax, scores = chain
    first, dims = scores.named, softmax.node.meta["val"].dim()
    probability, zero_point = probabilities.named["1"], probabilities.named["2"]
    need(softmax.named["dim"] in (-1, dims - 1), "its softmax is not over keys")
    need(softmax.named.get("dtype") in (None, torch.float32), "its softmax is not fp32")
    need(not zero_point, "its probabilities have a zero point")
    need(2 < dims <= 4, f"it has {dims} dimensions")
    need(first["output_dtype"] is torch.float32, "its scores are quantized")
    q, k, v = (recorder.read(value) for value in (first["left"], first["right"], a["right"]))
    texts, added = split(recorder, first["how"], first["others"])
    before, behind = [x for _, x in added], [recorder.read(value) for value in a["others"]]
    dtypes = q.tensor.dtype, k.tensor.dtype, v.tensor.dtype
    need(dtypes == (torch.uint8, torch.int8, torch.int8), "its sides are not uint8, int8 and int8 codes")
    q, k, v = (_of_4_dims(x) for x in (q, k, v))
    (rows, width), (keys, wide) = q.tensor.shape[2:], v.tensor.shape[2:]
    check_sizes(
        k.tensor.shape[2:] == (width, keys), scores.node, q.tensor.shape, k.tensor.shape, v.tensor.shape
    )
    batch, heads = (n if m == 1 else m for m, n in zip(q.tensor.shape[:2], k.tensor.shape[:2], strict=True))
    need(batch * heads * rows, "it has no row")
    need(0 < width <= _WIDEST and 0 < wide <= _WIDEST, f"a head is wider than {_WIDEST}")
    # keys and values of a head should stay in the second cache
    most = caches.second() // 2 // ((width + wide) * _bytes_of_code(isa))
    longest = keys if texts is None else texts.longest
    need(keys and longest <= most, f"it has no key, or more than {most}")
    need(len(before) + len(behind) <= _MOST_FOLLOWERS, f"more than {_MOST_FOLLOWERS} tensors follow products")
    q, k, v = (
        _repeated(q, (batch, heads, rows, width)),
        _repeated(PlanTensor(k.tensor.mT, k.root), (batch, heads, keys, width)),
        _repeated(v, (batch, heads, keys, wide)),
    )
    scores_of = (batch, heads, rows, keys) if texts is None else (1, heads, texts.longest, texts.longest)
    need(texts is None or not behind, "something follows its result that is not known to be of rows")
    follow_scores = _followers([how for how, _ in added], before, scores_of)
    follow_result = _followers(a["how"], behind, (batch, heads, rows, wide))
    zero_points = first["left_zero_point"], first["right_zero_point"], a["right_zero_point"]
    score = first["left_scale"] * first["right_scale"] * first["factor"]
    return _Attention(
        q,
        k,
        v,
        follow_scores,
        follow_result,
        zero_points,
        score,
        probability,
        probability * a["right_scale"] * a["factor"],
        texts,
    )


def _followers(
    how: Sequence[str], others: Sequence[PlanTensor], sizes: tuple[int, ...]
) -> tuple[tuple[str, PlanTensor], ...]:
    """Return what follows a product, repeated to its sizes."""
    for other in others:
        need(other.tensor.dtype is torch.float32, "what follows a product is not fp32")
        need(not other.tensor.is_neg(), "a view negates what follows a product, which memory does not show")
    return tuple(
        (name, _repeated(_of_4_dims(other), sizes, follows=True))
        for name, other in zip(how, others, strict=True)
    )


def _repeated(x: PlanTensor, sizes: tuple[int, ...], *, follows: bool = False) -> PlanTensor:
    """Return a tensor with these sizes, whose last dimension has no gaps.

    What follows a product may be repeated there too.
    """
    need(
        all(a in (1, b) for a, b in zip(x.tensor.shape, sizes, strict=True)),
        "a tensor is larger than what reads it",
    )
    whole = x.tensor.expand(sizes)
    # a dimension of 1 has any stride
    need(
        whole.stride(3) == 1 or sizes[3] == 1 or (follows and whole.stride(3) == 0),
        "rows of a tensor have gaps",
    )
    return PlanTensor(whole, x.root)


def _bytes_of_code(isa: str) -> int:
    """Bytes of a code of keys, values and probabilities: AVX2 sums products of 16 bits exactly."""
    return 2 if isa == "avx2" else 1


def _room(keys: int, width: int, wide: int, isa: str) -> int:
    """Bytes of memory for a thread.

    They hold keys, values, what zero points take off, and of some rows scores, codes and sums.
    """
    padded, columns = math.ceil(keys / 16) * 16, math.ceil(wide / 16) * 16
    codes = (math.ceil(width / 4) * 4 + columns + _ROWS) * _bytes_of_code(isa)
    return aligned(padded * (codes + 4 + _ROWS * 4) + _ROWS * columns * 4)


def _of_4_dims(x: PlanTensor) -> PlanTensor:
    return PlanTensor(x.tensor[(None,) * (4 - x.tensor.dim())], x.root)


OPERATORS = (
    PlannedOperator((product(),), {"C": attention, "oneDNN": matmul}, waits=is_scores, only_here=True),
)

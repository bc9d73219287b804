"""Attention in fp32 as one function in C (`nc/kernels/c_code/float_attention.c`), on CPUs with AVX-512.

It reads queries, keys and values where a linear wrote them, and writes its result as the next one reads it.
torch's kernel does what the function can't.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans import c_functions
from nc.backends.native.plans.arena import aligned
from nc.backends.native.plans.attention import Sides, call_attention, sides_of
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.products import named_codes
from nc.backends.native.plans.readers import strides_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.texts import texts_of
from nc.backends.native.plans.ways import PlannedOperator, Refused, need
from nc.graph.catalogue import schema_arguments
from nc.kernels import cpu, flash
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import Function
from nc.kernels.c_code.isas import ISAS
from nc.kernels.onednn.descriptions import contiguous_strides
from nc.ops import segment_attention
from nc.process.unavailable import Unavailable

_aten = torch.ops.aten
_sdpa = _aten.scaled_dot_product_attention.default
_ISA = "avx512"


@functools.cache
def _function() -> Function | Unavailable:
    """Return the function in C, or why there is none."""
    return c_functions.with_isa("float_attention", "float_attention", _ISA)


def why_unavailable() -> str:
    """Why there is no such function here; "" when there is one."""
    if missing := cpu.code_lacks(ISAS[_ISA]):
        return f"the CPU has no {', '.join(missing)}"
    found = _function()
    return found.reason if isinstance(found, Unavailable) else ""


def of_texts(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` of texts whose rows follow each other (`flash.c`)."""
    sides = _checked_sides(recorder, node, a)
    texts = sides.texts
    assert texts is not None, "callers ask before"
    heads = sides.query.tensor.shape[1]
    table = texts.table
    added = None if table is None else table.tensor.expand(1, heads, *table.tensor.shape[2:])
    fields = {
        "factor": a["scale"] if a["scale"] is not None else sides.query.tensor.shape[3] ** -0.5,
        "added_places": 0 if added is None else added.shape[3],
        "added_strides": (0, 0) if added is None else (added.stride(1), added.stride(2)),
    }
    sizes = (*sides.query.tensor.shape[:3], sides.value.tensor.shape[3])
    strides = strides_of(node, sizes)
    strides = strides if strides[-1] == 1 else contiguous_strides(sizes)
    others = [] if table is None else [table]
    return _call_flash(recorder, node, sides, texts.starts, fields, others, strides)


def by_distance(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`nc::segment_attention` in C (`flash.c`)."""
    given = [recorder.read(a[name]) for name in ("query", "key", "value")]
    dims = given[0].tensor.dim()
    need(dims in (3, 4), "its tensors have other than three or four dimensions")
    as_four = [PlanTensor(x.tensor.view((1,) * (4 - dims) + x.tensor.shape), x.root) for x in given]
    sides = Sides(as_four[0], as_four[1], as_four[2], None)
    sides.check(node)
    heads = sides.query.tensor.shape[1]
    need(sides.key.tensor.shape[1] == heads, "heads share keys")
    fields: dict[str, abi.Value] = {"factor": a["scale"]}
    others: list[PlanTensor | torch.Tensor] = []
    for vectors, column in (("of_queries", "query_columns"), ("of_keys", "key_columns")):
        tensor = recorder.optional_constant(a[vectors])
        if tensor is None:
            continue
        need(tensor.shape[0] in (1, heads), "vectors of distances are of other heads")
        of_heads = tensor.expand(heads, -1, -1)
        weight = named_codes(schema_arguments(node)[vectors], tensor)
        (panels,) = recorder.weights.formed(weight, "distances", functools.partial(_panels, of_heads))
        columns = recorder.constant(a[column])
        fields |= {column: tensor.shape[1], "distances": columns.shape[0] // 2 + 1}
        others += [panels, columns]
    result = _call_flash(recorder, node, sides, recorder.read(a["starts"]), fields, others)
    return result if dims == 4 else PlanTensor(result.tensor[0], result.root)


def _panels(vectors: torch.Tensor) -> tuple[torch.Tensor]:
    return (flash.panels(vectors),)


def _call_flash(
    recorder: Recorder,
    node: fx.Node,
    sides: Sides,
    starts: PlanTensor,
    given: Mapping[str, abi.Value],
    others: Sequence[PlanTensor | torch.Tensor],
    strides: Sequence[int] = (),
) -> PlanTensor:
    """Append a call of `flash.c` for texts whose rows follow each other.

    Args:
        recorder: of the plan.
        node: of the graph.
        sides: what it reads, of four dimensions.
        starts: int32, [texts + 1].
        given: fields that not every such call has.
        others: tensors that it reads besides.
        strides: of the result; heads of a row are next to each other by default.
    """
    code = flash.code()
    if isinstance(code, Unavailable):
        raise Refused(code.reason)
    query, key, value = (side.tensor for side in sides.tensors)
    batch, heads, rows, width = query.shape
    wide = value.shape[3]
    need(batch == 1, "its rows are of several texts, and it has a batch besides")
    need(max(width, wide) <= flash.WIDEST, f"its heads have more than {flash.WIDEST} elements")
    sizes = (*query.shape[:3], wide)
    result = recorder.new(sizes, strides or _rows_first(heads, rows, wide), torch.float32)
    size = flash.room(width, wide, distances="distances" in given)
    room = recorder.new((recorder.threads, size), (size, 1), torch.uint8)
    named = {"q": query, "k": key, "v": value, "y": result.tensor}
    fields: dict[str, abi.Value] = {
        **flash.PLAIN,
        "texts": starts.tensor.shape[0] - 1,
        "heads": heads,
        "group": heads // key.shape[1],
        "rows": rows,
        "keys": key.shape[2],
        "width": width,
        "wide": wide,
        "dtype": flash.DTYPES[torch.float32],
        **{f"{name}_strides": (tensor.stride(2), tensor.stride(1)) for name, tensor in named.items()},
        "bytes": size,
        "threads": recorder.threads,
        "isa": code.isas[torch.float32],
        **given,
    }
    tensors = [result, *sides.tensors, starts, starts, room, *others]
    recorder.call_function(code.function, fields, tensors, node, factors=3)
    return result


def _rows_first(heads: int, rows: int, wide: int) -> tuple[int, ...]:
    """Return strides of [1, heads, rows, wide] whose heads of a row are next to each other."""
    return heads * rows * wide, wide, heads * wide, 1


def attention(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> PlanTensor:
    """`aten::scaled_dot_product_attention` in C, and `nc_native::bf16_attention`."""
    if texts_of(recorder, a["attn_mask"]) is not None:
        try:
            return of_texts(recorder, node, a)
        except Refused as refused:  # nothing else computes it, and says why
            recorder.pass_over(node, "c:flash", str(refused))
            raise
    function, missing = _function(), why_unavailable()
    if isinstance(function, Unavailable) or missing:
        raise Refused(missing)
    sides = _checked_sides(recorder, node, a)
    _, heads, __, width = sides.query.tensor.shape
    of_key, keys = sides.key.tensor.shape[1:3]
    fields = {
        "group": heads // of_key,
        "causal": a["is_causal"],
        "bf16": node.target is not _sdpa,
        "factor": a["scale"] if a["scale"] is not None else width**-0.5,
    }
    memory = _room(keys, width, sides.value.tensor.shape[3])
    return call_attention(recorder, node, function, sides, fields, memory)


def _checked_sides(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Sides:
    """Return what an attention reads; raises `Refused` for what no function computes."""
    need(not a["dropout_p"], "it drops values")
    sides = sides_of(recorder, node, a)
    heads, of_key = sides.query.tensor.shape[1], sides.key.tensor.shape[1]
    need(not heads % of_key, "heads can't share keys evenly")
    need(of_key == heads or a["enable_gqa"], "heads share keys without `enable_gqa`")
    return sides


def _room(keys: int, width: int, wide: int) -> int:
    """Bytes of memory for a thread: keys, values, and some rows of scores and queries."""
    padded, depth, columns = (math.ceil(size / 16) * 16 for size in (keys, width, wide))
    rows = abi.CONSTANTS.float_rows
    return aligned((padded * (width + columns + rows) + depth * rows) * 4)


OPERATORS = (
    PlannedOperator((_sdpa,), {"C": attention}),
    PlannedOperator((segment_attention,), {"C": by_distance}),
)

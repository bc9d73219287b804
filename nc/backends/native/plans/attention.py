"""What attentions with sides in fp32 share, which plans compute by one function in C each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.operands import PlanTensor, check_sizes
from nc.backends.native.plans.readers import strides_of
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.texts import Texts, texts_of
from nc.backends.native.plans.ways import need
from nc.backends.native.torch_library import define
from nc.kernels import caches, tuning
from nc.kernels.c_code import abi
from nc.kernels.c_code.calls import Function
from nc.kernels.onednn.descriptions import contiguous_strides

_MASKS = {torch.bool: "bool", torch.float32: "float"}


def define_attention(name: str, computed: Callable[..., torch.Tensor]) -> torch._ops.OpOverload:
    """Return a new operator with the arguments of `aten::scaled_dot_product_attention`, in fp32.

    Args:
        name: of the operator.
        computed: computes it by torch's operators, for what the function in C does not take.
    """
    options = "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False"
    sides = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None"
    return define(
        f"{name}({sides}, {options}) -> Tensor",
        computed,
        lambda query, _, value, *__, **___: query.new_empty((*query.shape[:-1], value.shape[-1])),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Sides:
    """What an attention reads.

    Attributes:
        query: fp32, [batch, heads, rows, width].
        key: fp32, [batch, heads or fewer, keys, width].
        value: fp32, [batch, heads of key, keys, wide].
        mask: bool or fp32, which broadcasts to [batch, heads, rows, keys]; or None.
        texts: which rows are of the same text; None: those of a batch are.
    """

    query: PlanTensor
    key: PlanTensor
    value: PlanTensor
    mask: PlanTensor | None
    texts: Texts | None = None

    @property
    def tensors(self) -> list[PlanTensor]:
        """Query, key and value."""
        return [self.query, self.key, self.value]

    def check(self, node: fx.Node) -> None:
        """Raise `Refused` for what no function takes."""
        query, key, value = tensors = [side.tensor for side in self.tensors]
        mask = self.mask
        need(all(x.dtype is torch.float32 for x in tensors), "one of its tensors is not fp32")
        need(all(x.dim() == 4 for x in tensors), "its tensors have other than four dimensions")
        negated = any(x.is_neg() for x in tensors) or (mask is not None and mask.tensor.is_neg())
        need(not negated, "a view negates a tensor, which memory does not show")
        fit = key.shape[3] == query.shape[3] and key.shape[2] == value.shape[2]
        check_sizes(fit, node, query.shape, key.shape, value.shape)
        need(all(x.numel() for x in tensors), "one of its tensors is empty")
        batches = key.shape[:2] == value.shape[:2] and key.shape[0] == query.shape[0]
        need(batches, "its tensors have other batches or heads")
        need(all(x.stride(3) == 1 or x.shape[3] == 1 for x in tensors), "rows of its tensors have gaps")


def sides_of(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Sides:
    """Return what an attention reads; raises `Refused` for what no function takes."""
    read, texts = recorder.read, texts_of(recorder, a["attn_mask"])
    mask = recorder.optional(a["attn_mask"]) if texts is None else texts.table
    found = Sides(read(a["query"]), read(a["key"]), read(a["value"]), mask, texts)
    found.check(node)
    return found


def call_attention(
    recorder: Recorder,
    node: fx.Node,
    function: Function,
    sides: Sides,
    fields: Mapping[str, abi.Value],
    bytes_of_thread: int,
    *,
    factors: int = 1,
) -> PlanTensor:
    """Append the call of a function; return its result, in the layout that the next reader wants.

    Args:
        recorder: of the plan.
        node: of the graph.
        function: to call.
        sides: what it reads.
        fields: those that not every such function has.
        bytes_of_thread: memory that each thread needs.
        factors: how many of the tensors that it reads a profile names.

    Raises:
        Refused: keys and values of a head don't fit into the second cache, or rows of the mask have gaps.
    """
    need(bytes_of_thread <= caches.second(), "keys and values of a head don't fit into the second cache")
    query, key, value = (side.tensor for side in sides.tensors)
    sizes, threads = (*query.shape[:3], value.shape[3]), recorder.threads
    strides = strides_of(node, sizes)
    result = recorder.new(sizes, strides if strides[-1] == 1 else contiguous_strides(sizes), torch.float32)
    room = recorder.new((threads, bytes_of_thread), (bytes_of_thread, 1), torch.uint8)
    batch, heads, rows, _ = sizes
    texts, keys = sides.texts, key.shape[2]
    seen = (batch, heads, rows, keys) if texts is None else (batch, heads, texts.longest, texts.longest)
    every: dict[str, abi.Value] = {
        **fields_of_mask(sides.mask, seen),
        **fields_of(query, key, value, result.tensor),
        "parts": parts_of_rows(batch * heads, rows, threads),
        "bytes": bytes_of_thread,
        "threads": threads,
    }
    if texts is not None:
        need(batch == 1, "its rows are of several texts, and it has a batch besides")
        every |= {"batch": texts.count, "keys": texts.longest, "parts": 1}
    mask = [] if sides.mask is None else [sides.mask]
    tensors = [result, *sides.tensors, room, *mask, *([] if texts is None else [texts.starts])]
    recorder.call_function(function, every | dict(fields), tensors, node, factors=factors)
    return result


def fields_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, result: torch.Tensor
) -> dict[str, int | Sequence[int]]:
    """Return sizes and strides of tensors of four dimensions, as the functions take them."""
    batch, heads, rows, width = query.shape
    sizes = {"batch": batch, "heads": heads, "rows": rows, "keys": key.shape[2], "width": width}
    named = {"q": query, "k": key, "v": value, "y": result}
    strides = {f"{name}_strides": tensor.stride()[:3] for name, tensor in named.items()}
    return {**sizes, "wide": value.shape[3], **strides}


def fields_of_mask(mask: PlanTensor | None, sizes: tuple[int, int, int, int]) -> dict[str, abi.Value]:
    """Fields of a mask, or of none."""
    if mask is None:
        return {"mask": abi.MASK.number("none"), "mask_strides": (0, 0, 0, 0)}
    need(mask.tensor.dtype in _MASKS, f"its mask is {mask.tensor.dtype}")
    need(mask.tensor.dim() <= len(sizes), "its mask has more than four dimensions")
    spread = mask.tensor.expand(sizes).stride()
    need(spread[3] in (0, 1), "rows of its mask have gaps")
    return {"mask": abi.MASK.number(_MASKS[mask.tensor.dtype]), "mask_strides": spread}


def parts_of_rows(heads: int, rows: int, threads: int) -> int:
    """Return into how many parts the rows of each head go, so that all threads have the same work."""
    if not heads % threads:
        return 1
    return max(1, min(math.ceil(2 * threads / heads), rows // tuning.FEWEST_ROWS.value))

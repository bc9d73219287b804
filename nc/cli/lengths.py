"""Mixes of lengths: `python -m nc bench DIR --lengths 5-128`.

The texts of a mix are computed in batches of several sizes, filled up to the longest text of each batch, in
random order and sorted by length.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from nc.api.quantized import QuantizedModel
from nc.api.warm import inputs_of
from nc.cli.inputs import RequestError
from nc.profiling.latency import interleaved, median

MASK = "attention_mask"
#: Texts of a batch.
BATCHES = (1, 8, 32)
#: Texts of a mix that is a range. All ways together have fewer sets of sizes than a model keeps kernels of.
TEXTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixTime:
    """What texts of one mix cost in one way.

    Attributes:
        batch: most texts of a call.
        order: "random", or "sorted" by length.
        calls: number of calls for all texts.
        padded_share: tokens that only fill up, of all that are given.
        us_per_token: microseconds for each real token.
    """

    batch: int
    order: str
    calls: int
    padded_share: float
    us_per_token: float


def lengths_of(text: str) -> list[int]:
    """Return the lengths that `5-128` (`TEXTS` of them at random) or `7,40,128` (these) stands for.

    Raises:
        RequestError: it is neither.
    """
    if found := re.fullmatch(r"(\d+)-(\d+)", text.strip()):
        least, most = map(int, found.groups())
        if 1 <= least <= most:
            chance = random.Random(0)
            return [chance.randint(least, most) for _ in range(TEXTS)]
    elif re.fullmatch(r"\d+(,\d+)*", text.strip()):
        lengths = [int(length) for length in text.split(",")]
        if min(lengths) >= 1:
            return lengths
    msg = f"--lengths {text!r}: expected a range, as 5-128, a list, as 7,40,128, or a file with requests."
    raise RequestError(msg)


def measured(
    model: QuantizedModel,
    lengths: Sequence[int],
    rounds: int,
    track: Callable[[Iterator[Any]], Iterable[Any]] = iter,
) -> list[MixTime]:
    """Return the times of all ways, which take turns.

    Args:
        model: over texts; all inputs of the shape of the first one are filled up.
        lengths: tokens of each text.
        rounds: how often all texts are computed in each way.
        track: shows how far the rounds are.

    Raises:
        RequestError: the model has no mask of the tokens.
    """
    mask = _check_is_of_texts(model)
    orders = {"random": list(lengths), "sorted": sorted(lengths)}
    ways = {}
    for batch in sorted({min(batch, len(lengths)) for batch in BATCHES}):
        for order, chosen in orders.items():
            if batch > 1 or order == "random":  # alone, a text is never filled up
                ways[batch, order] = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]
    calls = {f"{batch} {order}": _all(model, parts, mask) for (batch, order), parts in ways.items()}
    with torch.no_grad():
        times = median(list(track(interleaved(calls, rounds))))
    found = []
    for batch, order in ways:
        parts, real = ways[batch, order], sum(lengths)
        given = sum(len(part) * max(part) for part in parts)
        us = 1e3 * times[f"{batch} {order}"] / real
        found.append(
            MixTime(
                batch=batch, order=order, calls=len(parts), padded_share=1 - real / given, us_per_token=us
            )
        )
    return found


def _all(model: QuantizedModel, parts: Sequence[Sequence[int]], mask: str) -> Callable[[], None]:
    """Return a call with all batches."""
    inputs = [_filled(model, part, mask) for part in parts]

    def run() -> None:
        for flat in inputs:
            model(*flat[0], **flat[1])

    return run


def _filled(model: QuantizedModel, part: Sequence[int], mask: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call with texts of some lengths: values of the example, and a mask of the real tokens."""
    args, kwargs = inputs_of(model.graph, (len(part), max(part)))
    real = torch.arange(max(part), dtype=torch.int64) < torch.tensor(part, dtype=torch.int64)[:, None]
    names = [parameter.name for parameter in model.graph.signature.parameters]
    if mask in kwargs:
        return args, {**kwargs, mask: real.to(kwargs[mask].dtype)}
    place = names.index(mask)
    return (*args[:place], real.to(args[place].dtype), *args[place + 1 :]), kwargs


def _check_is_of_texts(model: QuantizedModel) -> str:
    """Return the name of the mask; raises RequestError where texts cannot be filled up."""
    leaves = [leaf for leaf in model.graph.signature.leaves if leaf.dtype is not None]
    dims = {leaf.path: leaf.dims for leaf in leaves}
    free = dims.get(MASK) is not None and all(isinstance(dim, str) for dim in dims[MASK])
    if not free or len(dims[MASK]) != 2 or len(leaves[0].dims) != 2:
        shown = ", ".join(f"{path} {list(sizes)}" for path, sizes in dims.items())
        msg = (
            f"--lengths with a range or a list is for models over texts, whose first input and {MASK} are "
            f"[texts, tokens] of any size; this one has {shown}."
        )
        raise RequestError(msg)
    return MASK

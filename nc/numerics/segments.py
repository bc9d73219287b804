"""Rows of several texts in one tensor: which rows are of the same text."""

from __future__ import annotations

import torch


def segment_bias(starts: torch.Tensor, rows: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Return what is added to the scores of attention, so that a row sees the rows of its own text only.

    Args:
        starts: int32, [texts + 1]: where each text begins; the last number is that of all rows.
        rows: any tensor with one element for each row.
        table: fp32, [heads or 1, length, length], what a row adds to the score of another one of its text, by
            their places in it; None: nothing.

    Returns:
        fp32, [1, heads or 1, rows, rows]; the lowest number for rows of two texts.
    """
    count = rows.shape[0]
    places = torch.arange(count)
    text = torch.searchsorted(starts, places, right=True, out_int32=False) - 1
    own = text[:, None] == text[None, :]
    lowest = torch.finfo(torch.float32).min
    if table is None:
        return torch.where(own, 0.0, lowest)[None, None]
    place = places - starts[text]
    added = table[:, place[:, None].where(own, 0), place[None, :].where(own, 0)]
    return added.where(own, lowest)[None]


def segment_sum(x: torch.Tensor, starts: torch.Tensor, keepdim: bool) -> torch.Tensor:
    """Return the sums of the rows of each text.

    Args:
        x: [1, rows, ...].
        starts: see `segment_bias`.
        keepdim: with a dimension of 1 for the rows. Rows behind the last text are in no sum.

    Returns:
        [texts, ...], or [texts, 1, ...]; of the dtype of `x`, int64 for integers.
    """
    places = torch.arange(x.shape[1])
    text = torch.searchsorted(starts, places, right=True) - 1
    dtype = x.dtype if x.is_floating_point() else torch.int64
    result = torch.zeros((starts.shape[0], *x.shape[2:]), dtype=dtype)
    result.index_add_(0, text, x[0].to(dtype))
    sums = result[:-1].contiguous()
    return sums[:, None] if keepdim else sums

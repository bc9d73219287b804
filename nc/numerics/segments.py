"""Rows of several texts in one tensor: which rows are of the same text."""

from __future__ import annotations

import torch


def segment_bias(starts: torch.Tensor, rows: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Return what is added to the scores of attention, so that a row sees only rows of the same text.

    Args:
        starts: int32, [texts + 1]: where each text begins; the last number is that of all rows.
        rows: any tensor with one element for each row.
        table: fp32, [heads or 1, length, length], what a row adds to the score of another one of its text, by
            their places in it; None: nothing.

    Returns:
        fp32, [1, heads or 1, rows, rows]; the lowest number for rows of two texts.
    """
    text = _text_of_rows(starts, rows.shape[0])
    own = text[:, None] == text[None, :]
    lowest = torch.finfo(torch.float32).min
    if table is None:
        return torch.where(own, 0.0, lowest)[None, None]
    place = torch.arange(rows.shape[0]) - starts[text]
    added = table[:, place[:, None].where(own, 0), place[None, :].where(own, 0)]
    return added.where(own, lowest)[None]


def segment_sum(x: torch.Tensor, starts: torch.Tensor, keepdim: bool) -> torch.Tensor:
    """Return the sums of the rows of each text.

    Args:
        x: [1, rows, ...].
        starts: see `segment_bias`.
        keepdim: with a dimension of 1 for the rows. Rows after the last text are not summed.

    Returns:
        [texts, ...], or [texts, 1, ...]; of the dtype of `x`, int64 for integers.
    """
    text = _text_of_rows(starts, x.shape[1])
    dtype = x.dtype if x.is_floating_point() else torch.int64
    result = torch.zeros((starts.shape[0], *x.shape[2:]), dtype=dtype)
    result.index_add_(0, text, x[0].to(dtype))
    sums = result[:-1].contiguous()
    return sums[:, None] if keepdim else sums


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    query_columns: torch.Tensor | None,
    key_columns: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return attention of rows to rows of the same text, with scores by distance.

    This is disentangled attention (He et al. 2021, arXiv 2006.03654, equation 4). For a query i and a key j,
    and c = j - i + distances - 1, the score is scale * q[i] k[j] + q[i] of_queries[query_columns[c]] +
    k[j] of_keys[key_columns[c]].

    Args:
        query: fp32, [..., heads, rows, width], where all sizes before are 1.
        key: likewise.
        value: fp32, [..., heads, rows, wide].
        starts: see `segment_bias`.
        of_queries: fp32, [heads, columns, width]; None: nothing is added.
        of_keys: likewise.
        query_columns: int32, [2 * distances - 1].
        key_columns: likewise.
        scale: of the products of queries and keys.

    Returns:
        fp32, [..., heads, rows, wide].
    """
    count = query.shape[-2]
    text, rows = _text_of_rows(starts, count), torch.arange(count)
    scores = query @ key.mT * scale
    for x, columns, column, turned in (
        (query, of_queries, query_columns, False),
        (key, of_keys, key_columns, True),
    ):
        if columns is None or column is None:
            continue
        most = column.shape[0] // 2
        away = (rows[None, :] - rows[:, None]).clamp(-most, most) + most
        of_pairs = column.long()[away.mT if turned else away]
        products = x @ columns.mT
        added = products.gather(-1, of_pairs.expand(*products.shape[:-1], count))
        scores = scores + (added.mT if turned else added)
    scores = scores.masked_fill(text[:, None] != text[None, :], torch.finfo(torch.float32).min)
    return scores.softmax(-1) @ value


def _text_of_rows(starts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the number of the text of each of so many rows."""
    return torch.searchsorted(starts, torch.arange(count), right=True) - 1

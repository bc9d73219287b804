"""Attention of texts of different lengths in float64, by its definition: what functions in C are compared with."""

import itertools

import torch


def attention(
    q,
    k,
    v,
    starts_q,
    starts_k,
    *,
    factor,
    causal=False,
    left=-1,
    right=-1,
    softcap=0.0,
    added=None,
    distances=(None, None),
):
    """The attention of each text by itself, with all its scores.

    Args:
        q, k, v: [rows, heads, width]; heads of q are a multiple of those of k and v.
        starts_q, starts_k: where texts begin, and where the last one ends.
        factor, causal, left, right, softcap: see `nc.kernels.flash.Scores`.
        added: to scores, [heads or 1, places, places], by places of query and key in their text; or None.
        distances: for queries and for keys, vectors [heads, columns, width] whose products with them are added,
            and the column for each distance of key and query [2 * distances - 1]; or None.
    """
    y = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for n in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        of_text = [x.double().transpose(0, 1) for x in (q[rows], k[keys], v[keys])]
        query, key, value = (x.repeat_interleave(q.shape[1] // len(x), 0) for x in of_text)
        scores = query @ key.mT * factor
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        count, length = scores.shape[1:]
        scores = scores if added is None else scores + added[:, :count, :length].double()
        of_distance = torch.arange(length) - torch.arange(count)[:, None]
        for x, given, is_key in ((query, distances[0], False), (key, distances[1], True)):
            for i, j in itertools.product(range(count), range(length)) if given is not None else ():
                vectors, column = given
                column = column[of_distance[i, j] + len(column) // 2]
                scores[:, i, j] += (x[:, j if is_key else i] * vectors[:, column].double()).sum(-1)
        # the last query is beside the last key
        apart = torch.arange(length) - (torch.arange(count)[:, None] + length - count)
        hidden = apart > (0 if causal else right if right >= 0 else length + count)
        hidden |= apart < (-left if left >= 0 else -length - count)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        y[rows] = (torch.where(hidden.all(1, keepdim=True), 0.0, weights) @ value).transpose(0, 1)
    return y


def gathered(k, v, table, lengths):
    """Keys and values of all texts, one after the other, of those that lie in pages.

    Args:
        k, v: [pages, page size, heads, width].
        table: numbers of pages [texts, most pages].
        lengths: keys of each text.
    """
    return tuple(
        torch.cat(
            [
                x[:0].flatten(0, 1),
                *(x[pages.long()].flatten(0, 1)[:n] for pages, n in zip(table, lengths, strict=True)),
            ]
        )
        for x in (k, v)
    )

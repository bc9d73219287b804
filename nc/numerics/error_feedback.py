"""Rounding column by column, where columns not rounded yet take over the error of those that are.

It minimises `tr((Q - W) H (Q - W)^T)` over the codes of Q greedily. GPTQ (arXiv 2210.17323, algorithm 1) does
this with the Cholesky factor of the inverse of H. Here it is written with the factor of H itself: `H = (A +
I) D (A + I)^T`, A strictly upper triangular, D diagonal; column k is rounded from `w_k + sum_{j<k} (w_j -
q_j) A_jk`. Both give the same codes (arXiv 2307.13304, theorem 6), and this one needs one factorisation and
no inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nc.formats.tensor_format import TensorFormat
from nc.numerics.groups import GroupParams, chunks, decode, encode

#: A pivot below this share of the mean of the diagonal is rounding error.
_LEAST_PIVOT = 1e-9


@dataclass(frozen=True, slots=True)
class Feed:
    """A, fp32: how much of the error of column j goes to column k, at [j, k].

    Only what is above the diagonal has a meaning.

    It is the largest matrix beside the factor that a solver makes, so what is below the diagonal is not held.

    Attributes:
        pieces: rows 0 to step - 1, the next `step` rows and so on, each from the column of its first row on.
        step: rows of each piece; the last one may have fewer.
    """

    pieces: list[torch.Tensor]
    step: int

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return a view of some rows, all in one piece, and columns of it."""
        piece, first = divmod(rows.start, self.step)
        before = piece * self.step
        found: torch.Tensor = self.pieces[piece][
            first : rows.stop - before, columns.start - before : columns.stop - before
        ]
        return found


@dataclass(frozen=True, slots=True)
class Factor:
    """`(A + I) D (A + I)^T` of a damped Hessian.

    Attributes:
        lower: R = (A + I) sqrt(D) with its rows and columns in reversed order, lower triangular, float64,
            shape [K, K].
        first: of the damped Hessian, at [0, 0].
    """

    lower: torch.Tensor
    first: float

    @property
    def upper(self) -> torch.Tensor:
        """R, upper triangular."""
        return self.lower.flip(0, 1)

    def feed(self, block: int, group: int) -> Feed:
        """Return a; arguments as for `round_columns`."""
        size, step = len(self.lower), _step(block, group)
        diagonal = self.lower.diagonal().flip(0)
        pieces = []
        for start in range(0, size, step):
            piece = torch.empty(min(step, size - start), size - start, dtype=torch.float32)
            for rows in chunks(*piece.shape):
                last = size - start - rows.start
                piece[rows] = (
                    self.lower[last - (rows.stop - rows.start) : last, : size - start].flip(0, 1)
                    / diagonal[start:]
                ).float()
            pieces.append(piece)
        return Feed(pieces, step)

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """Return the x of `damped Hessian @ x = right`, float64, shape [K, N]."""
        upper = self.upper
        half = torch.linalg.solve_triangular(upper, right, upper=True)
        solution: torch.Tensor = torch.linalg.solve_triangular(upper.T, half, upper=False)
        return solution


def factor(
    sums: torch.Tensor, damp: float, order: torch.Tensor | None = None, tokens: int = 1
) -> Factor | None:
    """Return the factor of `H + damp * mean(diag(H)) * I`, H being `sums / tokens`.

    None is returned if that is not positive definite.

    Args:
        sums: sums of x x^T, float64, shape [K, K]. A channel that is always zero gets the mean of the others
            on its diagonal.
        damp: at least 0.
        order: a permutation of the rows and columns of H; None: as given.
        tokens: how many x were added.
    """
    size = len(sums)
    # the upper factor is the lower one of the matrix in reversed order
    back = (torch.arange(size) if order is None else order).flip(0)
    work = torch.empty(size, size, dtype=torch.float64)
    for rows in chunks(size, size):
        work[rows] = sums[:, back[rows]][back].T
    damped = work.div_(tokens).T  # as LAPACK wants it, so that the factor is written over it
    diagonal = damped.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.sum() / (~dead).sum().clamp(min=1)) or 1.0
    diagonal[dead] = mean
    diagonal += damp * mean
    first = float(diagonal[-1])
    failed = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(damped, out=(damped, failed))
    if int(failed) or not bool((diagonal.square() > _LEAST_PIVOT * mean).all()):
        return None
    return Factor(damped, first)


def round_columns(
    target: torch.Tensor,
    form: TensorFormat,
    feed: Feed,
    params: Callable[[int], GroupParams],
    *,
    block: int,
    group: int,
    begin: Callable[[int, torch.Tensor], None] | None = None,
    value_feed: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of the columns, in their order.

    Args:
        target: W, fp32, shape [N, K]; not copied if `target.T` is contiguous.
        form: the format.
        feed: A, made for the same `block` and `group`.
        params: k → params of column k, shape [N, 1].
        block: after how many columns all that follow take over errors. But for rounding errors the codes do
            not depend on it.
        group: columns that share params.
        begin: called with k and the weights of the columns k to k + group, shape [N, group], when a group
            begins. The weights are those that fit best to all columns that are rounded.
        value_feed: B, fp32, [K, K]: `v_j B_jk` is added to column k too, v_j being the values that column j
            was rounded from.
        first: the values to round the first column from, shape [N].

    Returns:
        uint8, shape [N, K].
    """
    outputs, inputs = target.shape
    original = target.T.contiguous()  # a row is an input channel from here on
    current = original.clone()
    codes = torch.empty(inputs, outputs, dtype=torch.uint8)
    for start, end in _blocks(inputs, block, group):
        errors = torch.empty(end - start, outputs, dtype=torch.float32)
        for i in range(start, end):
            if begin is not None and i % group == 0:
                begin(i, _best_fit(original, current, feed, slice(i, i + group)).T)
            row = first if i == 0 and first is not None else current[i]
            found = params(i)
            code = encode(row.unsqueeze(1), found, form)
            codes[i] = code[:, 0]
            error = torch.sub(original[i], decode(code, found, form)[:, 0], out=errors[i - start])
            current[i + 1 : end].addr_(feed.part(slice(i, i + 1), slice(i + 1, end))[0], error)
            if value_feed is not None:
                current[i + 1 : end].addr_(value_feed[i, i + 1 : end], row)
        current[end:].addmm_(feed.part(slice(start, end), slice(end, inputs)).T, errors)
        if value_feed is not None:
            current[end:].addmm_(value_feed[start:end, end:].T, current[start:end])
    return codes.T.contiguous()


def _blocks(inputs: int, block: int, group: int) -> list[tuple[int, int]]:
    """Return where blocks begin and end.

    A group never begins in one block and ends in another that holds other groups too.

    So all earlier columns have passed their errors to all columns of a group before it begins.
    """
    if group <= block:
        size = _step(block, group)
        return [(start, min(start + size, inputs)) for start in range(0, inputs, size)]
    return [
        (start, min(start + block, end))
        for end in range(group, inputs + 1, group)
        for start in range(end - group, end, block)
    ]


def _step(block: int, group: int) -> int:
    """Columns of whole groups that are worked on together."""
    return max(block // group, 1) * group


def _best_fit(original: torch.Tensor, current: torch.Tensor, feed: Feed, part: slice) -> torch.Tensor:
    """Return the columns of a group that have the least loss, given the columns already rounded.

    Each is a row of the result. The loss is that without further rounding.

    The errors of earlier columns in `current` are `c = d (I + A)`, d being the change of the columns and A
    that part of the matrix.
    """
    inside = feed.part(part, part).T
    change: torch.Tensor = torch.linalg.solve_triangular(
        inside, current[part] - original[part], upper=False, unitriangular=True
    )
    return original[part] + change

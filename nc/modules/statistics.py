"""What calibration collects of the inputs of low-bit layers.

These are sums over tokens, in float64, so that they can be merged in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from nc.errors import CalibrationError

#: Rows of a matrix of sums, or of a weight, that are worked on at once, so that nothing else of its size is
#: in memory.
_ROWS = 512


@dataclass(slots=True)
class InputStatistics:
    """Sums over the tokens x of shape [K] that reached a layer, or several layers that read one tensor.

    Attributes:
        tokens: n, how many.
        absolute: sum of |x|, float64, shape [K].
        squares: sum of x^2, float64, shape [K].
        largest: the largest |x|, fp32, shape [K].
        outer: sum of x x^T, float64, shape [K, K]; None if nothing asks for it.
        cross: sum of (y - x) x^T, where y is the same token in the float model, float64, [K, K]; None if
            nothing asks for it.
    """

    tokens: int
    absolute: torch.Tensor
    squares: torch.Tensor
    largest: torch.Tensor
    outer: torch.Tensor | None = None
    cross: torch.Tensor | None = None

    @classmethod
    def empty(cls, channels: int, *, hessian: bool, cross: bool = False) -> InputStatistics:
        """Without a token."""

        def square() -> torch.Tensor:
            return torch.zeros(channels, channels, dtype=torch.float64)

        zeros = torch.zeros(channels, dtype=torch.float64)
        return cls(
            0,
            zeros,
            zeros.clone(),
            zeros.float(),
            square() if hessian or cross else None,
            square() if cross else None,
        )

    def add(self, x: torch.Tensor, float_x: torch.Tensor | None = None) -> None:
        """Add tokens.

        Args:
            x: shape [..., K]; its products are computed in fp32, and summed in float64.
            float_x: the same tokens in the float model, if `cross` is collected.

        Raises:
            CalibrationError: NaN or infinite values; nothing was added.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not bool(rows.isfinite().all()):
            msg = "its input holds NaN or infinite values"
            raise CalibrationError(msg)
        if not len(rows):
            return
        self.tokens += len(rows)
        magnitudes = rows.abs()
        self.absolute += magnitudes.sum(0, dtype=torch.float64)
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        self.squares += rows.square().sum(0, dtype=torch.float64)
        difference = None if float_x is None else float_x.detach().reshape(rows.shape).float() - rows
        for start in range(0, rows.shape[1], _ROWS):
            part, end = slice(start, start + _ROWS), start + _ROWS
            if self.outer is not None:
                product = rows[:, part].T @ rows[:, start:]
                self.outer[part, start:] += product
                self.outer[end:, part] += product[:, _ROWS:].T  # it is symmetric
            if self.cross is not None and difference is not None:
                self.cross[part] += difference[:, part].T @ rows

    def merge(self, other: InputStatistics) -> None:
        """Add the tokens of another one, of the same channels."""
        self.tokens += other.tokens
        self.absolute += other.absolute
        self.squares += other.squares
        self.largest = torch.maximum(self.largest, other.largest)
        for name in ("outer", "cross"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None:
                mine += theirs

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is collected beside `tokens`, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    @property
    def mean_square(self) -> torch.Tensor:
        """E[x^2] of each channel, fp32, shape [K]."""
        return (self.squares / max(self.tokens, 1)).float()

    @property
    def mean_absolute(self) -> torch.Tensor:
        """E[|x|] of each channel, fp32, shape [K]."""
        return (self.absolute / max(self.tokens, 1)).float()

    @property
    def hessian(self) -> torch.Tensor:
        """E[x x^T], float64, shape [K, K]; diagonal where only squares were collected."""
        whole = torch.diag(self.squares) if self.outer is None else self.outer
        return whole / max(self.tokens, 1)


def weighted_loss(
    weight: torch.Tensor, rounded: torch.Tensor, inputs: InputStatistics | None, *, two_sided: bool = False
) -> float:
    """`tr((W - W^) H (W - W^)^T) / tr(W H W^T)`.

    It is the mean squared error of the layer's output over its mean square.

    Two-sided, `tr((W - W^) H (W - W^)^T) + 2 tr(W C (W - W^)^T)` over the same, with C = E[(y - x) x^T]: the
    error `|W y - W^ x|^2` against the output in the float model, less that of W itself. It is below 0 where
    W^ makes up for a part of what earlier layers did to x.

    Args:
        weight: W, fp32, shape [N, K].
        rounded: W^, likewise.
        inputs: give H = E[x x^T]; None, or without tokens: the identity.
        two_sided: see above; needs the inputs of the float model.

    Returns:
        0 for a weight that is all zero.
    """
    lost = total = torch.zeros((), dtype=torch.float64)
    for start in range(0, weight.shape[0], _ROWS):
        part = slice(start, start + _ROWS)
        error, whole = (weight[part] - rounded[part]).double(), weight[part].double()
        lost = lost + _energy(error, inputs)
        total = total + _energy(whole, inputs)
        if two_sided and inputs is not None and inputs.cross is not None:
            lost = lost + 2 * ((whole @ inputs.cross) * error).sum()
    return float(lost / total) if float(total) > 0 else 0.0


def _energy(rows: torch.Tensor, inputs: InputStatistics | None) -> torch.Tensor:
    """Sum of x^2 over the outputs of some rows, float64; without inputs over the rows."""
    if inputs is None or not inputs.tokens:
        return rows.square().sum()
    if inputs.outer is None:
        return (rows.square() @ inputs.squares).sum()
    return ((rows @ inputs.outer) * rows).sum()

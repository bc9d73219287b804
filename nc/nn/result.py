"""How the codes of one layer were found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nc.text.json_text import built


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerResult:
    """What a report says of one layer.

    Attributes:
        solver: the solver whose codes were kept.
        asked: the solver that the configuration asks for.
        loss: `tr((W - W^) H (W - W^)^T) / tr(W H W^T)` of the codes, H the mean of x x^T; without data H is
            the identity. Of two-sided solvers the error against the float model's output, see
            `statistics.weighted_loss`; it may be below 0.
        rtn_loss: the same for round to nearest.
        tokens: rows of calibration data that reached the layer; 0: none did, or no data was needed.
        note: what a reader must know, e.g. that calibration never reached the layer; "" if nothing.
    """

    solver: str
    asked: str
    loss: float
    rtn_loss: float
    tokens: int = 0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerResult:
        """Return the inverse of `to_dict`.

        Raises:
            ValueError: a field is missing, unknown or of another type.
        """
        return built(cls, data, "a layer's result")

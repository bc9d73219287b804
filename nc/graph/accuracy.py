"""How far a quantized model is from fp32, on the data that a conversion judges by."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

#: Data of a graph without calibration data.
EXAMPLE = "the example inputs"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Outputs of a quantized graph against those of the fp32 graph.

    Attributes:
        sqnr_db: SQNR of the worst output over all data together, in dB.
        data: what it was measured on, in words.
        changed: the share of places whose largest entry is another one, of outputs that look like scores;
            None where none does.
        places: how many places those are.
    """

    sqnr_db: float
    data: str = EXAMPLE
    changed: float | None = None
    places: int = 0

    def __str__(self) -> str:
        """Return one line."""
        scores = "" if self.changed is None else f"; {self.changed:.1%} of the largest entries are others"
        return f"{self.sqnr_db:.1f} dB against fp32 on {self.data}{scores}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite as text."""
        db = self.sqnr_db if math.isfinite(self.sqnr_db) else str(self.sqnr_db)
        return {**dataclasses.asdict(self), "sqnr_db": db}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Accuracy:
        """Return the inverse of `to_dict`, through JSON too.

        Raises:
            TypeError, ValueError, KeyError: it is not what `to_dict` gives.
        """
        changed, places, where = data["changed"], data["places"], data["data"]
        is_share = changed is None or (isinstance(changed, float) and 0 <= changed <= 1)
        if not is_share or type(places) is not int or not isinstance(where, str):
            msg = f"expected a share, a number and a text, but got {changed!r}, {places!r} and {where!r}"
            raise TypeError(msg)
        return cls(sqnr_db=float(data["sqnr_db"]), data=where, changed=changed, places=places)

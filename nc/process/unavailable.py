"""Why something can't be had here, as a value of its own."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Unavailable:
    """What a function gives in place of what there is not.

    Attributes:
        reason: for reports and errors.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason

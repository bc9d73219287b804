"""The reason why something is unavailable here, as a value."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Unavailable:
    """What a function returns in place of something unavailable.

    Attributes:
        reason: for reports and errors.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason

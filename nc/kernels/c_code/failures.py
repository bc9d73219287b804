"""What functions in C return when they fail."""

from __future__ import annotations

from nc.kernels.c_code.abi import STATUS, STATUSES

#: For indices of a caller that are out of range. Other failures are faults of this package.
INDEX = STATUS.number("other_index")


def words(status: int) -> str:
    """Return what a status means."""
    return tuple(STATUSES.values())[status] if 0 <= status < len(STATUSES) else f"status {status}"

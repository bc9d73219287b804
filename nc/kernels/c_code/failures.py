"""What functions in C return when they fail."""

from __future__ import annotations

#: The number for values of a caller that are none of those that there are: the only one that is not a fault of this package.
INDEX = 1
#: In the order of the numbers in `calls.h`.
_WORDS = (
    "it succeeded",
    "an index is out of range",
    "there is no memory for its scratch",
    "it has no code that it may use for this instruction set",
    "it takes another count of numbers",
    "it takes another count of tensors",
    "it knows no such dtype",
    "it has no room for a size, or sizes do not fit each other",
    "it knows no such operation",
)


def words(status: int) -> str:
    """Return what a status means."""
    return _WORDS[status] if 0 <= status < len(_WORDS) else f"status {status}"

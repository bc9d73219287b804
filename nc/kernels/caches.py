"""Sizes of this CPU's caches."""

from __future__ import annotations

import functools
import re
from pathlib import Path

_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
#: Where the system does not tell, as in some containers.
_USUAL_SECOND, _USUAL_LAST = 2**20, 2**25
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


@functools.cache
def second() -> int:
    """Return the bytes of a core's second cache."""
    return _size(_FOLDER / "index2/size") or _USUAL_SECOND


@functools.cache
def last() -> int:
    """Return the bytes of the largest cache that the first core has."""
    return max((_size(path) for path in _FOLDER.glob("index*/size")), default=0) or _USUAL_LAST


def _size(path: Path) -> int:
    """Return what a file of the system says; 0 where there is none."""
    found = re.fullmatch(r"(\d+)([KM]?)\s*", path.read_text(encoding="ascii") if path.exists() else "")
    return int(found[1]) * _UNITS[found[2]] if found else 0

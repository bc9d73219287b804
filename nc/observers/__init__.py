"""Observers: one statistic per file. `OBSERVERS` is the one place where a new one is entered."""

from __future__ import annotations

from nc.observers.base import Observer, Statistic
from nc.observers.minmax import MINMAX

OBSERVERS: dict[str, Statistic] = {s.name: s for s in (MINMAX,)}

__all__ = ["OBSERVERS", "Observer", "Statistic"]

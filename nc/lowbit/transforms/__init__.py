"""Transforms by name. A new one is a file here and a line below."""

from __future__ import annotations

from nc.lowbit.transforms.base import Scope, Target, Transform

TRANSFORMS: dict[str, type] = {}

__all__ = ["TRANSFORMS", "Scope", "Target", "Transform"]

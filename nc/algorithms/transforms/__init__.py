"""Transforms by name. A new one is a file here and a line below."""

from __future__ import annotations

from nc.algorithms.transforms.awq import AWQ
from nc.algorithms.transforms.base import Scope, Target, Transform
from nc.algorithms.transforms.rotation import Rotation
from nc.algorithms.transforms.smooth import Smooth
from nc.algorithms.transforms.teq import TEQ

TRANSFORMS: dict[str, type] = {cls.name: cls for cls in (AWQ, Smooth, TEQ, Rotation)}

__all__ = ["AWQ", "TEQ", "TRANSFORMS", "Rotation", "Smooth", "Scope", "Target", "Transform"]

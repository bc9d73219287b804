"""Autocast of the user's, which nothing of nc depends on."""

from __future__ import annotations

import contextlib

import torch


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Switch autocast off: the plan decides the precision of each operator, also inside the user's autocast block."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()

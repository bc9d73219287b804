"""The calibration of a search, of which a note is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def calibrate(prepared: torch.nn.Module, run_fn: Callable[[Any], Any], note: Callable[..., None]) -> int:
    """Calibrate a prepared model, and record its calls; return the number of calls.

    Args:
        prepared: the prepared model.
        run_fn: calls the model with calibration data.
        note: records a call, see `SeenCalls`.
    """
    calls = 0

    def noted(*call: Any) -> None:
        nonlocal calls
        calls += 1
        note(*call)

    hook = prepared.register_forward_pre_hook(noted, with_kwargs=True)
    try:
        run_fn(prepared)
    finally:
        hook.remove()
    return calls

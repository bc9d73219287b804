"""Settings of torch's that the user may have changed: nothing that nc computes depends on them."""

from __future__ import annotations

import contextlib

import torch

from nc.errors import StateError


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Switch autocast off.

    The plan decides the precision of each operator, also inside the user's autocast block.
    """
    return (
        torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()
    )


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """Return a context in which new tensors are on the CPU, whatever the user's default is.

    Where that is the default nothing is entered: torch would look at each call.
    """
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")


def check_default_device(step: str) -> None:
    """Raise StateError if new tensors would not be on the CPU.

    `step` is the public function that makes some.
    """
    device = torch.get_default_device()
    if device.type != "cpu":
        msg = (
            f"{step}() makes tensors on the CPU, but torch's default device is {device}. Call it inside "
            '`with torch.device("cpu"):`.'
        )
        raise StateError(msg)

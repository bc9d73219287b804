"""How long each low-bit linear takes within calls of its model."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nc.modules.block_calls import BlockCall, run
from nc.nn import QuantLinear

_WARM_UP, _CALLS = 2, 5


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """The measured time of one low-bit linear.

    Attributes:
        us: median time of one call of the layer, in microseconds.
        rows: number of rows of activations in its last call, M.
        calls: how many times one call of the model calls the layer.
    """

    us: float
    rows: int
    calls: int


def layer_speeds(
    model: torch.nn.Module, call: BlockCall, clock: Callable[[], float] = time.perf_counter
) -> dict[str, LayerSpeed]:
    """Return the times of the low-bit linears that a call of the model reaches, by name.

    Args:
        model: called a few times.
        call: its arguments.
        clock: gives the time in seconds.
    """
    started: dict[str, float] = {}
    times: defaultdict[str, list[float]] = defaultdict(list)
    rows: dict[str, int] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
            rows[name] = args[0].numel() // args[0].shape[-1]
            started[name] = clock()

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            times[name].append(1e6 * (clock() - started[name]))

        return hook

    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    for _ in range(_WARM_UP):
        run(model, call)
    handles = [layer.register_forward_pre_hook(before(name)) for name, layer in layers.items()]
    handles += [layer.register_forward_hook(after(name)) for name, layer in layers.items()]
    try:
        for _ in range(_CALLS):
            run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: LayerSpeed(statistics.median(found), rows[name], len(found) // _CALLS)
        for name, found in times.items()
    }

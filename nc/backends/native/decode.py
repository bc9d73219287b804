"""A graph that computes one token of a language model → plans.

The plans call low-bit kernels and functions in C between them, and no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import fx

from nc.backends.low_bit.engine import LowBitEngine
from nc.backends.low_bit.graph import replace_low_bit
from nc.backends.native import operators
from nc.backends.native.planned import PlannedModel
from nc.backends.native.plans import c_functions
from nc.errors import BackendError, BackendUnavailableError
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.kernels.onednn.providers import provider
from nc.kernels.onednn.runner import runner
from nc.nn import QuantLinear
from nc.numerics.packed_weight import PackedWeight


def planned_step(module: fx.GraphModule, layers: Sequence[QuantLinear]) -> PlannedModel:
    """Return what runs a graph that may change its inputs in place.

    Args:
        module: flat graph, changed here.
        layers: of the model that it was captured from; what their kernels packed is shared.

    Raises:
        BackendUnavailableError: this machine has no compiler, and the package no compiled code for it; or
            oneDNN is missing.
    """
    why = c_functions.why_unavailable()
    if why:
        msg = f"Tokens can't be computed by a plan here: {why}."
        raise BackendUnavailableError(msg)
    owners = {layer.packed.codes.data_ptr(): layer for layer in layers}

    def pack(kernel: LowBitKernel, weight: PackedWeight) -> PackedLayout:
        layer = owners.get(weight.codes.data_ptr())
        if layer is None or not isinstance(layer.engine, LowBitEngine):
            return kernel.pack(weight)
        return layer.engine.packed(layer, kernel)

    replace_low_bit(module, "native", pack=pack)
    module.recompile()
    source = provider()

    def otherwise() -> NoReturn:
        raise BackendError("; ".join(planned.unplanned()))

    planned = PlannedModel(
        module,
        source,
        runner(source.maker.library)[0],
        otherwise,
        operators.table(one_token=True),
        follow=True,
    )
    return planned

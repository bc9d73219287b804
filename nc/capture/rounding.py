"""Models whose low-bit layers round activations, compared as if they did not.

Sums in another order differ by parts in a million. Where one ends at half a code, that rounds it to the next
one, and layer by layer more of them: the outputs of two right computations differ as those of two models do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from nc.graph.fx_utils import copy_module
from nc.graph.views import set_argument
from nc.nn import QuantLinear
from nc.ops import quant_linear

#: `act_dtype` of a layer that takes activations as they are.
_AS_THEY_ARE = "fp32"


def rounding_layers(model: torch.nn.Module) -> list[QuantLinear]:
    """Return the layers of a model that round their activations."""
    return [m for m in model.modules() if isinstance(m, QuantLinear) and m.act_dtype != _AS_THEY_ARE]


@contextlib.contextmanager
def unrounded(layers: list[QuantLinear]) -> Iterator[None]:
    """Inside, layers take activations as they are, and are computed by their operator."""
    before = [(layer.act_dtype, layer.engine) for layer in layers]
    try:
        for layer in layers:
            layer.act_dtype, layer.engine = _AS_THEY_ARE, None
        yield
    finally:
        for layer, (act_dtype, engine) in zip(layers, before, strict=True):
            layer.act_dtype, layer.engine = act_dtype, engine


def unrounded_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph whose low-bit linears take activations as they are; constants are shared."""
    copy, _ = copy_module(module)
    for node in copy.graph.nodes:
        if node.target is quant_linear:
            set_argument(node, "act_dtype", _AS_THEY_ARE)
    copy.recompile()
    return copy

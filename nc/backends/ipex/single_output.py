"""Calls in which an AMX convolution with a stride has a result of one place: its sums are wrong there.

The outputs of a whole model need not show it: RegNet had 19 to 40 dB. The rewrite of `wrong_window` for all
free sizes would let ResNet-50 take four times as long, so the sizes are looked at instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.catalogue import kind_of_node
from nc.graph.views import Conv
from nc.kernels import cpu
from nc.ops import dequantize_per_tensor


def one_place(module: fx.GraphModule) -> Callable[[Sequence[torch.Tensor]], str] | None:
    """Return what tells of flat inputs why kernels are wrong for their sizes, "" for others.

    None is returned where no kernel can be.

    Args:
        module: QDQ graph; it must stay as it is.
    """
    suspects = (
        frozenset(node for node in module.graph.nodes if _is_suspect(node))
        if "amx_int8" in cpu.machine_features()
        else frozenset()
    )
    if not suspects:
        return None

    def why_wrong(inputs: Sequence[torch.Tensor]) -> str:
        places = _Places(module, suspects)
        with torch.no_grad():
            places.run(*inputs)
        return (
            f"{places.narrow[0]!r} has a result of one place, which AMX kernels with a stride compute wrongly"
            if places.narrow
            else ""
        )

    return why_wrong


class _Places(fx.Interpreter):
    """Runs a graph, and notes the convolutions whose result is one place wide."""

    def __init__(self, module: fx.GraphModule, suspects: frozenset[fx.Node]) -> None:
        super().__init__(module)
        self._suspects = suspects
        self.narrow: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        """Compute a node."""
        result = super().run_node(n)
        if n in self._suspects and result.shape[-1] == 1:
            self.narrow.append(n.meta["operator"])
        return result


def _is_suspect(node: fx.Node) -> bool:
    kind = kind_of_node(node) or ""
    if not kind.startswith("conv") or "transpose" in kind:
        return False
    conv = Conv.of(node)
    is_int8 = conv.input.target is dequantize_per_tensor
    return is_int8 and conv.stride[-1] > 1 and int(conv.weight.meta["val"].shape[-1]) > 1

"""The OpenVINO backend: the quantized graph computed by OpenVINO's CPU plugin. Needs the package openvino."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from nc.backends.base import VERIFY, Backend, EngineModel, Exporter, Option
from nc.backends.onednn_capabilities import onednn_capabilities
from nc.backends.openvino import lower, write
from nc.formats import Capabilities, OpSupport
from nc.graph.qdq import QDQGraph
from nc.kernels import cpu

NAME = "openvino"
_INSTALL = "pip install 'nc-quant[openvino]'"
_ACTIVATIONS = ("uint8", "int8")
_WIDE = "with VNNI or AMX"
_TRANSPOSED = f"groups=1 per channel, else per tensor; {_WIDE}"

#: Kinds whose int8 kernels need VNNI or AMX.
_WIDE_KINDS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul"})
OPS = (
    OpSupport(kind="linear", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv1d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv2d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv3d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv_transpose1d", activations=_ACTIVATIONS, weights=("int8",), note=_WIDE),
    OpSupport(kind="conv_transpose2d", activations=_ACTIVATIONS, weights=("int8",), note=_TRANSPOSED),
    OpSupport(kind="conv_transpose3d", activations=_ACTIVATIONS, weights=("int8",), note=_TRANSPOSED),
    OpSupport(kind="matmul", activations=("int8",), symmetric=True, note=f"symmetric; {_WIDE}"),
    OpSupport(kind="add", activations=_ACTIVATIONS, note="as a post-operation of a convolution or linear"),
)


class OpenVINOBackend(Backend):
    """See the module text."""

    name = NAME
    options: Mapping[str, Option] = {"verify_sizes": Option((True, False), protects=True)}
    exports: Mapping[str, Exporter] = {
        "openvino": Exporter(write.write, ".xml", {"verify": VERIFY}, from_graph=True)
    }
    packages = ("openvino",)

    def why_unavailable(self) -> str:
        """Return what is missing and what to install; "" when it can run. Imports nothing of OpenVINO."""
        if importlib.util.find_spec("openvino") is None:
            return f"openvino is not installed: {_INSTALL}."
        if "avx2" not in cpu.machine_features():
            return 'this CPU lacks AVX2, which int8 kernels need; use backend="reference".'
        if "avx512f" in cpu.machine_features() and not cpu.accumulates_wide():
            return (
                f"this CPU has AVX-512 without VNNI{cpu.why_narrow()}: the 16-bit sums of OpenVINO's kernels "
                "there overflow also with "
                'weights that nc has reduced; use backend="native".'
            )
        return ""

    def capabilities(self) -> Capabilities:
        """Return what the CPU plugin computes in int8.

        Without VNNI it computes neither products of two activations nor transposed convolutions.

        It has no static kernel for ranges that are found in each call.
        """
        ops = OPS if cpu.accumulates_wide() else tuple(row for row in OPS if row.kind not in _WIDE_KINDS)
        return onednn_capabilities(NAME, ops, bf16=True)

    def lower(self, graph: QDQGraph, **options: Any) -> EngineModel:
        """See `lower.lower`; raises BackendUnavailableError when it can't run here."""
        self.start()
        return lower.lower(graph, **options)

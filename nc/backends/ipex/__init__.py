"""Intel Extension for PyTorch: TorchScript → freeze → warm-up → oneDNN-graph fusion.

The only folder that imports IPEX, and only to use it.

IPEX ended with 2.8.0, for torch 2.8; its repository is archived.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from packaging.version import Version

from nc.backends.base import Backend, EngineModel, Exporter, Option, check_available, write_script
from nc.backends.ipex.capture_passes import CAPTURE_PASSES, right_layer_norms
from nc.backends.ipex.low_bit import IPEX_WOQ
from nc.backends.onednn_capabilities import onednn_capabilities
from nc.formats import Capabilities, OpSupport
from nc.graph.qdq import QDQGraph
from nc.kernels import cpu
from nc.kernels.low_bit.kernel import LowBitKernel

NAME = "ipex"
_PACKAGE = "intel-extension-for-pytorch"
_INSTALL = "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0 (or pip install 'nc-quant[ipex]')"
_ACTIVATIONS = ("uint8", "int8")

OPS = (
    OpSupport(
        kind="linear", activations=_ACTIVATIONS, weights=("int8",), dynamic=("per_token", "per_tensor")
    ),
    OpSupport(kind="conv1d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv2d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv3d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(kind="conv_transpose1d", activations=_ACTIVATIONS, weights=("int8",)),
    OpSupport(
        kind="conv_transpose2d",
        activations=_ACTIVATIONS,
        weights=("int8",),
        note="groups=1 per channel, else per tensor",
    ),
    OpSupport(
        kind="conv_transpose3d",
        activations=_ACTIVATIONS,
        weights=("int8",),
        note="groups=1 per channel, else per tensor",
    ),
    OpSupport(
        kind="matmul",
        activations=_ACTIVATIONS,
        note="both sides of 2 or at least 4 dimensions; 3-D is run as 4-D",
    ),
    *(
        OpSupport(
            kind=kind,
            weights=("int8",),
            dynamic=("per_tensor",),
            affine_only=True,
            note="torch's own dynamic kernel",
        )
        for kind in ("lstm", "gru", "lstm_cell", "gru_cell")
    ),
    OpSupport(kind="add", activations=_ACTIVATIONS, note="as a post-operation of a convolution or linear"),
)

#: For int8 activations oneDNN itself halves the weights of these.
_HALVED = frozenset(row.kind for row in OPS if row.kind.startswith("conv"))


class IpexBackend(Backend):
    """See the module text."""

    name = NAME
    options: Mapping[str, Option] = {
        "isolate": Option(("auto", "always", "never"), protects=True),
        "verify_sizes": Option((True, False), protects=True),
    }
    exports: Mapping[str, Exporter] = {"torchscript": Exporter(write_script)}
    capture_passes = CAPTURE_PASSES
    packages = (_PACKAGE,)

    def around_model(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """See `right_layer_norms`."""
        return right_layer_norms(model)

    def low_bit_kernels(self) -> tuple[LowBitKernel, ...]:
        """Kernels for low-bit weights."""
        return (IPEX_WOQ,)

    def why_unavailable(self) -> str:
        """Return what is missing and what to install; "" when it can run.

        Looks at versions only, imports nothing of IPEX.
        """
        try:
            ipex = Version(importlib.metadata.version(_PACKAGE))
        except importlib.metadata.PackageNotFoundError:
            return f"{_PACKAGE} is not installed: {_INSTALL}."
        torch_version = Version(importlib.metadata.version("torch"))
        if ipex.release[:2] != torch_version.release[:2]:
            return (
                f"{_PACKAGE} {ipex} needs torch {ipex.major}.{ipex.minor}, but torch is {torch_version}: "
                f"{_INSTALL}."
            )
        if "avx2" not in cpu.machine_features():
            return 'this CPU lacks AVX2, which IPEX needs; use backend="reference".'
        return ""

    def capabilities(self) -> Capabilities:
        """Return what the fuser takes, and torch's dynamic kernels."""
        return onednn_capabilities(NAME, OPS, halved=_HALVED)

    def start(self) -> None:
        """Import IPEX, which registers its fusion pass and a layer norm for fp32.

        The last digits of that layer norm are others than torch's.

        Raises:
            BackendUnavailableError: IPEX can't run here.
        """
        check_available(self)
        from nc.backends.ipex.quiet import import_ipex

        import_ipex()

    def lower(self, graph: QDQGraph, **options: Any) -> EngineModel:
        """See `lower.lower`; raises BackendUnavailableError when IPEX can't run here."""
        self.start()
        from nc.backends.ipex.lower import lower

        return lower(graph, **options)

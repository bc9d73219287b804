"""The native backend: the int8 oneDNN operators of stock PyTorch, called one by one. Needs only torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.base import VERIFY, Backend, EngineModel, Exporter, Option, ThreadCounts, check_available
from nc.backends.native import decode, lower, package, runner_folder
from nc.backends.onednn_capabilities import onednn_capabilities
from nc.formats import Capabilities, OpSupport
from nc.graph.catalogue import RECURRENT
from nc.graph.qdq import QDQGraph
from nc.kernels import cpu
from nc.kernels.low_bit.aten import DYN_QUANT_4BIT, INT4PACK, INT8PACK
from nc.kernels.low_bit.bag import BAG
from nc.kernels.low_bit.blocks import BLOCKS, BLOCKS_BF16
from nc.kernels.low_bit.compiled import KERNELS as IN_C
from nc.kernels.low_bit.compiled_blocks import KERNELS as IN_C_BY_BLOCKS
from nc.kernels.low_bit.kernel import LowBitKernel
from nc.nn import QuantLinear
from nc.process.lock import LOCK

NAME = "native"
_ACTIVATIONS = ("uint8", "int8")
_NEEDED = ("qlinear_prepack", "qlinear_pointwise", "qconv_prepack", "qconv2d_pointwise")
_ROWS = ("per_token", "per_tensor")
_PLANS = "in plans of oneDNN primitives"
_IMAGES = ("per_tensor",)
_ON_REQUEST = f"dynamic: where a rule names it, {_PLANS}"
_TRANSPOSED = f"groups=1 per channel, else per tensor; {_PLANS}"

OPS = (
    OpSupport(
        kind="linear", activations=_ACTIVATIONS, weights=("int8",), dynamic=("per_token", "per_tensor")
    ),
    OpSupport(kind="conv1d", activations=_ACTIVATIONS, weights=("int8",), dynamic=_IMAGES, note=_ON_REQUEST),
    OpSupport(kind="conv2d", activations=_ACTIVATIONS, weights=("int8",), dynamic=_IMAGES, note=_ON_REQUEST),
    OpSupport(kind="conv3d", activations=_ACTIVATIONS, weights=("int8",), dynamic=_IMAGES, note=_ON_REQUEST),
    OpSupport(kind="conv_transpose1d", activations=_ACTIVATIONS, weights=("int8",), note=_TRANSPOSED),
    OpSupport(kind="conv_transpose2d", activations=_ACTIVATIONS, weights=("int8",), note=_TRANSPOSED),
    OpSupport(kind="conv_transpose3d", activations=_ACTIVATIONS, weights=("int8",), note=_TRANSPOSED),
    OpSupport(kind="matmul", activations=_ACTIVATIONS, dynamic=("per_token",), affine_only=True, note=_PLANS),
    *(
        OpSupport(kind=kind, weights=("int8",), dynamic=_ROWS, projections=("per_token",), affine_only=True)
        for kind in ("lstm", "gru")
    ),
    *(
        OpSupport(kind=kind, weights=("int8",), dynamic=_ROWS, affine_only=True)
        for kind in ("lstm_cell", "gru_cell")
    ),
    *(
        OpSupport(kind=kind, weights=("int8",), dynamic=("per_token",), affine_only=True)
        for kind in ("rnn", "rnn_cell")
    ),
    OpSupport(kind="add", activations=_ACTIVATIONS, note="as a post-operation of a convolution or linear"),
)


class NativeBackend(Backend):
    """See the module text."""

    name = NAME
    packs_weights = True
    options: Mapping[str, Option] = {
        "compile": Option((False, True)),
        "verify_sizes": Option((True, False), protects=True),
        "verify_kernels": Option((lower.ALWAYS, lower.IN_DOUBT), protects=True),
        "padding": Option((lower.SKIPPED, lower.COMPUTED), protects=True),
    }
    exports: Mapping[str, Exporter] = {
        "pt2": Exporter(
            package.write, options={"free_sizes": Option((False, True)), "verify": VERIFY}, from_graph=True
        ),
        "runner": Exporter(
            runner_folder.write,
            options={"threads": ThreadCounts(()), "verify": VERIFY},
            from_graph=True,
            folder=runner_folder.FORMAT,
        ),
    }

    def why_unavailable(self) -> str:
        """Return what this torch or CPU lacks; "" when it can run."""
        missing = [name for name in _NEEDED if not hasattr(torch.ops.onednn, name)]
        if missing:
            return f"torch {torch.__version__} has no onednn::{missing[0]}: pip install 'torch>=2.8'."
        if "avx2" not in cpu.machine_features():
            return 'this CPU lacks AVX2, which oneDNN\'s int8 kernels need; use backend="reference".'
        return ""

    def capabilities(self) -> Capabilities:
        """Return what the kernels take.

        Codes of int8 activations are shifted to uint8, so without VNNI they saturate alike.

        Recurrent layers with ranges per row, and attention, run in nc's C code, which sums exactly on every
        CPU.
        """
        return onednn_capabilities(
            NAME, OPS, exact=frozenset((kind, "per_token") for kind in (*RECURRENT, "matmul")), bf16=True
        )

    def low_bit_kernels(self) -> tuple[LowBitKernel, ...]:
        """Kernels for low-bit weights, the preferred ones first."""
        return (*IN_C, *IN_C_BY_BLOCKS, INT4PACK, INT8PACK, DYN_QUANT_4BIT, BAG, BLOCKS_BF16, BLOCKS)

    def plan_token(
        self, module: fx.GraphModule, layers: Sequence[QuantLinear]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """See `decode.planned_step`; raises BackendUnavailableError where this machine can have no plans."""
        return decode.planned_step(module, layers)

    def start(self) -> None:
        """Nothing to import.

        Hides torch 2.13's warning that quantized tensors are deprecated, because users cannot act on it.

        Raises:
            BackendUnavailableError: it can't run here.
        """
        check_available(self)
        with LOCK, warnings.catch_warnings():  # torch says it once per process
            warnings.simplefilter("ignore")
            torch.quantize_per_tensor(torch.zeros(1, dtype=torch.float32), 1.0, 0, torch.quint8)

    def lower(self, graph: QDQGraph, **options: Any) -> EngineModel:
        """See `lower.lower`; raises BackendUnavailableError when it can't run here."""
        self.start()
        return lower.lower(graph, **options)

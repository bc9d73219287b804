"""Which operators of an ONNX file can saturate on CPUs without VNNI.

There ONNX Runtime's kernels for unsigned activations and signed weights add two products in 16 bits
(`vpmaddubsw`, in MLAS, its library of kernels). Which weights make a pair differs from oneDNN for
convolutions: they become products of matrices whose rows go through all positions of the kernel, at each
through the input channels of a group, and two neighbours of a row are a pair.
"""

from __future__ import annotations

import torch

from nc.formats import Capabilities
from nc.graph import saturation
from nc.graph.qdq import QDQGraph
from nc.numerics.int16_pairs import fit
from nc.numerics.weights import pairs_fit

_KINDS = ("linear", "conv1d", "conv2d", "conv3d", "matmul")
#: Kernels of CPUs without VNNI; ranges of each call are computed in fp32.
WITHOUT_VNNI = Capabilities(
    backend="onnx",
    ops=(),
    narrow_sums=frozenset((kind, dtype) for kind in _KINDS for dtype in ("uint8", "int8")),
)


def saturating(graph: QDQGraph) -> tuple[str, ...]:
    """Return the operators that some input can make saturate on CPUs without VNNI.

    They are names, in execution order. They saturate if they run in int8.
    """
    return saturation.saturating(graph, WITHOUT_VNNI, _fit)


def _fit(codes: torch.Tensor, axis: int | None, groups: int, limit: int) -> bool:
    if axis != 0 or codes.dim() == 2:
        return pairs_fit(codes, axis, groups, limit)
    if codes.shape[:2] == (groups, 1):  # depthwise: separate kernels, which sum in 32 bits
        return True
    return fit(codes.movedim(1, -1).flatten(1), limit)

"""What an engine on oneDNN can run on this CPU."""

from __future__ import annotations

import dataclasses

from nc.formats import Capabilities, OpSupport
from nc.graph.catalogue import CONVOLUTIONS
from nc.kernels import cpu


def onednn_capabilities(
    backend: str,
    ops: tuple[OpSupport, ...],
    *,
    halved: frozenset[str] = frozenset(),
    exact: frozenset[tuple[str, str]] = frozenset(),
    bf16: bool = False,
) -> Capabilities:
    """Return what a backend on oneDNN, with dynamic kernels of FBGEMM, can run here.

    Args:
        backend: its name.
        ops: its table.
        bf16: it computes in bf16 where this CPU does.
        halved: kinds for whose int8 activations oneDNN halves the weights itself, so that they can't
            saturate.
        exact: (kind, granularity) of dynamic ranges for which the backend has its own kernels, whose sums are
            exact.
    """
    narrow: set[tuple[str, str]] = set()
    windows = [row for row in ops if row.kind in CONVOLUTIONS]  # oneDNN computes these, also dynamic ones
    if not cpu.accumulates_wide():
        narrow |= {(row.kind, dtype) for row in ops for dtype in row.activations if row.kind != "add"}
        narrow -= {(kind, "int8") for kind in halved}
        narrow |= {(row.kind, granularity) for row in windows for granularity in row.dynamic}
    if not cpu.fbgemm_accumulates_wide():
        others = (row for row in ops if row.kind not in CONVOLUTIONS)
        narrow |= {(row.kind, granularity) for row in others for granularity in row.dynamic} - exact
    fused_add = frozenset({"conv1d", "conv2d", "conv3d", "linear"})
    found = Capabilities(
        backend=backend,
        ops=ops,
        narrow_sums=frozenset(narrow),
        isa=cpu.relied_on(),
        fused_add=fused_add,
    )
    if not bf16:
        return found
    why = "" if cpu.BF16 in cpu.machine_features() else f"this CPU has no AVX512-BF16{cpu.why_narrow()}"
    return dataclasses.replace(found, why_no_bf16=why, bf16_isa=(cpu.BF16,))

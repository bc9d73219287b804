"""IPEX's own kernel for linears with low-bit weights, which is refused."""

from __future__ import annotations

from nc.kernels.low_bit.kernel import LowBitKernel

IPEX_WOQ = LowBitKernel(
    name="ipex weight-only",
    what="IPEX's WeightOnlyQuantizedLinear",
    bits=(4, 8),
    floats=("nf4",),
    refused=(
        "without AVX512-FP16 it dequantizes the whole weight in each call; with it, nc has no row for it yet"
    ),
)

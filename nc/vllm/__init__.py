"""A plug-in of vLLM: kernels for low-bit weights on CPUs, where vLLM has none.

vLLM finds `register` by its entry point `vllm.general_plugins`, in each of its processes. Nothing else of nc
needs vLLM.
"""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Let vLLM consider nc's kernel for weights of 2, 4 and 8 bits, after its own ones.

    vLLM takes the first kernel that can compute a layer: nc's for 2 and 8 bits, for sizes that are no
    multiples of 32, and for 4 bits where `VLLM_DISABLED_KERNELS=CPUWNA16LinearKernel` is set.
    """
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms.interface import PlatformEnum

    from nc.vllm.linear import NCLinearKernel

    register_linear_kernel(NCLinearKernel, PlatformEnum.CPU)

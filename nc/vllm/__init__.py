"""A plug-in of vLLM: kernels for low-bit weights on CPUs, where vLLM has none.

vLLM finds `register` by its entry point `vllm.general_plugins`, in each of its processes. Nothing else of nc
needs vLLM.
"""

from __future__ import annotations

import functools

from nc.process.warn import warn


@functools.cache
def register() -> None:
    """Let vLLM consider nc's kernel for weights of 2, 4 and 8 bits, after its own ones.

    vLLM takes the first kernel that can compute a layer: nc's for 2 and 8 bits, for sizes that are no
    multiples of 32, and for 4 bits where `VLLM_DISABLED_KERNELS=CPUWNA16LinearKernel` is set.

    vLLM calls this wherever nc is installed. One that has no such kernels goes on without nc's, with an
    `NCWarning`.
    """
    try:
        from vllm.model_executor.kernels.linear import register_linear_kernel
        from vllm.platforms.interface import PlatformEnum

        from nc.vllm.linear import NCLinearKernel
    except ImportError as error:
        warn(f"nc's kernels are not used in vLLM, which has to be 0.32 or alike: {error}.")
        return
    register_linear_kernel(NCLinearKernel, PlatformEnum.CPU)

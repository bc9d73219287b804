"""Linears of compressed-tensors folders in vLLM, by nc's kernels for low-bit weights.

The contract is that of `vllm.model_executor.kernels.linear.MPLinearKernel` (vLLM 0.32).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from nc.interchange.layer import GroupCodes, codes_in, layer_of
from nc.kernels.low_bit import compiled
from nc.nn import QuantLinear

#: vLLM's type of a code → its bits.
_BITS = {
    **{scalar_types.uint2b2: 2, scalar_types.uint4b8: 4, scalar_types.uint8b128: 8},
    **{scalar_types.uint2: 2, scalar_types.uint4: 4, scalar_types.uint8: 8},
}
_DTYPES = (torch.float32, torch.bfloat16)
#: Where schemes with int8 activations keep what they know of them.
_ACTIVATIONS = "_humming_input_quant_config"


class NCLinearKernel(MPLinearKernel):  # type: ignore[misc] # vLLM has no annotations here
    """Computes y = x W^T + bias with the integers of a folder.

    Activations are int8 with a scale for each token where the folder says so, else floats.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least capability of a GPU: none is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether the kernel computes such layers, and why not."""
        reasons = (
            (not current_platform.is_cpu(), "nc computes on CPUs"),
            (c.weight_type not in _BITS, f"nc has no kernel for {c.weight_type}"),
            (c.act_type not in _DTYPES, f"nc computes in fp32 and bf16, not in {c.act_type}"),
            (
                c.group_size != -1 and c.partition_weight_shape[0] % c.group_size != 0,
                f"groups of {c.group_size} do not divide {c.partition_weight_shape[0]} inputs",
            ),
            (bool(compiled.why_unavailable()), f"nc's kernels: {compiled.why_unavailable()}"),
        )
        why = next((reason for is_so, reason in reasons if is_so), None)
        return why is None, why

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Take the integers of a layer over, and leave empty parameters there.

        Raises:
            ValueError: they are not packed as compressed-tensors packs them.
        """
        packed, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        zero = getattr(layer, self.w_zp_name) if self.config.zero_points else None
        if (packed.output_dim, packed.packed_dim) != (0, 1):
            msg = "nc reads weights that are packed along their inputs, as compressed-tensors has them"
            raise ValueError(msg)
        bits, (inputs, outputs) = _BITS[self.config.weight_type], self.config.partition_weight_shape
        zeros = None if zero is None else codes_in(zero.data.t(), bits, outputs).t().contiguous()
        codes = GroupCodes(bits, codes_in(packed.data, bits, inputs), scale.data.float(), zeros)
        act_dtype = "int8" if getattr(layer, _ACTIVATIONS, None) else "fp32"
        stored = layer_of(codes, scale.dtype, type(layer).__name__, act_dtype)
        self._linear: Any = QuantLinear(
            stored.weight, None, stored.act_dtype, result_dtype=self.config.out_type or self.config.act_type
        )
        for parameter in filter(lambda parameter: parameter is not None, (packed, scale, zero)):
            parameter.data = parameter.data.new_empty(0)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` of shape [..., inputs] → [..., outputs]."""
        y: torch.Tensor = self._linear(x)
        return y if bias is None else y + bias

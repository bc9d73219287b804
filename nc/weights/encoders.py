"""Encoders of torch with low-bit layers: at padding they give what the float encoder gives.

In eval mode and without gradients `torch.nn.TransformerEncoder` leaves padding out, by nested tensors, and
gives zeros in its place. Packed weights keep it from that path.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from nc.capture.export_guards import zero_padding
from nc.modules.layers import has_low_bit


def zeros_at_padding(model: torch.nn.Module) -> None:
    """Let encoders with low-bit layers give zeros at padding where the float ones do."""
    for encoder in model.modules():
        if (
            not isinstance(encoder, torch.nn.TransformerEncoder)
            or type(encoder).forward is not torch.nn.TransformerEncoder.forward
        ):
            continue
        if getattr(encoder, "use_nested_tensor", False) and has_low_bit(encoder):
            hook = functools.partial(_zeros, getattr(encoder, "mask_check", True))
            encoder.layers[-1].register_forward_hook(hook, with_kwargs=True)


def _zeros(
    check: bool,
    layer: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: torch.Tensor,
) -> torch.Tensor:
    if layer.training or torch.is_grad_enabled() or output.is_nested:
        return output
    return zero_padding(output, args[0] if args else kwargs["src"], kwargs, check)

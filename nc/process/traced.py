"""Whether a graph is captured on this thread. Torch's own flags are for all threads."""

from __future__ import annotations

import torch


def in_trace(x: torch.Tensor) -> bool:
    """Tell whether a call with a tensor becomes part of a graph.

    While one thread captures, `torch.compiler.is_compiling()` is true on all others too. There tensors are
    plain, and no mode is active. Dynamo reads the first condition as true.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if not torch.compiler.is_compiling():
        return False
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return not plain or torch._C._len_torch_dispatch_stack() > 0

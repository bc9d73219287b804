"""What capture does because of engines that change torch's own kernels in the whole process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import fx


@dataclasses.dataclass(frozen=True, slots=True)
class Precautions:
    """See the module text; the backends of such engines list what they need.

    Attributes:
        rewrites: change the exported graph in place, before all other rewrites.
        around: each gives a context for calls of the user's model, in which it computes what torch alone
            would compute.
    """

    rewrites: tuple[Callable[[fx.GraphModule], object], ...] = ()
    around: tuple[Callable[[torch.nn.Module], AbstractContextManager[object]], ...] = ()


NO_PRECAUTIONS = Precautions()

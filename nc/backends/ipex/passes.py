"""What is done to a QDQ graph before IPEX sees it: one visible, ordered list."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from nc.backends.ipex.layout import make_row_major, pack_operands_of_products, put_batches_outermost
from nc.backends.ipex.workarounds import WORKAROUNDS
from nc.backends.passes import Pass


def passes(inputs: Sequence[torch.Tensor]) -> tuple[Pass, ...]:
    """All passes, in order.

    Args:
        inputs: flat inputs on which the layout of every tensor is found; no free dimension is of size 1.
    """
    layout = functools.partial(make_row_major, inputs=inputs)
    packed = functools.partial(pack_operands_of_products, inputs=inputs)
    outermost = functools.partial(put_batches_outermost, inputs=inputs)
    return (
        Pass(
            "memory_layout", layout, avoids="compiles for the strides of its first run, for all later shapes"
        ),
        Pass("batch_within", outermost, avoids="fails on its first run"),
        Pass("operand_with_gaps", packed, avoids="returns garbage"),
        *WORKAROUNDS,
    )

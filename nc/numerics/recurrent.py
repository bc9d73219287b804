"""LSTM and GRU with int8 weights and activations quantized in each step: what torch's dynamic kernels compute, in plain operators.

The input of a layer is quantized once for all steps, the hidden state in each step, both with affine codes and one range per tensor. Gates
are those of `torch.nn.LSTM` and `torch.nn.GRU`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from nc.numerics.dynamic import quantize_dequantize_dynamic

#: Gates of the input and of the hidden state, and the state before → the state after, whose first tensor is the output.
Cell = Callable[[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def lstm_dynamic(
    x: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and the last hidden and cell states, as `torch.nn.LSTM` gives them; `options` are those of `_layers`."""
    y, states = _layers(_lstm_cell, x, hx, params, *options)
    return y, torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])


def gru_dynamic(x: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the last hidden state, as `torch.nn.GRU` gives them; `options` are those of `_layers`."""
    y, states = _layers(_gru_cell, x, [hx], params, *options)
    return y, torch.stack([s[0] for s in states])


def _lstm_cell(gates: torch.Tensor, hidden: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    i, f, g, o = (gates + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(gates: torch.Tensor, hidden: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), hidden.chunk(3, -1)
    update = (z + hz).sigmoid()
    new = (n + (r + hr).sigmoid() * hn).tanh()
    return (new + update * (state[0] - new),)


def _layers(
    cell: Cell,
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    quant_min: int,
    quant_max: int,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """The output, and the last state of each layer and direction; options as in ATen's operators."""

    def quantized(values: torch.Tensor) -> torch.Tensor:
        return quantize_dequantize_dynamic(values, False, quant_min, quant_max, False)

    steps = x.transpose(0, 1) if batch_first else x
    weights = _weights(params, has_biases)
    finals = []
    for layer in range(num_layers):
        gathered = []
        for direction in range(1 + bidirectional):
            w_ih, w_hh, b_ih, b_hh = next(weights)
            state = tuple(h[layer * (1 + bidirectional) + direction] for h in hx)
            outputs = []
            gates = linear(quantized(steps), w_ih, b_ih).unbind(0)
            for gate in reversed(gates) if direction else gates:
                state = cell(gate, linear(quantized(state[0]), w_hh, b_hh), state)
                outputs.append(state[0])
            gathered.append(torch.stack(outputs[::-1] if direction else outputs))
            finals.append(state)
        steps = torch.cat(gathered, -1)
    return steps.transpose(0, 1) if batch_first else steps, finals


def _weights(
    params: Sequence[torch.Tensor], has_biases: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    each = 4 if has_biases else 2
    for i in range(0, len(params), each):
        yield params[i], params[i + 1], params[i + 2] if has_biases else None, params[i + 3] if has_biases else None

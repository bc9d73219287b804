"""LSTM, GRU and RNN with int8 weights and activations that are quantized in each step, in plain operators.

The input of a layer and the hidden state are quantized to affine codes, and so is the input of a projection.
There are two granularities. `per_token`: each row of each step has its own range, so a row of the result
depends on the same row of the input alone. Otherwise the input has one range for all steps, and the state one
for all rows of a step, as in torch's dynamic kernels. Gates are those of `torch.nn.LSTM`,
`torch.nn.GRU` and `torch.nn.RNN`. With `float_input` the first layer multiplies its input in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from nc.numerics.dynamic import quantize_dequantize_dynamic

#: Gates of the input and of the hidden state, and the state before → the state after, whose first tensor is
#: the output.
Cell = Callable[[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def lstm_dynamic(
    x: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute an LSTM; return the output and the last hidden and cell states, as `torch.nn.LSTM` does.

    `options` are those of `_layers`.
    """
    y, states = _layers(_lstm_cell, x, hx, params, *options)
    return y, torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])


def gru_dynamic(
    x: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a GRU; return output and last hidden state, as `torch.nn.GRU`. For `options` see `_layers`."""
    y, states = _layers(_gru_cell, x, [hx], params, *options)
    return y, torch.stack([s[0] for s in states])


def rnn_dynamic(
    x: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *options: Any, relu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute an RNN; return output and last hidden state, as `torch.nn.RNN`. For `options` see `_layers`."""
    y, states = _layers(
        functools.partial(_rnn_cell, torch.relu if relu else torch.tanh), x, [hx], params, *options
    )
    return y, torch.stack([s[0] for s in states])


def _lstm_cell(
    gates: torch.Tensor, hidden: torch.Tensor, state: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    i, f, g, o = (gates + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    gates: torch.Tensor, hidden: torch.Tensor, state: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), hidden.chunk(3, -1)
    update = (z + hz).sigmoid()
    new = (n + (r + hr).sigmoid() * hn).tanh()
    return (new + update * (state[0] - new),)


def _rnn_cell(
    function: Callable[[torch.Tensor], torch.Tensor],
    gates: torch.Tensor,
    hidden: torch.Tensor,
    state: tuple[torch.Tensor, ...],  # of a `Cell`
) -> tuple[torch.Tensor, ...]:
    return (function(gates + hidden),)


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
    per_token: bool,
    float_input: bool,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """Return the output, and the last state of each layer and direction; options as in ATen's operators."""

    def quantized(values: torch.Tensor) -> torch.Tensor:
        return quantize_dequantize_dynamic(values, per_token, quant_min, quant_max, False)

    steps = x.transpose(0, 1) if batch_first else x
    weights = weights_of_layers(params, has_biases, num_layers * (1 + bidirectional))
    finals = []
    for layer in range(num_layers):
        gathered = []
        for direction in range(1 + bidirectional):
            w_ih, w_hh, b_ih, b_hh, w_hr = next(weights)
            state = tuple(h[layer * (1 + bidirectional) + direction] for h in hx)
            outputs = []
            read = steps if float_input and layer == 0 else quantized(steps)
            gates = linear(read, w_ih, b_ih).unbind(0)
            for gate in reversed(gates) if direction else gates:
                state = cell(gate, linear(quantized(state[0]), w_hh, b_hh), state)
                if w_hr is not None:
                    state = (linear(quantized(state[0]), w_hr), *state[1:])
                outputs.append(state[0])
            gathered.append(torch.stack(outputs[::-1] if direction else outputs))
            finals.append(state)
        steps = torch.cat(gathered, -1)
    return steps.transpose(0, 1) if batch_first else steps, finals


RecurrentWeights = tuple[Any, Any, Any, Any, Any]


def weights_of_layers(params: Sequence[Any], has_biases: bool, layers: int) -> Iterator[RecurrentWeights]:
    """For each of so many layers and directions: input and hidden matrix, biases of both, and the projection.

    For none it is None.
    """
    each = len(params) // layers
    for i in range(0, len(params), each):
        biases = params[i + 2 : i + 4] if has_biases else (None, None)
        projection = params[i + each - 1] if has_projections(params, has_biases, layers) else None
        yield params[i], params[i + 1], *biases, projection


def has_projections(params: Sequence[Any], has_biases: bool, layers: int) -> bool:
    """Return whether each layer and direction has a matrix after its gates (`proj_size`)."""
    return len(params) == layers * (5 if has_biases else 3)

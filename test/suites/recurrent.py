"""Recurrent layers in float64."""

import torch
from torch import nn


def float64_layers(layer, x, states, weight_of, *, float_input=False):
    """All outputs and last states of a recurrent layer in float64, each product's input rounded row by row.

    With `float_input` what the first layer reads is not.
    """
    steps = (x.transpose(0, 1) if layer.batch_first else x).double()
    last = []

    def rounded(values):
        low, high = values.amin(-1, keepdim=True).clamp_max(0), values.amax(-1, keepdim=True).clamp_min(0)
        scale = torch.where(high - low < 2.0**-100, 1.0, (high - low) / 255).float().double()
        zero = (-torch.round(low / ((high - low) / 255).clamp_min(2.0**-110))).clamp(0, 255)
        return ((values.float() / scale.float()).round().double() + zero).clamp(0, 255).sub(zero) * scale

    for index in range(layer.num_layers):
        sides = []
        for direction in range(1 + layer.bidirectional):
            name = f"l{index}" + "_reverse" * direction
            w, u = weight_of(f"weight_ih_{name}"), weight_of(f"weight_hh_{name}")
            b, d = (getattr(layer, f"bias_{k}_{name}").double() if layer.bias else 0.0 for k in ("ih", "hh"))
            state = [s[len(last)].double() for s in states]
            outputs = []
            for step in reversed(steps) if direction else steps:
                read = step if float_input and index == 0 else rounded(step)
                gates, hidden = read @ w.T + b, rounded(state[0]) @ u.T + d
                if isinstance(layer, nn.LSTM):
                    i, f, g, o = (gates + hidden).chunk(4, -1)
                    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
                    h = o.sigmoid() * c.tanh()
                    state = [rounded(h) @ weight_of(f"weight_hr_{name}").T if layer.proj_size else h, c]
                elif isinstance(layer, nn.GRU):
                    (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), hidden.chunk(3, -1)
                    z, n = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
                    state = [(1 - z) * n + z * state[0]]
                else:
                    state = [
                        (gates + hidden).relu() if layer.nonlinearity == "relu" else (gates + hidden).tanh()
                    ]
                outputs.append(state[0])
            sides.append(torch.stack(outputs[::-1] if direction else outputs))
            last.append(state)
        steps = torch.cat(sides, -1)
    return [
        steps.transpose(0, 1) if layer.batch_first else steps,
        *(torch.stack(s) for s in zip(*last, strict=True)),
    ]

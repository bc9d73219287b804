"""Recurrent layers with a range for each row of each step as calls of the function in C, in plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native import recurrent
from nc.backends.native.plans.c_functions import converted
from nc.backends.native.plans.layouts import in_rows
from nc.backends.native.plans.operands import PlanTensor
from nc.backends.native.plans.recorder import Recorder
from nc.backends.native.plans.ways import PlannedOperator, need
from nc.graph.catalogue import schema_arguments
from nc.kernels.onednn.descriptions import contiguous_strides

#: Numbers of the gates of all steps and rows that plans hold memory for. Where there are more, torch calls
#: the operator, which gives the memory back.
_MOST_GATES = 2**24


def layers(recorder: Recorder, node: fx.Node, a: Mapping[str, Any]) -> Sequence[PlanTensor]:
    """Record the calls of all layers and directions; returns the output and the last states."""
    x, hx = recorder.read(a["x"]), [recorder.read(h) for h in a["hx"]]
    matrices = recurrent.matrices_of([recorder.optional_constant(part) for part in a["packed"]])
    kind, hidden, directions = a["kind"], a["hidden"], 1 + a["bidirectional"]
    state = recurrent.state_of(matrices, hidden)
    sizes = (a["num_layers"] * directions, a["features"], (state, hidden))
    recurrent.check(x.tensor, [h.tensor for h in hx], *sizes, batch_first=a["batch_first"])
    steps = PlanTensor(x.tensor.transpose(0, 1), x.root) if a["batch_first"] else x
    before = tuple(steps.tensor.shape[:2])
    gates = recurrent.gates_of(kind, hidden)
    need(before[1], "it has no row")
    need(before[0] * before[1] * gates <= _MOST_GATES, "its gates take more memory than a plan holds")
    of_states = schema_arguments(node)["hx"]  # a copy is not a kernel of the layers
    last = [converted(recorder, n, h, torch.float32) for n, h in zip(of_states, hx, strict=True)]
    code = recurrent.available()
    function = dataclasses.replace(code.function, name=f"recurrent {code.isa()}")
    for layer in range(a["num_layers"]):
        if steps.tensor.stride(-1) != 1:
            steps = in_rows(recorder, steps, node)
        shape = (*before, directions * state)
        output = recorder.new(shape, contiguous_strides(shape), torch.float32)
        for direction in range(directions):
            index = layer * directions + direction
            part = PlanTensor(output.tensor[..., direction * state :], output.root)
            fields = recurrent.fields_of(
                steps.tensor,
                part.tensor,
                state,
                matrices[index],
                kind,
                reverse=direction == 1,
                hidden=hidden,
                threads=recorder.threads,
            )
            states = [PlanTensor(h.tensor[index], h.root) for h in last]
            cells = states[1] if len(states) > 1 else recurrent.NOTHING
            flat = (before[0] * before[1] * gates,)
            room = recorder.new(flat, (1,), torch.float32)
            given = [part, steps, states[0], cells, room, *recurrent.in_order(matrices[index])]
            recorder.call_function(function, fields, given, node)
        steps = output
    result = PlanTensor(steps.tensor.transpose(0, 1), steps.root) if a["batch_first"] else steps
    return [result, *last]


OPERATORS = (PlannedOperator((recurrent.recurrent_layers(),), {"C": layers}),)

"""What the graph says of LSTM and GRU nodes of ATen."""

from __future__ import annotations

import torch
from torch import fx

from nc.graph.catalogue import RECURRENT, kind_of_node, schema_arguments
from nc.spec.reasons import Cause, Reason


def why_not_recurrent(node: fx.Node) -> Reason | None:
    """Why an LSTM or GRU can't be quantized; None when it can."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target._overloadname != "input":
        return Cause.PACKED_SEQUENCE()
    weights = weights_of(node)
    if any(not isinstance(w, fx.Node) or w.op != "get_attr" for w in weights):
        return Cause.COMPUTED_WEIGHTS()
    if any(w.meta["val"].dtype != torch.float32 for w in weights):
        return Cause.WEIGHTS_NOT_FP32()
    arguments = schema_arguments(node)
    layers = arguments["num_layers"] * (1 + arguments["bidirectional"])
    if len(weights) != layers * (4 if arguments["has_biases"] else 2):
        return Cause.PROJECTIONS()
    return None


def weights_of(node: fx.Node) -> list[fx.Node]:
    """Matrices and biases: for each layer and direction input, hidden, and the biases of both."""
    return list(schema_arguments(node)["params"])


def is_recurrent(node: fx.Node) -> bool:
    """Whether a node is an LSTM or GRU, of ATen or of `nc`."""
    return kind_of_node(node) in RECURRENT

"""What the graph says of recurrent layers and cells, of ATen and of `nc`."""

from __future__ import annotations

import torch
from torch import fx

from nc.formats.reasons import Cause, Reason
from nc.graph.catalogue import RECURRENT, kind_of_node, schema_arguments
from nc.graph.fx_utils import fqn_of
from nc.graph.views import RecurrentCell
from nc.numerics.recurrent import has_projections

#: The input matrices of the first layer stay fp32 up to this share of a layer's weights; see `float_weights`.
FLOAT_SHARE = 0.25
#: Kinds of single steps.
CELLS = frozenset({"lstm_cell", "gru_cell", "rnn_cell"})


def why_not_recurrent(node: fx.Node) -> Reason | None:
    """Why a recurrent layer or cell can't be quantized; None when it can."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target._overloadname == "data":
        return Cause.PACKED_SEQUENCE()
    weights = weights_of(node)
    if any(not isinstance(w, fx.Node) or w.op != "get_attr" for w in weights):
        return Cause.COMPUTED_WEIGHTS()
    if any(w.meta["val"].dtype != torch.float32 for w in weights):
        return Cause.WEIGHTS_NOT_FP32()
    return None


def weights_of(node: fx.Node) -> list[fx.Node]:
    """Matrices and biases.

    For each layer and direction they are input, hidden, the biases of both, and a projection if there is one.
    """
    if kind_of_node(node) in CELLS:
        cell = RecurrentCell.of(node)
        return [w for w in (cell.w_ih, cell.w_hh, cell.b_ih, cell.b_hh) if w is not None]
    return list(schema_arguments(node)["params"])


def float_weights(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the input matrices of the first layer, where they are a small part of all weights.

    What the first layer reads is not bounded as states are: channels of real features differ by five orders
    of magnitude, and one of them takes the whole range of a row. The product is small, and is computed for
    all steps at once. In fp32 it costs next to nothing, and the rest can be int8.
    """
    matrices = [w for w in weights_of(node) if w.meta["val"].dim() == 2]
    bidirectional = kind_of_node(node) not in CELLS and schema_arguments(node)["bidirectional"]
    each = len(matrices) // _directions(node)
    first = matrices[::each][: 1 + bidirectional]
    share = sum(w.meta["val"].numel() for w in first) / sum(w.meta["val"].numel() for w in matrices)
    return tuple(fqn_of(w) for w in first) if share <= FLOAT_SHARE else ()


def _directions(node: fx.Node) -> int:
    """Return the number of layers times that of directions."""
    if kind_of_node(node) in CELLS:
        return 1
    a = schema_arguments(node)
    return int(a["num_layers"] * (1 + a["bidirectional"]))


def is_projected(node: fx.Node) -> bool:
    """Return whether a node is an LSTM with projections (`proj_size`)."""
    if kind_of_node(node) != "lstm":
        return False
    a = schema_arguments(node)
    return has_projections(a["params"], a["has_biases"], _directions(node))


def is_recurrent(node: fx.Node) -> bool:
    """Return whether a node is a recurrent layer or cell, of ATen or of `nc`."""
    return kind_of_node(node) in RECURRENT

"""Kinds of ATen operators: the table that capture, rules and q/dq placement read.

Names are those of the operator without namespace and overload: "linear" for `aten.linear.default`.
The name of a node's operator is written on the node where the node comes from: `name_operators` for a graph
that was exported or loaded, `nc.graph.fx_utils` for a node that a pass makes or changes. `op_name` reads it.
The quantizable kind of a node is decided from it once, by `decide_kinds`, when a model is captured or loaded.
`kind_of_node` reads it.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from torch import fx

from nc.formats.reasons import Cause, Reason
from nc.graph.schemas import schema_of
from nc.graph.tensor_meta import TENSORS

#: Kinds with a constant weight. Each has the name of its operator.
WEIGHTED = frozenset(
    {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)
#: Those of them with a window that is read at each place of the result.
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
#: Kinds with two activations.
BINARY = frozenset({"matmul", "add"})
#: Kinds that can compute in bf16 where they do not in int8: where the multiply-adds are.
PRODUCTS = WEIGHTED | {"matmul"}
#: Recurrent layers, and single steps of them: integer compute with several constant weights, and most have a
#: tuple as result.
RECURRENT = frozenset({"lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell"})
#: Every quantizable kind.
KINDS = WEIGHTED | BINARY | RECURRENT
#: Operator name -> kind, where the two differ.
_OTHER_NAMES = {
    "bmm": "matmul",
    "mm": "matmul",
    "lstm_dynamic": "lstm",
    "gru_dynamic": "gru",
    **dict.fromkeys(("rnn_tanh", "rnn_relu", "rnn_dynamic"), "rnn"),
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell"), "rnn_cell"),
}

#: Elementwise operators that engines fuse into the integer operator before them.
ACTIVATIONS = frozenset(
    {
        "relu",
        "relu6",
        "hardtanh",
        "clamp",
        "gelu",
        "silu",
        "hardswish",
        "hardsigmoid",
        "sigmoid",
        "tanh",
        "leaky_relu",
        "prelu",
        "elu",
        "mish",
    }
)
#: Operators that only move values: codes pass through unchanged.
MOVES = frozenset(
    {
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "t",
        "contiguous",
        "clone",
        "squeeze",
        "unsqueeze",
        "expand",
        "slice",
        "select",
        "narrow",
        "chunk",
        "split",
        "split_with_sizes",
        "unbind",
        "pixel_shuffle",
        "channel_shuffle",
        "roll",
        "flip",
        "getitem",
        "movedim",
        "swapaxes",
        "index_select",
        "unsafe_chunk",
        "upsample_nearest2d",
    }
)
#: Operators whose output stays within the range of their input: they keep its scale and zero point, as
#: integer pools do in every engine.
POOLS = frozenset(
    {
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool2d",
    }
)
#: Operators that put several tensors together.
JOINS = frozenset({"cat", "concat", "stack"})

#: Float operators listed by `describe`, with the reason why they have no integer form.
FLOAT_OPS: dict[str, Reason] = {
    "embedding": Cause.LOOK_UP(),
    "embedding_bag": Cause.LOOK_UP(),
    "layer_norm": Cause.NORMALISATION(),
    "group_norm": Cause.NORMALISATION(),
    "instance_norm": Cause.NORMALISATION(),
    "batch_norm": Cause.LONE_BATCH_NORM(),
    "rms_norm": Cause.NORMALISATION(),
    "softmax": Cause.SOFTMAX(),
    "log_softmax": Cause.SOFTMAX(),
    "scaled_dot_product_attention": Cause.WHOLE_ATTENTION(),
    "einsum": Cause.REWRITABLE(kind="einsum", form="matmul"),
    "baddbmm": Cause.REWRITABLE(kind="baddbmm", form="matmul and add"),
}

#: Operators with a low-bit weight, float in and out.
LOW_BIT = frozenset({"quant_linear", "quant_embedding"})

#: Operators that do nothing in inference.
IDENTITIES = frozenset(
    {
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "detach",
        "detach_",
        "lift_fresh_copy",
        "lift_fresh",
        "alias",
        "dropout_",
    }
)
#: Checks that export puts into the graph; call inputs are checked by `Signature` instead.
CHECKS = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_functional_assert_async",
    }
)


#: Keys of `Node.meta`: the name of the operator, and the quantizable kind.
_NAME, _KIND = "operator_name", "kind"
#: What of a node's meta is about the operator that it calls.
OF_OPERATOR = frozenset({_NAME, _KIND})


def op_name(node: object) -> str:
    """Return the name of a node's operator ("linear"), see `name_of`.

    It is "" for nodes that are not calls, and for arguments that are not nodes.

    Raises:
        LookupError: the node does not carry it.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    if _NAME not in node.meta:
        msg = (
            f"Node {node.name!r} calls {node.target} and does not carry the name of this operator. Make "
            "nodes with nc.graph.fx_utils.call_function or call_operator, and change what they call with "
            "nc.graph.fx_utils.retarget."
        )
        raise LookupError(msg)
    name: str = node.meta[_NAME]
    return name


def name_operator(node: fx.Node) -> fx.Node:
    """Write the name of its operator on a node that calls one; returns the node."""
    if node.op == "call_function":
        node.meta[_NAME] = name_of(node.target)
    return node


def name_operators(graph: fx.Graph) -> None:
    """Write the names of their operators on all nodes of a graph that was exported or loaded."""
    for node in graph.nodes:
        name_operator(node)


def name_of(target: object) -> str:
    """Return the name of an operator without namespace and overload ("linear").

    It also knows those of `nc` ("quantize_per_tensor").

    Other namespaces keep theirs ("torchvision::nms"), and so does arithmetic on sizes ("operator.add"):
    neither is the ATen operator of that name.
    """
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).removeprefix("aten::").removeprefix("nc::")
    name = getattr(target, "__name__", str(target))
    if isinstance(target, types.BuiltinFunctionType) and target is not operator.getitem:
        return f"{target.__module__.lstrip('_')}.{name}"
    return name


def decide_kinds(module: fx.GraphModule) -> None:
    """Write the kind of every quantizable operator on its node, whose operators have names.

    Only capture and load call this.

    A pass that puts another operator in the place of one leaves the kind out, see `fx_utils.take_over`.
    """
    for node in module.graph.nodes:
        name = op_name(node)
        kind = _OTHER_NAMES.get(name, name)
        if kind in KINDS:
            node.meta[_KIND] = kind
        else:
            node.meta.pop(_KIND, None)  # a rewrite of capture may have copied it from another node


def kind_of_node(node: object) -> str | None:
    """Return the quantizable kind of a node ("linear", "matmul", …), as `decide_kinds` wrote it.

    None is returned for other nodes and values.

    Raises:
        LookupError: the node does not have the name of its operator: `decide_kinds` has not seen it.
    """
    return node.meta.get(_KIND) if isinstance(node, fx.Node) and op_name(node) else None


def is_float_tensor(node: object) -> TypeGuard[fx.Node]:
    """Return whether a node yields one float tensor."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(val, TENSORS) and val.dtype.is_floating_point


def first_input(node: fx.Node) -> fx.Node | None:
    """Return the node that an operator reads first.

    None is returned where its first argument is a number, a list, or missing.
    """
    first = _first_argument(node)
    return first if isinstance(first, fx.Node) else None


def input_node(node: fx.Node) -> fx.Node:
    """Return the node that an operator reads first, where captured graphs have nothing else there."""
    first = _first_argument(node)
    assert isinstance(first, fx.Node), f"the first argument of {node.name} is not a node"
    return first


def _first_argument(node: fx.Node) -> object:
    """Return the first argument of a call, also where it is given by name; None where there is none."""
    return node.args[0] if node.args else next(iter(schema_arguments(node).values()), None)


def works_in_place(node: fx.Node) -> bool:
    """Return whether an operator changes an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def may_be_view(node: fx.Node) -> bool:
    """Return whether the result may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and any(r.alias_info is not None for r in schema.returns)
        and not schema.is_mutable
        or op_name(node) in ("reshape", "contiguous", "flatten", "to", "getitem")
    )


def climb(node: fx.Node, through: Callable[[fx.Node], bool]) -> fx.Node:
    """Return the first node that is not `through`, from `node` up along first inputs.

    The climb also stops at a node whose first input is not a node.
    """
    while through(node) and (source := first_input(node)) is not None:
        node = source
    return node


def joined_inputs(node: fx.Node) -> Sequence[object]:
    """Return what an operator of `JOINS` puts together.

    The result is empty where that is one value, a list of unknown length.
    """
    parts = _first_argument(node)
    return parts if isinstance(parts, (list, tuple)) else ()


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by their schema name, with defaults filled in.

    {} for Python functions, which have no schema.
    """
    values: dict[str, Any] = {}
    args, kwargs = node.args, node.kwargs
    for i, argument in enumerate(schema_of(node.target)):
        if i < len(args):
            values[argument.name] = args[i]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        elif argument.has_default:
            values[argument.name] = argument.default_value
    return values


def weight_axis(node: fx.Node) -> int | None:
    """Return the output channel axis of a weighted operator's weight.

    None is returned when channels of several groups are mixed along it.
    """
    if not is_transposed(node):
        return 0
    return 1 if schema_arguments(node)["groups"] == 1 else None


def is_transposed(node: fx.Node) -> bool:
    """Return whether a node is a transposed convolution."""
    return (kind_of_node(node) or "").startswith("conv_transpose")


def groups_of(node: fx.Node) -> int:
    """Return the groups of a convolution; 1 for what has none.

    The operator has no `computed_options`.
    """
    return int(schema_arguments(node).get("groups", 1))


def computed_options(node: fx.Node) -> list[str]:
    """Return the names of the numbers of an operator, such as groups, that the graph computes from sizes."""
    values = schema_arguments(node)
    return [a.name for a in schema_of(node.target) if "Tensor" not in a.type and _has_node(values[a.name])]


def _has_node(value: object) -> bool:
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(part, fx.Node) for part in parts)

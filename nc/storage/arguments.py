"""The arguments of a stored call against the schema of its operator.

A graph that could not run is refused before it is built.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.errors import ConfigError
from nc.formats import DTYPES, dtype, granularity
from nc.formats.tensor_format import ROUND_METHODS, SCALE_ROUNDINGS
from nc.graph.catalogue import input_node, schema_arguments
from nc.graph.fx_utils import constant_of
from nc.graph.schemas import Argument, returns_of, schema_of
from nc.graph.views import Dequantize, Quantize, Recurrent
from nc.ops import (
    DEQUANTIZE,
    QUANTIZE,
    RECURRENT,
    dequantize_float,
    dequantize_per_channel,
    dequantize_per_tensor,
    from_bf16,
    quantize_float,
    to_bf16,
)

#: Types of a schema whose values JSON says by a tag.
_TAGGED: dict[str, type] = {
    "ScalarType": torch.dtype,
    "MemoryFormat": torch.memory_format,
    "Layout": torch.layout,
    "Device": torch.device,
}
#: Arguments by which an operator's result can have more values than what it reads.
_AMOUNTS = frozenset(
    ("size", "repeats", "output_size", "scale_factors", "s", "n", "m", "steps", "length", "num_classes")
    + ("window_length", "row", "col", "bins", "minlength", "n_fft")
)
#: Operators whose result has as many values as a tensor that they read says.
_COUNTED = ("aten.item", "aten.one_hot", "aten.repeat_interleave", "aten.bincount")
#: A tensor of fp32 with so many has 8 GB.
MOST_VALUES = 1 << 31
_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "number": (int, float, complex),
    "complex": (int, float, complex),
    "bool": (bool,),
    "str": (str,),
}
#: Index of the projection among the weights of a layer with biases.
_PROJECTION = 4
#: Codes of each dtype.
_CODES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def check(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError when an operator does not take these arguments.

    Args:
        target: an operator of the allow-list.
        args: values and nodes.
        kwargs: the same by name.
    """
    if not isinstance(target, torch._ops.OpOverload):
        _check_python(target, args, kwargs)
        return
    given = _by_name(target, args, kwargs)
    for argument in schema_of(target):
        if argument.name in given:
            _check_value(target, argument, given[argument.name])
        elif not argument.has_default:
            msg = f"{target} lacks its argument {argument.name!r}"
            raise ValueError(msg)
    _check_amount(target, given)
    if target.namespace == "nc":
        if kwargs:
            msg = f"arguments of {target} have no names in a stored graph"
            raise ValueError(msg)
        _check_qparams(given)


def _check_amount(target: torch._ops.OpOverload, given: Mapping[str, Any]) -> None:
    """Raise ValueError where numbers alone ask for more values than any tensor of a model has.

    It would be too late after the allocation.
    """
    asked = 1.0
    for name in _AMOUNTS & given.keys():
        value = given[name]
        values = value if isinstance(value, (list, tuple)) else (value,)
        asked *= math.prod(max(1.0, float(each)) for each in values if _is_number(each))
    asked *= max((1.0, *(float(each) for each in given.get("pad", ()) if _is_number(each))))
    if target.overloadpacket is torch.ops.aten.arange and _is_number(given["end"]):
        start, step = given.get("start", 0), given.get("step", 1)
        if _is_number(start) and _is_number(step) and step:
            asked *= abs((given["end"] - start) / step)
    if asked > MOST_VALUES:
        msg = f"{target} asks for {asked:.3g} values, more than {MOST_VALUES:.3g}"
        raise ValueError(msg)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _by_name(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Raises:
        ValueError: one is unknown, given twice, or too many.
    """
    arguments = schema_of(target)
    names = {a.name for a in arguments}
    if not set(kwargs) <= names:
        msg = f"{target} has no argument {', '.join(sorted(set(kwargs) - names))}"
        raise ValueError(msg)
    positional = [a for a in arguments if not a.kwarg_only]
    if len(args) > len(positional):
        msg = f"{target} takes {len(positional)} arguments, not {len(args)}"
        raise ValueError(msg)
    given = {a.name: value for a, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys():
        msg = f"{target} has an argument twice: {', '.join(given.keys() & kwargs.keys())}"
        raise ValueError(msg)
    return {**given, **kwargs}


def _check_value(target: torch._ops.OpOverload, argument: Argument, value: Any) -> None:
    """Raise ValueError for a value of another type than an argument has; `nc` takes no numbers as tensors."""
    is_number = not isinstance(value, fx.Node) or _yields(value) == "number"
    needs_tensor = target.namespace == "nc" and argument.type == "Tensor"
    if not _fits(argument.type, value, argument.length) or (needs_tensor and is_number):
        msg = f"{target}: argument {argument.name!r} should be {argument.type}, not {value!r}"
        raise ValueError(msg)


def check_codes(module: fx.GraphModule) -> None:
    """Raise ValueError if codes are not read as they were made.

    Engines merge the operators in between.

    Codes are constants, or made by a quantize node, and only dequantize nodes read those; scales of channels
    are constants.
    """
    for node in module.graph.nodes:
        _check_counts(module, node)
        what = _why_misread(node)
        if what:
            msg = f"node {node.name!r}: {what}"
            raise ValueError(msg)
        if node.target is from_bf16 and _dtype(module, input_node(node)) is not torch.bfloat16:
            msg = f"node {node.name!r} does not read bf16"
            raise ValueError(msg)
        if node.target in DEQUANTIZE:
            _check_dequantize(module, node)
        if node.target is dequantize_float:
            _check_dequantize_float(module, node)
        if node.target in RECURRENT.values():
            _check_recurrent(module, node)


def _check_counts(module: fx.GraphModule, node: fx.Node) -> None:
    """Raise ValueError where a constant asks for more values than any tensor of a model has."""
    if not str(node.target).startswith(_COUNTED):
        return
    for each in node.all_input_nodes:
        constant = constant_of(module, each) if each.op == "get_attr" else torch.empty(0, dtype=torch.int64)
        if constant.numel() and not constant.is_complex() and constant.max() > MOST_VALUES:
            msg = f"node {node.name!r}: {each.name!r} asks for {constant.max().item():.3g} values"
            raise ValueError(msg)


def _why_misread(node: fx.Node) -> str:
    """Return what is wrong with the readers of codes or bf16 that a node makes; "" if nothing is."""
    if node.target in QUANTIZE and not all(user.target in DEQUANTIZE for user in node.users):
        return "only dequantize nodes read codes"
    if node.target is quantize_float and not all(_has_dtype_of(user, node) for user in node.users):
        return "only dequantize nodes of the same dtype read codes"
    if node.target is to_bf16 and not all(user.target is from_bf16 for user in node.users):
        return "only from_bf16 reads bf16"
    return ""


def _has_dtype_of(reader: fx.Node, codes: fx.Node) -> bool:
    """Return whether a node dequantizes codes of the dtype that another one makes."""
    if reader.target is not dequantize_float:
        return False
    return bool(schema_arguments(reader)["dtype"] == schema_arguments(codes)["dtype"])


def _dtype(module: fx.GraphModule, node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a constant, or of what is rounded to bf16."""
    if node.op == "get_attr":
        return constant_of(module, node).dtype
    return torch.bfloat16 if node.target is to_bf16 else None


def _check_recurrent(module: fx.GraphModule, node: fx.Node) -> None:
    """Check the weights of a recurrent layer.

    Kernels take two int8 matrices, two fp32 biases and a projection for each layer and direction, all
    constant. With `float_input` the input matrices of the first layer are fp32.
    """
    layer = Recurrent.of(node)
    layers = layer.num_layers * (1 + layer.bidirectional)
    counts = [
        2 + 2 * layer.has_biases,
        *([3 + 2 * layer.has_biases] if node.target is RECURRENT["lstm"] else []),
    ]
    if layers < 1 or len(layer.params) not in [layers * count for count in counts]:
        msg = f"node {node.name!r}: {len(layer.params)} weights are none of {layers} layers"
        raise ValueError(msg)
    each = len(layer.params) // layers
    for state in [layer.hx] if isinstance(layer.hx, fx.Node) else layer.hx:
        constant = constant_of(module, state) if state.op == "get_attr" else None
        if constant is not None and (constant.dim() != 3 or constant.dtype is not torch.float32):
            msg = f"node {node.name!r}: {state.name!r} is not an fp32 state with three dimensions"
            raise ValueError(msg)
    _check_params(module, node, each)


def _check_params(module: fx.GraphModule, node: fx.Node, each: int) -> None:
    """Check that each matrix and bias of a recurrent layer is one; `each` direction has so many."""
    layer = Recurrent.of(node)
    first = {i * each for i in range(1 + layer.bidirectional)} if layer.float_input else set()
    for i, value in enumerate(layer.params):
        is_matrix = i % each < 2 or not layer.has_biases or i % each == _PROJECTION
        is_float = i in first or not is_matrix
        if not (_is_fp32(module, value, 1 + is_matrix) if is_float else _is_matrix(value)):
            what = f"{'fp32' if is_float else 'int8'} {'matrix' if is_matrix else 'bias'}"
            msg = f"node {node.name!r}: {value.name!r} is not an {what}"
            raise ValueError(msg)


def _is_fp32(module: fx.GraphModule, node: fx.Node, dims: int) -> bool:
    """Return whether a node is a constant in fp32 with so many dimensions."""
    if node.op != "get_attr":
        return False
    constant = constant_of(module, node)
    return constant.dtype is torch.float32 and constant.dim() == dims


def _is_matrix(node: fx.Node) -> bool:
    """Tell whether a node gives the values of an int8 matrix, with one scale or one for each of its rows."""
    is_per_row = node.target is dequantize_per_channel and Dequantize.of(node).axis == 0
    return node.target is dequantize_per_tensor or is_per_row


def _check_dequantize(module: fx.GraphModule, node: fx.Node) -> None:
    view = Dequantize.of(node)
    constant = constant_of(module, view.codes) if view.codes.op == "get_attr" else None
    made = Quantize.of(view.codes).dtype if view.codes.target in QUANTIZE else None
    dtype = made if constant is None else constant.dtype
    if dtype is not view.dtype:
        msg = f"node {node.name!r}: {view.codes.name!r} gives no codes of {view.dtype}"
        raise ValueError(msg)
    if view.axis is None or view.group_size is not None:
        return
    scale = (
        constant_of(module, view.scale)
        if isinstance(view.scale, fx.Node) and view.scale.op == "get_attr"
        else None
    )
    fits = (
        constant is not None
        and scale is not None
        and scale.dtype is torch.float32
        and 0 <= view.axis < constant.dim()
        and scale.shape == constant.shape[view.axis :][:1]
    )
    if not fits:
        msg = (
            f"node {node.name!r}: expected constant codes, and a constant fp32 scale for each index of axis "
            f"{view.axis}"
        )
        raise ValueError(msg)


def _check_dequantize_float(module: fx.GraphModule, node: fx.Node) -> None:
    """Codes, if they are constant, are codes of the format.

    A scale, if it is, has one number for all of them or for each block.
    """
    arguments = schema_arguments(node)
    codes, scale, dtype = arguments["codes"], arguments["scale"], DTYPES[arguments["dtype"]]
    if codes.op == "get_attr":
        constant = constant_of(module, codes)
        if constant.dtype is not dtype.storage or int(constant.view(torch.uint8).max()) > dtype.quant_max:
            msg = f"node {node.name!r}: {codes.name!r} holds no codes of {dtype}"
            raise ValueError(msg)
        sizes = constant_of(module, scale).shape if scale.op == "get_attr" else ()
        if sizes and (
            len(sizes) != constant.dim()
            or any(size % count for size, count in zip(constant.shape, sizes, strict=True))
        ):
            msg = (
                f"node {node.name!r}: a scale of shape {tuple(sizes)} does not fit codes of shape "
                f"{tuple(constant.shape)}"
            )
            raise ValueError(msg)
    elif codes.target is not quantize_float:
        msg = f"node {node.name!r}: {codes.name!r} gives no codes of {dtype}"
        raise ValueError(msg)


def _fits(expected: str, value: Any, length: int | None = None) -> bool:
    """Return whether a value is of a schema's type; `length` of a list that may be given as one number."""
    if expected.startswith("Optional["):
        return value is None or _fits(expected[9:-1], value, length)
    if expected.startswith("List["):
        if isinstance(value, (list, tuple)):
            return all(_fits(expected[5:-1], v) for v in value)
        # a node may give a list, as `split` does
        return (isinstance(value, fx.Node) and _yields(value) in ("list", "any")) or (
            length is not None and _fits(expected[5:-1], value)
        )
    if isinstance(value, fx.Node):
        kind = _yields(value)
        return kind in ("any", "number") or (
            kind == "tensor" and expected == "Tensor"
        )  # for a number as a tensor see below
    if expected in _TAGGED:
        return isinstance(value, _TAGGED[expected])
    if expected == "Tensor":
        # arithmetic takes a number in the place of a tensor: a constant, or a size of an input
        return isinstance(value, (bool, int, float, complex))
    types = _PLAIN.get(expected)
    return types is not None and isinstance(value, types)


def _yields(node: fx.Node) -> str:
    """Return what a node gives.

    It is "tensor", "number", "list" (several values), or "any" where only running it would tell.
    """
    if node.op in ("placeholder", "get_attr"):
        return "tensor"
    if node.op != "call_function":
        return "list"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "any" if node.target is operator.getitem else "number"
    returns = returns_of(node.target)
    if len(returns) != 1 or returns[0].startswith("List"):
        return "list"
    return "tensor" if returns[0] == "Tensor" else "number"


def _check_python(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Arithmetic on sizes takes numbers; `getitem` one of several values."""
    try:
        expected = len([p for p in inspect.signature(target).parameters.values() if p.default is p.empty])
    except ValueError:  # math.* of some versions have no signature
        expected = len(args)
    if kwargs or len(args) != expected:
        msg = f"{target} takes {expected} arguments, not {len(args)}"
        raise ValueError(msg)
    if target is operator.getitem:
        _check_getitem(*args)
        return
    for value in args:
        is_computed = isinstance(value, fx.Node) and _yields(value) != "list"
        if not is_computed and not isinstance(value, (bool, int, float)):
            msg = f"{target} takes sizes, not {value!r}"
            raise ValueError(msg)


def _check_getitem(source: Any, index: Any) -> None:
    """Raise ValueError where an operator does not give several results, or none with this index."""
    several = isinstance(source, fx.Node) and _yields(source) in ("list", "any")
    if not several or not isinstance(index, int) or isinstance(index, bool):
        msg = f"getitem takes an operator with several results and an index, not {source!r} and {index!r}"
        raise ValueError(msg)
    returns = returns_of(source.target) if isinstance(source.target, torch._ops.OpOverload) else ()
    if len(returns) > 1 and not 0 <= index < len(returns):
        msg = f"{source.target} gives {len(returns)} results, and none with index {index}"
        raise ValueError(msg)


def _check_qparams(given: Mapping[str, Any]) -> None:
    """Raise ValueError for scales, zero points and codes that no quantization has."""
    if "format" in given:
        _check_simulated(given)
    elif isinstance(given.get("dtype"), str):
        _check_format(given["dtype"], is_low_bit="codes" in given and "outer_scale" in given)
    else:
        limits = _limits_of_codes(given)
        _check_scale(given.get("scale"), given.get("zero_point"), given.get("dtype"), limits)


def _check_format(name: str, *, is_low_bit: bool) -> None:
    """Raise ValueError for a number format that does not exist, or has integers and no low-bit weight."""
    if name not in DTYPES or not (is_low_bit or DTYPES[name].kind == "float"):
        msg = f"{name!r} is not a {'number' if is_low_bit else 'floating-point'} format"
        raise ValueError(msg)


def _limits_of_codes(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the codes that a dtype has; None where none is given.

    Raises:
        ValueError: it has no codes, or those that are used are not among them.
    """
    if "dtype" not in given:
        return None
    limits = _CODES.get(given["dtype"])
    if limits is None:
        msg = f"codes are uint8 or int8, not {given['dtype']}"
        raise ValueError(msg)
    low, high = given.get("quant_min"), given.get("quant_max")
    if low is not None and high is not None and not limits[0] <= low < high <= limits[1]:
        msg = f"codes from {low} to {high} are none of {given['dtype']}"
        raise ValueError(msg)
    return limits


def _check_scale(scale: Any, zero_point: Any, dtype: Any, limits: tuple[int, int] | None) -> None:
    """Raise ValueError if a scale is not finite and positive, or a zero point is not a code of the dtype."""
    if isinstance(scale, (int, float)) and not (math.isfinite(scale) and scale > 0):
        msg = f"{scale!r} is not a scale"
        raise ValueError(msg)
    if isinstance(zero_point, int) and limits is not None and not limits[0] <= zero_point <= limits[1]:
        msg = f"{zero_point} is not a zero point of {dtype}"
        raise ValueError(msg)


def _check_simulated(given: Mapping[str, Any]) -> None:
    """Raise ValueError for names that no simulated format has."""
    try:
        granularity(given.get("granularity", "per_tensor"))
        dtype(given["format"])
    except ConfigError as error:
        raise ValueError(str(error)) from error
    for name, known in (("round_method", ROUND_METHODS), ("scale_type", SCALE_ROUNDINGS)):
        if name in given and given[name] not in known:
            msg = f"{given[name]!r} is not a {name}"
            raise ValueError(msg)

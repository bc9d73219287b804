"""QDQ graph → TorchScript, by writing its source.

It has one statement per node, so that a line number leads back to its operator.

Scripting keeps sizes free where tracing bakes them in. Names of ATen operators are resolved by TorchScript's
own overload resolution.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from nc.backends.dynamic import quantized_weight, replace_dynamic
from nc.errors import BackendError
from nc.graph.catalogue import (
    ACTIVATIONS,
    MOVES,
    POOLS,
    computed_options,
    first_input,
    input_node,
    is_float_tensor,
    is_transposed,
    op_name,
)
from nc.graph.fx_utils import call_function, copy_module
from nc.graph.placement import works_in_place
from nc.graph.views import Conv, Dequantize, Quantize, called_with, returned, set_argument
from nc.ops import dequantize_per_channel, dequantize_per_tensor, quantize_per_tensor

#: Arithmetic on sizes and its TorchScript spelling.
_SIZE_OPS: dict[Callable[..., object], str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.floordiv: "({} // {})",
    operator.truediv: "({} / {})",
    operator.mod: "({} % {})",
    operator.pow: "({} ** {})",
    operator.neg: "(-{})",
    operator.eq: "({} == {})",
    operator.ne: "({} != {})",
    operator.lt: "({} < {})",
    operator.le: "({} <= {})",
    operator.gt: "({} > {})",
    operator.ge: "({} >= {})",
    operator.and_: "({} & {})",
    operator.or_: "({} | {})",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
    torch.sym_float: "float({})",
    torch.sym_int: "int({})",
    torch.sym_not: "(not {})",
    math.ceil: "math.ceil({})",
    math.floor: "math.floor({})",
    math.trunc: "int({})",
}
_aten = torch.ops.aten
_CONVOLUTIONS = (
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.conv_transpose1d.default,
    _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
)
_MEMORY_FORMATS = {
    torch.contiguous_format: "torch.contiguous_format",
    torch.channels_last: "torch.channels_last",
    torch.preserve_format: "torch.preserve_format",
}


#: Codes that each dtype has, and its quantized dtype in torch.
_RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
_QUANTIZED = {torch.uint8: "torch.quint8", torch.int8: "torch.qint8"}
#: Types of lists whose elements say too little to TorchScript: numbers would be floats, and nothing of an
#: empty list.
_LISTS = ("List[Optional[number]]", "List[Optional[Tensor]]")
_NOTHING: Mapping[Callable[..., object], str] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A scripted graph.

    Attributes:
        module: TorchScript module; tensors in, a tuple of outputs back.
        operators: source line → name of the operator that it computes, or a part of it.
        source: the text, for debugging.
    """

    module: torch.jit.ScriptModule
    operators: Mapping[int, str]
    source: str


def script(
    module: fx.GraphModule, spelling: Mapping[Callable[..., object], str] = _NOTHING, helpers: str = ""
) -> Script:
    """Script a flat fx module, which stays as it is.

    Int8 weights become quantized constants, so that nothing keeps a fp32 copy; sizes stay free.

    Args:
        module: a QDQ graph, or what a backend made of one.
        spelling: how to write calls of functions that TorchScript has no name for, with places for their
            arguments.
        helpers: further methods, which `spelling` may call.

    Raises:
        BackendError: TorchScript can't express an operator; names it.
    """
    module, _ = copy_module(module)
    explicit_clamps(module)
    replace_dynamic(module)
    # a separate class: TorchScript shares types between modules with equal attributes, and a type has one
    # forward
    root = type("QuantizedGraph", (torch.nn.Module,), {})()
    names: dict[fx.Node, str] = {}
    inputs: list[str] = []
    body: list[tuple[fx.Node, str]] = []
    for node in module.graph.nodes:
        names[node] = _identifier(node.name)
        if node.op == "placeholder":
            inputs.append(names[node])
        elif node.op == "get_attr":
            if _is_plain_constant(node):
                _set(root, f"c_{node.target}", getattr(module, node.target))
                names[node] = f"self.c_{node.target}"
        elif node.op == "output":
            body.append((node, f"return ({', '.join(_text(a, names) for a in returned(module))},)"))
        else:
            body.append((node, f"{names[node]} = {_call(module, root, node, names, spelling)}"))
    head = f"def forward(self, {', '.join(f'{name}: Tensor' for name in inputs)}):"
    source = "\n".join([head, *(f"    {text}" for _, text in body)]) + f"\n{helpers}"
    scripted = torch.jit.script(root.eval())
    if not isinstance(scripted, torch.jit.ScriptModule):
        msg = "TorchScript is switched off: unset PYTORCH_JIT, or PYTORCH_JIT_ENABLED, in the environment."
        raise BackendError(msg)
    try:
        scripted.define(source)
    except RuntimeError as error:
        msg = f"TorchScript can't express this graph: {str(error).strip()}"
        raise BackendError(msg) from error
    return Script(
        scripted,
        {i + 2: node.meta["operator"] for i, (node, _) in enumerate(body) if "operator" in node.meta},
        source,
    )


def explicit_clamps(module: fx.GraphModule) -> None:
    """Write out the clamp of quantize nodes that use part of their dtype's codes.

    TorchScript's quantize saturates at the dtype's limits.

    The clamp moves up past operators that only move values, so that a fuser makes it a post-operation of the
    operator that computes them. Where operators work in place, a value depends on when it is read: there the
    clamp is directly before the quantize node.
    """
    hoist = not works_in_place(module)
    for node in [n for n in module.graph.nodes if n.target is quantize_per_tensor]:
        codes = Quantize.of(node)
        quant_min, quant_max = full = _RANGES[codes.dtype]
        if (codes.quant_min, codes.quant_max) == full:
            continue
        x, reader = codes.input, node
        while hoist and op_name(x) in MOVES and len(x.users) == 1 and is_float_tensor(first_input(x)):
            reader, x = x, input_node(x)
        with module.graph.inserting_before(reader):
            scale, zero_point = codes.numbers
            limits = ((end - zero_point) * scale for end in (codes.quant_min, codes.quant_max))
            clamp = call_function(module.graph, _aten.clamp.default, (x, *limits))
        clamp.meta["val"] = x.meta.get("val")
        reader.replace_input_with(x, clamp)
        set_argument(node, "quant_min", quant_min)
        set_argument(node, "quant_max", quant_max)


def _set(root: torch.nn.Module, name: str, value: object) -> None:
    """Set a constant of the script: a tensor, or a packed weight."""
    if isinstance(value, torch.Tensor):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


def _is_plain_constant(node: fx.Node) -> bool:
    """Tell whether the script reads a constant as it is.

    Int8 codes and their scales are merged into quantized tensors instead.
    """
    return not all(user.target in (dequantize_per_channel, dequantize_per_tensor) for user in node.users)


def _call(
    module: fx.GraphModule,
    root: torch.nn.Module,
    node: fx.Node,
    names: Mapping[fx.Node, str],
    spelling: Mapping[Callable[..., object], str],
) -> str:
    if node.target is quantize_per_tensor:
        codes = Quantize.of(node)
        return (
            f"torch.quantize_per_tensor({names[codes.input]}, {codes.scale!r}, {codes.zero_point}, "
            f"{_QUANTIZED[codes.dtype]})"
        )
    if node.target in (dequantize_per_tensor, dequantize_per_channel):
        return _dequantized(module, root, node, names)
    args, kwargs = called_with(node)
    arguments = [_text(a, names) for a in args]
    form = None if isinstance(node.target, str) else _SIZE_OPS.get(node.target) or spelling.get(node.target)
    if form is not None:
        return form.format(*arguments)
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if not isinstance(node.target, torch._ops.OpOverload):
        msg = f"Operator {node.target} of node {node.name!r} has no TorchScript form."
        raise BackendError(msg)
    arguments = annotated(node.target, arguments)
    arguments += [f"{k}={_text(v, names)}" for k, v in kwargs.items()]
    if node.target is torch.ops.aten.reshape.default:
        # fusers look through contiguous and view, not through reshape; the three mean the same
        x = f"{arguments[0]}.contiguous()" if _is_strided(input_node(node)) else arguments[0]
        return f"{x}.view({arguments[1]})"
    if (
        node.target in _CONVOLUTIONS
        and Conv.of(node).input.meta["val"].dim() == Conv.of(node).weight.meta["val"].dim()
    ):
        return _convolution(node, names)
    namespace, name = node.target._schema.name.split("::")
    return f"torch.ops.{namespace}.{name}({', '.join(arguments)})"


def _dequantized(
    module: fx.GraphModule,
    root: torch.nn.Module,
    node: fx.Node,
    names: Mapping[fx.Node, str],
) -> str:
    """Return the text that dequantizes codes; constant ones become a quantized tensor of the script."""
    values = Dequantize.of(node)
    source = values.codes
    if source.op != "get_attr":
        return f"{names[source]}.dequantize()"
    attribute = f"c_{source.target}_q{values.zero_point if values.axis is None else values.axis}"
    if not hasattr(root, attribute):
        root.register_buffer(attribute, quantized_weight(module, node))
    return f"self.{attribute}.dequantize()"


def annotated(target: torch._ops.OpOverload, arguments: Sequence[str]) -> list[str]:
    """Return the texts of positional arguments, with the types of the lists that a script can't tell."""
    types = [argument.type.annotation_str for argument in target._schema.arguments[: len(arguments)]]
    typed = zip(types, arguments, strict=True)
    return [f"torch.jit.annotate({kind}, {text})" if kind in _LISTS else text for kind, text in typed]


def _convolution(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Return the one operator that every convolution of a batch becomes.

    IPEX fuses conv1d and transposed ones in this form only.
    """
    conv = Conv.of(node)
    dims = conv.weight.meta["val"].dim() - 2
    stride, padding, dilation = conv.sizes(dims)
    transposed = is_transposed(node)
    output_padding = [*conv.output_padding] * (dims if len(conv.output_padding) == 1 else 1)
    sizes = stride, padding, dilation, transposed, output_padding, conv.groups
    given = ", ".join(_text(value, names) for value in (conv.input, conv.weight, conv.bias, *sizes))
    if computed_options(node):  # IPEX asks for numbers in all other forms
        return f"torch.convolution({given})"
    return f"torch._convolution({given}, False, False, True, True)"


def _is_strided(node: fx.Node) -> bool:
    """Return whether the memory layout of a value may differ from row-major."""
    if op_name(node) in POOLS and all(
        isinstance(size, int) and size == 1 for size in node.meta["val"].shape[2:]
    ):
        return False  # one position is left, so any order is the same
    if op_name(node) in ACTIVATIONS or node.target in (quantize_per_tensor, dequantize_per_tensor):
        return _is_strided(input_node(node))
    return op_name(node) not in ("linear", "layer_norm", "embedding", "reshape")


def _text(value: object, names: Mapping[fx.Node, str]) -> str:
    """Return an argument as TorchScript source."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v, names) for v in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    if isinstance(value, torch.memory_format):
        return _MEMORY_FORMATS[value]
    return repr(value)  # numbers, strings, None, and torch.float32 or torch.strided, whose repr is their name


def _identifier(name: str) -> str:
    """Return a name that is neither a keyword nor a TorchScript built-in."""
    return (
        f"{name}_"
        if keyword.iskeyword(name) or name in ("self", "torch", "math", "float", "int", "max", "min")
        else f"v_{name}"
    )

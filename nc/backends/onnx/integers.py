"""Constants of an ONNX model as narrower or wider integers.

They are what torch has no dtype for, and biases as ONNX Runtime fuses them.
"""

from __future__ import annotations

from typing import Any

#: What `program.py` calls constants with 4 bits.
_FOUR_BITS = "_4bit"
_LARGEST = 2**31 - 1
_CLIPPED = ("Relu", "Clip")


def pack_4_bits(model: Any) -> None:
    """Give codes and zero points of 4 bits, which torch holds as uint8, the type uint4: two in a byte.

    Args:
        model: an `onnx_ir.Model`, changed in place.
    """
    import ml_dtypes
    import onnx_ir

    for node in model.graph:
        for value in node.inputs if node.op_type == "DequantizeLinear" else ():
            constant = value.const_value if value is not None else None
            if constant is not None and _FOUR_BITS in value.name and constant.dtype is onnx_ir.DataType.UINT8:
                value.const_value = onnx_ir.tensor(constant.numpy().astype(ml_dtypes.uint4), name=value.name)
                value.type = onnx_ir.TensorType(onnx_ir.DataType.UINT4)


def explicit_zero_points(model: Any) -> None:
    """Write the zero points of int8 weights with scales per channel, which are all 0, into the file.

    ONNX lets them out. ONNX Runtime then fails on a weight that it leaves to fp32, where its session option
    turns int8 weights into uint8.

    Args:
        model: an `onnx_ir.Model`, changed in place.
    """
    import numpy as np
    import onnx_ir

    for node in [n for n in model.graph if n.op_type == "DequantizeLinear" and len(n.inputs) == 2]:
        codes, scale = (value.const_value for value in node.inputs)
        if (
            codes is None
            or scale is None
            or codes.dtype is not onnx_ir.DataType.INT8
            or len(scale.shape) != 1
        ):
            continue
        zeros = _constant(model, f"{node.name}_zero_point", np.zeros(tuple(scale.shape), np.int8))
        node.resize_inputs(3)
        node.replace_input_with(2, zeros)


def int32_biases(model: Any) -> None:
    """Write biases of convolutions whose inputs and output are quantized as int32.

    Their scale is that of the sums: input · weight. A bias that does not fit, as of a channel whose weights
    are all close to 0, stays fp32.

    Args:
        model: an `onnx_ir.Model`, changed in place.
    """
    for node in [
        n for n in model.graph if n.op_type == "Conv" and len(n.inputs) > 2 and n.inputs[2] is not None
    ]:
        sources = [value.producer() for value in node.inputs[:2]]
        if all(s is not None and s.op_type == "DequantizeLinear" for s in sources) and _is_quantized(
            node.outputs[0]
        ):
            _make_int32(model, node, *(source.inputs[1].const_value for source in sources))


def _is_quantized(value: Any) -> bool:
    """Whether a value is read by one quantize only, perhaps through what the range of codes does anyway."""
    readers = list(value.uses())
    if len(readers) != 1 or value.is_graph_output():
        return False
    reader = readers[0].node
    return reader.op_type == "QuantizeLinear" or (
        reader.op_type in _CLIPPED and _is_quantized(reader.outputs[0])
    )


def _make_int32(model: Any, node: Any, input_scale: Any, weight_scale: Any) -> None:
    import numpy as np
    import onnx_ir

    bias = node.inputs[2]
    if bias.const_value is None or input_scale is None or weight_scale is None:
        return
    values = bias.const_value.numpy()
    scale = np.broadcast_to(input_scale.numpy() * weight_scale.numpy(), values.shape).astype(np.float32)
    codes = np.rint(values.astype(np.float64) / scale)
    if not np.isfinite(codes).all() or np.abs(codes).max() > _LARGEST:
        return
    constants = {f"{node.name}_bias_int32": codes.astype(np.int32), f"{node.name}_bias_scale": scale}
    added = [_constant(model, name, array) for name, array in constants.items()]
    dequantized = onnx_ir.node("DequantizeLinear", added, {"axis": 0})
    dequantized.outputs[0].dtype, dequantized.outputs[0].shape = bias.dtype, bias.shape
    dequantized.name = f"{node.name}_bias"
    model.graph.insert_before(node, dequantized)
    node.replace_input_with(2, dequantized.outputs[0])
    if not bias.uses():
        model.graph.initializers.pop(bias.name)


def _constant(model: Any, name: str, array: Any) -> Any:
    """Return a new constant of the model."""
    import onnx_ir

    value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name))
    value.dtype, value.shape = value.const_value.dtype, value.const_value.shape
    model.graph.register_initializer(value)
    return value

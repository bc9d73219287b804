"""Keeps OpenVINO from wrong kernels: what its CPU plugin fuses with the FakeQuantize behind it can give 0 to 20 dB.

A ReduceMax or ReduceMin: the plugin also fuses what stands between them, but only operators of one value. The larger of a maximum and one
of the elements is the maximum, and its operator has two values.

A factor or summand for each channel becomes a range for each channel: the kernel takes the wrong ones where the plugin does not know the
number of channels, and behind a ReduceMean. The larger of a value and itself is the value.

A product of two activations: where both happen to have symmetric codes, the plugin computes it in int8 also on CPUs without VNNI, whose
sums of pairs of products overflow 16 bits. A maximum keeps it in fp32 there, as it is planned.
"""

from __future__ import annotations

import math
from typing import Any

_WITH_CONSTANT = ("Multiply", "Divide", "Add", "Subtract", "Maximum", "Minimum")
_PASSED = ("Relu", "Clamp")
#: What follows these is fused with them, and rightly.
_RIGHT = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData", "MVN")


def keep_unfused(model: Any, *, products: bool) -> None:
    """Put a pairwise maximum (minimum) behind each ReduceMax (ReduceMin), and a maximum in front of each range that would be split.

    Args:
        model: an `openvino.Model`, changed in place.
        products: products of two activations stay in fp32.
    """
    from openvino import opset13

    pairwise = {"ReduceMax": opset13.maximum, "ReduceMin": opset13.minimum}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "FakeQuantize" and _would_split(node):
            value = node.input_value(0)
            node.input(0).replace_source_output(opset13.maximum(value, value).output(0))
        if products and node.get_type_name() == "MatMul" and _of_activations(node):
            value = node.input_value(1)
            node.input(1).replace_source_output(opset13.maximum(value, value).output(0))
        if node.get_type_name() not in pairwise or not node.get_element_type().is_real():
            continue
        if node.get_input_partial_shape(0).rank == 0:  # a single number has no part
            continue
        readers = node.output(0).get_target_inputs()
        axes = opset13.reshape(node.input_value(1), [-1], special_zero=False)
        count = opset13.shape_of(axes)
        zeros, ones = (opset13.broadcast(opset13.constant(end, dtype="int64"), count) for end in (0, 1))
        element = opset13.slice(node.input_value(0), zeros, ones, ones, axes)
        if not node.get_attributes()["keep_dims"]:
            element = opset13.squeeze(element, axes)
        result = pairwise[node.get_type_name()](node, element)
        result.set_friendly_name(f"{node.get_friendly_name()}/of_pair")
        for reader in readers:
            reader.replace_source_output(result.output(0))


def _of_activations(product: Any) -> bool:
    """Whether the second input of a product is computed from inputs of the model."""
    waiting, seen = [product.input_value(1).get_node()], set()
    while waiting:
        node = waiting.pop()
        if node.get_type_name() == "Parameter":
            return True
        if node.get_name() not in seen:
            seen.add(node.get_name())
            waiting += [node.input_value(index).get_node() for index in range(node.get_input_size())]
    return False


def _would_split(quantize: Any) -> bool:
    """Whether a FakeQuantize would get a range for each channel: constants in front of it move into it, also past a relu or a clamp."""
    node, vectors = _source(quantize, 0), False
    while (kind := node.get_type_name()) in (*_WITH_CONSTANT, *_PASSED, "BatchNormInference"):
        data = 0
        if kind in _WITH_CONSTANT:
            constants = [index for index in (0, 1) if _source(node, index).get_type_name() == "Constant"]
            if len(constants) != 1:
                return vectors
            data = 1 - constants[0]
            vectors |= math.prod(node.get_input_shape(constants[0])) > 1
        vectors |= kind == "BatchNormInference"
        node = _source(node, data)
    return vectors and kind not in _RIGHT


def _source(node: Any, index: int) -> Any:
    """What an input of a node is made by, before conversions."""
    source = node.input_value(index).get_node()
    return _source(source, 0) if source.get_type_name() == "Convert" else source

"""Keeps OpenVINO from wrong kernels.

What its CPU plugin fuses with the FakeQuantize after it can give 0 to 20 dB.

A ReduceMax or ReduceMin: the plugin also fuses operators between it and the FakeQuantize, but only those with
one operand. The larger of a maximum and one of the elements is the maximum, and it has two operands.

A factor or summand for each channel becomes a range for each channel: the kernel takes the wrong ones where
the plugin does not know the number of channels, and after a ReduceMean. The larger of a value and itself is
the value.

Codes of a convolution with a bias that are reshaped to more dimensions, as in pixel shuffles and window
attention: the range for each channel that the bias became is lost. The larger of a value and itself is not a
bias.

A sum of tiny codes, as in untrained networks: the plugin loses the zero point. A maximum before the sum keeps
it, but not that of sums of sums.

A convolution whose groups have an odd number of inputs: on CPUs without VNNI its kernel adds pairs of
products from two positions of the window in 16 bits, and the weights of these were not made to fit. A maximum
keeps it in fp32 there.

A convolution with dilations, pads and codes that have a zero point: with AMX, making its kernel ends the
process (`nc.kernels.onednn.trials.overruns_with_amx`). A maximum keeps it in fp32 there.

A product of two activations: where both happen to have symmetric codes, the plugin computes it in int8 also
on CPUs without VNNI, whose sums of pairs of products overflow 16 bits. A maximum keeps it in fp32 there, as
it is planned.
"""

from __future__ import annotations

import math
from typing import Any

_WITH_CONSTANT = ("Multiply", "Divide", "Add", "Subtract", "Maximum", "Minimum")
_PASSED = ("Relu", "Clamp")
#: What follows these is fused with them, and rightly.
_RIGHT = (
    "MatMul",
    "Convolution",
    "GroupConvolution",
    "ConvolutionBackpropData",
    "GroupConvolutionBackpropData",
    "MVN",
)
#: Below it the plugin takes the product of a scale and a zero point for 0.
_TINY = 1e-5


def keep_unfused(model: Any, *, narrow: bool, amx: bool) -> None:
    """Insert a pairwise maximum (minimum) after each ReduceMax (ReduceMin).

    In the other cases above, insert a maximum as they say.

    Args:
        model: an `openvino.Model`, changed in place.
        narrow: kernels of this CPU add pairs of products in 16 bits.
        amx: this CPU has AMX.
    """
    from openvino import opset13

    pairwise = {"ReduceMax": opset13.maximum, "ReduceMin": opset13.minimum}
    for node in model.get_ordered_ops():
        for index in _kept_apart(node, narrow=narrow, amx=amx):
            value = node.input_value(index)
            node.input(index).replace_source_output(opset13.maximum(value, value).output(0))
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


def _kept_apart(node: Any, *, narrow: bool, amx: bool) -> list[int]:
    """Return the inputs of an operator that get a maximum in front; none for most."""
    kind = node.get_type_name()
    if kind == "FakeQuantize" and (_would_split(node) or _is_cut_up(node)):
        return [0]
    if kind == "Add":
        return [index for index in (0, 1) if _is_tiny(_source(node, index))]
    if narrow and kind == "MatMul" and _of_activations(node):
        return [1]
    if amx and kind in ("Convolution", "GroupConvolution") and _overruns(node):
        return [0]
    return [0] if narrow and kind == "GroupConvolution" and _has_odd_groups(node) else []


def _is_cut_up(quantize: Any) -> bool:
    """Return whether codes of a convolution get more dimensions than it has."""
    node = _source(quantize, 0)
    while node.get_type_name() in (*_WITH_CONSTANT, *_PASSED):
        node = _source(node, 0)
    if "Convolution" not in node.get_type_name():
        return False
    dims = len(node.get_input_partial_shape(1)) - ("Group" in node.get_type_name())  # of its weight
    readers = [reader.get_node() for reader in quantize.output(0).get_target_inputs()]
    ranks = [
        reader.get_output_partial_shape(0).rank for reader in readers if reader.get_type_name() == "Reshape"
    ]
    return any(rank.is_static and rank.get_length() > dims for rank in ranks)


def _is_tiny(quantize: Any) -> bool:
    """Return whether a FakeQuantize gives tiny values only."""
    ends = (
        [_source(quantize, index) for index in (3, 4)] if quantize.get_type_name() == "FakeQuantize" else []
    )
    return bool(ends) and all(
        end.get_type_name() == "Constant" and abs(end.get_data()).max() < _TINY for end in ends
    )


def _overruns(convolution: Any) -> bool:
    """Return whether a window has dilations and pads, and reads codes with a zero point."""
    attributes, source = convolution.get_attributes(), _source(convolution, 0)
    dims = len(attributes["dilations"])
    window = convolution.get_input_shape(1)[-dims:]
    is_dilated = any(size > 1 and d > 1 for size, d in zip(window, attributes["dilations"], strict=True))
    is_padded = (
        any((*attributes["pads_begin"], *attributes["pads_end"]))
        or "SAME" in str(attributes["auto_pad"]).upper()
    )
    is_quantized = source.get_type_name() == "FakeQuantize"
    has_zero_point = is_quantized and bool((_source(source, 3).get_data() != 0).any())
    return is_dilated and is_padded and has_zero_point


def _has_odd_groups(convolution: Any) -> bool:
    """Return whether pairs of products are not those of two inputs.

    The groups have an odd number of inputs and are not single channels.
    """
    _, outputs, inputs, *_ = convolution.get_input_shape(1)
    return inputs % 2 == 1 and (outputs, inputs) != (1, 1)


def _of_activations(product: Any) -> bool:
    """Return whether the second input of a product is computed from inputs of the model."""
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
    """Return whether a FakeQuantize would get a range for each channel.

    Constants before it move into it, also past a relu or a clamp.
    """
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
    """Return what an input of a node is made by, before conversions."""
    source = node.input_value(index).get_node()
    return _source(source, 0) if source.get_type_name() == "Convert" else source

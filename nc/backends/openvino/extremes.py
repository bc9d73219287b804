"""Keeps OpenVINO from a wrong kernel: a ReduceMax or ReduceMin that its CPU plugin fuses with the FakeQuantize behind it gives 0 to 20 dB.

The plugin also fuses what stands between them, but only operators of one value. The larger of a maximum and one of the elements is the
maximum, and its operator has two values.
"""

from __future__ import annotations

from typing import Any


def keep_unfused(model: Any) -> None:
    """Put a pairwise maximum (minimum) behind each ReduceMax (ReduceMin).

    Args:
        model: an `openvino.Model`, changed in place.
    """
    from openvino import opset13

    pairwise = {"ReduceMax": opset13.maximum, "ReduceMin": opset13.minimum}
    for node in model.get_ordered_ops():
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

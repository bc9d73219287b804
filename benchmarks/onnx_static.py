"""ONNX Runtime's static quantization, as its documentation describes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: Inputs of a call by name.
Feed = Mapping[str, Any]


def quantize_onnx(source: Path, target: Path, feeds: Iterable[Feed], *, reduce_range: bool = False) -> None:
    """Quantize a file: QDQ, uint8 activations by min-max, int8 weights per channel.

    Args:
        source: ONNX.
        target: the new file.
        feeds: numpy arrays to calibrate with.
        reduce_range: weights have 7 bits.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self.left, None)

    quantize_static(
        source,
        target,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=reduce_range,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )

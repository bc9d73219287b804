"""torchao's names over what `nc` has: docs/how-to/migrate-from-torchao.md has a table."""

from nc.nn.tensor import SAFE_GLOBALS, QuantizedTensor, flatten, unflatten
from nc.torchao.primitives import MappingType, choose_qparams_affine, dequantize_affine, quantize_affine
from nc.torchao.quantize import quantize_

__all__ = [
    "SAFE_GLOBALS",
    "MappingType",
    "QuantizedTensor",
    "choose_qparams_affine",
    "dequantize_affine",
    "flatten",
    "quantize_",
    "quantize_affine",
    "unflatten",
]

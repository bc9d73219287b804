"""Export to ONNX: quantize and dequantize nodes (QDQ) around fp32 operators, int8 weights, checked by ONNX Runtime; extra `onnx`."""

from nc.backends.onnx.report import OnnxOperator as OnnxOperator
from nc.backends.onnx.report import OnnxReport as OnnxReport
from nc.backends.onnx.write import write as write

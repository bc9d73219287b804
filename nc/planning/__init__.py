"""Planning: configuration and operators → how each operator is quantized.

It also says where quantize/dequantize nodes go.
"""

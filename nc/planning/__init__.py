"""Planning: configuration and operators → how each operator is quantized, and where quantize/dequantize nodes go."""

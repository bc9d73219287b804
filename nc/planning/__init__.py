"""Planning: configuration and operators → what each operator is quantized to, and where quantize/dequantize nodes go."""

"""Storage: a quantized graph as a directory of safetensors and JSON, without code."""

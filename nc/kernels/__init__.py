"""Compiled code: C sources and oneDNN. Nothing here knows quantized graphs or configurations."""

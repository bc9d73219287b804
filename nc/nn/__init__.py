"""Layers with low-bit weights, and what computes them."""

from nc.nn.layers import KernelChoice, LinearEngine, QuantEmbedding, QuantLinear

__all__ = ["KernelChoice", "LinearEngine", "QuantEmbedding", "QuantLinear"]

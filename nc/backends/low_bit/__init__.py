"""Kernels for linears with low-bit weights, as rows of data, and the engine that chooses among them.

It chooses layer by layer.
"""

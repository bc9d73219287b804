"""Packing of low-bit weights for the C code and torch, and their calls."""

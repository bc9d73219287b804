"""Algorithms that improve a quantized graph; each knows graphs and statistics, never a backend."""

"""Profiling: which kernels ran, and for how long."""

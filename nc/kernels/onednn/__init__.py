"""oneDNN's C API, called from Python.

It tells where the library comes from, its functions, and primitives that are made once and kept.
"""

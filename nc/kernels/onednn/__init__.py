"""oneDNN's C API, called from Python.

Where the library comes from, its functions, and primitives that are made once and kept.
"""

"""oneDNN's C API, called from Python: where the library comes from, its functions, and primitives that are made once and kept."""

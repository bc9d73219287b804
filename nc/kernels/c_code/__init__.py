"""The few lines of C in this package: their sources, and what compiles and loads them.

Everything works without, only slower.
"""

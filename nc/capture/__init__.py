"""Capture: a model → one flat graph of named ATen operators."""

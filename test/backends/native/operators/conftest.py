"""Fixtures of the operators' tests."""

from row_functions import on_isa  # noqa: F401  # pytest finds it here

"""Rewrites of graphs that several engines use."""

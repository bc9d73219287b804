"""Calibration: observers in the graph, their statistics, and the scales and zero points found from them."""

"""Run a lowered graph as a list of kept oneDNN primitives: one plan for each set of input sizes."""

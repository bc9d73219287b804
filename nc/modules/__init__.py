"""What solvers and transforms are given: layers, the inputs of blocks, their statistics."""

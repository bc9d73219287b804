"""Pure functions on tensors; the oracle of everything else."""

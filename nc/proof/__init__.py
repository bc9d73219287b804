"""Proof: what every tensor of an engine should be, given the tensors that the engine had."""

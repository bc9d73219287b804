"""Files of models with low-bit weights."""

"""Weight-only quantization of the user's own modules: block by block, its statistics, and files."""

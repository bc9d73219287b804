"""Weight-only and low-bit quantization of the user's own modules: number format, range rule, transforms and solver are four choices."""

"""The table by which `gelu.h` computes GELU: what it takes off, as polynomials between even points.

Imports nothing of nc: setup.py runs this file where there is no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

#: Polynomials, one for each lane of a register, and their degree.
PIECES, DEGREE = 16, 5
#: Distance of the points around which each polynomial is used. Beyond the last one, the function is less than
#: 2e-8.
STEP = 0.375


def tail_of_normal(x: float) -> float:
    """Return 1 - Φ(x), what `x * Φ(x)` takes off x."""
    return math.erfc(x / math.sqrt(2)) / 2


def tail_of_tanh(x: float) -> float:
    """Return the same of GELU's approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return 1 / (1 + math.exp(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def definitions() -> str:
    """Return the tables as macros of C: coefficients [degree from the highest to 0][piece]."""
    lines = [f"#define GELU_STEP {STEP}f", f"enum {{ GELU_PIECES = {PIECES}, GELU_DEGREE = {DEGREE} }};"]
    for name, function in (("ERF", tail_of_normal), ("TANH", tail_of_tanh)):
        pieces = [interpolated(function, STEP * i, STEP / 2) for i in range(PIECES)]
        rows = [
            ", ".join(f"{piece[degree]!r}f" for piece in pieces) for degree in reversed(range(DEGREE + 1))
        ]
        joined = ", ".join(f"{{ {row} }}" for row in rows)
        lines.append(f"#define GELU_TAIL_{name} {{ {joined} }}")
    return "\n".join(lines) + "\n"


def interpolated(function: Callable[[float], float], middle: float, radius: float) -> list[float]:
    """Return coefficients of `t`, from degree 0 on, of a polynomial that is near `function(middle + t)`.

    It agrees at Chebyshev's points of [-radius, radius].
    """
    count = DEGREE + 1
    angles = [math.pi * (j + 0.5) / count for j in range(count)]
    values = [function(middle + radius * math.cos(angle)) for angle in angles]
    result = [0.0] * count
    before, current = [1.0], [0.0, 1.0]  # Chebyshev's polynomials, by their coefficients
    for k in range(count):
        share = sum(v * math.cos(k * angle) for v, angle in zip(values, angles, strict=True)) / count
        for degree, coefficient in enumerate(before):
            result[degree] += (1 if k == 0 else 2) * share * coefficient / radius**degree
        before, current = current, _next(before, current)
    return result


def _next(before: Sequence[float], current: Sequence[float]) -> list[float]:
    """2 t T_k - T_k-1."""
    doubled = [0.0, *(2 * c for c in current)]
    return [d - (before[i] if i < len(before) else 0.0) for i, d in enumerate(doubled)]

"""Which backend computes a configuration that simulates number formats."""

from __future__ import annotations

from nc.backends.reference import NAME as REFERENCE
from nc.config import AnyConfig, is_simulated

#: Why "auto" takes the reference.
WHY_REFERENCE = (
    '"auto" takes the reference, because the configuration simulates number formats: it computes them in '
    "fp32, slowly"
)


def that_simulates(backend: str, config: AnyConfig) -> str:
    """Return the backend that is asked for.

    For "auto" it is the reference, if the configuration simulates formats, which no engine does.
    """
    return REFERENCE if backend == "auto" and is_simulated(config) else backend

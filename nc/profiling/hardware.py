"""What this CPU can do at best: multiply-adds of registers alone, and reading weights from memory.

The least time of an operator is the larger one of both (S. Williams et al., Roofline, 2009). Weights are read
from memory only where all of them together do not fit into the last cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from nc.errors import BackendUnavailableError
from nc.kernels import caches, cpu
from nc.kernels.c_code import build, limit
from nc.kernels.c_code.abi import PRODUCT
from nc.kernels.c_code.isas import ISAS
from nc.profiling.bandwidth import read_bandwidth

#: Precision → instruction sets that multiply it, the best one first.
_PRODUCTS = {
    "int8": ("amx", "avx512_vnni", "avx_vnni", "avx2"),
    "bf16": ("amx", "avx512_bf16"),
    "fp32": ("avx512", "avx2"),
}
#: Precision → bytes of a weight.
_BYTES = {"int8": 1, "bf16": 2, "fp32": 4}


class Work(Protocol):
    """What is read of an operator."""

    @property
    def operator(self) -> str: ...  # noqa: D102
    @property
    def ran(self) -> str: ...  # noqa: D102
    @property
    def multiply_adds(self) -> int | None: ...  # noqa: D102
    @property
    def weights(self) -> tuple[tuple[str, int], ...]: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Rates of all threads together.

    Attributes:
        multiply_adds: precision → in a second, of the best instruction set that kernels may use.
        read_gb_s: GB that are read from memory in a second.
        cache_bytes: of the last cache.
        missing: why nothing was measured; "" if it was.
    """

    multiply_adds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    read_gb_s: float = 0.0
    cache_bytes: int = 0
    missing: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Limits:
        """Return the inverse of `dataclasses.asdict`, through JSON too."""
        return cls(**data)

    def least_ms(self, operators: Iterable[Work], *, from_memory: bool) -> float | None:
        """Return the milliseconds that operators take at least; None where nothing is known of any.

        Args:
            operators: that are computed one after another.
            from_memory: their weights do not stay in a cache.
        """
        known = [
            max(
                1e3 * op.multiply_adds / self.multiply_adds[op.ran],
                1e-6 * _bytes(op) / self.read_gb_s if from_memory and self.read_gb_s else 0.0,
            )
            for op in operators
            if op.multiply_adds and op.ran in self.multiply_adds
        ]
        return sum(known) if known else None

    def exceeds_cache(self, operators: Iterable[Work]) -> bool:
        """Return whether the weights of all operators of a model are larger than the last cache."""
        sizes = {name: size * _BYTES.get(op.ran, 4) for op in operators for name, size in op.weights}
        return sum(sizes.values()) > self.cache_bytes


def _bytes(op: Work) -> int:
    return sum(size for _, size in op.weights) * _BYTES[op.ran]


@functools.cache
def measured(threads: int) -> Limits:
    """Measure the limits of this CPU, once per process, in about a second.

    Args:
        threads: that compute at once.
    """
    try:
        library = build.load("peak")
    except BackendUnavailableError as error:
        return Limits(missing=str(error))
    library.nc_peak.argtypes, library.nc_peak.restype = (ctypes.c_int64,), ctypes.c_double
    usable = limit.used(library)
    rates: dict[str, float] = {}
    for precision in _PRODUCTS:
        for product in _products(precision, usable):
            with ThreadPoolExecutor(threads) as pool:  # ctypes releases the GIL
                rate = sum(pool.map(lambda _, number=product: library.nc_peak(number), range(threads)))
            if rate:  # 0: the operating system lends no tiles
                rates[precision] = rate
                break
    return Limits(multiply_adds=rates, read_gb_s=read_bandwidth(threads), cache_bytes=caches.last())


def _products(precision: str, usable: Collection[str]) -> list[int]:
    """Return the numbers of the products that this CPU may use for a precision, the best one first."""
    return [
        PRODUCT.number(f"{precision}_{name}")
        for name in _PRODUCTS[precision]
        if name in usable and not cpu.machine_lacks(ISAS[name])
    ]

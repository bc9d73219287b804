"""Observers: one range algorithm per file. To add one, enter it in `ALGORITHMS`."""

from __future__ import annotations

from nc.errors import ConfigError
from nc.observers.auto import AUTO
from nc.observers.base import Observer, RangeAlgorithm, Statistic
from nc.observers.kl import KL
from nc.observers.minmax import MINMAX
from nc.observers.moving_average import MOVING_AVERAGE
from nc.observers.mse import MSE
from nc.observers.percentile import PERCENTILE

ALGORITHMS: dict[str, RangeAlgorithm] = {
    a.name: a for a in (MINMAX, MOVING_AVERAGE, PERCENTILE, MSE, KL, AUTO)
}


def register_algorithm(algorithm: RangeAlgorithm) -> None:
    """Make a range algorithm known under its name, as a legal value of `act_algo`.

    Raises:
        ConfigError: another algorithm has that name.
    """
    if ALGORITHMS.setdefault(algorithm.name, algorithm) != algorithm:
        msg = f"{algorithm.name!r} is the name of another algorithm; give yours a different name."
        raise ConfigError(msg)


__all__ = ["ALGORITHMS", "Observer", "RangeAlgorithm", "Statistic", "register_algorithm"]

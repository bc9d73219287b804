"""Metrics of models that are computed by an executor: on other cores, or other machines.

A quantized model is sent as its artefact, so what is judged is what a deployment loads.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from pathlib import Path
from typing import Any

import torch

from nc.api.artefact import load, save
from nc.api.quantized import QuantizedModel
from nc.errors import ConfigError
from nc.kernels import cpu
from nc.tuning.identity import Metric
from nc.tuning.measure import score

#: Models that are sent at most at a time.
_MOST = 8


class Elsewhere:
    """Models whose metrics an executor computes.

    Args:
        executor: of `concurrent.futures`, or of the same surface.
        metric: see `nc.tune`.
        model: the float model, of whose class models with low-bit weights are.
        backend: computes these.

    Raises:
        ConfigError: `executor` is not an executor, or there is no metric.
    """

    def __init__(
        self,
        executor: Executor,
        metric: Metric | None,
        model: torch.nn.Module | None = None,
        backend: str = "auto",
    ) -> None:
        if not callable(getattr(executor, "submit", None)):
            msg = f"executor={executor!r}: expected a concurrent.futures.Executor."
            raise ConfigError(msg)
        if metric is None:
            msg = "executor= computes metric=, which is None: there is nothing to compute elsewhere."
            raise ConfigError(msg)
        self._executor, self._metric, self._model, self._backend = executor, metric, model, backend
        try:
            self._probe = executor.submit(_ready, metric)
        except Exception as error:  # any executor: it may be shut down
            msg = f"executor={executor!r} takes no work: {type(error).__name__}: {error}"
            raise ConfigError(msg) from error
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._sent: list[tuple[Path, bool]] = []

    def keep(self, model: Any) -> None:
        """Keep a model until its metric is asked for: an artefact on disk.

        Raises:
            ConfigError: the metric can't be sent.
            ArtefactError: the model can't be saved.
        """
        error = self._probe.exception() if self._probe.done() and not self._probe.cancelled() else None
        if error is not None:
            msg = (
                f"executor= can't be sent the metric: {type(error).__name__}: {error}. For processes it must "
                "be a function of a module that they can import."
            )
            raise ConfigError(msg)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="nc-tune-")
        target = Path(self._folder.name) / str(len(self._sent))
        save(model, target)
        self._sent.append((target, isinstance(model, QuantizedModel)))

    def values(self, seconds_left: Callable[[], float]) -> Iterator[tuple[int, float | str]]:
        """Yield the number of a model and its metric, or why there is none, as they come.

        Metrics that are not there when the time is over are given up.
        """
        waiting, self._sent = list(enumerate(self._sent)), []
        running: dict[Future[Any], int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _MOST:
                    index, (path, is_graph) = waiting.pop(0)
                    try:
                        packed = _packed(path) if is_graph else self._loaded(path)
                        running[self._executor.submit(judged, packed, self._metric)] = index
                    except Exception as error:  # a worker died, or the executor was shut down
                        yield index, f"it could not be sent: {type(error).__name__}: {error}"
                if not running:
                    continue
                done, _ = wait(running, timeout=max(0.0, seconds_left()), return_when=FIRST_COMPLETED)
                if not done:
                    yield from (
                        (i, "the budget ended before its metric was computed") for i in running.values()
                    )
                    yield from ((i, "the budget ended before its metric was computed") for i, _ in waiting)
                    return
                for future in done:
                    yield running.pop(future), _value(future)
        finally:
            for future in running:
                future.cancel()

    def _loaded(self, path: Path) -> torch.nn.Module:
        """Return a model with low-bit weights: a worker has no model of its class."""
        found: torch.nn.Module = load(path, model=self._model, backend=self._backend)
        return found

    def close(self) -> None:
        """Remove what is on disk."""
        if self._folder is not None:
            self._folder.cleanup()


def _ready(_: Metric) -> None:
    """Show that a metric can be sent."""


def judged(model: bytes | torch.nn.Module, metric: Metric) -> tuple[float, list[str]]:
    """Return the metric of a model, and the instruction sets of the CPU that computed it.

    Args:
        model: the model, or its artefact as a tar file.
        metric: see `nc.tune`.
    """
    if not isinstance(model, bytes):
        return score(metric, model), list(cpu.detected())
    with tempfile.TemporaryDirectory(prefix="nc-tune-") as folder:
        with tarfile.open(fileobj=io.BytesIO(model)) as file:
            file.extractall(folder, filter="data")
        return score(metric, load(folder, verify_sizes=False)), list(cpu.detected())


def _packed(path: Path) -> bytes:
    """Return an artefact as a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for each in sorted(path.iterdir()):
            file.add(each, each.name)
    return buffer.getvalue()


def _value(future: Future[Any]) -> float | str:
    """Return a metric, or why there is none."""
    if future.cancelled():
        return "its metric was cancelled"
    error = future.exception()
    if error is not None:
        return f"its metric failed elsewhere: {type(error).__name__}: {error}"
    value, isa = future.result()
    if list(isa) != list(cpu.detected()):
        return f"its metric was computed on another kind of CPU ({', '.join(isa) or 'no integer kernels'})"
    return float(value)

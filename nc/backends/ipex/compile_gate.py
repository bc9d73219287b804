"""Calls of one fused model from several threads: a call that compiles runs alone.

IPEX compiles per thread and input shape. While it compiles, it rewrites tables of the fused kernel (where
each output is, which input may be overwritten) that calls in other threads read without a lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

#: Keys that a thread keeps; IPEX forgets compiled kernels too, at 7500 per thread.
_KEPT = 64


class Gate:
    """Lets a thread's first call of a key in alone, and further ones together."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._thread = threading.local()

    @contextlib.contextmanager
    def enter(self, key: Hashable) -> Iterator[None]:
        """Hold the gate for one call.

        Args:
            key: what the engine compiles a kernel for.
        """
        known: set[Hashable] = self._thread.__dict__.setdefault("known", set())
        if key in known:
            with self._together():
                yield
            return
        with self._alone():
            yield
        if len(known) >= _KEPT:
            known.clear()
        known.add(key)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._inside)
                yield  # with the condition's lock: nobody else gets in
            finally:
                self._waiting -= 1
                self._condition.notify_all()

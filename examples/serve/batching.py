"""Compute what waits together, in batches up to a number of tokens. For servers on asyncio; needs no package.

While one batch is computed, requests wait; the next batch takes as many of them, in their order, as its
tokens allow. An idle server computes a request at once: there is no window to wait for others in, and no
length that texts are filled up to.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class OverloadedError(RuntimeError):
    """More waits than is allowed.

    Attributes:
        retry_after: whole seconds in which what waits now is probably computed.
    """

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} items wait already; try again in {retry_after} s")
        self.retry_after = retry_after


class ClosedError(RuntimeError):
    """The server is closing and takes nothing new."""


class TooLateError(RuntimeError):
    """A request was not answered within its time."""


@dataclasses.dataclass(eq=False, slots=True)
class _Entry(Generic[Item, Answer]):
    item: Item
    tokens: int
    answer: asyncio.Future[Answer]


class Batches(Generic[Item, Answer]):
    """Batches of what waits.

    All methods but `replace` belong to one event loop.

    Args:
        run: returns one answer for each item of a list, in their order. An `async def` is awaited; another
            function runs in one separate thread, so that the event loop stays free. Where it raises, it
            is called with halves of the list, until the items that fail are alone.
        cost: returns the tokens of an item.
        most_tokens: of a batch. An item with more is a batch by itself.
        most_items: of a batch.
        most_waiting: items that may wait. A request with more is taken only when nothing waits.
        timeout: seconds from `ask` to the answer.
        seen: is told the items, the tokens and the seconds of each call.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Any],
        cost: Callable[[Item], int],
        *,
        most_tokens: int = 4096,
        most_items: int = 64,
        most_waiting: int = 1024,
        timeout: float = 30.0,
        seen: Callable[[int, int, float], None] | None = None,
    ) -> None:
        if min(most_tokens, most_items, most_waiting) < 1:
            msg = "most_tokens, most_items and most_waiting: expected 1 or more"
            raise ValueError(msg)
        self.cost, self.timeout, self.seen = cost, timeout, seen
        self.most_tokens, self.most_items, self.most_waiting = most_tokens, most_items, most_waiting
        self._run = run
        self._waiting: dict[_Entry[Item, Answer], None] = {}  # in order; any one is removed at once
        self._worker: asyncio.Task[None] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
        self._seconds_per_token = 0.0
        self._closing = False

    async def ask(self, items: Sequence[Item]) -> list[Answer]:
        """Return an answer for each item of a request.

        When the caller is cancelled, or one item fails, no batch takes the others any more.

        Raises:
            OverloadedError: too much waits.
            ClosedError: `close` was called.
            TooLateError: the time of the request is over.
            Exception: what `run` raised for an item, or has given as its answer.
        """
        if self._closing:
            msg = "the server is closing"
            raise ClosedError(msg)
        if self._waiting and len(self._waiting) + len(items) > self.most_waiting:
            raise OverloadedError(len(self._waiting), self._seconds_until_free())
        loop = asyncio.get_running_loop()
        entries = [_Entry(item, self.cost(item), loop.create_future()) for item in items]
        self._waiting.update(dict.fromkeys(entries))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        limit = loop.call_later(self.timeout, self._expire, entries)
        try:
            return await asyncio.gather(*(entry.answer for entry in entries))
        finally:
            limit.cancel()
            for entry in entries:
                self._waiting.pop(entry, None)

    def replace(self, run: Callable[[list[Item]], Any]) -> None:
        """Compute all later batches by another function; any thread may call this."""
        self._run = run

    async def close(self, drain: bool = True) -> None:
        """Take nothing new, and return when nothing is computed any more.

        Args:
            drain: whether what waits is still answered; otherwise it gets `ClosedError`.
        """
        self._closing = True
        if not drain:
            for entry in self._waiting:
                _settle(entry, ClosedError("the server is closing"))
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        while self._waiting:
            taken = self._next()
            if not taken:
                continue
            try:
                answers = await each_alone(self._call, [entry.item for entry in taken])
            except BaseException:  # the loop is ending, or `run` cancelled itself
                for entry in taken:
                    entry.answer.cancel()
                raise
            for entry, answer in zip(taken, answers, strict=True):
                _settle(entry, answer)

    def _next(self) -> list[_Entry[Item, Answer]]:
        """Remove the entries of the next batch, and those that nobody waits for, from the queue."""
        taken: list[_Entry[Item, Answer]] = []
        passed, tokens = [], 0
        for entry in self._waiting:
            if not entry.answer.done():
                full = len(taken) == self.most_items or tokens + entry.tokens > self.most_tokens
                if taken and full:
                    break
                taken.append(entry)
                tokens += entry.tokens
            passed.append(entry)
        for entry in passed:
            del self._waiting[entry]
        return taken

    async def _call(self, items: list[Item]) -> Sequence[Any]:
        run, loop, begin = self._run, asyncio.get_running_loop(), time.perf_counter()
        if inspect.iscoroutinefunction(run):
            answers = await run(items)
        else:
            answers = await loop.run_in_executor(self._thread, run, items)
        seconds, tokens = time.perf_counter() - begin, sum(map(self.cost, items))
        own = seconds / max(1, tokens)
        self._seconds_per_token = (
            0.8 * self._seconds_per_token + 0.2 * own if self._seconds_per_token else own
        )
        if self.seen is not None:
            loop.call_soon(self.seen, len(items), tokens, seconds)
        return list(answers)

    def _expire(self, entries: Sequence[_Entry[Item, Answer]]) -> None:
        for entry in entries:
            _settle(entry, TooLateError(f"there was no answer within {self.timeout:g} s"))

    def _seconds_until_free(self) -> int:
        tokens = sum(entry.tokens for entry in self._waiting)
        return max(1, math.ceil(tokens * self._seconds_per_token))


async def each_alone(
    call: Callable[[list[Item]], Awaitable[Sequence[Any]]], items: Sequence[Item]
) -> list[Any]:
    """Return an answer for each item, or the exception that it raised.

    Where a call fails, halves of the items are tried: one item that fails among n costs about 2 log2(n)
    further calls.
    """
    try:
        answers = list(await call(list(items)))
        if len(answers) != len(items):
            msg = f"expected {len(items)} answers, but got {len(answers)}"
            raise ValueError(msg)
    except Exception as error:  # whatever a model may raise
        if len(items) == 1:
            return [error]
        half = len(items) // 2
        return [*await each_alone(call, items[:half]), *await each_alone(call, items[half:])]
    return answers


def _settle(entry: _Entry[Any, Any], answer: Any) -> None:
    """Give an answer to who waits for it; the client may have gone."""
    if not entry.answer.done():
        (entry.answer.set_exception if isinstance(answer, Exception) else entry.answer.set_result)(answer)

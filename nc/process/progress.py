"""How far a long call is: a bar in a terminal, a line that changes in a notebook, else a line a minute."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nc.text.plain import plain

#: Called as (done, total, name) before a step.
Progress = Callable[[int, int, str], None]
#: Seconds until something is shown, in a terminal and elsewhere, and between lines.
_BAR_AFTER, _LINE_AFTER = 2.0, 60.0


@contextlib.contextmanager
def shown(progress: Progress | bool | None, what: str) -> Iterator[Progress]:
    """Yield what is to be told how far a call is.

    Args:
        progress: the caller's function, which is yielded as it is; None, True: show it; False: show nothing.
        what: the call, in a word.
    """
    if callable(progress):
        yield progress
    elif progress is False or sys.stderr is None:
        yield lambda *_: None
    else:
        display = _Display(what)
        try:
            yield display.tell
        finally:
            display.end()


class _Display:
    """Shows the last step that was reported, from its own thread."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, time.monotonic()
        self._step: tuple[int, int, str] = (0, 0, "")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="nc-progress", daemon=True)
        self._thread.start()

    def tell(self, done: int, total: int, name: str) -> None:
        self._step = (done, total, name)

    def end(self) -> None:
        """Take the bar away."""
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        display = _display_of_notebook()
        if display is not None or sys.stderr.isatty():
            if not self._ended.wait(_BAR_AFTER):
                self._bar() if display is None else self._updates(display)
            return
        while not self._ended.wait(_LINE_AFTER):
            sys.stderr.write(f"{self._line()}\n")
            sys.stderr.flush()

    def _line(self) -> str:
        done, total, name = self._step
        count = f" [{done}/{total}]" if total else ""
        text = " ".join(plain(f"nc: {self._what}{count} {name}").split())
        return f"{text}, {time.monotonic() - self._start:.0f} s"

    def _updates(self, display: Callable[..., Any]) -> None:
        """Show a line in a notebook that changes; a bar of rich would need ipywidgets."""
        shown = display({"text/plain": self._line()}, raw=True, display_id=True)
        while not self._ended.wait(0.5):
            shown.update({"text/plain": self._line()}, raw=True)
        shown.update({"text/plain": f"{self._line()}, done"}, raw=True)

    def _bar(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        with Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=_console(),
            transient=True,
            refresh_per_second=2,
        ) as bar:
            task = bar.add_task(self._what, total=None)
            while not self._ended.wait(0.5):
                done, total, name = self._step
                text = plain(f"{self._what}: {name}") if name else self._what
                bar.update(task, completed=done, total=total or None, description=text)


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def _display_of_notebook() -> Callable[..., Any] | None:
    """Return what shows values in the notebook that runs this process; None where there is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return ipython.display.display if ipython is not None and hasattr(shell, "kernel") else None

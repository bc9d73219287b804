"""Warn at the line of the user's code that called nc."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from nc.errors import NCWarning
from nc.text.plain import plain

#: Warnings that wait in this thread of execution; None: they are said at once.
_HELD: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar("held", default=None)


def warn(text: str, category: type[NCWarning] = NCWarning) -> None:
    """Give a warning whose place is the innermost call outside of nc and torch.

    Python's import does not count either.
    """
    packages = [sys.modules[name].__file__ for name in ("nc", "torch") if name in sys.modules]
    between = (*(f"{Path(file).parent}{os.sep}" for file in packages if file), "<frozen importlib")
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    _say(functools.partial(warnings.warn_explicit, plain(text), category, *place))


def _say(warning: Callable[[], None]) -> None:
    held = _HELD.get()
    if held is None:
        warning()
    else:
        held.append(warning)


@contextlib.contextmanager
def said_after(check: Callable[[], None]) -> Iterator[None]:
    """Check something at the end of a block, and hold the warnings of the block back until then.

    Args:
        check: raises where they are not worth saying, and whatever fails in the block has its cause here.
    """
    held: list[Callable[[], None]] = []
    token = _HELD.set(held)
    try:
        yield
    finally:
        _HELD.reset(token)
        check()
        for warning in held:
            _say(warning)

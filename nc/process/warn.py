"""Warn the user at the line of theirs that called nc."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from nc.errors import NCWarning
from nc.text.plain import plain


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
    warnings.warn_explicit(
        plain(text), category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )

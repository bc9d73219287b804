"""Warn the user at the line of theirs that called nc."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

from nc.errors import NCWarning

#: Code that is between the user's call and the warning: that of these folders, and of Python's import.
_BETWEEN = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<frozen importlib")


def warn(text: str, category: type[NCWarning] = NCWarning) -> None:
    """Give a warning whose place is the innermost call that is neither of nc nor of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)

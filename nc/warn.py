"""Warn the user at the line of theirs that called nc."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from nc.errors import NCWarning

#: Frames in these folders are between the user's call and the warning.
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def warn(text: str, category: type[NCWarning] = NCWarning) -> None:
    """Give a warning whose place is the innermost call that is neither of nc nor of torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)

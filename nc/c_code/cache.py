"""Small files that can be made again, kept between processes in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def folder() -> Path:
    """The folder, which need not exist."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the XDG specification ignores others, which would mean another folder in each working directory
        return named / "nc"
    try:
        return Path.home() / ".cache" / "nc"
    except RuntimeError:  # a user without a home, as containers have
        return Path(tempfile.gettempdir()) / f"nc-{os.getuid()}"


def trusted(path: Path) -> bool:
    """Whether a file exists that nobody else could have written: what is kept here is run, or jumped to."""
    try:
        status, parent = path.stat(), path.parent.stat()
    except OSError:
        return False
    return all(s.st_uid == os.getuid() and not s.st_mode & 0o022 for s in (status, parent))


def write(path: Path, content: bytes) -> bool:
    """Write a file as a whole.

    Returns:
        Whether it is there: without a folder to write to, the next process makes its content again, which costs time only.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except OSError:
        return False
    return True

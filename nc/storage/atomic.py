"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from nc.errors import ArtefactError


def staging_path(target: Path) -> Path:
    """Return a new hidden name beside a path, for what gets that path when it is complete."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")


def check_no_directory(target: Path) -> None:
    """Raise ArtefactError where a file is to be written and a directory has its name."""
    if target.is_dir():
        msg = f"{str(target)!r} is a directory; choose another name for the file."
        raise ArtefactError(msg)


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write a file to.

    It replaces `path` when the block ends without an exception; else `path` stays as it was.

    Parents are created. A link stays a link, to the new file.

    Raises:
        ArtefactError: a directory has the name.
    """
    target = Path(path).resolve()
    check_no_directory(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = staging_path(target)
    try:
        yield staged
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)

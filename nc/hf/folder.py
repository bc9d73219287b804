"""Folders of quantized models that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from nc.errors import ArtefactError
from nc.storage.atomic import staging_path
from nc.storage.folder import alone_in, publish

#: Folder of the artefact beside config.json. Readers of other projects find no weights, and say so.
ARTEFACT = "nc"


def is_result(folder: Path, marker: str) -> bool:
    """Whether a folder has the artefact of a quantized model, and a file by which it is known."""
    return (folder / marker).is_file() and (folder / ARTEFACT).is_dir()


def replaceable(target: Path, marker: str) -> Path:
    """Return a folder that may be written.

    Raises:
        ArtefactError: something else than an earlier result lies there.
    """
    if (
        target.exists()
        and not is_result(target, marker)
        and not (target.is_dir() and not any(target.iterdir()))
    ):
        msg = (
            f"{str(target)!r} exists and is no earlier result. Choose another folder: float weights beside "
            "quantized ones would be loaded in their place."
        )
        raise ArtefactError(msg)
    return target


@contextlib.contextmanager
def written(target: Path, marker: str) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` at the end of the block."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = staging_path(target)
    try:
        yield staged
        with alone_in(target.parent):
            publish(staged, replaceable(target, marker))
    finally:
        shutil.rmtree(staged, ignore_errors=True)

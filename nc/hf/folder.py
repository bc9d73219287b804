"""Folders of quantized models that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nc.errors import ArtefactCorruptError, ArtefactError, NCError
from nc.hf import checksums
from nc.storage.atomic import Ours, check_first, replaced_folder

#: Folder of the artefact beside config.json. Readers of other projects find no weights, and say so.
ARTEFACT = "nc"
#: Folder of the encoder's artefact where a model has an encoder and a decoder; `ARTEFACT` has the decoder.
ENCODER = "nc-encoder"
#: File by which a folder of transformers is known.
CONFIG = "config.json"


def is_result(folder: Path, *marks: str) -> bool:
    """Return whether a folder has all files and folders by which a result is known."""
    return all((folder / mark).exists() for mark in marks)


def replaceable(target: Path, *marks: str) -> Path:
    """Return a folder that may be written.

    Raises:
        ArtefactError: something else than an earlier result is there, or one with files that nc did not
            write.
    """
    check_first(target, _known(marks))
    return target


def _known(marks: tuple[str, ...]) -> Ours:
    """Return what knows an empty folder, and an earlier result by its marks and its record of all files."""

    def known(target: Path) -> bool:
        if target.is_dir() and not any(target.iterdir()):
            return True
        if is_result(target, *marks) and checksums.is_ours(target):
            return True
        msg = (
            f"{str(target)!r} exists and is not an earlier result, has files that nc did not write, or is of "
            "an older nc. Remove it, or choose another folder: float weights beside quantized ones would be "
            "loaded in their place."
        )
        raise ArtefactError(msg)

    return known


@contextlib.contextmanager
def read_by_others(place: Path, trust_remote_code: bool) -> Iterator[None]:
    """Give errors of transformers and sentence-transformers that read a file or folder a type.

    Raises:
        ArtefactError: code in the folder would have to run.
        ArtefactCorruptError: any other error.
    """
    try:
        yield
    except NCError:
        raise
    except Exception as error:  # whatever they raise for files that were altered
        if "trust_remote_code" in str(error) and not trust_remote_code:
            msg = (
                f"{place} needs Python code that is not part of the installed packages, and was not run. If "
                f"you trust who wrote it, give trust_remote_code=True. ({error})"
            )
            raise ArtefactError(msg) from error
        msg = f"{place} could not be read ({type(error).__name__}: {error}). Get it again."
        raise ArtefactCorruptError(msg) from error


@contextlib.contextmanager
def written(target: Path, *marks: str) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` at the end of the block.

    It gets a record of all its files.

    Raises:
        ArtefactError: as `replaceable`; it cannot be written.
    """
    with replaced_folder(target, _known(marks)) as staged:
        yield staged
        checksums.write(staged)

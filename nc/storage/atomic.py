"""The one way to write: beside the target, flushed, then renamed.

What nc did not write is never replaced. Each kind of file or folder says by what it is known (see
`nc.storage.marks`); everything else at the target, damaged files and those of a newer nc too, is an error
that leaves it as it is. A link stays a link: what it leads to is replaced by the same rule, and a link that
leads nowhere is an error.

What writes has a row in test/api/test_writers.py, and what it wrote a kind in test/api/test_damaged_files.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from nc.errors import ArtefactError, ArtefactWriteError, NCError
from nc.formats.checks import checked_path

#: Whether nc wrote what is at a path, which exists. It may raise an ArtefactError that says more.
Ours = Callable[[Path], bool]
#: Errors of disks that are full, broken or read-only.
_OF_DISKS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


def staging_path(target: Path) -> Path:
    """Return a new hidden name beside a path, for what gets that path when it is complete."""
    # a name may have 255 bytes
    return target.with_name(f".{target.name[:40]}.{uuid.uuid4().hex[:12]}.tmp")


def is_staged(path: Path) -> bool:
    """Return whether a name is a `staging_path`: of a process that was killed, if nobody writes now."""
    return path.name.startswith(".") and path.suffix in (".tmp", ".old")


def check_no_directory(target: Path) -> None:
    """Raise ArtefactError where a file is to be written and a directory, pipe or device has its name."""
    if target.exists() and not target.is_file():
        what = "a directory" if target.is_dir() else "a pipe or device"
        msg = f"{str(target)!r} is {what}; choose another name for the file."
        raise ArtefactError(msg)


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return where a path leads to.

    Raises:
        InputError: `path` is not a path.
        ArtefactError: it is a link that leads nowhere, or to itself.
    """
    given = checked_path("path", path)
    with writing(given):
        try:
            target = given.resolve()
        except RuntimeError as error:  # how Python before 3.13 says that links lead to themselves
            raise OSError(str(error)) from error
        lost = given.is_symlink() and not target.exists()
    if lost:
        msg = f"{str(given)!r} is a link that leads nowhere ({given.readlink()}). Remove the link."
        raise ArtefactError(msg)
    return target


def check_ours(target: Path, ours: Ours) -> None:
    """Raise ArtefactError if something is at a path that nc did not write, or not for this purpose."""
    if not os.path.lexists(target):
        return
    with writing(target):
        known = ours(target)
    if not known:
        msg = (
            f"{str(target)!r} exists, and is not an earlier result that this replaces. Choose another name, "
            "or remove it."
        )
        raise ArtefactError(msg)


def check_first(target: Path, ours: Ours) -> None:
    """Do the same before any work is done, while no other saver renames what is there."""
    if os.path.lexists(target):
        with writing(target), alone_in(target.parent):
            check_ours(target, ours)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Say of what can't be written its own name: the error has that of a temporary file.

    Raises:
        ArtefactWriteError: for an OSError, such as a full disk or a folder without permission.
    """
    try:
        yield
    except NCError:
        raise
    except (OSError, SafetensorError) as error:  # the second is how its library says that a disk is full
        raise _cannot(target, error) from error


@contextlib.contextmanager
def _body(target: Path, staged: Path) -> Iterator[None]:
    """Do the same for the block of a caller, which also runs other code: its errors stay as they are."""
    try:
        yield
    except NCError:
        raise
    except (OSError, SafetensorError) as error:
        if not _is_of(error, staged):
            raise
        raise _cannot(target, error) from error


def _cannot(target: Path, error: Exception) -> ArtefactWriteError:
    return ArtefactWriteError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}.")


def _is_of(error: Exception, staged: Path) -> bool:
    """Return whether an error is one of writing to a name, or into a folder of that name.

    What names no file counts if a disk is full or broken: `write` has no more than a number.
    """
    if not isinstance(error, OSError) or isinstance(error, shutil.Error):
        return True
    named = [
        name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes, os.PathLike))
    ]
    if not named:
        return error.errno in _OF_DISKS
    return any(str(Path(os.fsdecode(name)).resolve()).startswith(str(staged)) for name in named)


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str], ours: Ours) -> Iterator[Path]:
    """Yield a path to write a file to.

    It becomes `path` when the block ends without an exception; else `path` stays as it was, and nothing is
    left beside it. Parents are created.

    Args:
        path: of the file.
        ours: whether what is there may be replaced.

    Raises:
        ArtefactError: something else is there, or it can't be written.
        OSError: what the block raises, if it is not of writing to the path.
    """
    target = resolved(path)
    check_no_directory(target)
    check_first(target, ours)
    staged = staging_path(target)
    with writing(Path(path)):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _body(Path(path), staged):
            yield staged
        with writing(Path(path)):
            if target.exists():
                shutil.copymode(target, staged)
            flush(staged)
            with alone_in(target.parent) as handle:
                check_no_directory(target)
                check_ours(target, ours)
                staged.replace(target)
                os.fsync(handle)
    finally:
        with writing(Path(path)):
            staged.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, ours: Ours) -> None:
    """Write a text file in UTF-8; arguments and errors as of `replaced`."""
    content = text.encode("utf-8", "backslashreplace")  # names may have halves of pairs
    with replaced(path, ours) as staged:
        staged.write_bytes(content)


@contextlib.contextmanager
def replaced_folder(path: str | os.PathLike[str], ours: Ours) -> Iterator[Path]:
    """Yield a name that does not exist yet, to make a folder of; the rest is as for `replaced`.

    An empty folder is replaced, too.
    """
    target = resolved(path)

    def known(folder: Path) -> bool:
        return (folder.is_dir() and not any(folder.iterdir())) or ours(folder)

    check_first(target, known)
    staged = staging_path(target)
    with writing(Path(path)):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _body(Path(path), staged):
            yield staged
        with writing(Path(path)):
            for each in (*staged.rglob("*"), staged):
                flush(each)
            with alone_in(target.parent) as handle:
                check_ours(target, known)
                publish(staged, target)
                os.fsync(handle)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def flush(path: Path) -> None:
    """Hand a file, or a directory's entries, to the disk before it gets its name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(staged: Path, target: Path) -> None:
    """Give a complete directory its name; what was there survives until then, and a failure.

    Args:
        staged: a `staging_path` of the target.
        target: what is there is removed; the caller has checked that it may be, within `alone_in`.
    """
    aside = staged.with_suffix(".old")
    try:
        if target.exists():  # a full directory can't be renamed over another
            target.rename(aside)
        staged.rename(target)
    finally:
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.rename(target)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """Keep other savers, in threads and processes, out of a directory while its entries are renamed.

    Yields:
        A descriptor of it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # there are file systems without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)

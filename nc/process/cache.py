"""Small files that can be made again, kept between processes in the user's cache folder.

What is kept here is run, or jumped to. So it is read through descriptors that were checked, never by a name
that was checked before.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nc.process import env

#: Seconds after which a file that was not written to its end is nobody's any more.
_ABANDONED_S = 86400
_UNFINISHED = "unfinished-"


def folder() -> Path:
    """Return the folder, which need not exist."""
    named = Path(env.XDG_CACHE_HOME.get())
    if (
        named.is_absolute()
    ):  # the XDG specification ignores others, which would mean another folder in each working directory
        return named / "nc"
    try:
        return Path.home() / ".cache" / "nc"
    except RuntimeError:  # a user without a home, as containers have
        return Path(tempfile.gettempdir()) / f"nc-{os.getuid()}"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file that nobody else could have written or put there; yield its descriptor.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: somebody else could have; says where.
        OSError: it can't be opened.
    """
    directory = Path(os.path.realpath(path.parent))
    for above in dict.fromkeys((*path.parents[1:], *directory.parents)):
        if _others_decide(above.stat()):
            msg = f"others may change {above}"
            raise PermissionError(msg)
    with _descriptor(str(directory), os.O_DIRECTORY, None) as parent:
        _check_own(os.fstat(parent), directory)
        with _descriptor(path.name, os.O_NONBLOCK, parent) as file:
            status = os.fstat(file)
            _check_own(status, path)
            if not stat.S_ISREG(status.st_mode):
                msg = f"{path} is not a regular file"
                raise PermissionError(msg)
            yield file


@contextlib.contextmanager
def _descriptor(name: str, flags: int, directory: int | None) -> Iterator[int]:
    """Open a name that is not a link, and yield the descriptor."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            msg = f"{name} is a link"
            raise PermissionError(msg) from None
        raise
    try:
        yield handle
    finally:
        os.close(handle)


def read(path: Path) -> bytes:
    """Return the content of a file; errors as of `opened`."""
    with opened(path) as handle:
        return content(handle)


def content(handle: int) -> bytes:
    """All that the file of a descriptor has."""
    with os.fdopen(os.dup(handle), "rb") as file:
        file.seek(0)
        return file.read()


def _check_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        msg = f"{path} is another user's"
        raise PermissionError(msg)
    if status.st_mode & 0o022:
        msg = f"others may write {path}"
        raise PermissionError(msg)


def _others_decide(status: os.stat_result) -> bool:
    """Return whether another user than root can put something else in the place of a folder's content."""
    if status.st_uid not in (0, os.getuid()):
        return True
    if status.st_mode & stat.S_ISVTX:  # as /tmp: only owners of its entries can
        return False
    return bool(status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_own_group(status.st_gid)))


def _is_own_group(gid: int) -> bool:
    """Tell whether only this user is in a group: many systems give each user such a one, and let it write."""
    if gid == 0:
        return True
    try:
        user = pwd.getpwuid(os.getuid())
        return gid == user.pw_gid and set(grp.getgrgid(gid).gr_mem) <= {user.pw_name}
    except KeyError:
        return False


def write(path: Path, content: bytes) -> bool:
    """Write a file as a whole.

    Returns:
        Whether it is there: without a folder to write to, the next process makes its content again, which
            costs time only.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return False
    return True


def prune(pattern: str, most: int) -> None:
    """Remove files of a pattern in the folder but for those that were used last.

    What an interrupted process has left goes too.
    """
    with contextlib.suppress(OSError):  # another process removes the same
        files = sorted(folder().glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
        old = [
            path
            for path in folder().glob(f"{_UNFINISHED}*")
            if time.time() - path.stat().st_mtime > _ABANDONED_S
        ]
        for path in (*files[most:], *old):
            path.unlink(missing_ok=True)

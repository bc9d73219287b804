"""Files as pages of memory, which the system reads when they are needed and takes back when they are not."""

from __future__ import annotations

import dataclasses
import mmap
import os
from pathlib import Path

from nc.errors import ArtefactCorruptError


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Which file it was, and in which state.

    A file that is deleted, or replaced by renaming another one to its name (as `save` does), lives on as long
    as it is mapped. One that another program writes into changes in memory too, and one that it cuts ends the
    process when a missing page is read.

    Attributes:
        path: where it was.
        file: device and number.
        state: size and time of the last change.
    """

    path: Path
    file: tuple[int, int]
    state: tuple[int, int]

    @staticmethod
    def of(path: Path, status: os.stat_result) -> Identity:
        """From what the system says of a file."""
        return Identity(path, (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns))

    def check(self) -> None:
        """Raise ArtefactCorruptError when the file was written into since.

        It is to be called before its pages are read again.
        """
        try:
            now = Identity.of(self.path, self.path.stat())
        except OSError:
            return  # deleted: the pages are what they were
        if now.file == self.file and now.state != self.state:
            msg = (
                f"{self.path} was changed while a model that was loaded from it is in use. Load it again. To "
                "replace a model that is in use, save the new one, or rename it to this name; do not write "
                "into its files."
            )
            raise ArtefactCorruptError(msg)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """The bytes of a file.

    Attributes:
        buffer: the bytes; what this process writes into them is its own, the file stays as it is.
        identity: of the file.
    """

    buffer: mmap.mmap | bytearray
    identity: Identity

    @staticmethod
    def of(path: Path) -> MappedFile:
        """Map a file; where the file system can't, read it."""
        with path.open("rb") as file:
            identity = Identity.of(path, os.fstat(file.fileno()))
            try:
                buffer = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            except (OSError, ValueError):  # ValueError: it is empty
                return MappedFile(bytearray(file.read()), identity)
        buffer.madvise(mmap.MADV_WILLNEED)
        return MappedFile(buffer, identity)

    def release(self) -> None:
        """Free the memory; later reads come from the file again.

        The bytes must not have been written to.
        """
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.madvise(mmap.MADV_DONTNEED)

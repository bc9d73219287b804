"""oneDNN's verbose output about the kernels that it runs, captured and parsed.

oneDNN prints from C++ to the standard output of the whole process, whichever thread a call comes from.
Capture it in a separate process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Sequence

import torch

#: Has oneDNN print when each call began; it reads the variable once, before it prints anything.
TIMESTAMPS = ("ONEDNN_VERBOSE_TIMESTAMP", "1")
_MARK = "nc_mark,"
_TENSOR = re.compile(r"(?:^| )(src\d*|wei|dst)[:_](?:\d+:)?([a-z]+\d+)")
_CODES = ("u8", "s8")


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutedPrimitive:
    """One primitive that oneDNN ran.

    Attributes:
        primitive: what it computes: "convolution", "matmul", "reorder", …
        implementation: the code that computes it, e.g. "jit_uni_int8:avx2"; "" where oneDNN does not say.
        reads: dtypes of its inputs and weights as oneDNN names them: ("u8", "s8").
        writes: dtype of its result.
        ms: what oneDNN measured, while it printed too.
        start: when it began, in ms on oneDNN's clock; 0.0 where the stream has no such column.
    """

    primitive: str
    implementation: str
    reads: tuple[str, ...]
    writes: str
    ms: float
    start: float = 0.0

    @property
    def computes_on_codes(self) -> bool:
        """Whether it does arithmetic on 8-bit codes."""
        return self.primitive != "reorder" and self.reads[:1] in [(dtype,) for dtype in _CODES]

    def __str__(self) -> str:
        """As the report shows it: "convolution jit_uni_int8:avx2 (u8, s8 -> u8)"."""
        dtypes = f" ({', '.join(self.reads)} -> {self.writes})" if self.reads or self.writes else ""
        return f"{self.primitive} {self.implementation}{dtypes}"


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """One partition of oneDNN Graph, which runs one or more primitives.

    Attributes:
        kernels: its primitives, in order.
    """

    kernels: tuple[ExecutedPrimitive, ...]


def parse(lines: Sequence[str]) -> list[ExecutedPrimitive | Partition | int]:
    """Return the executions and marks of a stream, in order; other lines say nothing.

    A partition's line follows those of its primitives, and of primitives that ran just before it: when they
    began tells them apart.
    """
    found: list[ExecutedPrimitive | Partition | int] = []
    for line in lines:
        if line.startswith(_MARK):
            found.append(int(line.removeprefix(_MARK)))
            continue
        fields = line.strip().split(",")
        if not fields[0].endswith("_verbose") or "exec" not in fields:
            continue
        at = fields.index("exec")
        start = float(fields[2]) if re.fullmatch(r"\d+\.\d+", fields[2]) else 0.0
        if fields[at - 1] == "graph":
            inside: list[ExecutedPrimitive] = []
            while found and isinstance(last := found[-1], ExecutedPrimitive) and last.start >= start:
                inside.insert(0, last)
                found.pop()
            found.append(Partition(tuple(inside)))
        else:
            tensors = dict(_TENSOR.findall(fields[at + 5]))
            writes = tensors.pop("dst", "?")
            found.append(
                ExecutedPrimitive(
                    fields[at + 2], fields[at + 3], tuple(tensors.values()), writes, float(fields[-1]), start
                )
            )
    return found


def by_mark(
    stream: Sequence[ExecutedPrimitive | Partition | int],
) -> dict[int, tuple[ExecutedPrimitive, ...]]:
    """Return the kernels that follow each mark."""
    found: dict[int, tuple[ExecutedPrimitive, ...]] = {}
    current = -1
    for entry in stream:
        if isinstance(entry, int):
            current = entry
        elif isinstance(entry, ExecutedPrimitive):
            found[current] = (*found.get(current, ()), entry)
    return found


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Collect the lines that oneDNN prints inside, complete once the block ends.

    It takes the standard output of the process over.
    """
    lines: list[str] = []
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as sink:
        libc.fflush(None)
        saved = os.dup(1)
        os.dup2(sink.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call] # not annotated
                yield lines
        finally:
            libc.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
        sink.seek(0)
        lines += sink.read().decode(errors="replace").splitlines()


def mark(number: int) -> None:
    """Put a number into the stream, by the C library's buffer.

    That keeps it in order with what oneDNN prints.
    """
    ctypes.CDLL(None).printf(f"{_MARK}{number}\n".encode())

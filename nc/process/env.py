"""The environment variables that nc reads; no other module reads any.

A variable is read when its value is needed, never at import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """One variable.

    Attributes:
        name: its name.
        values: what it may hold, for documents.
        default: what holds where it is not set, for documents.
        meaning: what nc does with it, for documents.
    """

    name: str
    values: str
    default: str
    meaning: str

    def get(self, default: str = "") -> str:
        """Return its value in this moment, or `default` where it is not set."""
        return os.environ.get(self.name, default)

    @property
    def is_set(self) -> bool:
        """Whether it is set in this moment, be it to nothing."""
        return self.name in os.environ


NC_ONEDNN = Variable(
    "NC_ONEDNN",
    "`torch`, `package`, `system`, the path of a library, or `none`",
    "`torch`, then `package`, then `system`",
    "which oneDNN library the plans of `native` call: the copy inside torch, `libdnnl.so.3` of a Python "
    "package or of the system, this file, or no library, which leaves everything to torch's operators",
)
CC = Variable(
    "CC",
    "a command",
    "the first of `cc`, `gcc` and `clang` that exists",
    "compiles the C kernels at their first use, where the wheel has none",
)
NC_MAX_ISA = Variable(
    "NC_MAX_ISA",
    "`avx2`, `avx_vnni`, `avx512`, `avx512_vnni`, `avx512_bf16` or `amx`",
    "no limit",
    "the best instruction set that nc's C kernels use and that plans count on; any other value is an error. "
    "Set it when the process starts",
)
NC_EMULATE = Variable(
    "NC_EMULATE",
    "an instruction set, as `NC_MAX_ISA`",
    "none",
    "only for nc's own tests, an error elsewhere: nc's C kernels are compiled for AVX2 alone, and emulate it",
)
NC_EMULATE_HEADERS = Variable(
    "NC_EMULATE_HEADERS",
    "folders, with `:` between them",
    "none",
    "only for nc's own tests: the headers that `NC_EMULATE` needs",
)
CXX = Variable("CXX", "a command", "`g++`", "the C++ compiler that `compile=True` and `export_pt2` need")
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME",
    "an absolute path",
    "`~/.cache`",
    "compiled kernels and addresses of oneDNN's functions are kept in its folder `nc`; a path that is not "
    "absolute does not count",
)
COLUMNS = Variable(
    "COLUMNS",
    "a number",
    "the terminal's width; 160 in a file or pipe",
    "width of the tables that the command line prints",
)
ONEDNN_MAX_CPU_ISA = Variable(
    "ONEDNN_MAX_CPU_ISA",
    "a name of oneDNN, for example `AVX2` or `AVX512_CORE`",
    "no limit",
    "limits the instruction sets of oneDNN and of nc's C kernels; a CPU with VNNI counts as one without "
    "where the limit excludes it. Set it when the process starts",
)
DNNL_MAX_CPU_ISA = Variable(
    "DNNL_MAX_CPU_ISA", "the same", "no limit", "older name of `ONEDNN_MAX_CPU_ISA`, which has priority"
)
FBGEMM_ENABLE_INSTRUCTIONS = Variable(
    "FBGEMM_ENABLE_INSTRUCTIONS",
    "`AVX2`, `AVX512`, `AVX512_256`, …",
    "no limit",
    "limits FBGEMM, which computes dynamic linears, and LSTM and GRU with one range per tensor",
)
OMP_NUM_THREADS = Variable(
    "OMP_NUM_THREADS",
    "a number",
    "the number of cores",
    "threads of torch and of nc's kernels, as `torch.set_num_threads`. Where neither it nor "
    "`MKL_NUM_THREADS` is set, `load` takes no more threads than the container has CPUs",
)
MKL_NUM_THREADS = Variable("MKL_NUM_THREADS", "a number", "`OMP_NUM_THREADS`", "likewise")
#: All variables that nc reads.
VARIABLES = (
    NC_ONEDNN,
    NC_MAX_ISA,
    NC_EMULATE,
    NC_EMULATE_HEADERS,
    CC,
    CXX,
    XDG_CACHE_HOME,
    COLUMNS,
    ONEDNN_MAX_CPU_ISA,
    DNNL_MAX_CPU_ISA,
    FBGEMM_ENABLE_INSTRUCTIONS,
    OMP_NUM_THREADS,
    MKL_NUM_THREADS,
)
#: Variables that nc does not read, and that change what it does, because a library reads them; for documents.
OTHERS = (
    Variable(
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "a number",
        "1024",
        "primitives that oneDNN keeps, about half a megabyte each; `0` keeps only those that nc's plans hold",
    ),
    Variable(
        "PYTORCH_JIT",
        "`0` or `1`",
        "`1`",
        "`0` switches TorchScript off, which `ipex` and `export_torchscript` need",
    ),
)


def extended(added: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of this moment with some variables more, for a child process."""
    return {**os.environ, **added}


@functools.cache
def at_start() -> Mapping[str, str]:
    """Return the environment that the process was started with, as Linux keeps it."""
    kept = Path("/proc/self/environ")
    entries = os.fsdecode(kept.read_bytes()).split("\0") if kept.exists() else []
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@contextlib.contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    """Set a variable inside, and put it back afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

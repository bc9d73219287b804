"""Importing IPEX without its console noise."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

from nc.process import env
from nc.process.lock import LOCK


@contextlib.contextmanager
def quiet(*, drop: bool = False) -> Iterator[None]:
    """Hold back what reaches the console inside.

    IPEX and the JIT print from C++, past Python's warnings and logging.

    One thread at a time; another thread's output of that moment is held back too, and shown afterwards.

    Args:
        drop: do not show it, unless the block raises.
    """
    with LOCK, tempfile.TemporaryFile() as sink, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        shown = True
        try:
            yield
            shown = not drop
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            if shown:
                sink.seek(0)
                sys.stderr.write(sink.read().decode(errors="replace"))


def import_ipex() -> None:
    """Import IPEX, silently; registers its fusion pass with TorchScript.

    IPEX imports Inductor, which would start a pool of compiler processes that nothing here uses.
    """
    if "intel_extension_for_pytorch" in sys.modules:
        return
    with quiet(drop=True), env.changed("TORCH_WARM_POOL", "0"):
        import intel_extension_for_pytorch  # noqa: F401

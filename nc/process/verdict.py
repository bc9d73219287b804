"""A command whose exit code is a verdict, while code of the user's could end its process with any code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable


def run_apart(command: Callable[[], object]) -> None:
    """Run a command in a child process, and exit with its code.

    The code counts only if the command itself has told it. A process that `os._exit`, a signal or the end of
    memory stopped has told none: that is exit code 2, and a line of JSON.

    Args:
        command: ends with SystemExit, as those of click do.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            command()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            os.write(writing, bytes([code & 255]))
            raise
        return
    os.close(writing)
    os.set_blocking(reading, False)  # processes that the user's code has started may still hold the other end
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the child gets it too, and ends
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            break
    told = b""
    with contextlib.suppress(BlockingIOError):
        told = os.read(reading, 1)
    if told:
        sys.exit(told[0])
    how = f"signal {-status}" if status < 0 else f"exit code {status}, as os._exit gives"
    why = f"The process ended before it had a result ({how}). See what ends it in the model or the metric."
    print(json.dumps({"outcome": "error", "passed": False, "reasons": [why]}))
    print(f"nc: error: {why}", file=sys.stderr)
    sys.exit(2)

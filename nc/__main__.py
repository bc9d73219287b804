"""`python -m nc`, and the command `nc-quant`."""

import functools
import os
import sys

from nc.process.installation import why_not_ours
from nc.process.verdict import run_apart


def run(name: str = "nc-quant") -> None:
    """Run the command line.

    Args:
        name: what the user typed, for messages.
    """
    why = why_not_ours()
    if why:
        print(f"nc: error: {why}", file=sys.stderr)
        sys.exit(2)
    if sys.argv[1:2] == ["check"] and hasattr(os, "fork"):
        run_apart(functools.partial(_main, name))
    else:
        _main(name)


def _main(name: str) -> None:
    from nc.cli.main import main

    main(prog_name=name)


if __name__ == "__main__":
    run("python -m nc")

"""`python -m nc`."""

import sys

from nc.installation import why_not_ours


def _run() -> None:
    why = why_not_ours()
    if why:
        print(f"nc: error: {why}", file=sys.stderr)
        sys.exit(2)
    from nc.cli.main import main

    main(prog_name="python -m nc")


_run()

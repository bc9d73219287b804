"""`python -m nc`, and the command `nc-quant`."""

import sys

from nc.process.installation import why_not_ours


def run(name: str = "nc-quant") -> None:
    """Run the command line.

    Args:
        name: what the user typed, for messages.
    """
    why = why_not_ours()
    if why:
        print(f"nc: error: {why}", file=sys.stderr)
        sys.exit(2)
    from nc.cli.main import main

    main(prog_name=name)


if __name__ == "__main__":
    run("python -m nc")

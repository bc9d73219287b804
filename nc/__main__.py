"""`python -m nc`."""

from nc.cli import main

main(prog_name="python -m nc")

"""`python -m nc`."""

from nc.cli.main import main

main(prog_name="python -m nc")

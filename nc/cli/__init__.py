"""The command line: `python -m nc`."""

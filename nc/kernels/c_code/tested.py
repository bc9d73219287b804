"""On which instruction sets the C code was tested; `make test-isas RECORD=1` writes the table."""

#: Of the sources, headers and flags that were tested.
SOURCES = ""
#: Instruction set → how: by a CPU that has it, or emulated.
TESTED: dict[str, tuple[str, ...]] = {}

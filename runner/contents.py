"""What nc_run has besides its own files: modules of nc that import nothing else of it, and libraries."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
C_CODE = ROOT / "nc/kernels/c_code"
MODULES = (C_CODE / "abi.py", C_CODE / "isas.py", ROOT / "nc/text/json_text.py")
#: C sources of the functions that plans may call, and of what calls them.
SOURCES = (
    "attention",
    "dynamic_attention",
    "flash",
    "float_attention",
    "recurrent",
    "rows",
    "runner",
    "steps",
)

"""The code of `rows.c` for each instruction set, also for two that this CPU lacks.

AVX-VNNI is tested in the encoding that AVX512-VNNI has for its instruction, and AMX with tiles in plain C
(emulated/tiles.h).
"""

import ctypes
import functools
import tempfile
from pathlib import Path

from nc.backends.native.plans import row_linears
from nc.kernels.c_code import build, emulation, openmp
from nc.kernels.c_code.calls import function_of

_TILES = Path(__file__).parents[1] / "emulated" / "tiles.h"
#: What stands for an instruction set that the CPU lacks → its name, and the compiler's options.
STAND_INS = {
    "avx_vnni as evex": ("avx_vnni", "-DNC_TEST_EVEX"),
    "emulated amx": ("amx", f"-include {_TILES}"),
}


def isas_to_test(form=row_linears.CODES):
    """Instruction sets of this CPU with code for rows of a format, and what stands for others."""
    found = row_linears.isas(form)
    compiled = build.loaded("rows").isas if found else ()
    has_vnni = "avx512_vnni" in row_linears.isas(row_linears.CODES) and not emulation.emulated()
    possible = has_vnni and build._compiler() and " " not in str(_TILES)
    names = [
        name for name, (isa, _) in STAND_INS.items() if isa in form.isas and isa in compiled and possible
    ]
    return [*found, *names]


@functools.cache
def code_of(form, name):
    """The instruction set that a name of `isas_to_test` stands for, and its functions."""
    isa, options = STAND_INS.get(name, (name, ""))
    library = _compiled(options) if options else build.load_on_threads("rows")
    names = ("row_product", "code_product", "norm_rows", "row_chain")
    functions = (function_of(library, which, f"{which} {isa}") for which in names)
    return row_linears._Code(function_of(library, form.function), *functions, isa)


@functools.cache
def _compiled(options):
    """The library with options of the compiler; it may use all instruction sets."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "row_linears.so"
        build.compile_source(Path(build.__file__).parent / "rows.c", target, f"{build._compiler()} {options}")
        library = ctypes.CDLL(str(target))
    openmp.connect(library)
    return library

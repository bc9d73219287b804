"""The short tests of kernels for each instruction set: on the CPU itself where it has the set, and emulated.

    python test/isas.py [NAME…] [--jobs 2] [--cases 20] [--record]

Where the CPU has the set, processes have the limits of `environment`: on the C code of this package, and on
oneDNN, torch and FBGEMM, so a CPU with AMX computes as one with AVX2 alone does. Emulated, the C code is compiled
for AVX2 against emulated/immintrin.h and SIMDe, and the libraries are limited to AVX2, so that every CPU runs
the same. Where both ran, c_fuzz.py gives the same cases to both, and their results are compared: integers must be
equal, floating-point numbers be next to each other at most.

--record writes into the package what passed, for `nc doctor`. `make test-isas` runs this file, and pytest's
marker `isas` selects the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import torch

from nc.kernels import cpu
from nc.kernels.c_code import build, tested
from nc.kernels.c_code.isas import ISAS
from nc.kernels.c_code.limit import VARIABLE
from nc.process import env

_HERE = Path(__file__).parent
_TESTED = Path(tested.__file__)
#: Where `make setup-emulated` puts SIMDe.
SIMDE = Path(sysconfig.get_path("purelib")) / "cmeel.prefix" / "include"
#: Name of an instruction set → what limits oneDNN, torch's operators and FBGEMM to it ("": nothing does).
LIMITS = {
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx_vnni": ("AVX2_VNNI", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "avx512", ""),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", ""),
    "amx": ("AVX512_CORE_AMX", "avx512", ""),
}
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "FBGEMM_ENABLE_INSTRUCTIONS")
#: What else may be set, and would change a run.
_OTHERS = ("DNNL_MAX_CPU_ISA", env.NC_EMULATE.name, env.NC_EMULATE_HEADERS.name)
#: How an instruction set is tested: by a CPU that has it, or in portable C.
HOW = REAL, EMULATED = "real", "emulated"
#: Of the real instructions that emulated ones are compared with. Else the compiler decides which products and
#: sums are rounded once.
_UNFUSED = {"CC": "gcc -ffp-contract=off"}


@dataclass(frozen=True, slots=True)
class Run:
    """What came of the tests of an instruction set.

    Attributes:
        isa: its name.
        how: `REAL` or `EMULATED`.
        code: exit code of pytest.
        passed, skipped, failed: numbers of tests.
        compared: results of c_fuzz.py that were compared with those of the real instructions.
        differences: where they are not the same, one line each.
    """

    isa: str
    how: str
    code: int
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    compared: int = 0
    differences: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether it may count as tested."""
        return not self.code and self.passed > 0 and not self.differences


def environment(name: str) -> dict[str, str]:
    """Return the variables that limit a process to an instruction set of this CPU."""
    return {
        VARIABLE: name,
        **{variable: value for variable, value in zip(_VARIABLES, LIMITS[name], strict=True) if value},
    }


def emulation(name: str) -> dict[str, str]:
    """Return the variables with which a process emulates an instruction set.

    Raises:
        SystemExit: SIMDe is not installed.
    """
    if not SIMDE.exists():
        sys.exit(f"{SIMDE} does not exist: run `make setup-emulated`, and use the Python of .venv-emulated.")
    headers = os.pathsep.join(map(str, (_HERE / "emulated", SIMDE)))
    return {
        **environment("avx2"),
        VARIABLE: name,
        env.NC_EMULATE.name: name,
        env.NC_EMULATE_HEADERS.name: headers,
    }


def lacking(name: str) -> tuple[str, ...]:
    """Return the features of the CPU that an instruction set needs and that are missing here."""
    return tuple(flag for flag in ISAS[name] if flag not in cpu.flags())


def run(name: str, how: str, jobs: int) -> Run:
    """Run the tests for one instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "-q", "--disable-warnings", "-n", str(jobs), "--dist", "worksteal"]
        selected = ["-m", "isas and not exhaustive", f"--junitxml={report}"]
        files = sorted(
            str(f) for f in _HERE.rglob("test_*.py") if "mark.isas" in f.read_text(encoding="utf-8")
        )
        code = _python([*command, *selected, *files], _variables(name, how))
        if not report.exists():
            return Run(name, how, code or 1)
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    every, failed, errors, skipped = (
        int(suite.get(n, 0)) for n in ("tests", "failures", "errors", "skipped")
    )
    return Run(name, how, code, every - failed - errors - skipped, skipped, failed + errors)


def _variables(name: str, how: str) -> dict[str, str]:
    return environment(name) if how == REAL else emulation(name)


def _python(command: Sequence[str], variables: Mapping[str, str]) -> int:
    kept = {k: v for k, v in os.environ.items() if k not in (*_VARIABLES, *_OTHERS)}
    return subprocess.run([sys.executable, *command], env={**kept, **variables}, check=False).returncode


def compared(name: str, cases: int) -> tuple[int, tuple[str, ...]]:
    """Compare results of the emulated instructions with those of the real ones.

    Returns:
        How many there are, and where they are not the same.
    """
    results = []
    for how in HOW:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.pt"
            command = [str(_HERE / "c_fuzz.py"), "--cases", str(cases), "--quiet", "--record", str(file)]
            code = _python(command, {**_variables(name, how), **(_UNFUSED if how == REAL else {})})
            if code:
                return 0, (f"c_fuzz.py, {how}: exit code {code}",)
            results.append(torch.load(file))
    real, emulated = results
    if [case for case, _ in real] != [case for case, _ in emulated]:
        return 0, ("c_fuzz.py chose other cases",)
    pairs = [
        (case, difference(a, b, approximate=any(name in case for name in _APPROXIMATE)))
        for (case, ours), (_, theirs) in zip(real, emulated, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return len(pairs), tuple(f"{case}: {why}" for case, why in pairs if why)


_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
#: Activations that use RCP14PS, of whose result CPUs give 14 bits or more, each others.
_APPROXIMATE = ("swish",)
#: How far apart their results may be, as a part of the largest number.
_APART = 2.0**-21


def difference(a: torch.Tensor, b: torch.Tensor, *, approximate: bool = False) -> str:
    """Return how two results are not the same; "" where they are.

    Integers are equal, and floating-point numbers are next to each other at most. Where they are approximate,
    integers may be next to each other, and floating-point numbers be `_APART`.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return "another form"
    if a.dtype not in _BITS:
        count = int(((a.long() - b.long()).abs() > approximate).sum())
        return f"{count} of {a.numel()} integers differ" if count else ""
    apart = torch.where(a.isnan() & b.isnan(), 0, (_place(a) - _place(b)).abs())
    limit = _APART * a.double().abs().nan_to_num(0, 0, 0).amax() if approximate and a.numel() else 0.0
    wrong = (apart > 1) & ~((a.double() - b.double()).abs() <= limit)
    worst = int(apart[wrong].max()) if wrong.any() else 0
    return (
        f"{int(wrong.sum())} of {a.numel()} numbers differ, by {worst} units in the last place"
        if worst
        else ""
    )


def _place(x: torch.Tensor) -> torch.Tensor:
    """Return where numbers are in the order of all numbers of their dtype; 0 and -0 are the same."""
    bits = x.view(_BITS[x.dtype]).long()
    return torch.where(bits < 0, torch.iinfo(_BITS[x.dtype]).min - bits, bits)


def table(runs: Sequence[Run]) -> list[str]:
    """Return one line for each run, with a heading."""
    rows = [("set", "how", "passed", "skipped", "failed", "compared", "differences")]
    rows += [
        (
            r.isa,
            r.how,
            *map(str, (r.passed, r.skipped, r.failed)),
            *((str(r.compared), str(len(r.differences))) if r.compared or r.differences else ("-", "-")),
        )
        for r in runs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def record(runs: Sequence[Run]) -> str:
    """Return the content of `nc.kernels.c_code.tested` with what passed; what was tested of other sources is left out."""
    before = tested.TESTED if build.all_sources() == tested.SOURCES else {}
    passed = {
        name: {*before.get(name, ()), *(r.how for r in runs if r.isa == name and r.is_right)} for name in ISAS
    }
    lines = [
        f"    {json.dumps(name)}: ({', '.join(map(json.dumps, sorted(hows)))},),"
        for name, hows in passed.items()
        if hows
    ]
    head, _, _ = _TESTED.read_text(encoding="utf-8").partition("\nSOURCES = ")
    middle = "#: Instruction set → how: by a CPU that has it, or emulated."
    return "\n".join(
        (
            head,
            f'SOURCES = "{build.all_sources()}"',
            middle,
            "TESTED: dict[str, tuple[str, ...]] = {",
            *lines,
            "}",
            "",
        )
    )


def main() -> None:
    """Run the tests for all instruction sets that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ISAS)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("--cases", type=int, default=20, help="of each function that are compared")
    parser.add_argument("--record", action="store_true", help="write what passed into the package")
    options = parser.parse_args()
    asked = options.names or list(ISAS)
    if unknown := [name for name in asked if name not in ISAS]:
        parser.error(f"no such instruction set: {', '.join(unknown)}")
    runs = []
    for name in asked:
        for how in HOW:
            if how == REAL and lacking(name):
                print(f"--- {name}: this CPU lacks {', '.join(lacking(name))}", flush=True)
                continue
            print(f"--- {name}, {how}", flush=True)
            done = run(name, how, options.jobs)
            if how == EMULATED and not lacking(name):
                count, differences = compared(name, options.cases)
                done = replace(done, compared=count, differences=differences)
            runs.append(done)
    print(*(line for r in runs for line in r.differences), *table(runs), sep="\n")
    if options.record:
        _TESTED.write_text(record(runs), encoding="utf-8")
    sys.exit(0 if all(r.is_right for r in runs) else 1)


if __name__ == "__main__":
    main()

"""The limit `NC_MAX_ISA`.

What Python believes of the CPU, which code the libraries take, and the runs for each instruction set.
"""

import os
import subprocess
import sys
from pathlib import Path

import isas as runs
import pytest
import torch
from suites.low_bit import form, weight

from nc.backends.native import recurrent
from nc.backends.native.operators import int8_attention
from nc.backends.native.plans import row_linears as row_format
from nc.cli import doctor
from nc.errors import BackendError, ConfigError
from nc.kernels import cpu
from nc.kernels.c_code import build, isas, limit, tested
from nc.kernels.low_bit import compiled, compiled_blocks
from nc.process import env

ALL = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_tile")
needs_compiler = pytest.mark.skipif(not build._compiler(), reason="there is no C compiler")


@pytest.fixture
def sapphire_rapids(monkeypatch):
    """A CPU that has everything, and no limit of oneDNN."""
    monkeypatch.setattr(cpu, "detected", lambda: ALL)
    monkeypatch.setattr(
        cpu, "flags", lambda: frozenset(flag for flags in isas.ISAS.values() for flag in flags)
    )
    monkeypatch.setattr(env, "at_start", dict)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("sapphire_rapids")
@pytest.mark.parametrize(
    ("name", "features", "permitted"),
    [
        ("avx2", ("avx2",), ("avx2",)),
        ("avx_vnni", ("avx2", "avx_vnni"), ("avx2", "avx_vnni")),
        ("avx512", ALL[:2], ("avx2", "avx512")),
        ("avx512_vnni", ALL[:3], ("avx2", "avx512", "avx512_vnni")),
        ("avx512_bf16", (*ALL[:3], "avx512_bf16"), ("avx2", "avx512", "avx512_vnni", "avx512_bf16")),
        ("amx", ALL, tuple(isas.ISAS)),
        ("", ALL, tuple(isas.ISAS)),
    ],
)
def test_the_limit_hides_features_and_instruction_sets(monkeypatch, name, features, permitted):
    monkeypatch.setenv("NC_MAX_ISA", name)
    assert cpu.machine_features() == features
    assert limit.permitted() == permitted
    assert compiled.of_this_cpu(isas.ISAS) == tuple(reversed(permitted))
    assert cpu.limits() == ((f"NC_MAX_ISA={name}",) if features != ALL else ())
    assert cpu.why_narrow() == (f" (limited by NC_MAX_ISA={name})" if features != ALL else "")


@pytest.mark.usefixtures("sapphire_rapids")
def test_features_are_those_that_both_limits_leave(monkeypatch):
    monkeypatch.setenv("NC_MAX_ISA", "avx512_vnni")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert cpu.machine_features() == ("avx2", "avx512f")
    assert cpu.limits() == ("ONEDNN_MAX_CPU_ISA=AVX512_CORE", "NC_MAX_ISA=avx512_vnni")


@pytest.mark.parametrize("name", ["AVX2", "avx2 ", "sse2", "1"])
def test_a_limit_that_names_nothing_is_an_error(monkeypatch, name):
    monkeypatch.setenv("NC_MAX_ISA", name)
    for ask in (limit.limit, limit.permitted, cpu.machine_features, cpu.limits):
        with pytest.raises(
            ConfigError, match=f"NC_MAX_ISA='{name}' names no instruction set. Set it to one of avx2, "
        ):
            ask()


def code_of_each_library():
    """What each library would compute with now, by its own word or by the number that it is given."""
    steps = build.load("steps").nc_step_isa()
    return {
        "low_bit": compiled.usable()[0],
        "low_bit_blocks": compiled_blocks.usable()[0],
        "recurrent": recurrent._code().isa(),
        "attention": int8_attention.isas()[0],
        "steps": list(isas.ISAS)[steps],
        "rows": row_format.isas(row_format.CODES)[0],
    }


#: Limit → what each library takes, in the order of `code_of_each_library`, on a CPU that has it.
TAKEN = {
    "avx2": ("avx2", "avx2", "avx2", "avx2", "avx2", "avx2"),
    "avx_vnni": ("avx_vnni", "avx2", "avx2", "avx_vnni", "avx2", "avx_vnni"),
    "avx512": ("avx512", "avx512", "avx2", "avx2", "avx512", "avx2"),
    "avx512_vnni": ("avx512_vnni", "avx512", "avx512_vnni", "avx512_vnni", "avx512", "avx512_vnni"),
    "avx512_bf16": ("avx512_bf16", "avx512", "avx512_vnni", "avx512_vnni", "avx512", "avx512_vnni"),
    "amx": ("amx", "amx", "avx512_vnni", "avx512_vnni", "avx512", "amx"),
}


def refused():
    """Instruction sets whose code a library does not run when it is told to, though it has it."""
    found = []
    for code, name in ((compiled, "low_bit"), (compiled_blocks, "low_bit_blocks")):
        for isa in isas.compiled(build.load(name)):
            if isa in limit.used(build.load(name)):
                continue
            packed = weight(form(), 16, 64)
            with pytest.raises(BackendError, match="no code that it may use for this instruction set"):
                code.linear(torch.randn(2, 64), code.pack(packed, isas.NUMBERS[isa]), packed)
            found.append(f"{name} {isa}")
    return found


@needs_compiler
@pytest.mark.isas
def test_libraries_take_the_code_of_the_limit_and_refuse_what_is_above_it():
    """`test/isas.py` runs this under each limit; the short suite under none."""
    name = limit.limit() or compiled.usable()[0]
    assert code_of_each_library() == dict(zip(code_of_each_library(), TAKEN[name], strict=True))
    for library in map(build.load, build.sources()):
        assert limit.used(library) == tuple(isa for isa in isas.compiled(library) if isa in limit.permitted())
    above = [isa for isa in isas.ISAS if isa not in limit.permitted()]
    assert refused() == [
        f"{name} {isa}"
        for name in ("low_bit", "low_bit_blocks")
        for isa in isas.compiled(build.load(name))
        if isa in above
    ]


@needs_compiler
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in isas.ISAS if not runs.lacking(name)])
def test_a_process_with_the_limit_takes_its_code(name):
    """The test above, in a process with the limit."""
    test = (
        f"{Path(__file__)}::{test_libraries_take_the_code_of_the_limit_and_refuse_what_is_above_it.__name__}"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, env={**os.environ, **runs.environment(name)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


# --- the runs


def test_there_are_limits_for_each_instruction_set():
    assert list(runs.LIMITS) == list(isas.ISAS)
    for name, (onednn, _, _) in runs.LIMITS.items():
        allowed = cpu._ONEDNN_LIMITS.get(onednn.lower())
        assert (
            allowed is None
            if name == "amx"
            else set(allowed) == {flag for flag in isas.ISAS[name] if flag in cpu._FLAGS}
        )


AVX2 = frozenset({"avx2", "fma", "f16c"})


@pytest.mark.parametrize(
    ("words", "right", "code"),
    [(["amx"], True, 0), (["amx", "avx2"], True, 0), (["amx"], False, 1), ([], True, 0)],
)
def test_each_instruction_set_runs_emulated_and_where_the_cpu_has_it(monkeypatch, capsys, words, right, code):
    done = []

    def run(name, how, jobs):
        done.append((name, how))
        return runs.Run(name, how, 0, passed=3 if right else 0, skipped=1)

    monkeypatch.setattr(cpu, "flags", lambda: AVX2)
    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "compared", lambda name, cases: (cases, ()))
    monkeypatch.setattr(sys, "argv", ["isas.py", *words])
    with pytest.raises(SystemExit) as ended:
        runs.main()
    assert ended.value.code == code
    names = words or list(isas.ISAS)
    assert done == [(n, how) for n in names for how in runs.HOW if how == "emulated" or n == "avx2"]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("--- amx: this CPU lacks avx512f, avx512bw, ") for line in lines)
    assert [line.split()[:2] for line in lines[-len(done) :]] == [list(each) for each in done]


def test_a_difference_is_a_failure(monkeypatch):
    found = runs.Run(
        "avx2", "emulated", 0, passed=3, compared=9, differences=("map: 1 of 3 integers differ",)
    )
    assert not found.is_right
    assert [line.split() for line in runs.table([found])[1:]] == [
        ["avx2", "emulated", "3", "0", "0", "9", "1"]
    ]


@pytest.mark.parametrize(
    ("a", "b", "approximate", "same"),
    [
        (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 2], dtype=torch.uint8), False, True),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8), False, False),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8), True, True),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 4], dtype=torch.uint8), True, False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False, True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-22]), False, False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-22]), True, True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-20]), True, False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False, True),
        (torch.tensor([2.0**-149]), torch.tensor([-(2.0**-149)]), False, False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False, True),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), False, False),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), True, False),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), True, False),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2**-7]).bfloat16(), False, True),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2**-6]).bfloat16(), False, False),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0]), False, False),
    ],
)
def test_results_are_the_same_to_one_unit_in_the_last_place(a, b, approximate, same):
    assert (runs.difference(a, b, approximate=approximate) == "") == same
    assert (runs.difference(b, a, approximate=approximate) == "") == same


def test_the_record_is_of_the_sources_that_were_tested(monkeypatch):
    right, wrong = runs.Run("amx", "emulated", 0, passed=3), runs.Run("avx2", "real", 1, passed=3, failed=1)

    def recorded():
        found = {}
        exec(compile(runs.record([right, wrong]), "tested.py", "exec"), found)
        return found["SOURCES"], found["TESTED"]

    monkeypatch.setattr(tested, "TESTED", {"avx2": ("real",)})
    monkeypatch.setattr(tested, "SOURCES", build.all_sources())
    assert recorded() == (build.all_sources(), {"avx2": ("real",), "amx": ("emulated",)})
    monkeypatch.setattr(tested, "SOURCES", "of others")
    assert recorded() == (build.all_sources(), {"amx": ("emulated",)})


def test_what_was_tested_are_instruction_sets():
    assert set(tested.TESTED) <= set(isas.ISAS)
    assert {how for hows in tested.TESTED.values() for how in hows} <= set(runs.HOW)


def test_doctor_says_what_was_tested(monkeypatch):
    monkeypatch.setattr(tested, "TESTED", {"avx2": ("emulated", "real"), "amx": ("emulated",)})
    monkeypatch.setattr(tested, "SOURCES", build.all_sources())
    assert doctor.tested_on() == "The C code was tested on avx2 (emulated, real), amx (emulated)."
    monkeypatch.setattr(tested, "SOURCES", "of others")
    assert doctor.tested_on().startswith("The C code has changed since it was tested on avx2 ")
    monkeypatch.setattr(tested, "TESTED", {})
    assert doctor.tested_on() == "No record says on which instruction sets the C code was tested."

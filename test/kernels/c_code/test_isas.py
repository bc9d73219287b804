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

from nc.backends import cpu
from nc.backends.low_bit import compiled, compiled_blocks
from nc.backends.native import recurrent
from nc.backends.native.operators import int8_attention
from nc.backends.native.plans import rows as row_format
from nc.errors import BackendError, ConfigError
from nc.kernels.c_code import build, isas, limit
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
        "attention": "" if int8_attention.why_unavailable() else "avx512_vnni",
        "steps": list(isas.ISAS)[steps],
        "rows": row_format.isas(row_format.CODES)[0],
    }


#: Limit → what each library takes, in the order of `code_of_each_library`, on a CPU that has it.
TAKEN = {
    "avx2": ("avx2", "avx2", "avx2", "", "avx2", "avx2"),
    "avx_vnni": ("avx_vnni", "avx2", "avx2", "", "avx2", "avx_vnni"),
    "avx512": ("avx512", "avx512", "avx2", "", "avx512", "avx2"),
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


def test_a_run_that_the_cpu_can_not_have_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert runs.summary({"avx2": 0}, ["avx2", "avx_vnni"]) == [
        "avx2: passed",
        "avx_vnni: skipped, this CPU lacks avx_vnni",
    ]
    assert runs.summary({"avx2": 1}, ["avx2"]) == ["avx2: FAILED (exit code 1 of pytest)"]


def test_an_instruction_set_that_is_asked_for_and_lacking_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setattr(runs, "run", lambda name, jobs: 0)
    for words, code in ((["amx"], 1), (["amx", "avx2"], 0), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["isas.py", *words])
        with pytest.raises(SystemExit) as ended:
            runs.main()
        assert ended.value.code == code
    assert "amx: skipped, this CPU lacks avx512f, avx512bw, " in capsys.readouterr().out

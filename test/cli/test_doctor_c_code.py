"""`nc doctor` says of each library of C code where it comes from, what it was compiled for, and why there is no better one."""

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from nc.cli import doctor
from nc.kernels.c_code import build, flags, isas

pytestmark = pytest.mark.skipif(not build._compiler(), reason="there is no C compiler")
EDITABLE = "the installation has no compiled libraries: it is editable, or of a wheel for any platform"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose only source is runner.c, and an empty cache folder."""
    monkeypatch.setattr(flags, "FLAGS", ("-O0", *flags.FLAGS[1:]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    return only("runner", tmp_path / "package", monkeypatch)


def only(name, folder, monkeypatch):
    folder.mkdir()
    for path in (Path(build.__file__).parent / f"{name}.c", *Path(build.__file__).parent.glob("*.h")):
        shutil.copy(path, folder)
    monkeypatch.setattr(build, "_HERE", folder)
    return folder


def told():
    """The only row, and the printed text."""
    text = io.StringIO()
    (row,) = doctor.of_c_code()
    build._found.cache_clear()
    console = Console(file=text, width=400)
    doctor.tell_c_code([row], console)
    return row, text.getvalue()


def test_shipped_in_the_wheel(package):
    build.compile_source(package / "runner.c", package / "runner.so", build._compiler())
    row, text = told()
    assert (row["origin"], row["where"], row["remarks"]) == (
        "shipped",
        f"shipped as {package / 'runner.so'}",
        [],
    )
    assert re.search(r"^runner +the wheel +any x86-64 +(gcc|clang) ", text, re.MULTILINE)


def test_compiled_in_this_process_and_kept_for_the_next_one(package, tmp_path, capsys):
    row, text = told()
    (path,) = (tmp_path / "cache" / "nc").glob("runner-*.so")
    assert (row["origin"], row["where"], row["remarks"]) == (
        "compiled",
        f"compiled in this process, kept as {path}",
        [EDITABLE],
    )
    assert re.search(r"^runner +the compiler, in this process ", text, re.MULTILINE)
    row, text = told()
    assert (row["origin"], row["where"], row["remarks"]) == ("kept", f"kept as {path}", [EDITABLE])
    assert re.search(r"^runner +the cache folder ", text, re.MULTILINE)
    assert f"C code, all: {EDITABLE}\n" in capsys.readouterr().out


def test_no_compiler(package, monkeypatch, capsys):
    monkeypatch.setattr(build, "_compiler", lambda: "")
    row, text = told()
    assert (row["origin"], row["instruction_sets"]) == ("", [])
    assert row["remarks"] == [
        "there is no C compiler: install gcc or clang, or set the environment variable CC"
    ]
    assert re.search(r"^runner +nowhere +none *$", text, re.MULTILINE)
    assert "C code, all: there is no C compiler: install gcc" in capsys.readouterr().out


def test_a_shipped_library_of_other_sources(package):
    build.compile_source(package / "runner.c", package / "runner.so", build._compiler())
    (package / "more.h").write_text("/* changed */")
    row, _ = told()
    assert (row["origin"], row["remarks"]) == (
        "compiled",
        ["runner.so of the package: it was made of other sources"],
    )


def test_a_cache_that_others_may_write(package, tmp_path):
    told()
    (tmp_path / "cache" / "nc").chmod(0o777)
    row, _ = told()
    assert row["origin"] == "compiled"
    assert row["where"].startswith("compiled in this process, loaded from ")
    assert any(
        "others may write" in remark and str(tmp_path / "cache") in remark for remark in row["remarks"]
    )


def test_a_compiler_that_does_not_know_an_instruction_set(package, tmp_path, monkeypatch):
    only("low_bit", tmp_path / "low_bit", monkeypatch)
    monkeypatch.setattr(build, "_compiler", lambda: "cc -DNC_OLD_COMPILER")
    row, text = told()
    assert row["instruction_sets"] == ["avx2", "avx512", "avx512_vnni"]
    unknown = (
        "avx_vnni takes gcc 11 or clang 12, avx512_bf16 takes gcc 10 or clang 9, amx takes gcc 11 or clang 12"
    )
    assert row["remarks"] == [f"{row['compiler']} has no code for {unknown}", EDITABLE]
    assert re.search(
        r"^low_bit +the compiler, in this process +avx2, avx512, avx512_vnni ", text, re.MULTILINE
    )


def test_this_compiler_makes_code_for_all_instruction_sets():
    libraries = [build.load(name) for name in build.sources()]
    assert [isas.missing(library) for library in libraries] == [()] * len(libraries)
    assert {isa for library in libraries for isa in isas.compiled(library)} == set(isas.ISAS)
    assert set(isas.COMPILERS) <= set(isas.ISAS)

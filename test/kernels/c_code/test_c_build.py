"""Where the C code comes from.

What is kept, what can't be loaded, what was compiled, and who could have written it.
"""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from models import library
from torch import nn

import nc
from nc.backends.native import recurrent
from nc.backends.native.operators import depthwise, dynamic_attention, float_attention, int8_attention
from nc.backends.native.plans import c_functions, row_linears
from nc.errors import BackendUnavailableError, NCWarning
from nc.kernels import cpu, flash
from nc.kernels.c_code import build, flags, isas
from nc.kernels.low_bit import compiled, compiled_blocks
from nc.kernels.onednn.runner import PythonRunner, runner
from nc.process import cache

pytestmark = pytest.mark.skipif(not build._compiler(), reason="there is no C compiler")

#: What remembers a library, or that there is none.
REMEMBERED = (
    (depthwise, "_function"),
    (compiled, "_code"),
    (compiled_blocks, "_code"),
    (c_functions, "_functions"),
    (int8_attention, "_library"),
    (int8_attention, "_function"),
    (float_attention, "_function"),
    (flash, "code"),
    (dynamic_attention, "_function"),
    (row_linears, "_library"),
    (row_linears, "_tiles"),
    (recurrent, "_code"),
)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Where the runner is kept, after it was compiled once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    anew()
    assert build.load("runner").nc_run
    (path,) = (tmp_path / "nc").glob("runner-*.so")
    anew()
    yield path
    anew()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What is compiled here, is so in less time, and later tests do not find it."""
    monkeypatch.setattr(flags, "FLAGS", ("-O1", *flags.FLAGS[1:]))
    for module, name in REMEMBERED:
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)


def anew():
    """Forget which libraries were found, and what was said, as a new process does."""
    build._found.cache_clear()
    build._say_not_kept.cache_clear()


def refuse(monkeypatch, *folders):
    """Let nothing below some folders be loaded, as from file systems that are mounted so."""
    real, of_torch = ctypes.CDLL, str(Path(torch.__file__).resolve().parent)

    def opened(path, *args):
        at = os.path.realpath(path) if path else ""  # without a path: the process itself
        if any(at.startswith(folder) for folder in folders) and not at.startswith(of_torch):
            msg = f"{path}: failed to map segment from shared object"
            raise OSError(msg)
        return real(path, *args)

    monkeypatch.setattr(build.ctypes, "CDLL", opened)


def test_a_library_of_an_earlier_process_is_taken(kept, monkeypatch):
    monkeypatch.setattr(build, "compile_source", lambda *_: pytest.fail("it is there"))
    found = build.loaded("runner")
    assert found.library.nc_run
    assert (found.where, found.passed_over) == (f"kept as {kept}", ())


def of_another_c_library(path):
    """A library that needs another one which does not exist here, as one version of the C library does."""
    folder = path.parent.parent
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "libelsewhere.so"],
        input=b"int x;",
        check=True,
    )
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "-",
        "-o",
        path,
        "-x",
        "none",
        "-Wl,--no-as-needed",
        folder / "libelsewhere.so",
    ]
    subprocess.run(command, input=b"int nc_run;", check=True)
    (folder / "libelsewhere.so").unlink()


def of_other_sources(path):
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=b"int nc_run;", check=True
    )


DAMAGE = {
    "of another C library": of_another_c_library,
    "of other sources": of_other_sources,
    "without its end": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "no library": lambda path: path.write_bytes(b"x" * 5000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_kept_library_that_can_t_be_loaded_is_made_again(kept, damage):
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(whole)
    kept.chmod(0o600)
    DAMAGE[damage](kept)
    found = build.loaded("runner")
    assert found.library.nc_run
    assert str(kept) in found.passed_over[0]
    anew()
    assert build.loaded("runner").passed_over == ()  # the next process finds a good one


def test_a_cache_from_which_nothing_can_be_run(kept, monkeypatch, tmp_path):
    refuse(monkeypatch, str(tmp_path))
    found = build.loaded("runner")
    assert found.library.nc_run
    assert ", loaded from " in found.where
    assert "failed to map" in found.passed_over[0]


def test_no_folder_from_which_something_can_be_run(kept, monkeypatch):
    refuse(monkeypatch, str(kept.parent), "/tmp", os.path.realpath("/tmp"))
    found = build.loaded("runner")
    assert found.library.nc_run
    assert found.where.endswith("loaded from memory")


def test_where_nothing_can_be_loaded_python_calls_and_the_report_says_why(kept, monkeypatch):
    refuse(monkeypatch, "/")
    with pytest.raises(BackendUnavailableError, match="failed to map segment"):
        build.load("runner")
    found, why = runner(library().maker.library)
    assert isinstance(found, PythonRunner)
    assert "failed to map segment" in why
    x = torch.randn(2, 8)
    q = nc.quantize(
        nn.Linear(8, 4).eval(), nc.StaticQuantConfig(), lambda p: p(x), example_inputs=x, backend="native"
    )
    assert torch.isfinite(q(x)).all()
    assert re.search(
        r"called by ctypes \(.*failed to map.*operators between products by torch: .*failed to map",
        q.report().details["kernels"],
    )


def test_the_low_bit_kernels_go_on_without_it(kept, monkeypatch):
    refuse(monkeypatch, "/")
    assert "its C code can't be loaded: " in compiled.why_unavailable()
    q = nc.quantize(
        nn.Sequential(nn.Linear(64, 32)).eval(), nc.WeightOnlyConfig("int4", group_size=32), backend="native"
    )
    assert torch.isfinite(q(torch.randn(2, 64))).all()
    assert "failed to map segment" in nc.report(q).text(details=True)


def test_a_failure_is_remembered(kept, monkeypatch):
    calls = []
    monkeypatch.setattr(build, "_compiler", lambda: "false")
    real = build.compile_source
    monkeypatch.setattr(build, "compile_source", lambda *args: calls.append(1) or real(*args))
    for _ in range(3):
        with pytest.raises(BackendUnavailableError, match="the C compiler 'false' fails on runner.c"):
            build.load("runner")
    assert len(calls) == 1


def test_what_is_shipped_must_be_of_the_same_sources(tmp_path, monkeypatch):
    here = tmp_path / "c_code"
    shutil.copytree(Path(build.__file__).parent, here, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_HERE", here)
    build.compile_source(here / "runner.c", here / "runner.so", build._compiler())
    assert build.loaded("runner").where == f"shipped as {here / 'runner.so'}"
    (here / "runner.c").write_text((here / "runner.c").read_text() + "\nint nc_changed;\n")
    found = build.loaded("runner")
    assert found.origin == "compiled"
    assert found.passed_over == ("runner.so of the package: it was made of other sources",)
    assert found.library.nc_changed


def test_old_files_go(kept):
    for i in range(20):
        other = kept.with_name(f"runner-{i:02}.so")
        other.write_bytes(b"")
        os.utime(other, (i, i))
    abandoned, written = kept.with_name("unfinished-a"), kept.with_name("unfinished-b")
    abandoned.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    written.write_bytes(b"")
    kept.unlink()
    build.load("runner")
    left = sorted(path.name for path in kept.parent.glob("*"))
    assert left == sorted([kept.name, *(f"runner-{i:02}.so" for i in range(13, 20)), written.name])


def by_link(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


OPEN = {
    "others may write": lambda path: path.chmod(0o666),
    "is a link": by_link,
    "others may write .*/nc": lambda path: path.parent.chmod(0o777),
    "others may change": lambda path: path.parent.parent.chmod(0o777),
}


@pytest.mark.parametrize("how", OPEN)
def test_a_file_that_others_could_have_put_there_is_not_taken(kept, how):
    with cache.opened(kept):
        pass
    OPEN[how](kept)
    with pytest.raises(PermissionError, match=how):
        cache.read(kept)
    found = build.loaded("runner")
    assert found.library.nc_run
    assert any(str(kept.parent.parent) in reason for reason in found.passed_over)


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_may_write_is_said_once(kept, level):
    """All is compiled again in each process, which costs seconds, and nobody would know why."""
    kept.parents[level].chmod(0o777)
    with pytest.warns(NCWarning, match="compiled in each process anew.*others may.*XDG_CACHE_HOME") as said:
        assert all(build.load(name) for name in build.sources()[:2])
    assert len(said) == 1


def test_a_folder_that_can_not_be_written_is_said_once(kept, monkeypatch):
    kept.unlink()
    monkeypatch.setattr(
        cache.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError(30, "read-only"))
    )
    with pytest.warns(NCWarning, match="compiled in each process anew.*can't be written") as said:
        build.load("runner")
    assert len(said) == 1


@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_a_blank_command_names_no_compiler(kept, monkeypatch, blank):
    found = build._compiler()
    monkeypatch.setenv("CC", blank)
    assert build._compiler() == found
    assert build.load("runner").nc_run


def test_a_command_is_taken_apart_as_a_shell_does(tmp_path, monkeypatch):
    place = tmp_path / "my gcc"
    place.mkdir()
    (place / "gcc").symlink_to(shutil.which(build._compiler()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", f'"{place / "gcc"}" -g')
    anew()
    assert build.loaded("runner").origin == "compiled"
    anew()
    assert build.loaded("runner").origin == "kept"
    for wrong in ('"gcc', '""', "'"):
        monkeypatch.setenv("CC", wrong)
        (kept,) = (tmp_path / "cache" / "nc").glob("runner-*.so")
        anew()
        with pytest.raises(BackendUnavailableError, match="the C compiler .* can't be run"):
            build.load("runner")
        assert kept.exists()
    anew()


def test_a_folder_of_temporary_files_may_be_shared(kept):
    kept.parent.parent.chmod(0o1777)  # as /tmp
    assert cache.read(kept)


@pytest.mark.skipif(os.getuid() != 0, reason="gives files away")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_files_of_other_users_are_not_taken(kept, level):
    path = (kept, *kept.parents)[level]
    os.chown(path, 12345, 12345)
    try:
        with pytest.raises(PermissionError):
            cache.read(kept)
    finally:
        os.chown(path, 0, 0)


def test_what_was_checked_is_what_is_read(kept):
    """Another file that gets the name meanwhile is not."""
    first = kept.read_bytes()
    with cache.opened(kept) as handle:
        kept.rename(kept.with_name("first"))
        kept.write_bytes(b"another")
        assert cache.content(handle) == first


def test_libraries_that_are_loaded_by_descriptor_are_told_apart(kept):
    names = build.sources()
    loaded = [build.load(name) for name in names]
    assert [hasattr(library, "nc_run") for library in loaded] == [name == "runner" for name in names]


# --- instruction sets


@pytest.mark.parametrize("name", build.sources())
def test_each_library_says_what_it_is(name):
    found = build.loaded(name)
    assert (
        found.library.nc_source_hash()
        == flags.source_hash(Path(build.__file__).parent / f"{name}.c").encode()
    )
    assert found.compiler.startswith(("gcc ", "clang "))
    assert found.missing == ()


@pytest.fixture(scope="module")
def folder_of_old_compiler(tmp_path_factory):
    return tmp_path_factory.mktemp("old")


@pytest.fixture
def old_compiler(monkeypatch, folder_of_old_compiler):
    """Compiled without what older compilers do not know."""
    monkeypatch.setattr(build, "_compiler", lambda: "cc -DNC_OLD_COMPILER -DNC_NO_CLONES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder_of_old_compiler))


@pytest.mark.usefixtures("old_compiler")
def test_only_instruction_sets_that_were_compiled_are_chosen(monkeypatch):
    """Where the compiler is too old for this CPU, an older set computes; the first call failed."""
    assert build.loaded("low_bit").isas == ("avx2", "avx512", "avx512_vnni")
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx_vnni"))
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"fma", "f16c"}))
    assert compiled.usable() == ("avx2",)
    for act in ("int8", "int8_block32", "fp32", "bf16"):
        layer = nn.Linear(64, 48)
        q = nc.quantize(
            nn.Sequential(layer).eval(),
            nc.WeightOnlyConfig("int8", group_size=32, act_dtype=act),
            backend="native",
        )
        x = torch.randn(3, 64)
        assert torch.nn.functional.cosine_similarity(q(x).flatten(), layer(x).flatten(), 0) > 0.99


@pytest.mark.usefixtures("old_compiler")
def test_kernels_for_bf16_say_that_they_were_not_compiled(monkeypatch):
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx512f", "avx512_vnni", "avx512_bf16"))
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"fma", "f16c", "avx512bw", "avx512vl"}))
    assert "without AVX512-BF16" in compiled.C_BF16.unavailable()
    assert "without AVX512-BF16" in compiled.C_BF16_FEW_ROWS.unavailable()
    assert compiled.C_BF16_IN_FP32.unavailable() == ""


@pytest.mark.usefixtures("old_compiler")
@pytest.mark.needs_plans
def test_the_report_says_that_there_is_no_code_for_avx():
    x = torch.randn(2, 8)
    q = nc.quantize(
        nn.Linear(8, 4).eval(), nc.StaticQuantConfig(), lambda p: p(x), example_inputs=x, backend="native"
    )
    assert re.search(
        r"operators between products without AVX2 or AVX-512, for which gcc \d", q.report().details["kernels"]
    )


@pytest.mark.parametrize("missing", ["avx512bw", "avx512vl", "fma"])
def test_all_that_a_target_may_use_is_asked_for(monkeypatch, missing):
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx512f", "avx512_vnni"))
    everything = frozenset({"fma", "f16c", "avx512bw", "avx512vl"})
    monkeypatch.setattr(cpu, "flags", lambda: everything)
    assert int8_attention.isas() == ("avx512_vnni", "avx2")
    assert compiled.usable() == ("avx512_vnni", "avx512", "avx2")
    monkeypatch.setattr(cpu, "flags", lambda: everything - {missing})
    assert int8_attention.isas() == (() if missing == "fma" else ("avx2",))
    assert int8_attention.why_unavailable() == ("there is no fma" if missing == "fma" else "")
    assert compiled.usable() == (() if missing == "fma" else ("avx2",))


def test_the_targets_in_c_ask_for_nothing_that_python_does_not():
    """The text of each target attribute, against the table."""
    names = {
        "avx512vnni": "avx512_vnni",
        "avx512bf16": "avx512_bf16",
        "amx-tile": "amx_tile",
        "amx-int8": "amx_int8",
        "amx-bf16": "amx_bf16",
    }
    found = set()
    for path in Path(build.__file__).parent.glob("*.[ch]"):
        for target in re.findall(r'FOR_CPU\("(.+?)"\)', path.read_text()):
            needed = {names.get(flag, flag) for flag in target.split(",")}
            assert any(needed <= set(flags) for flags in isas.ISAS.values()), (path.name, target)
            found.add(path.name)
    in_blocks = {"low_bit_blocks.c", "low_bit_blocks_amx.h"}
    others = {
        "attention.c",
        "depthwise.c",
        "dynamic_attention.c",
        "flash.c",
        "float_attention.c",
        "low_bit.c",
        "low_bit_amx.h",
        "recurrent.c",
        "rows.c",
        "steps.c",
    }
    assert found == others | in_blocks

"""`NC_EMULATE`: which features are emulated, what is concluded about libraries, and what the compiler makes of it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nc.errors import ConfigError
from nc.kernels import cpu
from nc.kernels.c_code import build, emulation, flags, isas, limit
from nc.kernels.low_bit import compiled
from nc.kernels.low_bit.kernel import features
from nc.process import env

HEADERS = Path(__file__).parents[2] / "emulated"
SOURCE = Path(build.__file__).parent / "rows.c"


@pytest.fixture
def emulates_amx(monkeypatch):
    """On a CPU with AVX2 alone."""
    monkeypatch.setattr(cpu, "detected", lambda: ("avx2",))
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.delenv("NC_MAX_ISA", raising=False)
    monkeypatch.setenv("NC_EMULATE", "amx")
    monkeypatch.setenv("NC_EMULATE_HEADERS", f"{HEADERS}:/simde")


@pytest.mark.parametrize(("name", "headers"), [("amx", ""), ("AMX", str(HEADERS)), ("sse2", str(HEADERS))])
def test_nothing_is_emulated_outside_of_tests(monkeypatch, name, headers):
    monkeypatch.delenv("NC_MAX_ISA", raising=False)
    monkeypatch.setenv("NC_EMULATE", name)
    monkeypatch.setenv("NC_EMULATE_HEADERS", headers)
    for ask in (limit.permitted, cpu.code_features, cpu.machine_features, lambda: build.load("rows")):
        with pytest.raises(ConfigError, match=f"NC_EMULATE='{name}' is for nc's own tests"):
            ask()


@pytest.mark.usefixtures("emulates_amx")
def test_the_code_has_what_is_emulated_and_libraries_what_the_cpu_has(monkeypatch):
    assert cpu.machine_features() == ("avx2",)
    assert cpu.code_features() == ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_tile")
    assert not cpu.accumulates_wide()
    assert not cpu.fbgemm_accumulates_wide()
    assert cpu.relied_on() == ("avx2",)
    assert cpu.missing(("avx512_bf16",)) == ("avx512_bf16",)
    assert "avx512_bf16" in features(in_c=True)
    assert "avx512_bf16" not in features()
    assert compiled.of_this_cpu(isas.ISAS) == tuple(n for n in reversed(isas.ISAS) if n != "avx_vnni")
    monkeypatch.setenv("NC_MAX_ISA", "avx512_vnni")
    assert compiled.of_this_cpu(isas.ISAS) == ("avx512_vnni", "avx512", "avx2")


@pytest.mark.usefixtures("emulates_amx")
def test_libraries_do_not_use_more_than_is_emulated(monkeypatch):
    """Operators between products ask the CPU themselves, which is not asked then."""
    monkeypatch.setenv("NC_EMULATE", "avx_vnni")
    assert limit.permitted() == ("avx2", "avx_vnni")


@pytest.mark.usefixtures("emulates_amx")
def test_a_library_is_of_the_headers_that_it_was_compiled_with(monkeypatch, tmp_path):
    before = emulation.options(SOURCE)
    assert {"-mavx2", f"-I{HEADERS}", "-I/simde"} < set(before)
    assert flags.source_hash(SOURCE, before) != flags.source_hash(SOURCE)
    copy = shutil.copytree(HEADERS, tmp_path / "emulated")
    monkeypatch.setenv("NC_EMULATE_HEADERS", f"{copy}:/simde")
    same = emulation.options(SOURCE)
    (copy / "tiles.h").write_text("changed", encoding="utf-8")
    (of_before,) = {each for each in same if "NC_EMULATED" in each} & set(before)
    assert of_before not in emulation.options(SOURCE)
    assert emulation.options(SOURCE.with_name("peak.c")) == ()
    monkeypatch.delenv("NC_EMULATE")
    assert emulation.options(SOURCE) == ()


#: Registers and prefixes that AVX2 does not have, and instructions.
_BEYOND_AVX2 = re.compile(
    r"%zmm|%k[0-7]\b|%[xy]mm(?:1[6-9]|2\d|3[01])|%tmm|\{evex\}|vpdpbusd|vdpbf16ps|ldtilecfg"
)


@pytest.mark.isas
@pytest.mark.skipif(
    not env.NC_EMULATE.get() or not shutil.which("objdump"), reason="nothing is emulated here"
)
@pytest.mark.parametrize("name", [name for name in build.sources() if name != "peak"])
def test_an_emulated_library_has_no_instruction_beyond_avx2(name):
    """`peak` measures the CPU itself."""
    path = re.search(r"as (/.*\.so)", build.loaded(name).where).group(1)
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    )
    assert code.stdout.count("\n") > 50
    assert not _BEYOND_AVX2.findall(code.stdout)

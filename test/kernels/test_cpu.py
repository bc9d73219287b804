"""Which features kernels may use: what the CPU has, less what environment variables hide from oneDNN."""

import pytest

from nc.kernels import cpu
from nc.process import env

ALL = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_tile")


@pytest.fixture(autouse=True)
def sapphire_rapids(monkeypatch):
    monkeypatch.setattr(cpu, "detected", lambda: ALL)
    monkeypatch.setattr(env, "at_start", dict)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("value", "features", "relied_on"),
    [
        ("SSE41", (), "avx2"),
        ("AVX", (), "avx2"),
        ("AVX2", ALL[:1], "avx2"),
        ("avx2", ALL[:1], "avx2"),
        ("AVX2_VNNI", ("avx2", "avx_vnni"), "avx_vnni"),
        ("AVX2_VNNI_2", ("avx2", "avx_vnni"), "avx_vnni"),
        ("AVX512_CORE", ALL[:2], "avx2"),
        ("AVX512_CORE_VNNI", ALL[:3], "avx512_vnni"),
        ("AVX512_CORE_BF16", (*ALL[:3], "avx512_bf16"), "avx512_vnni"),
        ("AVX512_CORE_FP16", ALL[:5], "avx512_vnni"),
        ("AVX10_1_512", ALL[:5], "avx512_vnni"),
        ("AVX512_CORE_AMX", ALL, "avx512_vnni"),
        ("AVX512_CORE_AMX_FP16", ALL, "avx512_vnni"),
        ("DEFAULT", ALL, "avx512_vnni"),
        ("AVX512", ALL, "avx512_vnni"),  # no such value: oneDNN takes no notice of it
        (" AVX2", ALL, "avx512_vnni"),
        ("", ALL, "avx512_vnni"),
    ],
)
def test_a_limit_hides_features(monkeypatch, name, value, features, relied_on):
    monkeypatch.setenv(name, value)
    assert cpu.machine_features() == features
    assert cpu.relied_on() == (relied_on,)
    assert cpu.accumulates_wide() is (relied_on != "avx2")
    hidden = features != ALL
    assert cpu.limits() == ((f"{name}={value}",) if hidden else ())
    assert cpu.why_narrow() == (f" (limited by {name}={value})" if hidden else "")


def test_of_both_variables_onednn_reads_the_newer(monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu.limits() == ("ONEDNN_MAX_CPU_ISA=AVX2",)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "no such value")
    assert cpu.limits() == ()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    assert cpu.limits() == ("DNNL_MAX_CPU_ISA=SSE41",)


def test_a_limit_that_is_lifted_too_late_still_counts(monkeypatch):
    monkeypatch.setattr(env, "at_start", lambda: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"})
    assert not cpu.accumulates_wide()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2_VNNI")
    assert cpu.machine_features() == ("avx2",)


def test_features_are_found_without_a_copy_of_the_environment(monkeypatch):
    """Kernels ask in each call, and a copy takes longer than one step of a cell."""
    monkeypatch.setattr(env, "extended", lambda added: pytest.fail("the environment was copied"))
    assert cpu.machine_features() == ALL
    monkeypatch.setenv("NC_MAX_ISA", "avx2")
    assert cpu.machine_features() == ("avx2",)
    monkeypatch.delenv("NC_MAX_ISA")
    assert cpu.machine_features() == ALL


def test_what_an_artefact_needs(monkeypatch):
    monkeypatch.setattr(cpu, "detected", lambda: ("avx2",))
    assert cpu.missing(("avx2", "avx512_vnni", "amx_int8", "avx512_bf16", "avx9")) == ("avx512_bf16", "avx9")

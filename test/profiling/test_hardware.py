"""What the CPU can do at best, and the part of it that a call reaches."""

import dataclasses
import json

import pytest

from nc.errors import BackendUnavailableError
from nc.kernels import cpu
from nc.kernels.c_code import build
from nc.kernels.c_code.abi import PRODUCT
from nc.profiling import hardware
from nc.profiling.hardware import Limits
from nc.profiling.profile import EngineCall, Profile
from nc.reports.op_report import OpReport
from nc.reports.page_times import limit_text, times

LIMITS = Limits(multiply_adds={"int8": 2e9, "fp32": 1e9}, read_gb_s=10.0, cache_bytes=1000)
needs_compiler = pytest.mark.skipif(
    not build._compiler() and not build.is_shipped("peak"), reason="there is no C compiler"
)


def op(name, ran="int8", adds=1_000_000, weights=()):
    """An operator of a report."""
    given = {"kind": "linear", "asked": ran, "rule": "", "reason": ""}
    return OpReport(operator=name, ran=ran, multiply_adds=adds, weights=weights, **given)


def test_an_operator_takes_as_long_as_its_slower_part():
    compute, memory = op("a", weights=(("a.w", 1_000),)), op("b", weights=(("b.w", 50_000_000),))
    # 1e6 / 2e9 s; 50 MB / 10 GB/s
    assert LIMITS.least_ms([compute], from_memory=True) == pytest.approx(0.5)
    assert LIMITS.least_ms([memory], from_memory=True) == pytest.approx(5.0)
    assert LIMITS.least_ms([memory], from_memory=False) == pytest.approx(0.5)
    wide = op("c", ran="fp32", weights=(("c.w", 50_000_000),))
    assert LIMITS.least_ms([compute, wide], from_memory=True) == pytest.approx(0.5 + 20.0)


def test_what_is_not_known_has_no_limit():
    assert LIMITS.least_ms([op("a", adds=None), op("b", ran="int4 weight")], from_memory=True) is None
    assert Limits(missing="no compiler").least_ms([op("a")], from_memory=True) is None


def test_weights_of_all_operators_are_compared_with_the_cache():
    shared = ("w", 600)
    assert not LIMITS.exceeds_cache([op("a", weights=(shared,)), op("b", weights=(shared,))])  # counted once
    assert LIMITS.exceeds_cache([op("a", weights=(shared,)), op("b", weights=(("v", 600),))])
    assert LIMITS.exceeds_cache([op("a", ran="fp32", weights=(shared,))])


@needs_compiler
def test_this_cpu_has_a_limit_for_each_precision_that_it_multiplies():
    found = hardware.measured(1)
    assert found.missing == ""
    assert (
        ("fp32" in found.multiply_adds)
        == ("int8" in found.multiply_adds)
        == (not cpu.machine_lacks(("avx2",)))
    )
    assert ("bf16" in found.multiply_adds) == (not cpu.machine_lacks(("avx512f", "avx512_bf16")))
    assert all(1e8 < rate < 1e14 for rate in found.multiply_adds.values())
    assert hardware.measured(1) is found
    assert Limits.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) == found


@needs_compiler
def test_each_kind_of_product_that_this_cpu_has_can_be_measured():
    library = build.load("peak")
    library.nc_peak.restype = hardware.ctypes.c_double
    usable = hardware.limit.used(library)
    for precision, names in hardware._PRODUCTS.items():
        for name in names:
            if name in usable and not cpu.machine_lacks(hardware.ISAS[name]):
                rate = library.nc_peak(PRODUCT.number(f"{precision}_{name}"))
                assert rate > 1e8 or name == "amx"  # the operating system may lend no tiles


@needs_compiler
def test_products_above_the_users_limit_are_not_run():
    library = build.load("peak")
    library.nc_peak.restype = hardware.ctypes.c_double
    before = hardware.limit.permitted()
    library.nc_permit(0)
    try:
        assert [library.nc_peak(number) for number in range(len(PRODUCT.members) + 1)] == [0.0] * (
            len(PRODUCT.members) + 1
        )
    finally:
        hardware.limit.restrict(library)
    assert hardware.limit.used(library) == before


def test_without_the_code_the_reason_is_told(monkeypatch):
    def load(_):
        msg = "there is no C compiler"
        raise BackendUnavailableError(msg)

    monkeypatch.setattr(hardware.build, "load", load)
    assert hardware.measured.__wrapped__(1) == Limits(missing="there is no C compiler")


def test_without_tiles_the_next_instruction_set_is_the_limit(monkeypatch):
    """The operating system may lend none."""

    class Library:
        @staticmethod
        def nc_peak(number):
            return 0.0 if PRODUCT.members[number].endswith("amx") else 1e9 * (number + 1)

    monkeypatch.setattr(hardware.build, "load", lambda _: Library)
    monkeypatch.setattr(hardware.limit, "used", lambda _: tuple(hardware.ISAS))
    monkeypatch.setattr(hardware.cpu, "machine_lacks", lambda _: ())
    monkeypatch.setattr(hardware, "read_bandwidth", lambda _: 1.0)
    number = PRODUCT.number
    assert hardware.measured.__wrapped__(2).multiply_adds == {
        name: 2e9 * (number(product) + 1)
        for name, product in (
            ("int8", "int8_avx512_vnni"),
            ("bf16", "bf16_avx512_bf16"),
            ("fp32", "fp32_avx512"),
        )
    }


def profile(limits, **more):
    steps = (
        EngineCall(name="onednn::q", operators=("a",), ms=1.0),
        EngineCall(name="aten::to", operators=("a",), converts=True, ms=1.0),
        EngineCall(name="aten::softmax", operators=("s",), ms=2.0),
    )
    return Profile(steps=steps, call_ms=5.0, calls=3, threads=2, limits=limits, **more)


def test_the_page_has_the_part_of_the_limit():
    ops = (op("a"), op("s", ran="fp32", adds=None))
    limits = dataclasses.replace(LIMITS, cache_bytes=10**9)
    text = times(profile(limits), ops)
    assert ">of the limit<" in text
    rows = [row.split("</tr>")[0] for row in text.split("<tr>")]
    assert next(row for row in rows if "onednn::q" in row).endswith("<td>50.0%</td>")
    assert next(row for row in rows if "aten::to" in row).endswith("<td></td>")
    assert next(row for row in rows if "softmax" in row).endswith("<td></td>")
    assert limit_text(profile(limits), ops) == (
        "The limit: 2 threads of this CPU do int8 2, fp32 1 billion multiply-adds in a second. At this limit the "
        "call takes 0.50 ms, 10.0% of its time; conversions and operators without products are not in it."
    )


def test_the_page_says_why_there_is_no_limit():
    assert "have other sizes" in limit_text(profile(None), ())
    assert "not measured: no compiler" in limit_text(profile(Limits(missing="no compiler")), ())
    large = (op("a", weights=(("w", 10_000_000),)),)
    assert "read with 10.0 GB/s" in limit_text(profile(LIMITS), large)
    assert times(None, ()) == ""

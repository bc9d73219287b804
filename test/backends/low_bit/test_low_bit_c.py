"""The C kernels of low-bit linears.

Each instruction set against float64, threads, rounding of activations, what happens without them.
"""

import os
import subprocess
import sys
import threading

import pytest
import torch
from models import path
from suites.low_bit import exact, form, layer_with, ran, weight
from suites.low_bit_c import HERE, TESTED, bound, rounded
from suites.reports import said
from torch import nn

import nc
from nc.backends import get_backend
from nc.backends.low_bit.engine import LowBitEngine, set_backend
from nc.kernels import cpu
from nc.kernels.c_code import build, emulation, limit
from nc.kernels.low_bit import compiled
from nc.kernels.low_bit.bag import BAG
from nc.kernels.low_bit.compiled import (
    C_BF16,
    C_BF16_FEW_ROWS,
    C_BF16_IN_FP32,
    C_FP32,
    C_INT8,
    C_INT8_BLOCK32,
    KERNELS,
    NUMBERS,
)
from nc.nn import QuantLinear

pytestmark = [
    pytest.mark.isas,
    pytest.mark.skipif(
        C_FP32.why_not(form(), (48, 128), "fp32") is not None, reason="needs AVX2 and a C compiler"
    ),
]
WEIGHTS = [
    (name, group, kind)
    for name in ("int4", "uint4", "int8", "uint8", "int3", "int6")
    for group in (32, 64, 96, -1)
    for kind in ("symmetric", "zero point", "minimum")
]
#: K where groups of that size divide it; a whole row is no multiple of anything.
INPUTS = {32: 96, 64: 192, 96: 192, -1: 83}


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def packed_of(name, group, kind, outputs):
    return weight(form(name, group, kind), outputs, INPUTS[group])


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(("name", "group", "kind"), WEIGHTS)
def test_fp32_is_exact_up_to_fp32_sums(name, group, kind, best):
    for outputs in (16, 33, 48):
        packed = packed_of(name, group, kind, outputs)
        layout, bias = compiled.pack(packed, HERE[best]), torch.randn(outputs)
        for rows in (1, 2, 3, 4, 7, 20):
            x = torch.randn(rows, packed.shape[1])
            result = compiled.linear(x, layout, packed, bias)
            expected = x.double() @ exact(packed).T + bias.double()
            assert ((result.double() - expected).abs() <= bound(x.double(), packed, bias)).all()


@pytest.mark.parametrize("block", [-1, 32])
@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(("name", "group", "kind"), WEIGHTS)
def test_int8_is_exact_for_the_rounded_activations(name, group, kind, best, block):
    for outputs in (16, 33, 48):
        packed = packed_of(name, group, kind, outputs)
        layout, bias = compiled.pack(packed, HERE[best]), torch.randn(outputs)
        for rows in (1, 2, 3, 4, 7, 20):
            x = torch.randn(rows, packed.shape[1]) * torch.logspace(-2, 2, rows).unsqueeze(1)
            result = compiled.linear(x, layout, packed, bias, block)
            values = rounded(x, block)
            assert (
                (result.double() - (values @ exact(packed).T + bias.double())).abs()
                <= bound(values, packed, bias)
            ).all()


@pytest.mark.parametrize("block", [-1, 32])
@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(("name", "kind"), [("int4", "zero point"), ("int8", "symmetric")])
def test_int8_gives_a_row_the_same_bits_alone_and_among_others(name, kind, best, block):
    """Weights that are read in several pieces, for more rows than codes become bytes for at once."""
    for group, inputs in ((32, 4640), (928, 4640), (-1, 4640)):
        packed = weight(form(name, group, kind), 20, inputs)
        layout, x = compiled.pack(packed, HERE[best]), torch.randn(125, inputs)
        alone = torch.cat([compiled.linear(row[None], layout, packed, None, block) for row in x])
        for rows in (2, 3, 16, 125):
            assert torch.equal(compiled.linear(x[:rows], layout, packed, None, block), alone[:rows])


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16", "e8m0"])
def test_scales_of_16_bits_are_packed_as_they_are_stored(scale_dtype, best):
    packed = weight(form("int4", 64, "symmetric", scale_dtype), 33, 128)
    packed.scale[0, 0] = 2**-20  # fp16 holds it without its leading 1
    layout = compiled.pack(packed, HERE[best])
    assert layout[1].element_size() == (4 if scale_dtype == "e8m0" else 2)
    x, bias = torch.randn(5, 128), torch.zeros(33)
    for block, values in ((0, x.double()), (-1, rounded(x, -1))):
        result = compiled.linear(x, layout, packed, None, block)
        assert ((result.double() - values @ exact(packed).T).abs() <= bound(values, packed, bias)).all()


@pytest.mark.parametrize("inputs", [128, 83, 20])
@pytest.mark.parametrize(("act", "block"), [("int8", -1), ("int8_block32", 32)])
def test_kernel_bag_and_reference_round_activations_alike(act, block, inputs):
    packed = weight(form("int4", -1, "zero point"), 24, inputs)
    x = torch.randn(2, 3, inputs) * torch.logspace(-2, 2, inputs)
    values = rounded(x.reshape(6, inputs), block)
    expected, limit = values @ exact(packed).T, bound(values, packed, torch.zeros(24))
    kernel = next(row for row in KERNELS if act in row.activations)
    for layer in (
        layer_with([kernel], packed, act),
        layer_with([BAG], packed, act),
        QuantLinear(packed, None, act),
    ):
        assert ((layer(x).reshape(6, 24).double() - expected).abs() <= limit).all()
    assert not torch.allclose(expected, x.reshape(6, inputs).double() @ exact(packed).T, rtol=1e-5)


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_largest_products_do_not_saturate(name, best):
    packed = weight(form(name, -1), 16, 9000)
    for code in (0, 2**packed.form.bits - 1):
        packed.codes.fill_(code * 17 if name == "int4" else code)
        x = torch.ones(1, 9000)
        x[0, 1::2] = -1.0 if code else 1.0
        for signs in (x, x.abs(), -x.abs()):
            result = compiled.linear(signs, compiled.pack(packed, HERE[best]), packed, None, -1)
            assert torch.allclose(result.double(), signs.double() @ exact(packed).T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=pytest.mark.exhaustive)])
@pytest.mark.skipif("avx512_vnni" not in HERE, reason="needs AVX512-VNNI")
@pytest.mark.skipif(bool(emulation.emulated()), reason="needs the instruction of a CPU")
def test_the_code_of_avx_vnni_with_the_instruction_of_avx512(name, tmp_path, monkeypatch):
    """AVX-VNNI and AVX512-VNNI encode the same instruction differently.

    All else of that code is tested where only the latter is there.
    """
    monkeypatch.delenv(limit.VARIABLE, raising=False)  # a limit to AVX512-VNNI forbids the code of AVX-VNNI
    monkeypatch.setattr(build, "_compiler", lambda: "cc -DNC_TEST_EVEX")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "load", build.load)
    monkeypatch.setattr(compiled, "_code", compiled._code.__wrapped__)
    for kind in ("symmetric", "zero point"):
        packed = weight(form(name, 64, kind), 33, 192)
        for rows in (1, 6):
            x, bias = torch.randn(rows, 192), torch.zeros(33)
            result = compiled.linear(x, compiled.pack(packed, NUMBERS["avx_vnni"]), packed, None, -1)
            values = rounded(x, -1)
            assert ((result.double() - values @ exact(packed).T).abs() <= bound(values, packed, bias)).all()


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize(
    ("act", "kernel"), [("fp32", C_FP32), ("int8", C_INT8), ("int8_block32", C_INT8_BLOCK32)]
)
def test_the_number_of_threads_changes_no_bit(threads, act, kernel):
    packed = weight(form("int4", 64, "zero point"), 1000, 512)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 512)
        torch.set_num_threads(1)
        alone = layer_with([kernel], packed, act)(x)
        torch.set_num_threads(threads)
        assert torch.equal(layer_with([kernel], packed, act)(x), alone)
    values = {"fp32": x.double(), "int8": rounded(x, -1), "int8_block32": rounded(x, 32)}[act]
    assert (
        (alone.double() - values @ exact(packed).T).abs() <= bound(values, packed, torch.zeros(1000))
    ).all()


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(
    ("name", "group", "inputs", "kind"),
    [
        ("int4", 32, 1120, "zero point"),
        ("int4", 160, 1120, "minimum"),
        ("int4", -1, 1115, "symmetric"),
        ("uint4", 64, 1152, "zero point"),
        ("int8", 96, 1056, "symmetric"),
        ("int8", -1, 1115, "zero point"),
    ],
)
def test_many_rows_and_inputs(name, group, inputs, kind, best):
    """More than a tile of AMX, than the codes that are unpacked at once, and than the rows that are summed at once."""
    packed = weight(form(name, group, kind), 33, inputs)
    layout, bias = compiled.pack(packed, HERE[best]), torch.randn(33)
    for rows in (8, 9, 10, 13, 17, 135, 300):
        x = torch.randn(rows, inputs) * torch.logspace(-2, 2, rows).unsqueeze(1)
        for block in (-1, 32, 0, compiled.BF16):
            given = x.bfloat16().float() if block == compiled.BF16 else x
            values = rounded(x, block) if block in (-1, 32) else given.double()
            result = compiled.linear(given, layout, packed, bias, block)
            limit = bound(values, packed, bias) * (4 if block == compiled.BF16 else 1)
            assert ((result.double() - (values @ exact(packed).T + bias.double())).abs() <= limit).all()
            if (
                block != compiled.BF16
            ):  # a few rows alone are computed by other instructions, and give the same bits
                assert torch.equal(compiled.linear(given[-3:], layout, packed, bias, block), result[-3:])


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_python_threads_do_not_disturb_each_other(threads):
    assert threads == 2
    layers = [layer_with([C_INT8], weight(form("int4", 64), 512, 512), "int8") for _ in range(4)]
    x = torch.randn(4, 512)
    expected, wrong = [layer(x) for layer in layers], []

    def call(layer, result):
        wrong.extend(layer for _ in range(30) if not torch.equal(layer(x), result))

    workers = [threading.Thread(target=call, args=pair) for pair in zip(layers, expected, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_many_rows_are_taken_in_parts():
    packed = weight(form("int4", 32, "zero point"), 20, 4096)
    x = torch.randn(150, 4096)  # parts of 128 rows of int8, of 32 or 132 rows of fp32
    for kernel, values in ((C_FP32, x.double()), (C_INT8, rounded(x, -1))):
        result = kernel.linear(x, kernel.pack(packed), packed, None)
        assert (
            (result.double() - values @ exact(packed).T).abs() <= bound(values, packed, torch.zeros(20))
        ).all()


@pytest.mark.parametrize(
    ("act", "kernel"), [("fp32", C_FP32), ("int8", C_INT8), ("int8_block32", C_INT8_BLOCK32)]
)
def test_any_strides_shapes_and_dtypes(act, kernel):
    packed = weight(form("int4", 64), 24, 128)
    layer = layer_with([kernel], packed, act, torch.randn(24))
    x = torch.randn(5, 3, 256)[..., ::2]
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert torch.equal(layer(x[0, 0]), layer(x[:1, :1])[0, 0])
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))
    assert layer(x[:0]).shape == (0, 3, 24)
    half = layer(x.half())
    assert half.dtype == torch.float16
    assert torch.equal(half, layer(x.half().float()).half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize(("name", "group", "kind"), WEIGHTS)
def test_bf16_activations_give_exact_products_and_fp32_sums(name, group, kind, best):
    packed = packed_of(name, group, kind, 33)
    layout, bias = compiled.pack(packed, HERE[best]), torch.randn(33)
    for rows in (1, 2, 3, 4, 7, 20):
        x = torch.randn(rows, packed.shape[1]).bfloat16()
        result = compiled.linear(x, layout, packed, bias)
        expected = x.double() @ exact(packed).T + bias.double()
        assert ((result.double() - expected).abs() <= bound(x.double(), packed, bias)).all()


def test_bf16_activations_are_multiplied_by_weights_in_fp32():
    packed = weight(form("int4", 64, "zero point"), 24, 128)
    x = torch.randn(5, 128).bfloat16()
    row = C_BF16_FEW_ROWS if "avx512_bf16" in HERE else C_BF16_IN_FP32
    result = layer_with([row], packed)(x)
    assert result.dtype == torch.bfloat16
    exactly = x.double() @ exact(packed).T
    assert (
        (result.double() - exactly).abs()
        <= 2**-8 * exactly.abs() + bound(x.double(), packed, torch.zeros(24))
    ).all()
    assert torch.equal(layer_with([row], packed, "bf16")(x.float()), row.linear(x, row.pack(packed), packed))


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("size", [1e-44, 1e-35, 1e-12, 1e5, 1e33])
def test_fp32_is_exact_for_tiny_and_huge_values(size, best):
    packed = weight(form("int4", 64, "zero point"), 24, 128)
    packed.scale.mul_(1e-3)
    x = torch.randn(3, 128).clamp(-1, 1) * size
    x[:, 5] *= 1e-3
    result = compiled.linear(x, compiled.pack(packed, HERE[best]), packed)
    limit = (
        bound(x.double(), packed, torch.zeros(24)) + 128 * 2.0**-112
    )  # sums of parts below the smallest normal number
    assert ((result.double() - x.double() @ exact(packed).T).abs() <= limit).all()


@pytest.mark.parametrize("best", TESTED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_fp32_passes_on_what_is_not_finite(value, best):
    packed = weight(form("int4", 64, "zero point"), 24, 128)
    x = torch.randn(300, 128)
    x[7, 77] = value
    result, expected = compiled.linear(x, compiled.pack(packed, HERE[best]), packed), QuantLinear(packed)(x)
    assert torch.equal(result[7].isfinite(), expected[7].isfinite())
    assert result[torch.arange(300) != 7].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_values_that_have_no_scale(value):
    packed = weight(form("int4", 64), 24, 128)
    x = torch.randn(3, 128)
    x[1] = value if value == 0 else x[1]
    x[1, 77] = value
    result, expected = (
        layer(x) for layer in (layer_with([C_INT8], packed, "int8"), QuantLinear(packed, None, "int8"))
    )
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.allclose(result[::2], expected[::2], rtol=1e-4, atol=1e-4)
    assert value != 0 or (result[1] == 0).all()


@pytest.mark.parametrize(
    ("kernel", "args", "reason"),
    [
        (C_FP32, (form("int4", 48), (48, 96), "fp32"), "multiples of 32, not 48"),
        (C_FP32, (form("int4", 83), (48, 83), "fp32"), None),  # a whole row
        (C_FP32, (form("fp8_e4m3", 32), (48, 128), "fp32"), "does not take fp8_e4m3"),
        (C_FP32, (form("nf4", 32), (48, 128), "fp32"), "does not take nf4"),
        (C_FP32, (form(), (7, 128), "bf16"), "fp32 only"),
        (
            C_BF16_IN_FP32,
            (form(), (7, 128), "bf16"),
            "has instructions for bf16" if "avx512_bf16" in HERE else None,
        ),
        (C_BF16_FEW_ROWS, (form(), (7, 128), "bf16"), "no avx512f, avx512_vnni, avx512_bf16"),
        (C_BF16, (form(), (7, 128), "bf16"), "no avx512f, avx512_vnni, avx512_bf16"),
        (C_BF16, (form("int8"), (7, 128), "bf16"), "no avx512f"),
        (C_INT8, (form(), (7, 128), "fp32"), 'int8 only; ask for act_dtype="int8"'),
        (C_INT8, (form(), (7, 128), "int8"), None),
        (C_INT8, (form("nf4"), (7, 128), "int8"), "does not take nf4"),
        (C_FP32, (form(), (7, 128), "int8"), None),  # of rounded activations
    ],
)
def test_what_it_cannot_do_is_data(kernel, args, reason):
    found = kernel.why_not(*args, ("avx2",))
    assert found is None if reason is None else reason in found


@pytest.mark.skipif("avx512_bf16" not in HERE, reason="needs AVX512-BF16")
@pytest.mark.skipif(bool(emulation.emulated()), reason="its code does not follow the CPU's features")
def test_the_user_s_limit_of_instruction_sets_holds(monkeypatch):
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    assert compiled.isa() == NUMBERS["avx2"]
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx512f", "avx512_vnni", "avx_vnni"))
    assert compiled.isa() == NUMBERS["avx512_vnni"]
    monkeypatch.setattr(
        cpu, "machine_features", lambda: ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16")
    )
    assert compiled.isa() == NUMBERS["avx512_bf16"]


@pytest.mark.usefixtures("without_c")
def test_without_a_compiler_others_compute_and_the_report_says_why():
    q = nc.quantize(
        nn.Sequential(nn.Linear(64, 32)).eval(),
        nc.WeightOnlyConfig("int4", group_size=32, act_dtype="int8"),
        backend="native",
    )
    report = nc.report(q)
    assert [layer.kernel for layer in report.layers] == ["bag (M <= 8), blocks"]
    assert (
        "kernel c int8 is not used for 1 layers: its C code can't be loaded: there is no C compiler"
        in said(report)
    )
    x = torch.randn(2, 64)
    assert "quantized::embedding_bag_4bit_rowwise_offsets" in ran(lambda: q(x))
    assert torch.allclose(q(x), set_backend(q, "reference")(x), rtol=1e-4, atol=1e-4)


def test_a_compiler_that_fails_is_a_reason_too(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_compiler", lambda: "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "load", build.load)
    found = compiled._code.__wrapped__()
    assert "its C code can't be loaded: the C compiler 'false' fails on low_bit.c" in found.reason


@pytest.mark.parametrize("act", ["fp32", "bf16", "int8", "int8_block32"])
def test_the_workflow_uses_it_and_the_report_says_so(act, tmp_path, monkeypatch):
    if act == "bf16" and emulation.emulated():
        pytest.skip("the library for many rows has no emulated BF16")
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33)).eval()
    q = nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=32, act_dtype=act), backend="native")
    x = torch.randn(3, 64)
    before = q(x)
    bf16 = "c bf16 (M <= 2048), blocks bf16" if "avx512_bf16" in HERE else "c bf16 in fp32"
    assert {layer.kernel for layer in nc.report(q).layers} == {
        bf16 if act == "bf16" else f"c {act}".replace("_", " ")
    }
    assert "quantized::embedding_bag_4bit_rowwise_offsets" not in ran(lambda: q(x))
    nc.save(q, tmp_path / "q")
    again = nc.load(tmp_path / "q", model=model, backend="native")
    assert torch.equal(again(x), before)
    assert {layer.kernel for layer in nc.report(again).layers} == {
        layer.kernel for layer in nc.report(q).layers
    }
    expected = set_backend(q, "reference")(x)
    assert torch.allclose(before, expected, rtol=1e-4, atol=1e-4 if act != "bf16" else 0.02)
    seen, real = [], compiled.call_packed
    monkeypatch.setattr(compiled, "call_packed", lambda *a: seen.append(a) or real(*a))
    again(x)
    assert len(seen) == 2  # the compiled function, once per layer


def test_it_comes_first_on_native():
    assert get_backend("native").low_bit_kernels()[: len(KERNELS)] == KERNELS
    assert {kernel.name for kernel in KERNELS} == {
        "c fp32",
        "c bf16",
        "c bf16 few rows",
        "c bf16 in fp32",
        "c int8",
        "c int8 block32",
    }
    assert str(LowBitEngine("x", KERNELS).kernels_of(QuantLinear(weight(form())), torch.float32)) == "c fp32"


FORKED = """
import os, sys, torch
from suites.low_bit import exact, form, layer_with, ran, weight
from nc.kernels.low_bit.compiled import C_FP32
torch.set_num_threads(int(sys.argv[1]))
layer = layer_with([C_FP32], weight(form(), 512, 512))
x = torch.randn(2, 512)
if sys.argv[2] == "quantized":
    import nc
    layer = nc.quantize(torch.nn.Sequential(torch.nn.Linear(512, 512)), nc.WeightOnlyConfig("int4", group_size=32), backend="native")
    torch.randn(1000, 1000).exp()
expected = layer(x) if sys.argv[2] == "used" else None
child = os.fork()
if not child:
    result = layer(x)
    os._exit(0 if expected is None or torch.equal(result, expected) else 1)
assert os.waitpid(child, 0)[1] == 0
layer(x)
"""


@pytest.mark.parametrize(
    ("threads", "before"), [("1", "used"), ("2", "used"), ("1", "new"), ("2", "quantized")]
)
@pytest.mark.sample(1)
def test_a_forked_process_computes(threads, before):
    subprocess.run(
        [sys.executable, "-c", FORKED, threads, before],
        check=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": path()},
    )

"""Kernels of low-bit linears.

Each against float64, proof of which one ran, refusals, packed layouts, captured graphs.
"""

import copy
import dataclasses
import gc
import io
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from suites.low_bit import exact, form, layer_with, native, ran, weight
from suites.reports import said
from suites.small_llama import random_llama
from torch import nn
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

import nc
from nc.backends import get_backend
from nc.backends.base import Backend
from nc.backends.low_bit.engine import LowBitEngine, engine, set_backend
from nc.formats import dtype
from nc.kernels import cpu
from nc.kernels.low_bit import kernel as kernel_module
from nc.kernels.low_bit.aten import INT4PACK, INT8PACK
from nc.kernels.low_bit.bag import BAG, grid
from nc.kernels.low_bit.blocks import BLOCK, BLOCKS, BLOCKS_BF16
from nc.nn import QuantLinear
from nc.numerics.group_ranges import choose
from nc.numerics.groups import encode
from nc.numerics.metrics import worst_sqnr_db
from nc.numerics.packed_weight import pack
from nc.profiling import bandwidth
from nc.weights.speed import layer_speeds

vector_aten = pytest.mark.skipif(
    "aten_avx2" not in kernel_module.features(), reason="needs ATen's vector code"
)
NAMES = {
    "bag": tuple(f"quantized::embedding_bag_{size}_rowwise_offsets" for size in ("2bit", "4bit", "byte")),
    "int4pack": ("aten::_weight_int4pack_mm_for_cpu",),
    "int8pack": ("aten::_weight_int8pack_mm",),
    "reference": ("nc::quant_linear",),
}


KINDS = ("symmetric", "zero point", "minimum")
INTEGERS = [
    *[(f"int{bits}", group, kind) for bits in (2, 4, 8) for group in (16, 32, -1) for kind in KINDS],
    *[(f"int{bits}", 32, kind) for bits in (3, 5, 6, 7) for kind in KINDS],
]
ON_A_GRID = [(name, 32, "symmetric") for name in ("fp4_e2m1", "fp6_e2m3")]
OTHERS = [(name, 32, "symmetric") for name in ("fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "nf4")]


@native
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("name", "group", "kind"), [*INTEGERS, *ON_A_GRID])
def test_bag_is_exact_in_fp32(name, group, kind, rows):
    packed = weight(form(name, group, kind), outputs=47)
    x, w = torch.randn(rows, 128), exact(packed)
    bias = torch.randn(47)
    layer = layer_with([BAG], packed, bias=bias)
    result = layer(x)
    terms = (
        x.double().abs() @ (w.abs() + packed.params.scale.abs().max() * 2**packed.form.bits).T + bias.abs()
    )
    assert ((result.double() - (x.double() @ w.T + bias)).abs() <= 128 * 2**-24 * terms).all()
    assert ran(lambda: layer(x)) & set(NAMES["bag"])


@native
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("name", "group", "kind"), [*INTEGERS, *ON_A_GRID, *OTHERS])
def test_blocks_are_exact_in_fp32(name, group, kind, rows, monkeypatch):
    monkeypatch.setattr("nc.kernels.low_bit.blocks.BLOCK", 128 * 20)  # the last block is smaller
    packed = weight(form(name, group, kind))
    x, w = torch.randn(rows, 128), exact(packed)
    result = layer_with([BLOCKS], packed)(x)
    assert ((result.double() - x.double() @ w.T).abs() <= 130 * 2**-24 * (x.double().abs() @ w.abs().T)).all()


@native
@pytest.mark.parametrize("group", [24, 100, 256, -1])
def test_bag_sums_long_groups_in_parts(group):
    inputs = {24: 120, 100: 300, 256: 512, -1: 1009}[group]
    packed = weight(form(group=group), inputs=inputs)
    x = torch.randn(2, inputs)
    assert torch.allclose(
        layer_with([BAG], packed)(x).double(), x.double() @ exact(packed).T, rtol=1e-5, atol=1e-4
    )


def bf16_bound(x, packed):
    """Of the rounding of activations, scales, middles and results to bf16, 8 bits each, and sums in fp32."""
    scale = (
        packed.params.scale.abs()
        .double()
        .repeat_interleave(packed.shape[1] // packed.params.scale.shape[1], 1)
    )
    largest = exact(packed).abs() + scale * 2**packed.form.bits
    return 2**-7 * (x.double().abs() @ largest.T)


BF16_CASES = [
    *[
        (INT4PACK, "int4", group, kind)
        for group in (32, 64, 128, -1)
        for kind in ("symmetric", "zero point", "minimum")
    ],
    (INT8PACK, "int8", -1, "symmetric"),
    (BAG, "int4", 16, "zero point"),
    (BLOCKS, "nf4", 32, "symmetric"),
    (BLOCKS, "int3", 32, "zero point"),
    (BLOCKS_BF16, "int4", 32, "zero point"),
    (BLOCKS_BF16, "nf4", 32, "symmetric"),
]


@native
@vector_aten
@pytest.mark.parametrize("model", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("row", "name", "group", "kind"), BF16_CASES)
def test_bf16_activations_within_bf16_bounds(row, name, group, kind, rows, model):
    if row is BLOCKS_BF16 and "avx512_bf16" not in cpu.machine_features():
        pytest.skip("needs AVX512-BF16")
    packed = weight(form(name, group, kind))
    x = torch.randn(rows, 128).to(torch.bfloat16 if model == "bf16" else torch.float32)
    layer = layer_with([row], packed, "fp32" if model == "bf16" else "bf16")
    result = layer(x)
    assert result.dtype == x.dtype
    assert ((result.double() - x.double() @ exact(packed).T).abs() <= bf16_bound(x, packed)).all()
    names = ran(lambda: layer(x))
    assert "nc::quant_linear" not in names
    assert names & {*NAMES.get(row.name, ("aten::mm",))}


@native
@pytest.mark.parametrize("kernel", [BAG, BLOCKS])
def test_int8_activations_are_rounded_per_token_first(kernel):
    packed = weight(form(), inputs=64)
    x = torch.randn(3, 64) * torch.tensor([[0.1], [1.0], [30.0]])
    scale = x.abs().amax(1, keepdim=True).double() / 127
    rounded = (x.double() / scale).round() * scale
    result = layer_with([kernel], packed, "int8")(x)
    assert torch.allclose(result.double(), rounded @ exact(packed).T, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(result.double(), x.double() @ exact(packed).T, rtol=1e-4, atol=1e-4)


@native
def test_fp16_models_get_fp16_results_of_fp32_sums():
    packed = weight(form())
    x = torch.randn(2, 3, 128).half()
    result = layer_with([BAG], packed)(x)
    assert result.dtype == torch.float16
    assert torch.allclose(result.double(), x.double() @ exact(packed).T, rtol=2**-10, atol=1e-3)


@native
@vector_aten
@pytest.mark.usefixtures("without_c")
def test_the_number_of_rows_chooses_the_kernel():
    packed = weight(form("int4", 32, scale_dtype="bf16"))
    for act, expected in (
        ("fp32", {1: "bag", 8: "bag", 9: None}),
        ("bf16", {1: "int4pack", 32: "int4pack", 33: None}),
    ):
        layer = QuantLinear(packed, act_dtype=act)
        set_backend(layer, "native")
        for rows, name in expected.items():
            names = ran(lambda: layer(torch.randn(rows, 128)))  # noqa: B023 - called at once
            assert "nc::quant_linear" not in names
            kernels = {kernel for kernel in ("bag", "int4pack") if names & {*NAMES[kernel]}}
            # blocks read codes by the same operator as the bag, but multiply afterwards
            assert ("aten::mm" in names) is (name is None)
            assert name is None or kernels == {name}


@native
def test_backends_by_name():
    layer = QuantLinear(weight(form()))
    assert layer.engine is None
    assert set_backend(layer, "auto") is layer
    assert layer.engine.name == "auto"
    assert "nc::quant_linear" not in ran(lambda: layer(torch.randn(2, 128)))
    set_backend(layer, "reference")
    assert layer.engine is None
    assert "nc::quant_linear" in ran(lambda: layer(torch.randn(2, 128)))
    with pytest.raises(nc.UnknownBackendError, match="No backend is called 'nativ'"):
        set_backend(layer, "nativ")
    with pytest.raises(nc.UnsupportedError, match=r"'ipex' has no kernel for low-bit weights.*AVX512-FP16"):
        set_backend(layer, "ipex")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()


CONFIG = nc.WeightOnlyConfig("int4", group_size=32)


@native
def test_the_workflow_takes_a_backend():
    x = torch.randn(3, 64)
    results = {}
    for name in ("auto", "native", "reference"):
        q = nc.quantize(mlp(), CONFIG, backend=name)
        results[name] = q(x)
        assert ("nc::quant_linear" in ran(lambda: q(x))) is (name == "reference")  # noqa: B023
    assert torch.allclose(results["auto"], results["reference"], rtol=1e-5, atol=1e-6)
    prepared = nc.prepare(mlp(), CONFIG, backend="native")
    assert nc.convert(prepared)[0].engine.name == "native"
    assert nc.convert(prepared, backend="reference")[0].engine is None
    for call in (lambda: nc.prepare(mlp(), CONFIG, backend="x"), lambda: nc.convert(prepared, backend="x")):
        with pytest.raises(nc.UnknownBackendError):
            call()


@native
def test_a_saved_model_is_loaded_for_a_backend(tmp_path):
    q, x = nc.quantize(mlp(), CONFIG, backend="native"), torch.randn(3, 64)
    expected = q(x)
    nc.save(q, tmp_path)
    for name in ("auto", "native", "reference"):
        loaded = nc.load(tmp_path, model=mlp(), backend=name)
        assert torch.allclose(loaded(x), expected, rtol=1e-5, atol=1e-6)
        assert ("nc::quant_linear" in ran(lambda: loaded(x))) is (name == "reference")  # noqa: B023
    with pytest.raises(nc.UnsupportedError, match="no kernel for low-bit"):
        nc.load(tmp_path, model=mlp(), backend="ipex")
    with pytest.raises(nc.UnknownBackendError):
        nc.load(tmp_path, model=mlp(), backend="x")


@native
def test_a_registered_backend_brings_kernels(monkeypatch):
    calls = []
    counted = dataclasses.replace(
        BLOCKS, name="own blocks", linear=lambda *a: calls.append(a[0].shape[0]) or BLOCKS.linear(*a)
    )

    class Own(Backend):
        name = "own"

        def capabilities(self):
            return get_backend("reference").capabilities()

        def low_bit_kernels(self):
            return (counted,)

    monkeypatch.setattr("nc.backends._REGISTERED", {"own": Own()})
    layer = QuantLinear(weight(form()))
    for name in ("own", "auto"):  # of "auto" it comes first
        set_backend(layer, name)(torch.randn(5, 128))
    assert calls == [5, 5]
    names = [kernel.name for kernel in engine("auto").kernels]
    assert names[0] == "own blocks"
    assert "int4pack" in names


ALL = ("avx2", "avx512f", "avx512_bf16", "aten_avx2")


@pytest.mark.parametrize(
    ("kernel", "args", "available", "reason"),
    [
        (INT4PACK, (form(), (48, 128), "fp32"), ALL, 'bf16 only; ask for act_dtype="bf16"'),
        (INT4PACK, (form(), (40, 128), "bf16"), ALL, "40 outputs are not a multiple of 16"),
        (INT4PACK, (form(group=16), (48, 128), "bf16"), ALL, "not 16"),
        (INT4PACK, (form("int3"), (48, 128), "bf16"), ALL, "does not take int3"),
        (INT4PACK, (form("nf4"), (48, 128), "bf16"), ALL, "does not take nf4"),
        (INT4PACK, (form(), (48, 128), "bf16"), ("avx2",), "no aten_avx2"),
        (INT4PACK, (form(), (48, 128), "bf16"), ALL, None),
        (INT8PACK, (form("int8", -1), (7, 128), "bf16"), ALL, None),
        (INT8PACK, (form("int8", 128), (7, 128), "bf16"), ALL, None),
        (INT8PACK, (form("int8", 64), (7, 128), "bf16"), ALL, "one scale per row only, not groups of 64"),
        (INT8PACK, (form("int8", -1, "zero point"), (7, 128), "bf16"), ALL, "symmetric weights only"),
        (BAG, (form("nf4"), (7, 128), "fp32"), ALL, "does not take nf4"),
        (BAG, (form("fp4_e2m1"), (7, 128), "fp32"), ALL, None),
        (BAG, (form(), (7, 128), "fp32"), (), "no avx2"),
        (BLOCKS_BF16, (form(), (7, 128), "bf16"), ("avx2",), "no avx512_bf16"),
        (BLOCKS, (form("fp8_e5m2"), (7, 128), "bf16"), ("avx2",), None),
    ],
)
def test_what_a_kernel_cannot_do_is_data(kernel, args, available, reason):
    found = kernel.why_not(*args, available)
    assert found is None if reason is None else reason in found


def test_a_cpu_without_vector_code_gets_the_operator(monkeypatch):
    monkeypatch.setattr(kernel_module, "features", lambda **_: ())
    layer = QuantLinear(weight(form()))
    layer.engine = LowBitEngine("native", get_backend("native").low_bit_kernels())
    assert str(layer.engine.kernels_of(layer, torch.float32)) == "reference"
    assert "nc::quant_linear" in ran(lambda: layer(torch.randn(2, 128)))
    assert ("bag", "this CPU has no avx2") in [
        (n, r.split(" (")[0]) for n, r in layer.engine.kernels_of(layer, torch.float32).refused
    ]


def test_known_bad_paths_are_refused():
    rows = {row.name: row for name in ("native", "ipex") for row in get_backend(name).low_bit_kernels()}
    assert "scalar thread" in rows["dyn_quant_4bit"].why_not(form(), (48, 128), "fp32")
    assert "AVX512-FP16" in rows["ipex weight-only"].why_not(form(), (48, 128), "bf16")


@pytest.mark.parametrize(
    ("name", "found"),
    [("fp4_e2m1", True), ("fp6_e2m3", True), ("fp6_e3m2", False), ("nf4", False), ("fp8_e4m3", False)],
)
def test_formats_on_a_grid_of_bytes(name, found):
    assert (grid(name) is not None) is found
    if found:
        low, step, steps = grid(name)
        assert [low + step * s for s in steps] == [float(v) for v in dtype(name).values]


def test_the_weight_of_a_layer_is_a_dequantized_copy():
    packed = weight(form("int4", 32, "zero point"))
    layer = QuantLinear(packed)
    assert torch.allclose(layer.weight.double(), exact(packed), rtol=1e-6, atol=1e-7)
    assert "weight" not in layer.state_dict()
    assert not list(layer.parameters())


@native
def test_packed_layouts_are_never_stored():
    q = nc.quantize(mlp(), CONFIG, backend="native")
    x = torch.randn(2, 64)
    before, keys = q(x), set(nc.quantize(mlp(), CONFIG, backend="reference").state_dict())
    assert q[0].packed_for_engine.packed
    assert set(q.state_dict()) == keys
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):  # our own bytes
        assert again[0].packed_for_engine is None
        assert again[0].engine.name == "native"
        assert torch.equal(again(x), before)
    file = io.BytesIO()
    torch.save(q, file)
    empty = nc.quantize(mlp(), CONFIG, backend="reference")
    smaller = io.BytesIO()
    torch.save(empty, smaller)
    assert abs(file.tell() - smaller.tell()) < 2000
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), before)


@native
def test_other_weights_are_packed_anew_and_the_old_layout_is_freed():
    first, second = QuantLinear(weight(form())), QuantLinear(weight(form()))
    x = torch.randn(2, 128)
    set_backend(first, "native")
    before = first(x)

    def layout():
        (packed,) = first.packed_for_engine.packed.values()
        return weakref.ref(packed[0])

    old = layout()
    first.load_state_dict(second.state_dict())
    gc.collect()
    assert old() is None
    assert first.packed_for_engine is None
    assert not torch.allclose(first(x), before)
    assert torch.allclose(first(x), second(x), rtol=1e-5, atol=1e-5)
    old = layout()
    first.to(torch.float32)
    assert old() is None
    first(x)
    first.scale.mul_(2)  # in place, by no method of the module
    assert torch.allclose(first(x), 2 * second(x), rtol=1e-5, atol=1e-5)
    old = layout()
    first.codes = second.codes.clone()
    first.scale = second.scale.clone()
    assert torch.allclose(first(x), second(x), rtol=1e-5, atol=1e-5)
    assert old() is None
    old = layout()
    set_backend(first, "reference")
    assert old() is None


@native
def test_threads_that_call_first_at_once_pack_once():
    packs, started = [], threading.Barrier(4)
    slow = dataclasses.replace(
        BAG, pack=lambda w: packs.append(1) or threading.Event().wait(0.05) or BAG.pack(w)
    )
    layer = layer_with([slow], weight(form()))
    x = torch.randn(2, 128)
    results = []

    def call():
        started.wait()
        results.append(layer(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packs) == 1
    assert len(results) == 4
    assert all(torch.equal(r, results[0]) for r in results)


@native
def test_blocks_need_memory_for_one_block_only(monkeypatch):
    monkeypatch.setattr("nc.kernels.low_bit.blocks.BLOCK", 16 * 256)
    packed = weight(form(), outputs=512, inputs=256)
    layer = layer_with([BLOCKS], packed)
    x = torch.randn(4, 256)
    layer(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        layer(x)
    largest = max(event.self_cpu_memory_usage for event in found.events())
    assert largest <= 4 * 16 * 256
    assert BLOCK * 4 * 3 < 7e6


@native
def test_shapes_of_inputs_and_what_the_operator_computes():
    packed = weight(form())
    layer = set_backend(QuantLinear(packed, torch.randn(48)), "native")
    assert layer(torch.randn(128)).shape == (48,)
    assert layer(torch.randn(2, 3, 128)).shape == (2, 3, 48)
    assert layer(torch.randn(0, 128)).shape == (0, 48)
    strided = torch.randn(128, 5).t()
    assert torch.allclose(layer(strided), layer(strided.contiguous()), rtol=1e-6, atol=1e-6)
    assert copy.deepcopy(layer).to("meta")(torch.randn(2, 128, device="meta")).shape == (2, 48)
    x = torch.randn(20, 128)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        inside = layer(x)
    assert torch.equal(inside, layer(x))


@native
@pytest.mark.parametrize("act_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("shape", [(3, 127), (3, 129), (2, 256), (2, 64), (64,), ()])
def test_inputs_of_another_size_are_refused(shape, act_dtype):
    layer = QuantLinear(weight(form()), act_dtype=act_dtype)
    set_backend(layer, "native")
    with pytest.raises(
        RuntimeError, match="cannot be multiplied|at least 1D"
    ):  # torch's own words, as for a float linear
        layer(torch.randn(shape))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("act_dtype", ["fp32", "bf16", "int8", "int8_block32"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_what_new_tensors_are_changes_nothing(backend, act_dtype, warm):
    """A kernel writes where it is told to.

    Memory of another dtype or on another device gave infinite numbers, or no process.
    """
    if backend == "native" and nc.available_backends()["native"]:
        pytest.skip("needs AVX2")
    packed, x = weight(form()), torch.randn(3, 128)
    expected = set_backend(QuantLinear(packed, act_dtype=act_dtype), backend)(x)
    layer = set_backend(QuantLinear(packed, act_dtype=act_dtype), backend)
    if warm:
        layer(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            result = layer(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(result, expected)


@pytest.fixture(scope="module")
def llama():
    model = random_llama(vocab_size=99)
    mask = (
        torch.full((7, 7), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 7, 7)
    )  # transformers 4.55 exports none
    return nc.quantize(model, CONFIG), {
        "input_ids": torch.randint(0, 99, (2, 7)),
        "attention_mask": mask,
        "use_cache": False,
    }


@native
def test_an_exported_model_holds_one_operator_per_layer(llama):
    q, inputs = llama
    expected = q(**inputs).logits
    program = torch.export.export(q, (), inputs, strict=False)
    targets = [str(n.target) for n in program.graph.nodes]
    assert (
        targets.count("nc.quant_linear.default") == sum(isinstance(m, QuantLinear) for m in q.modules()) == 14
    )
    assert not any("embedding_bag" in t or "int4pack" in t for t in targets)
    assert not [name for name in program.state_dict if name not in q.state_dict()]
    assert torch.allclose(program.module()(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


class Waiting(nn.Module):
    """Waits while it is captured."""

    def __init__(self):
        super().__init__()
        self.captured, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        self.captured.set()
        self.go_on.wait(60)
        return x + 1


@native
@pytest.mark.parametrize("act_dtype", ["fp32", "int8"])
def test_a_capture_in_another_thread_changes_no_bit(act_dtype, monkeypatch):
    """Torch says to all threads that something is captured; kernels are for all but the one that captures."""
    q = nc.quantize(
        nn.Sequential(nn.Linear(64, 48)).eval(),
        nc.WeightOnlyConfig("int4", group_size=32, act_dtype=act_dtype),
    )
    calls, linear = [], LowBitEngine.linear
    monkeypatch.setattr(LowBitEngine, "linear", lambda *args: calls.append(1) or linear(*args))
    x, other = torch.randn(5, 64), Waiting()
    with torch.no_grad():
        expected = q(x)
        thread = threading.Thread(target=torch.export.export, args=(other, (x,)), kwargs={"strict": False})
        thread.start()
        try:
            assert other.captured.wait(60)
            assert torch.compiler.is_compiling()
            assert torch.equal(q(x), expected)
        finally:
            other.go_on.set()
            thread.join()
    assert len(calls) == 2


@native
@pytest.mark.parametrize(
    "compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_a_compiled_model_gives_the_same_numbers(llama, compiler):
    q, inputs = llama
    torch._dynamo.reset()
    compiled = torch.compile(q, backend=compiler, fullgraph=compiler != "inductor")
    with torch.no_grad():
        assert torch.allclose(compiled(**inputs).logits, q(**inputs).logits, rtol=1e-4, atol=1e-5)


@native
@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="in torch.compile, torch 2.8 takes is_exporting() for true"
)
def test_a_compiled_model_runs_on_kernels():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    q = set_backend(nc.quantize(model, CONFIG), "native")
    torch._dynamo.reset()
    compiled, copied = torch.compile(q, backend="aot_eager", fullgraph=True), copy.deepcopy(q)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), q(x))
        names = ran(lambda: compiled(x))
        assert "nc_layers::call" in names
        assert "nc::quant_linear" not in names
        assert torch.equal(compiled(x[:, None]), q(x[:, None]))
        set_backend(q, "reference")
        assert "nc_layers::call" not in ran(lambda: compiled(x))
    # a copy is a layer of its own
    assert not {layer._number for layer in (q[0], q[2])} & {layer._number for layer in (copied[0], copied[2])}
    with torch.no_grad():
        copied[0].codes.zero_()
        assert torch.equal(torch.compile(copied, backend="aot_eager")(x), copied(x))


@native
@pytest.mark.parametrize("dtype", ["int4", "nf4", "fp8_e4m3", "mxint8"])
def test_gradients_of_a_compiled_model(dtype):
    """Of every kind of format, and nothing of what is traced stays behind."""
    q = set_backend(nc.quantize(mlp(), nc.WeightOnlyConfig(dtype, group_size=32)), "native")
    torch._dynamo.reset()
    x = torch.randn(3, 64, requires_grad=True)
    torch.compile(q, backend="aot_eager")(x).sum().backward()
    got, x.grad = x.grad, None
    q(x).sum().backward()
    torch.testing.assert_close(got, x.grad)
    assert all(
        type(layer.weight.dequantize()) is torch.Tensor
        for layer in q.modules()
        if isinstance(layer, QuantLinear)
    )


@native
def test_vmap_of_a_layer():
    q = set_backend(nc.quantize(mlp(), CONFIG), "native")
    x = torch.randn(4, 3, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its speed
        torch.testing.assert_close(torch.vmap(q)(x), q(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["native", "auto", "reference"])
def test_forward_derivatives_are_refused(backend):
    """They would be lost without a word."""
    q = set_backend(nc.quantize(mlp(), CONFIG), backend)
    x, tangent = torch.randn(3, 64), torch.randn(3, 64)
    with pytest.raises(nc.UnsupportedError, match="forward-mode"):
        torch.func.jvp(q, (x,), (tangent,))
    with forward_ad.dual_level():
        assert torch.equal(q(x), q(x))
        with pytest.raises(nc.UnsupportedError, match="forward-mode"):
            q(forward_ad.make_dual(x, tangent))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("backend", ["native", "auto"])
def test_groups_of_zeros_cost_no_precision(dtype, backend):
    """They have a scale of 1, beside which other weights are small."""
    linear = nn.Linear(256, 32, bias=False)
    with torch.no_grad():
        linear.weight.mul_(0.01).view(32, 4, 64)[:, ::2] = 0
        linear.weight[0] = 0
    q = set_backend(
        nc.quantize(nn.Sequential(linear).eval(), nc.WeightOnlyConfig(dtype, group_size=64, w_sym=False)),
        backend,
    )
    x = torch.randn(5, 256) + 3
    x[:, 7] = 300
    with torch.no_grad():
        got, expected = q(x), x.double() @ q[0].weight.dequantize().double().T
    assert worst_sqnr_db([expected], [got]) > 110
    assert not got[:, 0].any()


@pytest.mark.parametrize("backend", ["native", "auto"])
@pytest.mark.parametrize("kind", ["zero point", "minimum"])
@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_groups_of_one_code_cost_no_precision(name, kind, backend):
    """Those of zeros are stored with a scale of 1, whatever lies in the other groups."""
    values = torch.randn(32, 256) * 0.01
    values[:, 64:192] = 0
    values[:, :64] = 0.003
    found = form(name, 64, kind)
    params = choose(values, found, "minmax")
    layer = set_backend(
        nn.Sequential(QuantLinear(pack(encode(values, params, found), params, found))), backend
    )
    x = torch.randn(5, 256) + 3
    x[:, 7] = 300
    with torch.no_grad():
        assert worst_sqnr_db([x.double() @ layer[0].weight.dequantize().double().T], [layer(x)]) > 105


@native
@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_leaves_the_process_calls_no_layer(strict):
    q = set_backend(nc.quantize(mlp(), CONFIG), "native")
    with torch.no_grad():
        program = torch.export.export(q, (torch.randn(3, 64),), strict=strict)
    targets = [str(n.target) for n in program.graph.nodes]
    assert (
        targets.count("nc.quant_linear.default") == sum(isinstance(m, QuantLinear) for m in q.modules()) > 0
    )
    assert not any("nc_layers" in target for target in targets)


@native
def test_gradients_go_through_a_compiled_model():
    q = set_backend(nc.quantize(mlp(), CONFIG), "native")
    torch._dynamo.reset()
    x, y = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    torch.compile(q, backend="aot_eager")(x).sum().backward()
    q(y).sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_biases_can_be_trained(compiled, kind):
    """As adapters' `bias="all"` does."""
    q = set_backend(nc.quantize(mlp(), CONFIG), "auto")
    plain = copy.deepcopy(mlp()).double()
    for i in (0, 2):
        plain[i].weight.data = exact(q[i].packed)
    q[0].bias.requires_grad_(True)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(kind)
    torch._dynamo.reset()
    run = torch.compile(q, backend="aot_eager") if compiled else q
    run(x).float().pow(2).sum().backward()
    plain(x.double()).pow(2).sum().backward()
    assert q[0].bias.grad.dtype == q[0].bias.dtype
    error = (q[0].bias.grad.double() - plain[0].bias.grad).norm() / plain[0].bias.grad.norm()
    assert error < (1e-5 if kind == torch.float32 else 0.02)
    assert q[2].bias.grad is None
    with torch.no_grad():
        assert not q(x).requires_grad


@native
def test_a_parametrized_bias():
    class Doubled(torch.nn.Module):
        def forward(self, bias):
            return 2 * bias

    q, x = set_backend(nc.quantize(mlp(), CONFIG), "native"), torch.randn(3, 64)
    expected = q[0](x) + q[0].bias
    torch.nn.utils.parametrize.register_parametrization(q[0], "bias", Doubled())
    assert torch.allclose(q[0](x), expected, rtol=1e-5, atol=1e-6)


def test_a_state_dict_of_another_format_is_refused():
    first, second = (nc.quantize(mlp(), nc.WeightOnlyConfig(name, group_size=32)) for name in ("int4", "nf4"))
    state = first.state_dict()
    assert [(n, t.shape) for n, t in state.items()] == [(n, t.shape) for n, t in second.state_dict().items()]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for other in (state, torch.load(file)):
        with pytest.raises(
            RuntimeError, match="0 holds a weight of format nf4 .* but got one of format int4"
        ):
            second.load_state_dict(other)
        with pytest.raises(RuntimeError, match="holds a weight of format nf4"):
            second.load_state_dict(other, strict=False)
    x, again = torch.randn(2, 64), nc.quantize(mlp(), nc.WeightOnlyConfig("int4", group_size=32))
    again.load_state_dict(state)
    assert torch.equal(again(x), first(x))
    again.load_state_dict(dict(state))  # without metadata nothing can be said


def test_a_layer_that_is_gone_is_an_error():
    from nc.nn.calls import call_layer

    with pytest.raises(nc.errors.StateError, match="Compile the model again"):
        call_layer(torch.randn(1, 4), 1 << 40, 4)


@native
@pytest.mark.exhaustive
def test_a_package_of_aot_inductor_gives_the_same_numbers(tmp_path):
    q = nc.quantize(mlp(), CONFIG)
    x = torch.randn(3, 64)
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(q, (x,)), package_path=str(tmp_path / "m.pt2")
    )
    assert torch.allclose(torch._inductor.aoti_load_package(path)(x), q(x), rtol=1e-4, atol=1e-5)


@native
@pytest.mark.usefixtures("without_c")
def test_generate_runs_on_kernels(llama):
    q, inputs = set_backend(copy.deepcopy(llama[0]), "native"), llama[1]
    ids = inputs["input_ids"]
    fast = q.generate(ids, max_new_tokens=4, do_sample=False)
    names = ran(lambda: q.generate(ids, max_new_tokens=2, do_sample=False))
    assert "nc::quant_linear" not in names
    assert "quantized::embedding_bag_4bit_rowwise_offsets" in names
    slow = set_backend(copy.deepcopy(q), "reference").generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(fast, slow)


@native
@pytest.mark.usefixtures("without_c")
def test_the_report_names_kernels_and_why_not_others():
    q = nc.quantize(mlp(), CONFIG, backend="native")
    report = nc.report(q)
    assert [layer.kernel for layer in report.layers] == ["bag (M <= 8), blocks"] * 2
    assert all(layer.speed is None for layer in report.layers)
    assert report.bandwidth is None
    assert "GB/s" not in said(report)
    assert (
        'kernel int4pack is not used for 2 layers: it multiplies bf16 only; ask for act_dtype="bf16"'
        in said(report)
    )
    assert (
        "kernel c fp32 is not used for 2 layers: its C code can't be loaded: there is no C compiler"
        in said(report)
    )
    assert "int8pack" not in said(report)
    assert {layer.kernel for layer in nc.report(set_backend(q, "reference")).layers} == {"reference"}


@native
def test_the_report_times_layers_on_given_inputs(monkeypatch):
    monkeypatch.setattr("nc.reports.weight_report.read_bandwidth", lambda _: 10.0)
    q = nc.quantize(mlp(), CONFIG, backend="native")
    report = nc.report(q, profile_inputs=torch.randn(3, 64))
    assert [(layer.speed.rows, layer.speed.calls) for layer in report.layers] == [(3, 1)] * 2
    assert all(layer.speed.us > 0 for layer in report.layers)
    assert report.bandwidth == 10
    head, first = report.text(details=True).split("\n")[0], report.text(details=True).split("\n")[2]
    assert "us" in head
    assert "% of reading" in head
    rate = report.layers[0].size / report.layers[0].speed.us / 1e3
    assert f"{rate:.2f}" in first
    assert report.to_dict()["layers"][0]["speed"]["rows"] == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'profile'"):
        nc.report(q, profile=True)


def test_speeds_are_medians_of_one_layer():
    q = nc.quantize(nn.Sequential(nn.Linear(64, 64)).eval(), CONFIG, backend="reference")
    q.append(q[0])  # called twice
    ticks = iter(x * 1e-6 for i in range(10) for x in (100.0 * i, 100.0 * i + (7 if i else 50)))
    speeds = layer_speeds(q, ((torch.randn(2, 5, 64),), {}), clock=lambda: next(ticks))
    assert {name: (round(s.us), s.rows, s.calls) for name, s in speeds.items()} == {"0": (7, 10, 2)}


def test_bandwidth_is_measured_once_per_number_of_threads(monkeypatch):
    monkeypatch.setattr(bandwidth, "_BYTES", 1 << 20)
    bandwidth.read_bandwidth.cache_clear()
    try:
        first = bandwidth.read_bandwidth(1)
        assert first > 0
        assert bandwidth.read_bandwidth(1) is first
    finally:
        bandwidth.read_bandwidth.cache_clear()


@pytest.mark.parametrize(
    "options", [{}, {"refused": "it is slow", "linear": lambda *_: None}], ids=["neither", "both"]
)
def test_a_row_computes_or_is_refused(options):
    with pytest.raises(nc.ConfigError, match="'mine': give either"):
        kernel_module.LowBitKernel(name="mine", what="nothing", **options)

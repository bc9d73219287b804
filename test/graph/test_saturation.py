"""Artefacts for CPUs that sum in 32 bits, on those that sum pairs of products in 16.

What changes there, and that numbers are right.
"""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from models import MLP, Function, quantized, worst_db
from suites.saturating_nets import NETS
from torch import nn

from nc import DynamicQuantConfig, NCWarning, StaticQuantConfig, available_backends, load, save
from nc.backends import get_backend
from nc.formats.rule_key import KIND_NAMES
from nc.graph.saturation import narrow, saturating
from nc.kernels import cpu
from nc.numerics.int16_pairs import PAIR_LIMIT, fit, largest_pair
from nc.ops import quantize_per_tensor

ENGINES = [name for name, why in available_backends().items() if not why and name != "reference"]
STATIC = StaticQuantConfig(post=())


@pytest.fixture
def avx2(monkeypatch):
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))


def extreme(model):
    """Weights of one sign and nearly one size: all pairs are far above the limit."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = (0.6 + 0.4 * torch.rand(parameter.shape)) / parameter[0].numel()
    return model.eval()


def constants_of(graph):
    return dict(graph.module.named_buffers())


def codes_of(graph, operator):
    (node,) = [n for n in graph.module.graph.nodes if n.meta.get("operator") == operator]
    return getattr(graph.module, node.args[1].args[0].target)


# --- the proof ---


@pytest.mark.parametrize(
    ("codes", "largest"),
    [
        ([[64, 64]], 128),
        ([[64, 65]], 129),
        ([[-64, -65]], 129),
        ([[127, -127]], 127),
        ([[1, 127, 127, 1]], 128),
        ([[0, 127, 127, 0]], 127),
        ([[100, 28, 127]], 128),
        ([[-128, 0]], 128),
        ([[-128, -1]], 129),
        ([[]], 0),
    ],
)
def test_the_largest_pair(codes, largest):
    assert largest_pair(torch.tensor(codes, dtype=torch.int8)) == largest


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 5, 7), (2, 1, 6), (1, 1, 1)])
def test_the_largest_pair_of_codes_however_they_lie(shape):
    """Slices that begin at any byte, transposed, in other dtypes: against a loop."""
    whole = torch.randint(-128, 128, (*shape[:-1], shape[-1] + 1), dtype=torch.int8)
    for codes in (
        whole[..., 1:],
        whole[..., :-1],
        whole.flatten()[1:].unflatten(0, (1, -1)),
        whole.transpose(0, -1),
        whole[..., 1:].double(),
    ):
        rows = codes.flatten(0, -2).tolist()
        pairs = [row[i : i + 2] for row in rows for i in range(0, len(row), 2)]
        sums = [abs(sum(code for code in pair if code * sign > 0)) for pair in pairs for sign in (1, -1)]
        assert largest_pair(codes) == max(sums)
        assert [fit(codes, limit) for limit in range(258)] == [max(sums) <= limit for limit in range(258)]


@pytest.mark.parametrize("codes", [[], [0], [-128], [-128, 127], [127, 1], [127, 2], [-128, -1], [-127, -1]])
def test_codes_that_fit(codes):
    """At each limit as the largest pair says, where codes of both signs meet, and where they are the only ones."""
    tensor = torch.tensor(codes, dtype=torch.int8)
    largest = max([abs(sum(code for code in codes if code * sign > 0)) for sign in (1, -1)])
    assert [fit(tensor, limit) for limit in range(258)] == [largest <= limit for limit in range(258)]


def test_the_limit_is_the_largest_that_fits():
    """By brute force, for every highest activation: what is allowed fits 16 bits, and one more does not."""
    for highest in range(1, 256):
        limit = (2**15 - 1) // highest
        assert highest * limit <= 2**15 - 1 < highest * (limit + 1)
        assert min(limit, 254) >= PAIR_LIMIT


@pytest.mark.parametrize(("highest", "safe"), [(255, False), (130, False), (129, True), (63, True)])
@pytest.mark.parametrize("signed", [False, True])
def test_activations_with_few_codes_leave_room_for_large_weights(avx2, signed, highest, safe):
    """129 x 254 = 32766."""
    q = quantized(
        nn.Sequential(nn.Linear(16, 8)),
        torch.randn(8, 16),
        StaticQuantConfig(act_dtype="int8" if signed else "uint8"),
    )
    codes_of(q.graph, "0").fill_(127)
    (node,) = [n for n in q.graph.module.graph.nodes if n.target is quantize_per_tensor]
    node.update_arg(4, highest - 128 if signed else highest)
    names = saturating(q.graph, get_backend("native").capabilities())
    assert names == (() if safe else ("0",))


# --- what changes, and what does not ---


#: An engine that runs all kinds and adds all of them in 16 bits.
HERE = dataclasses.replace(
    get_backend("reference").capabilities(),
    narrow_sums=frozenset(
        (kind, dtype)
        for kind in KIND_NAMES
        if kind != "add"
        for dtype in ("uint8", "int8", "per_tensor", "per_token")
    ),
    isa=("avx2",),
)


def test_only_what_can_saturate_gets_other_codes():
    model = extreme(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
    model[2].weight.data = torch.tensor([1.0, -1.0]).repeat(4, 4) * model[2].weight.abs()
    model[0].weight.data[3:] *= torch.tensor([1.0, -1.0]).repeat(8)  # of the first layer three channels can
    x = torch.randn(32, 16)
    q = quantized(model, x, STATIC)
    before = {name: tensor.clone() for name, tensor in constants_of(q.graph).items()}
    after, names = narrow(q.graph, HERE)
    assert names == ("0",)
    assert largest_pair(codes_of(after, "0")) <= PAIR_LIMIT < largest_pair(codes_of(q.graph, "0"))
    assert torch.equal(codes_of(after, "0")[3:], codes_of(q.graph, "0")[3:])
    assert codes_of(after, "2") is codes_of(q.graph, "2")
    assert (after.plan["0"].spec.weight.paired, after.plan["2"].spec.weight.paired) == (True, False)
    assert after.plan.isa == ("avx2",)
    assert worst_db(q.graph.module(x), after.module(x)) > 30
    # nothing of the old one is changed, nothing of it is kept, and nothing is left to do
    assert all(torch.equal(before[name], tensor) for name, tensor in constants_of(q.graph).items())
    assert len(constants_of(after)) == len(before)
    again, none = narrow(after, HERE)
    assert none == ()
    assert again == after


def test_a_cpu_that_sums_in_32_bits_changes_nothing():
    q = quantized(extreme(MLP()), torch.randn(4, 16), STATIC)
    assert narrow(q.graph, dataclasses.replace(HERE, narrow_sums=frozenset(), isa=("amx_int8",))) == (
        q.graph,
        (),
    )


def test_a_graph_that_fits_changes_its_plan_only():
    q = quantized(nn.Sequential(nn.Linear(1, 8)), torch.randn(4, 1), STATIC)
    after, names = narrow(q.graph, HERE)
    assert (names, after.changes) == ((), ())
    assert (after.module, after.plan.decisions, after.plan.isa) == (
        q.graph.module,
        q.graph.plan.decisions,
        ("avx2",),
    )


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_every_kind_of_weight(name, granularity):
    build, shape = NETS[name]
    x = torch.rand(shape)
    q = quantized(extreme(nn.Sequential(build())), x, StaticQuantConfig(w_granularity=granularity, post=()))
    depthwise = name == "depthwise"  # with one input channel per group there are no pairs
    after, names = narrow(q.graph, HERE)
    assert names == (() if depthwise else ("0",))
    assert saturating(after, HERE) == ()
    assert worst_db(q.graph.module(x), after.module(x)) > (100 if depthwise else 25)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_all_matrices_of_recurrent_layers(layer):
    x = torch.randn(3, 4, 8)
    q = quantized(Function(lambda self, x: self.r(x)[0], r=extreme(layer(8, 6, 2))), x, DynamicQuantConfig())
    after, names = narrow(q.graph, HERE)
    assert names == ("r",)
    codes = [t for t in constants_of(after).values() if t.dtype == torch.int8]
    assert len(codes) == 4
    assert (
        max(largest_pair(c) for c in codes)
        <= PAIR_LIMIT
        < max(largest_pair(t) for t in constants_of(q.graph).values() if t.dtype == torch.int8)
    )
    assert worst_db(q.graph.module(x), after.module(x)) > 25


def test_a_weight_that_two_layers_share_stays_one():
    q = quantized(
        extreme(Function(lambda self, x: self.a(torch.relu(self.a(x))), a=nn.Linear(8, 8))),
        torch.rand(4, 8),
        STATIC,
    )
    after, names = narrow(q.graph, HERE)
    assert len(names) == 2
    assert len(constants_of(after)) == len(constants_of(q.graph)) == 3


def quantizes_of(graph, operator):
    (node,) = [n for n in graph.module.graph.nodes if n.meta.get("operator") == operator]
    return [node.args[i].args[0] for i in (0, 1)]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_second_input_of_a_matmul_moves_to_seven_bits(dtype, symmetric):
    def forward(self, x):
        y = self.a(x)
        turned = y.transpose(-1, -2)
        return y @ turned, y.abs() @ turned, turned @ y

    x = torch.randn(2, 5, 8)
    q = quantized(
        Function(forward, a=nn.Linear(8, 8)),
        x,
        StaticQuantConfig(act_dtype=dtype, act_sym=symmetric, post=()),
    )
    after, names = narrow(q.graph, HERE)
    matmuls = [name for name in names if name.startswith("matmul")]
    assert len(matmuls) == 3
    for name in matmuls:
        old, new = quantizes_of(q.graph, name), quantizes_of(after, name)
        assert new[0].args[1:] == old[0].args[1:]
        assert new[1].args[3:5] == ((64, 191) if dtype == "uint8" else (-64, 63))
        ends = [[(code - n.args[2]) * n.args[1] for code in n.args[3:5]] for n in (old[1], new[1])]
        assert ends[1] == pytest.approx(
            ends[0], abs=2 * new[1].args[1]
        )  # the same values, within a step or two
        assert (after.plan[name].spec.right.reduce_range, after.plan[name].spec.activation.reduce_range) == (
            True,
            False,
        )
    assert quantizes_of(after, matmuls[0])[1] is quantizes_of(after, matmuls[1])[1]  # one quantize for both
    assert saturating(after, HERE) == ()
    assert worst_db(q.graph.module(x), after.module(x)) > 25


def test_a_value_that_changes_in_place_is_quantized_anew_for_each_reader():
    def forward(self, x):
        y = self.a(x)
        view = y.view(y.shape)
        product = x @ view
        y.add_(3.0)
        return product @ view

    x = torch.randn(2, 8, 8)
    q = quantized(Function(forward, a=nn.Linear(8, 8)), x, STATIC)
    after, _ = narrow(q.graph, HERE)
    first, second = (quantizes_of(after, name)[1] for name in ("matmul", "matmul_1"))
    assert first.args[0] is second.args[0]
    assert first is not second
    assert worst_db(q.graph.module(x), after.module(x)) > 25


# --- load ---


@pytest.mark.parametrize("backend", ENGINES)
def test_load_says_what_it_changed_and_leaves_the_files(tmp_path, avx2, backend):
    x = torch.rand(4, 16)
    q = quantized(extreme(MLP()), x, STATIC)
    q.graph = dataclasses.replace(q.graph, plan=dataclasses.replace(q.graph.plan, isa=("avx512_vnni",)))
    save(q, tmp_path / "wide")
    before = {path.name: path.read_bytes() for path in (tmp_path / "wide").iterdir()}
    with pytest.warns(
        NCWarning,
        match=rf"'{backend}' adds products in 16 bits on this CPU.*\. 2 of 2 .*: fc1, fc2\..*convert the fp32 model here",
    ) as caught:
        loaded = load(tmp_path / "wide", backend=backend, isolate="never")
    assert next(each for each in caught if each.category is NCWarning).filename == __file__
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "wide").iterdir()}
    report = loaded.report()
    (line,) = report.changes
    assert line.startswith(
        "re-quantized from int8 for a CPU that adds products in 16 bits: 2 of 2 layers: fc1, fc2; outputs "
        "before and after"
    )
    assert line in " ".join(report.text(details=True).split())
    assert (report.isa, report.sqnr_vs_fp32_db) == (("avx2",), q.graph.sqnr_vs_fp32_db)
    assert loaded.graph.plan.to_dict()["decisions"][0]["spec"]["weight"]["paired"]
    assert report.ran_int8 == 2
    assert worst_db(loaded.reference(x), loaded(x)) > 60
    # saved again it is an artefact for such CPUs, and loads without a word
    save(loaded, tmp_path / "narrow")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NCWarning)
        again = load(tmp_path / "narrow", backend=backend, isolate="never")
    assert torch.equal(again(x), loaded(x))
    save(again, tmp_path / "again")
    assert (tmp_path / "again/model.json").read_bytes() == (tmp_path / "narrow/model.json").read_bytes()


@pytest.mark.ipex
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
def test_dynamic_layers_are_guarded_too(tmp_path, granularity, monkeypatch):
    """Also where oneDNN sums in 32 bits and FBGEMM does not: it uses the VNNI of AVX-512 only."""
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx_vnni"))
    x = torch.rand(16, 64) + 1
    model = extreme(MLP())
    model.fc1 = extreme(nn.Linear(64, 64))
    model.fc2 = extreme(nn.Linear(64, 64))
    q = quantized(model, x, DynamicQuantConfig(act_granularity=granularity))
    save(q, tmp_path / "a")
    with pytest.warns(NCWarning, match="2 of 2"):
        loaded = load(tmp_path / "a", backend="ipex", isolate="never")
    assert worst_db(loaded.reference(x), loaded(x)) > 35
    assert worst_db(model(x), loaded(x)) > 30
    if "avx512_vnni" not in cpu.detected():
        unguarded = get_backend("ipex").lower(q.graph, verify="off", isolate="never")
        assert worst_db(q.reference(x), unguarded.run([x])[0]) < 25


CHILD = """
    import json, sys, warnings
    import torch
    from nc import load
    from nc.backends import cpu, engine_options, get_backend
    from nc.storage import store
    from nc.numerics.metrics import sqnr_db

    folder, backend = sys.argv[1:]
    graph = store.read(folder).graph()
    x, = graph.example
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = load(folder, backend=backend, verify="off", isolate="never")
    fp32 = torch.load(folder + ".pt", weights_only=True)
    unguarded = get_backend(backend).lower(graph, verify="off", **engine_options(get_backend(backend), isolate="never"))
    codes = lambda g: {n: t for n, t in g.module.named_buffers() if t.dtype == torch.int8}
    old, new = codes(graph), codes(q.graph)
    with torch.no_grad():
        print(json.dumps({
            "features": cpu.machine_features(),
            "warnings": [str(w.message) for w in caught if "could saturate" in str(w.message)],
            "ran": q.report().ran_int8,
            "guarded": sqnr_db(q.reference(x), q(x)),
            "fp32": sqnr_db(fp32, q(x)),
            "unguarded": sqnr_db(graph.module(x)[0], unguarded.run([x])[0]),
            "kept": sorted(n for n in old if n in new and torch.equal(old[n], new[n])),
            "paired": [d.operator for d in q.graph.plan.quantized if d.spec.weight and d.spec.weight.paired],
            "right": [d.operator for d in q.graph.plan.quantized if d.spec.right is not None],
        }))
"""


def tokens():
    def forward(self, x):
        return self.out(self.a(x) @ self.b(x).transpose(-1, -2)) + self.safe(x)

    layers = {name: nn.Linear(32, 32) for name in ("a", "b", "safe", "out")}
    return Function(forward, **layers), torch.rand(2, 32, 32) * 0.2 + 0.8


def image():
    layers = {"a": nn.Conv2d(8, 16, 3), "safe": nn.Conv2d(16, 16, 1), "out": nn.Conv2d(16, 8, 3)}
    return Function(
        lambda self, x: self.out(torch.relu(self.safe(torch.relu(self.a(x))))), **layers
    ), torch.rand(2, 8, 12, 12) * 0.2 + 0.8


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("build", [tokens, image])
@pytest.mark.sample(3)
def test_numbers_are_right_in_a_process_without_vnni(build, backend, isa, tmp_path):
    """And would be wrong without the guard: every sum of the layers called a, b and out saturates."""
    model, x = build()
    for parameter in model.parameters():
        parameter.data.zero_()
    for layer in (model.a, model.out, *([model.b] if build is tokens else [])):
        layer.weight.data = (0.5 + 0.5 * torch.rand(layer.weight.shape)) / layer.weight[0].numel()
        layer.weight.data[len(layer.weight) // 2 :] *= -1
    signs = torch.tensor([1.0, -1.0]).repeat(model.safe.weight.shape[1] // 2)
    model.safe.weight.data = (torch.rand(model.safe.weight.shape[:2]) * signs).reshape(
        model.safe.weight.shape
    )
    q = quantized(model, x, STATIC)  # the reference sums in 32 bits, like any CPU with VNNI
    save(q, tmp_path / "a")
    with torch.no_grad():
        torch.save(model(x), tmp_path / "a.pt")
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "a"), backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    if backend == "openvino" and isa == "AVX512_CORE" and "avx512f" in cpu.detected():
        assert "AVX-512 without VNNI" in done.stderr  # it adds other neighbours than the guard knows
        return
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    layers = ["a", "b", "out"] if build is tokens else ["a", "out"]
    assert set(found["features"]) <= {"avx2", "avx512f"}
    assert found["paired"] == layers
    assert found["kept"] == ["safe_weight_int8"]
    assert found["right"] == (["matmul"] if build is tokens and backend in ("ipex", "native") else [])
    assert len(found["warnings"]) == 1
    assert found["guarded"] > 60
    assert found["fp32"] > 25
    assert found["unguarded"] < 15

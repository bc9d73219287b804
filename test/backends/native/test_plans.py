"""Plans of kept oneDNN primitives: memory, sizes, threads, and what a plan can't follow."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WHY_NO_PLANS, Function, assert_all_int8, library, quantized
from suites.reports import said
from torch import nn
from torch.nn import functional as F

import nc
from nc.backends import available_backends
from nc.backends.native import fuse, operators
from nc.backends.native import planned as planning
from nc.backends.native.grouped import join
from nc.backends.native.passes import finish, kernels
from nc.backends.native.plans import code_products, operands, recorder
from nc.backends.native.plans.arena import ALIGNMENT, solve
from nc.backends.native.plans.execution_plan import AtenCall, Block, ExecutionPlan, PrimitiveCall
from nc.backends.native.plans.ways import Refused
from nc.backends.passes import run_passes
from nc.errors import BackendError, BackendUnavailableError, InputError, NCError
from nc.graph.fx_utils import copy_module
from nc.graph.schemas import writes_into
from nc.kernels import cpu
from nc.kernels.c_code import build
from nc.kernels.onednn import elf, providers
from nc.kernels.onednn.api import Unimplemented
from nc.kernels.onednn.descriptions import DST, Desc
from nc.kernels.onednn.providers import provider
from nc.kernels.onednn.runner import CompiledRunner, PythonRunner, runner
from nc.numerics.metrics import worst_sqnr_db
from nc.process import cache
from nc.process.env import NC_ONEDNN

pytestmark = [
    pytest.mark.isas,
    pytest.mark.skipif(
        bool(available_backends()["native"]), reason=available_backends()["native"] or "it can run"
    ),
]


class Residual(nn.Module):
    """A sum in codes, a depthwise convolution, uneven pads, a pool, and a linear."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depth, self.fc = nn.Conv2d(16, 16, 3, stride=2, groups=16), nn.Linear(16, 10)

    def forward(self, x):
        y = F.relu(self.a(x))
        y = F.relu(self.b(y) + y)
        y = F.max_pool2d(F.relu6(self.depth(F.pad(y, (0, 1, 0, 1)))), 2)
        return self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Encoder(nn.Module):
    """What stands between the products of a transformer; returns a part of a tensor and a tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, mask):
        h = self.norm(x)
        q, k, v = (f(h).view(x.shape[0], -1, 4, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -1e4
        scores = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + bias, -1)
        y = x + self.o((scores @ v).transpose(1, 2).reshape(x.shape))
        y = y + self.down(F.gelu(self.up(y)))
        return y[:, 0], y


def mask_of(batch, length):
    return torch.ones(batch, length, dtype=torch.int64).tril_(length // 2)


CASES = {
    "residual": (Residual, [(torch.randn(b, 3, s, s),) for b, s in ((1, 16), (2, 16), (3, 11), (1, 16))]),
    "encoder": (
        Encoder,
        [(torch.randn(b, s, 32), mask_of(b, s)) for b, s in ((2, 7), (1, 7), (3, 12), (2, 7))],
    ),
}


def planned(model, inputs):
    """The quantized model, and its lowered graph with and without a plan."""
    library()
    q = quantized(model.eval(), inputs, None, "native")
    module, _ = copy_module(q.graph.module)
    run_passes(module, (*kernels(q.graph.example), *finish()))
    return q, module, planning.planned(module, lambda: pytest.fail("no plan"))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_computes_what_the_operators_compute(name):
    """At every size. Means and layer norms round otherwise, which may change a code behind them."""
    make, inputs = CASES[name]
    _, module, call = planned(make(), inputs[0])
    with torch.no_grad():
        for each, _ in itertools.product(inputs, range(2)):
            assert worst_sqnr_db(module(*each), call(*each)) > 35
    plans = list(call._plans.values())
    assert len(plans) == 3
    found = {
        entry.primitive.kernel for plan in plans for entry in plan.entries if isinstance(entry, PrimitiveCall)
    }
    assert found
    assert not any(kernel.startswith("ref") for kernel in found)


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (nn.Conv1d(64, 64, 128, padding=64, groups=16), (2, 64, 49)),  # as positions in Wav2Vec2, in small
        (nn.Conv1d(8, 32, 16), (2, 8, 130)),
        (nn.Conv1d(96, 96, 8, stride=3, groups=4), (2, 96, 130)),
        (nn.Conv1d(4, 32, 32), (1, 4, 300)),
        (nn.Conv2d(16, 32, (3, 16)), (2, 16, 40, 70)),
        (nn.Conv2d(28, 32, 16), (1, 28, 40, 40)),
        (nn.Conv2d(24, 24, 8), (1, 24, 30, 30)),
        (nn.Conv3d(16, 16, (2, 2, 16)), (1, 16, 8, 8, 40)),
    ],
    ids=str,
)
@pytest.mark.needs_plans
def test_wide_windows_over_few_channels(layer, sizes):
    """AMX kernels of oneDNN give wrong sums for these, in torch's operators too."""
    x = torch.randn(sizes)
    q = quantized(nn.Sequential(layer, nn.ReLU()).eval(), x, None, "native")
    assert "run by" not in q.report().details
    assert [op.ran for op in q.report().ops if "conv" in op.kind] == ["int8"]
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > 35


@pytest.mark.skipif("amx_int8" not in cpu.machine_features(), reason="needs AMX")
@pytest.mark.parametrize(("channels", "window", "amx"), [(3, 3, False), (3, 7, True), (16, 3, True)])
def test_small_windows_of_an_image_are_not_multiplied_by_amx(channels, window, amx):
    """It multiplies 64 values at once; VNNI is faster for 27."""
    x = torch.randn(2, channels, 20, 20)
    _, module, call = planned(nn.Sequential(nn.Conv2d(channels, 32, window), nn.ReLU()), x)
    for each in (
        x,
        torch.randn(1, channels, 31, 24),
    ):  # the second plan takes the weight as the first one packed it
        assert worst_sqnr_db(module(each), call(each)) > 35
    kernels = [
        e.primitive.kernel
        for plan in call._plans.values()
        for e in plan.entries
        if isinstance(e, PrimitiveCall) and e.primitive.kind == "convolution"
    ]
    assert [("amx" in kernel, kernel.startswith("ref")) for kernel in kernels] == [(amx, False)] * 2


def test_operations_of_two_tensors_write_codes():
    """The product with the gate of a channel is quantized in the same call, where nothing else reads it."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.gate, self.b = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            y = F.silu(self.a(x))
            return self.b(y * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(y, 1))))

    x = torch.randn(2, 4, 12, 12)
    q, module, call = planned(Gate(), x)
    assert worst_sqnr_db(module(x), call(x)) > 35
    assert worst_sqnr_db((q.reference(x),), call(x)) > 35
    plan = next(iter(call._plans.values()))
    written = {
        e.primitive.layouts[DST].dtype
        for e in plan.entries
        if isinstance(e, PrimitiveCall) and e.primitive.kind == "binary"
    }
    assert written == {torch.uint8}


@pytest.mark.parametrize("name", CASES)
def test_the_first_call_and_all_others_agree_whoever_calls_the_kernels(name):
    make, inputs = CASES[name]
    _, module, _ = planned(make(), inputs[0])
    compiled, why = runner(provider().maker.library)
    assert isinstance(compiled, CompiledRunner), why
    with torch.no_grad():
        for run_by in (compiled, PythonRunner(provider().maker.library)):
            call = planning.PlannedModel(module, provider(), run_by, lambda: pytest.fail("no plan"))
            first, second, third = (call(*inputs[0]) for _ in range(3))
            assert all(
                torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, second, third, strict=True)
            )
            if run_by is compiled:
                expected = first
            assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))


def _looked_up(self, x):
    codes = torch.sigmoid(self.a(F.relu(self.b(x)))).mul(9).long()
    return self.c(self.table(codes.sum(-1)))


@pytest.fixture
def onednn_alone(monkeypatch):
    """Without products in C."""
    monkeypatch.setattr(code_products, "why_unavailable", lambda: "left out")


@pytest.mark.usefixtures("onednn_alone")
@pytest.mark.parametrize("most", [0, 2**29])
@pytest.mark.parametrize("reads", [False, True])
def test_making_a_plan_computes_only_what_torch_reads(monkeypatch, reads, most):
    """Positions of a look-up come from products, so they must be there when torch looks up.

    Nothing else has to be.
    """
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8), "table": nn.Embedding(73, 8)}
    model = Function(
        _looked_up if reads else (lambda self, x: self.c(F.relu(self.a(F.relu(self.b(x)))))), **parts
    )
    monkeypatch.setattr(recorder, "_MOST_HELD", most)
    made = []
    run_once = recorder.run_once
    monkeypatch.setattr(
        recorder,
        "run_once",
        lambda maker, primitive, now: made.append(primitive) or run_once(maker, primitive, now),
    )
    x = torch.randn(5, 8)
    _, module, call = planned(model, x)
    made.clear()
    with torch.no_grad():
        assert worst_sqnr_db(module(x), call(x)) > 35
    (plan,) = call._plans.values()
    primitives = [entry.primitive for entry in plan.entries if isinstance(entry, PrimitiveCall)]
    products = [primitive for primitive in primitives if primitive.kind == "matmul"]
    assert len(products) == 3
    assert [p for p in made if p.kind == "matmul"] == (
        products if not most else products[:2] if reads else []
    )


@pytest.mark.usefixtures("onednn_alone")
def test_layers_that_are_alike_share_a_primitive():
    """Those with other sizes, or with something else behind the product, have their own."""
    model = nn.Sequential(
        *(nn.Linear(16, 16) for _ in range(4)), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 8)
    )
    x = torch.randn(5, 16)
    _, module, call = planned(model, x)
    with torch.no_grad():
        assert worst_sqnr_db(module(x), call(x)) > 100
        call(torch.randn(6, 16))
    by_rows = [
        [e.primitive for e in plan.entries if isinstance(e, PrimitiveCall) and e.primitive.kind == "matmul"]
        for plan in call._plans.values()
    ]
    for products in by_rows:
        assert [products.index(p) for p in products] == [0, 0, 0, 3, 0, 5]
    assert not set(map(id, by_rows[0])) & set(map(id, by_rows[1])), "of other sizes"


def test_results_stay_what_they_are():
    """The next call writes neither to what a call returned nor to what it was given, nor does a caller write to constants."""
    model = Function(
        lambda self, x: (self.b(F.relu(self.a(x))), x + 0, torch.arange(3.0)),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 8),
    )
    x, z = torch.randn(4, 8), torch.randn(4, 8)
    _, _, call = planned(model, x)
    with torch.no_grad():
        kept = [call(x), call(x), call(x)]
        copies = [[t.clone() for t in outputs] for outputs in kept]
        for outputs in (call(z), call(z)):
            for tensor in outputs:
                tensor.fill_(7.0)
        for outputs, copy in zip(kept, copies, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(outputs, copy, strict=True))
        assert torch.equal(call(x)[2], torch.arange(3.0))


def test_inputs_may_lie_in_memory_in_any_way():
    q, _, call = planned(Residual(), (torch.randn(2, 3, 16, 16),))
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = call(x)
        others = (
            x.to(memory_format=torch.channels_last),
            torch.stack([x, x], -1)[..., 0],
            x.transpose(2, 3).contiguous().transpose(2, 3),
        )
        for other in others:
            assert worst_sqnr_db(expected, call(other)) > 100
    assert worst_sqnr_db([q(x)], expected) > 100


def test_rows_of_one_element_may_have_any_stride():
    model = Function(
        lambda self, x: self.b(self.a(x).transpose(-1, -2)), a=nn.Linear(1, 1), b=nn.Linear(4, 3)
    ).eval()
    q_model = quantized(model, torch.randn(4, 1), None, "native")
    x = torch.randn(1, 4).t()
    assert x.stride() == (1, 4)
    torch.testing.assert_close(q_model(x), q_model.reference(x))


def test_threads_do_not_disturb_each_other():
    make, inputs = CASES["residual"]
    _, _, call = planned(make(), inputs[0])
    with torch.no_grad():
        expected = [call(*each) for each in inputs]
    wrong = []

    def work(offset):
        with torch.no_grad():
            for i in range(40):
                index = (i + offset) % len(inputs)
                if not torch.equal(call(*inputs[index])[0], expected[index][0]):
                    wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def in_vain_first(way):
    """A way that computes a node, takes memory besides, gives all of it up, and computes the node."""

    def handled(recorder, node, named):
        def in_vain():
            way(recorder, node, named)
            more = recorder.new((1 << 20,), (1,), torch.float32)
            recorder._slot(more.tensor)
            recorder._ref(more)
            raise Unimplemented

        return recorder.first_possible({"in vain": in_vain, "right": lambda: way(recorder, node, named)})

    return handled


def remains(call):
    """What the only plan of a model holds.

    Its entries, where blocks lie and how long they live, slots, bytes of weights.
    """
    (plan,) = call._plans.values()
    blocks = sorted((offset, block.size, block.first, block.last) for block, offset in plan.offsets.items())
    return (
        [type(e) for e in plan.entries],
        blocks,
        plan.arena,
        plan.slots,
        plan.scratchpad,
        call._weights.size(),
    )


@pytest.mark.parametrize("held", [2**29, 0], ids=["at once", "call by call"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_of_a_way_that_was_given_up(monkeypatch, name, held):
    monkeypatch.setattr(
        recorder, "_MOST_HELD", held
    )  # with 0, each call is made when it is recorded: also those of a way that is given up
    make, inputs = CASES[name]
    _, module, call = planned(make(), inputs[0])
    known = {
        target: dataclasses.replace(row, ways={name: in_vain_first(way) for name, way in row.ways.items()})
        for target, row in operators.table().items()
    }
    again = planning.PlannedModel(
        module, provider(), runner(provider().maker.library)[0], lambda: pytest.fail("no plan"), known
    )
    with torch.no_grad():
        expected, got = call(*inputs[0]), again(*inputs[0])
    assert all(map(torch.equal, expected, got))
    assert remains(again) == remains(call)


def test_calls_that_waited_for_a_way_that_was_given_up_are_made_once(monkeypatch):
    """Where too much memory waits while a way is tried, all calls are made.

    Those before it must not be made again, nor its own.
    """
    _, module, _ = planned(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8))
    plan = recorder.Recorder(module, provider().maker, operands.PackedWeights(), {})
    made, text = [], "no more"

    def way():
        plan._wait(lambda: made.append("given up"))
        plan._held = recorder._MOST_HELD + 1
        plan._wait(lambda: made.append("too much"))
        plan._held = 5
        plan._wait(lambda: made.append("never"))
        raise Refused(text)

    plan._wait(lambda: made.append("before"))
    with pytest.raises(Refused, match="way: no more"):
        plan.first_possible({"way": way})
    assert made == ["before", "given up", "too much"]
    assert (plan._waiting, plan._held) == ([], 0)
    plan._wait(lambda: made.append("behind"))
    plan._make_waiting()
    assert made == ["before", "given up", "too much", "behind"]


@pytest.mark.parametrize("name", CASES)
def test_what_a_plan_was_recorded_with_goes_at_once(name):
    """Activations of the recording are as large as those of a call; the collector may come much later."""
    make, inputs = CASES[name]
    _, module, call = planned(make(), inputs[0])
    made = recorder.Recorder(module, provider().maker, call._weights, operators.table())
    gone = weakref.ref(made)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            plan = made.record(inputs[0])
        del made
        assert plan.entries
        assert gone() is None
    finally:
        gc.enable()


def test_weights_that_were_packed_for_a_way_that_was_given_up_go(monkeypatch):
    _, module, call = planned(nn.Sequential(nn.Linear(64, 32)), torch.randn(2, 64))
    plan = recorder.Recorder(module, provider().maker, call._weights, {})
    weight = operands.WeightToPack("w", torch.ones(4, 4, dtype=torch.int8))

    def way():
        call._weights.formed(weight, "sums", lambda: (torch.ones(1000),))
        call._weights.add(
            weight, Desc.of(weight.tensor), plan.maker.layout(Desc.of(weight.tensor)), weight.tensor
        )
        assert call._weights.size() == size + 4016
        raise Unimplemented

    with torch.no_grad():
        call(torch.randn(2, 64))
    size = call._weights.size()
    with pytest.raises(Refused, match="way: "):
        plan.first_possible({"way": way})
    assert call._weights.size() == size > 0


def test_threads_that_want_the_same_new_sizes_record_them_once(monkeypatch):
    monkeypatch.setattr(planning, "_MOST_PLANS", 4)
    _, module, call = planned(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(2, 64)
    )
    inputs = [torch.randn(rows, 64) for rows in range(1, 31)]
    recorded, wrong, lock = [], [], threading.Barrier(4)
    record = call._record
    monkeypatch.setattr(
        call, "_record", lambda inputs: recorded.append(len(inputs[0])) or time.sleep(0.005) or record(inputs)
    )

    def work():
        with torch.no_grad():
            for x in inputs:
                lock.wait()  # all want the same plan
                if worst_sqnr_db(module(x), call(x)) < 35:
                    wrong.append(len(x))

    in_threads(*[work] * 4)
    assert not wrong
    assert recorded == list(range(1, 31))
    assert len(call._plans) == 4
    assert set(call._used) == set(call._plans)


def test_threads_with_many_new_sizes_leave_no_more_than_is_kept(monkeypatch):
    """Each in an order of its own, so that plans go while other threads have just found them."""
    monkeypatch.setattr(planning, "_MOST_PLANS", 2)
    _, module, call = planned(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 16))
    wrong = []

    def work(step):
        with torch.no_grad():
            for i in range(60):
                x = torch.randn(1 + i * step % 7, 16)
                if worst_sqnr_db(module(x), call(x)) < 35:
                    wrong.append(len(x))
                call.kernels(), call.multiplied(), call.unplanned()

    in_threads(*(functools.partial(work, step) for step in (1, 2, 3, 5)))
    assert not wrong
    call(torch.randn(9, 16))
    assert len(call._plans) == 2
    assert set(call._used) == set(call._plans)


def in_threads(*work):
    """Run each in a thread of its own; a test fails with what one raises."""
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()


def test_the_number_of_threads_may_change():
    make, inputs = CASES["encoder"]
    _, module, call = planned(make(), inputs[0])
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            for threads in (1, 2, 1, 3):
                torch.set_num_threads(threads)
                assert worst_sqnr_db(module(*inputs[0]), call(*inputs[0])) > 35
    finally:
        torch.set_num_threads(before)
    assert len(call._plans) == 3


def test_plans_are_bounded_and_share_packed_weights(monkeypatch):
    monkeypatch.setattr(planning, "_MOST_PLANS", 3)
    _, _, call = planned(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(2, 64))
    with torch.no_grad():
        call(torch.randn(2, 64))
        size = call._weights.size()
        for rows in range(1, 9):
            call(torch.randn(rows, 64))
        assert len(call._plans) == 3
        assert [key[1][0][0] for key in call._plans] == [6, 7, 8]
    assert size >= 2 * 64 * 128
    assert call._weights.size() <= 2 * size


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only glibc keeps freed memory, and can give it back",
)
def test_memory_is_bounded_under_random_sizes():
    """Calls after 64 sets of sizes are kept, and oneDNN's own cache is full; in a process with its own heap."""
    program = """
        from pathlib import Path
        import torch
        from torch import nn
        import nc

        def pages():
            return int(Path("/proc/self/statm").read_text().split()[1])

        layers = (nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128))
        x = torch.randn(8, 128)
        model = nc.prepare(nn.Sequential(*4 * layers).eval(), nc.StaticQuantConfig(), example_inputs=x)
        model(x)
        model = nc.convert(model, verify_sizes=False)
        for i, rows in enumerate(torch.randperm(4000)[:340].tolist()):
            if i == 240:
                before = pages()
            model(torch.randn(rows + 1, 128))
        print((pages() - before) * 4096)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 40_000_000


def test_a_plan_that_goes_takes_its_contexts_with_it(monkeypatch):
    """In all threads: a context refers to its primitives, and must not keep the plan that it hangs on."""
    monkeypatch.setattr(planning, "_MOST_PLANS", 1)
    _, _, call = planned(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8))
    with torch.no_grad():
        first = [call(torch.randn(2, 8)) for _ in range(2)]
        (plan,) = call._plans.values()
        gone = weakref.ref(plan)
        assert len(call._memory.contexts) == 1
        del plan, first
        call(torch.randn(3, 8))
        gc.collect()
        assert gone() is None
        assert list(call._memory.contexts) == list(call._plans.values())


class Between(nn.Module):
    """Operators of torch's between two products.

    Single and double results, views, one that is returned, one over a constant.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.table = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 8, 1),
            nn.Parameter(torch.rand(1, 16, 1, 1) + 0.5),
        )

    def forward(self, x):
        y = self.a(x)
        mean = y.mean(1, keepdim=True)
        y = (
            (y - mean) / ((y - mean).pow(2).mean(1, keepdim=True).sqrt() + 1e-5) * self.table.exp()
        )  # no layer norm: eps is not in the root
        largest, where = y.transpose(2, 3).max(dim=1)
        z = self.b(y * (1 + largest.transpose(1, 2)[:, None].cumsum(-1).tanh()))
        return z, largest, where, y[:, 1:3].abs().log1p().flip(1), z.amax((2, 3)).cos()


CASES_OF_TORCH = {"between": (Between, [(torch.randn(2, 3, 12, 12),), (torch.randn(1, 3, 9, 9),)])}


def test_torchs_operators_write_into_the_memory_of_the_plan():
    """New memory for large results took up to 100 of the 340 ms of ConvNeXt at batch 16.

    What is returned is the caller's.
    """
    make, inputs = CASES_OF_TORCH["between"]
    _, module, call = planned(make(), inputs[0])
    with torch.no_grad():
        kept = [(call(*each), module(*each)) for each, _ in itertools.product(inputs, range(3))]
    for got, expected in kept:  # no later call has written into earlier results
        assert worst_sqnr_db([e.float() for e in expected], [g.float() for g in got]) > 35
        assert [(g.dtype, g.shape, g.stride()) for g in got] == [
            (e.dtype, e.shape, e.stride()) for e in expected
        ]
    for plan in call._plans.values():
        calls = {str(entry.target): entry.results for entry in plan.entries if isinstance(entry, AtenCall)}
        assert {
            "aten.mean.out",
            "aten.pow.Tensor_Scalar_out",
            "aten.max.dim_max",
            "aten.cumsum.out",
            "aten.cos.out",
        } <= set(calls)
        assert {target for target, results in calls.items() if results} <= {"aten.flip.default"}, (
            "others have memory of the plan"
        )


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (torch.ops.aten.add.Tensor, (torch.randn(3, 4), 2.5)),
        (torch.ops.aten.mul.Tensor, (torch.randn(3, 4), torch.arange(4))),
        (torch.ops.aten.div.Tensor_mode, (torch.randn(3, 4), torch.rand(4) + 1)),
        (torch.ops.aten.mean.dim, (torch.randn(3, 4, 5), [0, 2])),
        (torch.ops.aten.max.dim, (torch.randn(3, 4), 1)),
        (torch.ops.aten.topk.default, (torch.randn(3, 9), 2)),
        (torch.ops.aten.where.self, (torch.rand(3, 4) > 0.5, torch.randn(4), torch.randn(3, 1))),
        (torch.ops.aten.index.Tensor, (torch.randn(5, 4), [torch.tensor([3, 0, 3])])),
        (torch.ops.aten.cat.default, ([torch.randn(2, 3), torch.randn(2, 3)], 1)),
        (torch.ops.aten.bmm.default, (torch.randn(2, 3, 4), torch.randn(2, 4, 5))),
        (torch.ops.aten.upsample_bilinear2d.default, (torch.randn(1, 2, 3, 4), [6, 8], False)),
        (
            torch.ops.aten.avg_pool2d.default,
            (torch.randn(1, 2, 6, 6).contiguous(memory_format=torch.channels_last), [2, 2]),
        ),
        (torch.ops.aten.eq.Scalar, (torch.arange(6).view(2, 3), 2)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_the_overload_that_writes_gives_the_same(operator, arguments):
    named = {"rounding_mode": "floor"} if operator is torch.ops.aten.div.Tensor_mode else {}
    overload, names = writes_into(operator)
    expected = operator(*arguments, **named)
    each = expected if isinstance(expected, (tuple, list)) else [expected]
    given = [torch.empty_like(tensor) for tensor in each]
    overload(*arguments, **named, **dict(zip(names, given, strict=True)))
    assert all(torch.equal(e, g) and e.stride() == g.stride() for e, g in zip(each, given, strict=True))


@pytest.mark.parametrize(
    "operator",
    [
        torch.ops.aten.add_.Tensor,  # changes its argument
        torch.ops.aten.embedding.default,  # torch's own is generated: it copies
        torch.ops.aten.reshape.default,
        torch.ops.aten.view.default,
        torch.ops.onednn.qlinear_pointwise.default,
        torch.relu,
    ],
    ids=lambda operator: getattr(operator, "__name__", ""),
)
def test_operators_that_do_not_write_into_given_memory(operator):
    assert writes_into(operator) is None


@pytest.mark.parametrize("case", ["encoder", "between"])
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_plans_of_inference_mode_and_outside(first, case):
    make, inputs = {**CASES, **CASES_OF_TORCH}[case]
    _, _, call = planned(make(), inputs[0])
    with first():
        expected = call(*inputs[0])
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert all(torch.equal(a, b) for a, b in zip(expected, call(*inputs[0]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_nothing(name):
    make, inputs = CASES[name]
    q = quantized(make().eval(), inputs[1], None, "native")
    empty = tuple(each[:0] for each in inputs[0])
    try:
        expected = q.reference(*empty)
    except InputError:
        with pytest.raises(InputError):
            q(*empty)
        return
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (expected, q(*empty))), strict=True):
        assert a.shape == b.shape


def test_a_forked_child_computes_too():
    """With one thread: this call bypasses what ends the threads of a process that is forked."""
    make, inputs = CASES["residual"]
    _, _, call = planned(make(), inputs[0])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            expected = call(*inputs[0])[0]
            call(*inputs[0])
            child = os.fork()
            if child == 0:
                same = torch.equal(call(*inputs[0])[0], expected) and call(*inputs[1])[0].shape[0] == 2
                os._exit(0 if same else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


UNPLANNABLE = {
    "a mask selects": lambda self, x: self.fc(x)[x[:, 0] > 0],
    "positions of what is not 0": lambda self, x: (self.fc(x), torch.nonzero(x > 0)),
}


@pytest.mark.parametrize("name", UNPLANNABLE)
def test_what_depends_on_values_is_not_planned(name):
    """Another call of the same sizes has a result of another size."""
    x = torch.randn(6, 8)
    q = quantized(Function(UNPLANNABLE[name], fc=nn.Linear(8, 8)).eval(), x, None, "native")
    assert WHY_NO_PLANS or "can't follow" in str(q.report().details)
    for _ in range(3):
        x = torch.randn(6, 8)
        for a, b in zip(
            *((v if isinstance(v, tuple) else (v,)) for v in (q.reference(x), q(x))), strict=True
        ):
            assert a.shape == b.shape
            assert worst_sqnr_db([a], [b]) > 60


@pytest.mark.parametrize("name", UNPLANNABLE)
def test_a_model_without_a_plan_is_measured_too(name):
    """By default `convert` times the operators of the example."""
    model, x = Function(UNPLANNABLE[name], fc=nn.Linear(8, 8)).eval(), torch.randn(6, 8)
    prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x, backend="native")
    prepared(x)
    assert re.search("quantized [0-9.]+ [mu]s, fp32 [0-9.]+ [mu]s", said(nc.convert(prepared).report()))


def test_linears_over_other_dimensions_are_planned():
    """What they read does not lie row by row: token mixing."""

    def forward(self, x):
        y = self.a(x)
        return y + self.c(F.gelu(self.b(y.transpose(1, 2)))).transpose(1, 2), self.b(y.mT) + y.mT[
            ..., :4
        ].tile(1, 1, 8)

    inputs = [(torch.randn(*shape),) for shape in ((2, 12, 16), (1, 12, 16), (5, 12, 16))]
    model = Function(forward, a=nn.Linear(16, 16), b=nn.Linear(12, 32), c=nn.Linear(32, 12))
    _, module, call = planned(model, inputs[0])
    with torch.no_grad():
        for each in inputs:
            assert worst_sqnr_db(module(*each), call(*each)) > 35


@pytest.mark.needs_plans
def test_sizes_without_a_plan_run_all_the_same_and_the_report_says_so(monkeypatch):
    x = torch.randn(4, 8)
    q = quantized(nn.Linear(8, 8).eval(), x, None, "native")

    def refuse(self, inputs):
        raise NCError("these are not the sizes") if inputs[0].shape[0] == 4 else BackendError("too many rows")

    monkeypatch.setattr(planning.Recorder, "record", refuse)
    x = torch.randn(5, 8)
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60
    assert q.report().details["not planned"] == "too many rows"
    for steps in (q.engine.profile((x,)).steps, q.engine.steps((x,))):  # of what runs these sizes
        assert any("qlinear" in step.name for step in steps)


@pytest.mark.needs_plans
def test_a_kernel_that_no_primitive_stands_for_is_left_to_torchs_operators(monkeypatch):
    """As where oneDNN has a reference kernel only."""
    known = {
        target: row for target, row in operators.table().items() if not str(target).startswith("onednn.")
    }
    monkeypatch.setattr(operators, "table", lambda: known)
    make, inputs = CASES["residual"]
    q = quantized(make().eval(), inputs[0], None, "native")
    assert "there is no primitive for" in str(q.report().details)
    for each, _ in itertools.product(inputs, range(2)):
        assert worst_sqnr_db([q.reference(*each)], [q(*each)]) > 35


@pytest.mark.needs_plans
def test_where_onednn_has_plain_code_only_the_plan_is_kept(monkeypatch):
    """Torch's own operator would run the same code, and products of two activations would have no kernel."""
    monkeypatch.setattr(fuse, "joined", lambda node: 1)
    make, inputs = CASES["encoder"]
    model = Function(
        lambda self, x, mask, z: (*self.encoder(x, mask), self.odd(z)),
        encoder=make(),
        odd=nn.Conv3d(6, 9, 3, groups=3),
    )
    inputs = *inputs[0], torch.randn(2, 6, 4, 5, 6)
    q = quantized(model.eval(), inputs, None, "native")
    report = q.report()
    assert {op.ran for op in report.ops if op.asked == "int8"} == {"int8"}
    odd = next(op for op in report.ops if op.operator == "odd")
    has_fast = cpu.accumulates_wide() or "avx512f" in cpu.machine_features()
    assert odd.kernel.startswith("convolution ref") or (has_fast and odd.kernel.startswith("convolution brg"))
    assert worst_sqnr_db(q.reference(*inputs), q(*inputs)) > 35


@pytest.mark.parametrize(
    ("make", "groups", "inputs", "outputs"),
    [
        (make, *sizes)
        for make in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        for sizes in (
            (32, 64, 64),
            (32, 32, 64),
            (8, 8, 16),
            (4, 8, 8),
            (16, 16, 16),
            (3, 9, 9),
            (5, 15, 30),
            (31, 62, 31),
        )
    ],
)
@pytest.mark.parametrize("how", [{"padding": 1}, {"dilation": 2, "stride": 2}])
def test_grouped_convolutions_have_fast_kernels(make, groups, inputs, outputs, how):
    """Groups are joined where oneDNN has none for them.

    The numbers stay the same, also at the ends of the ranges.
    """
    dims = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[make]
    conv = make(inputs, outputs, 3, groups=groups, **how)
    x = torch.rand(2, inputs, *[7] * dims) * 4 - 2
    q = quantized(nn.Sequential(conv, nn.ReLU()).eval(), x, None, "native")
    for batch in (x, x.abs(), torch.full_like(x, 2.0)):
        assert worst_sqnr_db([q.reference(batch)], [q(batch)]) > 50
    op = next(op for op in q.report().ops if op.operator == "0")
    odd = (inputs // groups) % 2 and inputs > groups
    assert op.ran == "int8" or (odd and not cpu.accumulates_wide() and "no fast int8 kernel" in op.reason)
    assert "ref" not in op.kernel


def test_joined_groups_give_the_same_sums():
    codes, x = torch.randint(-127, 128, (12, 3, 2, 2)), torch.randint(0, 256, (2, 18, 5, 5))
    expected = F.conv2d(x.double(), codes.double(), groups=6)
    for count in (1, 2, 3, 6):
        assert torch.equal(F.conv2d(x.double(), join(codes, 6, count).double(), groups=6 // count), expected)


@pytest.mark.parametrize(
    "move",
    [
        lambda y: y.transpose(-1, -2),
        lambda y: y.permute(0, 3, 1, 2),
        lambda y: y.transpose(1, 2),
        lambda y: y.permute(1, 0, 3, 2),
    ],
)
@pytest.mark.parametrize("follow", [lambda y, m: y, lambda y, m: y / 4 + m, lambda y, m: y * m])
@pytest.mark.parametrize("shape", [(1, 1, 1, 9), (2, 4, 9, 9), (2, 1, 9, 9), (1, 4, 1, 1)])
@pytest.mark.sample(12)
def test_products_of_activations_may_be_moved_in_any_way(move, follow, shape):
    """Kernels write rows, not columns."""

    def attend(self, x, mask):
        q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k))
        return move(follow(q @ k.transpose(-1, -2), mask))

    inputs = torch.randn(2, 9, 32), torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes of the masks can't stay free
        q = quantized(
            Function(attend, q=nn.Linear(32, 32), k=nn.Linear(32, 32)).eval(), inputs, None, "native"
        )
    assert_all_int8(q.report())
    assert worst_sqnr_db([q.reference(*inputs)], [q(*inputs)]) > 60


def test_random_numbers_are_drawn_anew_and_constants_are_not_computed_again():
    model = Function(lambda self, x: (self.fc(x), torch.arange(8) * 2 + x.shape[0]), fc=nn.Linear(8, 8))
    _, _, call = planned(model, torch.randn(2, 8))
    with torch.no_grad():
        call(torch.randn(2, 8))
    (plan,) = call._plans.values()
    assert not [entry for entry in plan.entries if isinstance(entry, AtenCall)]


@pytest.mark.needs_plans
def test_the_report_names_kernels_without_running():
    make, inputs = CASES["residual"]
    q = quantized(make().eval(), inputs[0], None, "native")
    ops = {op.operator: op for op in q.engine.report().ops}
    assert all(
        ":" in ops[name].primitive and "ref" not in ops[name].primitive for name in ("a", "b", "depth", "fc")
    )
    assert str(provider()) in q.report().details["kernels"]


# --- where oneDNN comes from


def test_torchs_own_copy_is_found_in_its_symbol_table(anew):
    found = provider()
    assert (found.name, found.passed_over) == ("torch", ())
    assert found.maker.library.version[0] == 3


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("none", "NC_ONEDNN is 'none'"),
        ("/no/such/libdnnl.so", "can't be loaded"),
        ("libc.so.6", "it lacks dnnl_"),
    ],
)
def test_a_library_that_is_of_no_use_is_said(monkeypatch, value, why):
    monkeypatch.setenv(NC_ONEDNN.name, value)
    with pytest.raises(BackendUnavailableError, match=why):
        provider()
    x = torch.randn(2, 8)
    q = quantized(nn.Linear(8, 4).eval(), x, None, "native")
    assert q.report().details["run by"].startswith("TorchScript: ")
    assert why in q.report().details["run by"]
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """Look for oneDNN as a new process with an empty cache does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(NC_ONEDNN.name, raising=False)
    providers._find.cache_clear()
    yield tmp_path
    providers._find.cache_clear()


TABLES = {
    "without a symbol": ({}, "has no symbol table"),
    "without some": (
        lambda found: {name: at for name, at in found.items() if "memory" not in name},
        "it lacks dnnl_memory",
    ),
    "at the begin of the file": (lambda found: dict.fromkeys(found, 64), "where it has no instructions"),
    "in front of it": (
        lambda found: {**found, "dnnl_version": -4096},
        "puts dnnl_version where it has no instructions",
    ),
    "far behind it": (
        lambda found: {**found, "dnnl_version": 2**50},
        "puts dnnl_version where it has no instructions",
    ),
}


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("table", TABLES)
def test_a_release_of_torch_without_the_symbols_costs_speed_only(monkeypatch, table):
    change, why = TABLES[table]
    real = elf._functions
    monkeypatch.setattr(elf, "_functions", lambda *args: change(real(*args)) if change else {})
    monkeypatch.setattr(providers, "_SOURCES", providers._SOURCES[:1])
    with pytest.raises(BackendUnavailableError, match=why):
        provider()
    x = torch.randn(2, 8)
    q = quantized(nn.Linear(8, 4).eval(), x, None, "native")
    assert why in q.report().details["run by"]
    assert worst_sqnr_db([q.reference(x)], [q(x)]) > 60


@pytest.mark.usefixtures("anew")
def test_without_the_symbols_the_next_library_is_asked(monkeypatch):
    monkeypatch.setattr(elf, "_functions", lambda *_: {})
    asked = []
    monkeypatch.setattr(
        providers, "_SOURCES", (*providers._SOURCES[:1], ("another", lambda: asked.append(1) or {}))
    )
    with pytest.raises(
        BackendUnavailableError, match="torch: torch .* has no symbol table.*; another: it lacks dnnl_"
    ):
        provider()
    assert asked


@pytest.mark.parametrize("address", [64, -4096, 2**50])
def test_kept_addresses_outside_the_code_are_read_again(anew, address):
    first = provider()
    (kept,) = (anew / "nc").glob("functions-*.json")
    content = json.loads(kept.read_text())
    content["functions"]["dnnl_version"] = address
    kept.write_text(json.dumps(content))
    providers._find.cache_clear()
    assert provider().name == "torch"
    assert provider().maker.library.addresses == first.maker.library.addresses
    assert json.loads(kept.read_text())["functions"]["dnnl_version"] != address


@pytest.mark.parametrize("damage", ["sections", "names", "short"])
def test_a_damaged_library_is_a_reason(anew, tmp_path, damage):
    found = elf.loaded("libtorch_cpu.so")
    content = bytearray(Path(torch._C.__file__).read_bytes())
    if damage == "sections":
        content[40:48] = b"\xff" * 8
    elif damage == "names":
        content[58:62] = b"\xff" * 4
    path = tmp_path / "damaged.so"
    path.write_bytes(content[:200] if damage == "short" else content)
    with pytest.raises(ValueError, match="its tables can't be read"):
        elf.functions(dataclasses.replace(found, path=path), "dnnl_")


def test_a_library_that_computes_something_else_is_not_taken(monkeypatch):
    real = providers.why_wrong
    monkeypatch.setattr(providers, "why_wrong", lambda maker: real(maker) or "its int8 matmul differs")
    monkeypatch.delenv(NC_ONEDNN.name, raising=False)
    providers._find.cache_clear()
    try:
        with pytest.raises(
            BackendUnavailableError, match="torch: its int8 matmul differs; package: .*; system: "
        ):
            provider()
    finally:
        providers._find.cache_clear()


def test_addresses_are_kept_for_the_next_process_and_only_trusted_files_are_read(tmp_path, monkeypatch):
    code = "import torch; from nc.kernels.onednn.providers import provider; print(provider())"
    env = {
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        NC_ONEDNN.name: "torch",
    }

    def run():
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env=env
        )
        return done.stdout.strip()

    first = run()
    (kept,) = (tmp_path / "nc").glob("functions-*.json")
    assert run() == first
    kept.write_text(
        kept.read_text().replace("dnnl_primitive_execute", "dnnl_primitive_exekute")
    )  # a file that is read is believed
    assert (
        "it lacks dnnl_primitive_execute"
        in subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=env
        ).stderr
    )
    kept.chmod(0o666)  # anybody could have written it
    assert run() == first


def test_without_a_compiler_python_calls_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "none")
    monkeypatch.setattr(build, "_compiler", lambda: "")
    found, why = runner(library().maker.library)
    assert isinstance(found, PythonRunner)
    assert "no C compiler" in why
    monkeypatch.setattr(build, "_compiler", lambda: "false")
    found, why = runner(provider().maker.library)
    assert isinstance(found, PythonRunner)
    assert "the C compiler 'false' fails" in why
    assert found.name == f"ctypes ({why})"


@pytest.mark.parametrize("value", ["", "relative/cache"])
def test_a_cache_folder_that_is_not_absolute_is_ignored(value, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache.folder()) == "/home/someone/.cache/nc"


# --- memory


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 6)), max_size=25))
def test_blocks_that_live_at_the_same_time_do_not_overlap(sizes):
    blocks = [Block(size, first, first + length) for size, first, length in sizes]
    offsets, total = solve(blocks)
    assert total <= sum(-(-b.size // ALIGNMENT) * ALIGNMENT for b in blocks)
    for a, b in itertools.combinations(blocks, 2):
        if a.first <= b.last and b.first <= a.last:
            assert offsets[a] + a.size <= offsets[b] or offsets[b] + b.size <= offsets[a]
    assert all(offset % ALIGNMENT == 0 and offset + block.size <= total for block, offset in offsets.items())


def test_memory_is_used_again():
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 1), nn.ReLU())]
    _, _, call = planned(nn.Sequential(*layers), torch.randn(1, 8, 64, 64))
    with torch.no_grad():
        call(torch.randn(1, 8, 64, 64))
    (plan,) = call._plans.values()
    assert isinstance(plan, ExecutionPlan)
    assert plan.arena <= 3 * 8 * 64 * 64


def test_features_that_are_no_names():
    plan = nc.describe(nn.Linear(4, 4).eval(), nc.StaticQuantConfig(), torch.randn(2, 4), backend="reference")
    with pytest.raises(TypeError, match="names of CPU features"):
        type(plan).from_dict({**plan.to_dict(), "isa": [None]})


def test_the_users_default_device_is_not_asked_for_memory():
    """Kernels would write to addresses that are none."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)).eval()
    q_model = quantized(model, torch.randn(2, 3, 4, 4), None, "native")
    x = torch.randn(3, 3, 4, 4)
    expected = q_model.reference(x)
    with torch.device("meta"):
        first, second = q_model(x), q_model(x)
    torch.testing.assert_close(first, expected)
    assert torch.equal(first, second)


def _then_in_rows(self, x):
    return self.b(self.a(x).transpose(1, 2))


def _sum_of_uneven(self, x):
    y = self.b(x)
    return F.relu(self.a(x) + y[:, :, : y.shape[2] // 8 * 8])


#: Model, sizes that fit, and sizes that do not.
FIT = {
    "linear": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
        (3, 8, 8),
        (3, 9, 9),
    ),
    "channels": (Function(_then_in_rows, a=nn.Conv1d(4, 8, 3), b=nn.Conv1d(14, 8, 3)), (4, 16), (4, 20)),
    "groups": (
        Function(_then_in_rows, a=nn.Conv1d(4, 8, 3), b=nn.Conv1d(32, 32, 3, groups=32)),
        (4, 34),
        (4, 20),
    ),
    "window": (nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 5, 2)), (4, 16, 16), (4, 6, 16)),
    "sum": (
        Function(_sum_of_uneven, a=nn.Conv2d(4, 8, 3, padding=1), b=nn.Conv2d(4, 8, 1)),
        (4, 16, 16),
        (4, 9, 9),
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FIT)
def test_kernels_are_given_no_sizes_that_do_not_fit(name, threads):
    model, shape, other = FIT[name]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        q = quantized(model.eval(), torch.randn(2, *shape), nc.StaticQuantConfig(), backend="native")
        # past the signature, which may have a condition: kernels compute addresses from sizes, and read and
        # write what lies there
        with pytest.raises(
            (ValueError, RuntimeError),
            match="do not fit|must match|invalid|match|could not create a primitive",
        ):
            q.engine.run([torch.randn(2, *other)])
        assert torch.isfinite(q(torch.randn(2, *shape))).all()
    finally:
        torch.set_num_threads(before)

"""The IPEX backend.

The common suite, int8 proven from the executed graph, and the engine faults that lints avoid.
"""

import functools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings

import psutil
import pytest
import torch
from models import FP32, MLP, Attention, Function, ResidualCNN, call, path, prepared_for, quantized, worst_db
from suites.backend_suite import MODELS, BackendSuite, changing_after_a_view
from torch import nn
from torch.nn import functional as F

from nc import (
    BackendError,
    DynamicQuantConfig,
    NCWarning,
    StaticQuantConfig,
    VerificationError,
    convert,
    prepare,
)
from nc.backends import auto_order, verify
from nc.backends.ipex import isolate, lower
from nc.backends.ipex.passes import passes
from nc.backends.ipex.quiet import quiet
from nc.backends.ipex.workarounds import WORKAROUNDS
from nc.backends.passes import run_passes
from nc.graph.signature import at_least_two
from nc.kernels import cpu

pytestmark = pytest.mark.ipex

#: Child processes find `models` as the tests do.
ENVIRONMENT = {**os.environ, "PYTHONPATH": path()}


class TestIpex(BackendSuite):
    backend = "ipex"

    def convert(self, prepared, **options):
        return convert(prepared, **{"isolate": "never", **options})

    @pytest.mark.parametrize("name", MODELS)
    def test_what_was_asked_runs_in_int8(self, converted, name):
        _, q = converted(name)
        report = q.report()
        assert {op.operator for op in report.not_int8} == set()
        assert report.groups > 0
        assert report.sqnr_db >= self.agreement

    def test_values_that_change_after_a_view_was_taken(self):
        """IPEX gives 1 dB here: that is an error by name, and "auto" goes on to the next engine."""
        x = torch.randn(4, 16)
        model = Function(changing_after_a_view, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval()
        with pytest.raises(VerificationError, match="IPEX computes something else"):
            quantized(model, x, None, "ipex")
        q = quantized(model, x, None, "auto")
        assert q.backend == "native"
        assert worst_db(q.reference(x), q(x)) > 60

    def test_a_residual_block_leaves_no_pair_between_its_kernels(self, converted):
        report = converted("residual")[1].report()
        assert report.quantize_outside <= 2  # the input, and the pooled features
        assert report.dequantize_outside <= 1  # in front of the average pool

    @pytest.mark.parametrize("name", ["attention", "flattened attention"])
    def test_attention_leaves_no_pair_between_its_kernels(self, converted, name):
        report = converted(name)[1].report()
        assert report.quantize_outside <= 1  # the input
        assert report.dequantize_outside == 0

    def test_weights_take_a_quarter_of_the_bytes(self):
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        report = quantized(model, torch.randn(4, 256), backend="ipex").report()
        assert report.weight_bytes < 0.28 * report.float_bytes

    def test_thread_count_is_the_users(self, converted):
        _, q = converted("residual")
        before, x = torch.get_num_threads(), torch.randn(2, 3, 8, 8)
        expected = q(x)
        assert torch.get_num_threads() == before
        torch.set_num_threads(1)
        try:
            assert worst_db(expected, q(x)) >= self.agreement
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)


# ---- faults of the engine ----

CONVS = "dict(pre=nn.Conv2d(3, 8, 3, padding=1), mid=nn.Conv2d(8, 8, 3, padding=1), post=nn.Conv2d(8, 4, 1))"
DEPTHWISE = CONVS.replace("mid=nn.Conv2d(8, 8, 3, padding=1", "mid=nn.Conv2d(8, 8, 3, padding=1, groups=8")
LINEARS = "dict(pre=nn.Linear(16, 16), mid=nn.Linear(16, 16), post=nn.Linear(16, 16))"
IMAGE, ROWS, SQUARE, SIGNAL = (2, 3, 8, 8), (2, 4, 16), (2, 16, 16), (2, 32, 40)
RELU, PLAIN = "self.post(f(F.relu(self.pre(x))))", "self.post(f(self.pre(x)))"
#: Products of heads, which lie side by side in memory.
KEYS = (
    "(lambda h: h(self.pre(y)) @ h(self.mid(y)).transpose(1, 2))(lambda t: t.reshape(t.shape[0], 64, "
    "4).transpose(0, 1))"
)
#: What is computed with scores s of 7 tokens and 4 heads.
SCORES = (
    "(lambda s: {})((lambda h: h(self.pre(y)) @ h(self.mid(y)).transpose(2, 3))(lambda t: "
    "t.reshape(t.shape[0], 7, 4, 8).transpose(1, 2)))"
)
HEADS, TOKENS = "dict(pre=nn.Linear(32, 32), mid=nn.Linear(32, 32), post=nn.Linear(7, 7))", (2, 7, 32)
INTO_A_PART = "(lambda b: (b[..., :7].add_(s / 8), b))(torch.tanh(y.reshape(y.shape[0], 4, 7, 8)))"
EXPANDED, GAPS = "y[:1, None, :, :7].expand(y.shape[0], 1, 7, 7)", "operand_with_gaps"


def _window(modules, shape, forward="self.mid(y)", whole="f(x)"):
    return modules, shape, whole, forward, "", "wrong_window"


def _scores(term):
    return HEADS, TOKENS, "self.post(f(x))", SCORES.format(term), "", GAPS


def _linears(forward, lint, whole="f(x)"):
    return LINEARS, ROWS, whole, forward, "", lint


#: name → (submodules, input shape, forward in terms of f, f, rule that asks explicitly, lint that must act)
FAULTS = {
    "conv(y) + y": (CONVS, IMAGE, RELU, "F.relu(self.mid(y) + y)", "", "operand_is_source"),
    "y + conv(y)": (CONVS, IMAGE, RELU, "y + self.mid(y)", "", "operand_is_source"),
    "depthwise(y) + y": (DEPTHWISE, IMAGE, RELU, "F.relu(self.mid(y) + y)", "", "operand_is_source"),
    "linear(y) + y": (LINEARS, ROWS, RELU, "F.relu(self.mid(y) + y)", "", "operand_is_source"),
    "conv(x) + x": (
        "dict(mid=nn.Conv2d(3, 3, 1))",
        IMAGE,
        "f(x)",
        "self.mid(y) + y",
        "add",
        "operand_is_source",
    ),
    "conv(pool(y)) + y": (CONVS, IMAGE, RELU, "F.relu(self.mid(F.max_pool2d(y, 3, 1, 1)) + y)", "", ""),
    "conv(y) + conv(y)": (CONVS, IMAGE, RELU, "F.relu(self.mid(y) + self.mid(y))", "", ""),
    "y @ y": (LINEARS, SQUARE, PLAIN, "y @ y", "", "same_tensor_twice"),
    "y @ y of matrices": (LINEARS, (16, 16), PLAIN, "y @ y", "", "same_tensor_twice"),
    "bmm(y, y)": (LINEARS, SQUARE, PLAIN, "torch.bmm(y, y)", "", "same_tensor_twice"),
    "x @ x": ("dict()", SQUARE, "f(x)", "y @ y", "", "same_tensor_twice"),
    "y @ y.T": (LINEARS, SQUARE, PLAIN, "y @ y.transpose(-1, -2)", "", ""),
    "r + r": (LINEARS, ROWS, RELU, "y + y", "add", "same_tensor_twice"),
    "r + r of images": (CONVS, IMAGE, RELU, "y + y", "add", "same_tensor_twice"),
    "x + x": (LINEARS, ROWS, "self.post(f(x))", "y + y", "add", "same_tensor_twice"),
    "linear(x) + x": (LINEARS, ROWS, "f(x)", "self.mid(F.gelu(self.pre(y))) + y", "", "operand_overwritten"),
    "x + linear(x)": (LINEARS, ROWS, "f(x)", "y + self.mid(F.gelu(self.pre(y)))", "", "operand_overwritten"),
    "linear(x) + view of x": _linears(
        "self.mid(y) + y.reshape(1, -1, 16).view(y.shape)", "operand_overwritten"
    ),
    "linear(y) + stream, viewed later": _linears(
        "(lambda s, v: (self.mid(y) + s, v * 2))(*(lambda s: (s, s.view(-1)))(torch.tanh(y)))",
        "operand_overwritten",
    ),
    "layer norm without weights": _linears(
        "F.layer_norm(self.pre(y), (16,))", "bare_layer_norm", "self.post(f(x))"
    ),
    "maximum of a dimension": _linears("self.pre(y).max(-1).values", "maximum_with_indices"),
    "minimum and where it is": _linears("self.pre(y).min(1, keepdim=True)", "maximum_with_indices"),
    "keys of torch's attention": (LINEARS, SQUARE, "f(x)", KEYS, "", "batch_within"),
    "scaled scores + expanded mask": _scores(f"s / 8 + {EXPANDED}"),
    "scaled scores + row of a tensor": _scores("s / 8 + y[:, None, :1, :7]"),
    "scores * expanded weights": _scores(f"{EXPANDED} * s"),
    "scores added to a part of a tensor": (HEADS, TOKENS, "f(x)", SCORES.format(INTO_A_PART), "", ""),
    "wide window over few channels": _window("dict(mid=nn.Conv1d(32, 64, 16, groups=4))", SIGNAL),
    "wide window, padded": _window(
        "dict(mid=nn.Conv1d(12, 8, 16, padding='same'))", (2, 12, 40), "self.mid(y).relu()"
    ),
    "wide window of images": _window(
        "dict(mid=nn.Conv2d(16, 8, (3, 8), stride=2, padding=1), post=nn.Conv2d(8, 4, 1))",
        (2, 16, 9, 24),
        "self.mid(y).relu()",
        PLAIN.replace("self.pre(x)", "x"),
    ),
    "long strides": _window("dict(mid=nn.Conv2d(32, 16, 4, stride=4))", (1, 32, 32, 32)),
    "strides of groups": _window("dict(mid=nn.Conv1d(6, 128, 5, 2, 1, groups=2))", (1, 6, 62)),
    "windows of groups": _window("dict(mid=nn.Conv1d(6, 192, 3, padding=1, groups=3))", (2, 6, 15)),
    "steps over values": _window("dict(mid=nn.Conv2d(12, 96, 11, stride=16))", (1, 12, 60, 60)),
    "one place behind a stride": _window("dict(mid=nn.Conv2d(80, 8, 3, 8, 1))", (1, 80, 89, 1)),
    "y + flipped y": (LINEARS, ROWS, RELU, "y + y.flip(1)", "", ""),
}

CHILD = r"""
import json, sys
import torch
from torch import nn
from torch.nn import functional as F
from models import Function, prepared_for, worst_db
from nc import StaticQuantConfig, convert

for name, (modules, shape, forward, f, explicit, _) in json.loads(sys.argv[1]).items():
    print(json.dumps({"begins": name}), flush=True)
    torch.manual_seed(0)
    namespace = {"F": F, "torch": torch}
    exec(f"def forward(self, x):\n    f = lambda y: {f}\n    return {forward}", namespace)
    model = Function(namespace["forward"], **eval(modules)).eval()
    config = StaticQuantConfig()
    if explicit:
        config.set_local(explicit, StaticQuantConfig())
    prepared = prepared_for(model, torch.randn(shape), config, backend="ipex")
    prepared(torch.randn(shape) * 2)
    q = convert(prepared, isolate="never", verify="off")
    worst = []
    with torch.no_grad():
        for batch in {shape[0], shape[0] + (len(shape) > 2)}:
            x = torch.randn(batch, *shape[1:])
            before = x.clone()
            worst += [worst_db(q.reference(before), q(x)) for _ in range(2)]
            assert torch.equal(x, before), "the input was changed"
    report = q.report()
    answer = {"ends": name, "db": min(worst), "rewrites": report.rewrites, "asked": report.asked_int8}
    print(json.dumps({**answer, "silent": [op.operator for op in report.not_int8 if not op.reason]}), flush=True)
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """name → what the child found; a fault that ends the child, or never ends, costs only its own test."""
    folder = tmp_path_factory.mktemp("faults")
    left, found = dict(FAULTS), {}
    while left:
        with (folder / "out").open("w") as out:
            command = [sys.executable, "-c", CHILD, json.dumps(left)]
            child = subprocess.Popen(
                command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=folder, env=ENVIRONMENT
            )
            try:
                _, errors = child.communicate(timeout=60 + 5 * len(left))
            except subprocess.TimeoutExpired:
                child.kill()
                errors = "no end in sight" + child.communicate()[1]
        lines = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
        found |= {line["ends"]: line for line in lines if "ends" in line}
        begun = [line["begins"] for line in lines if "begins" in line]
        if not begun:
            pytest.fail(errors[-3000:])
        found.setdefault(begun[-1], {"error": f"exit code {child.returncode}: {errors[-3000:]}"})
        left = {name: case for name, case in left.items() if name not in found}
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_patterns_that_the_engine_gets_wrong(faults, name):
    result, lint = faults[name], FAULTS[name][-1]
    if lint == "same_tensor_twice" and ("@" in name or "bmm" in name) and not cpu.accumulates_wide():
        lint = ""  # the second input takes 7 bits there, so the two differ
    if lint == "wrong_window" and "amx_int8" not in cpu.machine_features():
        lint = ""
    assert "error" not in result, result["error"]
    assert result["db"] >= 30
    assert [entry.split(":")[0] for entry in result["rewrites"]] == ([lint] if lint else [])
    assert result["asked"] > 0
    assert result["silent"] == []


def test_every_lint_is_needed_and_named():
    elsewhere = {"softmax_to_codes", "strided_pointwise", "memory_layout"}
    assert {case[-1] for case in FAULTS.values()} - {""} | elsewhere == {each.name for each in passes([])}
    assert all(each.avoids for each in passes([]))


@pytest.mark.parametrize(
    ("features", "fields", "acts"),
    [
        (("avx2",), {"act_dtype": "int8"}, True),
        (("avx2",), {"act_dtype": "int8", "act_sym": True}, True),
        (("avx2", "avx512f"), {"act_dtype": "int8"}, True),  # a zero point of -128
        (("avx2", "avx512f"), {"act_dtype": "int8", "act_sym": True}, False),
        (("avx2", "avx512f"), {"act_sym": True}, True),  # one of 128
        (("avx2",), {}, False),
    ],
)
def test_softmax_to_codes_acts_where_there_is_no_kernel(monkeypatch, features, fields, acts):
    """What AVX-512 lacks was seen on a CPU that has it.

    The suite of activation types runs each of these on the engine.
    """
    monkeypatch.setattr(cpu, "machine_features", lambda: features)
    module = quantized(
        Attention(), torch.randn(2, 6, 32), StaticQuantConfig(**fields), "reference"
    ).graph.module
    assert tuple(map(str, run_passes(module, WORKAROUNDS).rewrites)) == (
        ("softmax_to_codes: softmax",) if acts else ()
    )


@pytest.mark.parametrize("channels", [8, 24, 40])
def test_strided_pointwise_convolutions_are_right_each_time(channels):
    """Without the lint a few elements are wrong, others in each run.

    About 35 dB, which verification lets pass.
    """
    layers = (
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 32, 1, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 8, 1),
    )
    x = torch.randn(2, 3, 32, 32)
    q = quantized(nn.Sequential(*layers), x, backend="ipex")
    assert min(worst_db(q.reference(x), q(x)) for _ in range(8)) > 60
    report = q.report()
    assert report.rewrites == ("strided_pointwise: 2",)
    assert report.not_int8 == ()


def test_wide_windows_whose_weights_have_one_scale():
    x = torch.randn(2, 32, 40)
    model = nn.Sequential(nn.Conv1d(32, 64, 16, groups=4), nn.ReLU(), nn.Conv1d(64, 4, 1))
    q = quantized(model, x, StaticQuantConfig(w_granularity="per_tensor"), "ipex")
    assert worst_db(q.reference(x), q(x)) > 60
    assert q.report().rewrites == (("wrong_window: 0",) if "amx_int8" in cpu.machine_features() else ())
    assert q.report().not_int8 == ()


def test_examples_of_size_one_hide_no_strides():
    one, four = torch.zeros(1, 3), torch.zeros(4, 1)
    wide = [tuple(t.shape) for t in at_least_two([one, four, one], [("s1", 3), (4, "s10"), ("s1", 3)])]
    assert wide == [(2, 3), (4, 2), (2, 3)]
    computed = [tuple(t.shape) for t in at_least_two([one, four], [("s0", 3), ("4*s0", 1)])]
    assert computed == [(1, 3), (4, 1)]


def test_a_permuted_stream_that_was_captured_with_one_sample():
    build, shape, _ = MODELS["patches"]
    q = quantized(build(), torch.randn(1, *shape[1:]), backend="ipex")
    assert [r.partition(":")[0] for r in q.report().rewrites] == ["memory_layout"]
    for batch in (1, 3, 1, 2, 1, 3):
        x = torch.randn(batch, *shape[1:])
        assert worst_db(q.reference(x), q(x)) > 30


# ---- verification ----


class Residual(nn.Module):
    """conv(y) + y: garbage when its lint does not act."""

    def __init__(self):
        super().__init__()
        self.pre, self.conv, self.post = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = torch.relu(self.pre(x))
        return self.post(torch.relu(self.conv(y) + y))


@pytest.fixture
def broken(monkeypatch):
    """A prepared model that the engine gets wrong, because the lints are switched off."""
    monkeypatch.setattr("nc.backends.ipex.passes.WORKAROUNDS", ())
    torch.manual_seed(0)
    return prepared_for(Residual(), torch.randn(2, 3, 8, 8), backend="ipex")


def test_an_engine_that_disagrees_is_an_error_that_names_the_operator(broken):
    with pytest.raises(
        VerificationError,
        match=r"IPEX computes something else.*-?\d+\.\d dB.*first operator that differs is 'add'",
    ) as caught:
        convert(broken, isolate="never")
    assert 'set_local(\'add\', StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))' in str(caught.value)


def test_the_advice_of_the_error_helps(monkeypatch):
    monkeypatch.setattr("nc.backends.ipex.passes.WORKAROUNDS", ())
    x = torch.randn(2, 3, 8, 8)
    q = quantized(Residual(), x, StaticQuantConfig().set_local("add", FP32), "ipex")
    assert worst_db(q.reference(x), q(x)) > 30


def test_a_disagreement_can_be_a_warning(broken):
    with pytest.warns(NCWarning, match="first operator that differs is 'add'") as caught:
        q = convert(broken, isolate="never", verify="warn")
    assert caught[0].filename == __file__
    assert q.report().sqnr_db < 15


def test_verification_can_be_off(broken):
    q = convert(broken, isolate="never", verify="off")
    assert q.report().sqnr_db is None


def test_the_prepared_model_survives_a_failed_conversion(broken, monkeypatch):
    with pytest.raises(VerificationError):
        convert(broken, isolate="never")
    monkeypatch.undo()
    x = torch.randn(2, 3, 8, 8)
    q = convert(broken, isolate="never")
    assert worst_db(q.reference(x), q(x)) > 30


def test_an_output_of_garbage_without_an_operator_to_blame(monkeypatch):
    """The last resort of the message: every prefix is right, the whole is not."""
    monkeypatch.setattr(lower, "first_disagreement", lambda module, inputs, run: verify.Search(""))
    monkeypatch.setattr(verify, "worst_sqnr_db", lambda expected, got: -3.0)
    with pytest.raises(VerificationError, match="No single operator differs"):
        convert(prepared_for(MLP(), torch.randn(4, 16), backend="ipex"), isolate="never")


# ---- the first run in a child process ----


def test_nothing_that_lies_in_the_working_directory_runs(tmp_path, monkeypatch):
    """It may be the folder of somebody's artefact."""
    for name in ("torch", "fractions", "nc"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    x = torch.randn(4, 16)
    q = convert(prepared_for(MLP(), x, backend="ipex"), isolate="always")
    assert not (tmp_path / "ran").exists()
    assert worst_db(q.reference(x), q(x)) > 30


def test_a_hang_of_the_engine_ends_in_an_error(monkeypatch):
    """`r + r` without its lint never ends: the child does."""
    monkeypatch.setattr("nc.backends.ipex.passes.WORKAROUNDS", ())
    monkeypatch.setattr(
        lower, "first_run_in_child", functools.partial(isolate.first_run_in_child, time_limit_s=25.0)
    )
    model = Function(
        lambda self, x: self.post((lambda r: r + r)(F.relu(self.pre(x)))),
        pre=nn.Linear(16, 16),
        post=nn.Linear(16, 16),
    )
    config = StaticQuantConfig().set_local("add", StaticQuantConfig())  # by itself it would stay fp32
    prepared = prepared_for(model, torch.randn(16, 16), config, backend="ipex")
    with pytest.raises(
        BackendError, match=r"did not finish fusing this graph within 25 s in a child process.*set_local"
    ):
        convert(prepared, isolate="always")


HANGS = """
import torch
from models import Function
from nc import StaticQuantConfig, convert, prepare
from nc.backends.ipex import passes
passes.WORKAROUNDS = ()
layers = {name: torch.nn.Linear(16, 16) for name in ("pre", "post")}
model = Function(lambda self, x: self.post((lambda r: r + r)(torch.relu(self.pre(x)))), **layers)
config = StaticQuantConfig().set_local("add", StaticQuantConfig())
prepared = prepare(model.eval(), config, example_inputs=torch.randn(16, 16), backend="ipex")
prepared(torch.randn(16, 16))
convert(prepared, isolate="always")
"""


def test_a_hanging_child_ends_with_its_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", HANGS], cwd=tmp_path, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    )
    children, limit = [], time.monotonic() + 100
    while not children and parent.poll() is None and time.monotonic() < limit:
        children = [c for c in psutil.Process(parent.pid).children() if "ipex.child" in " ".join(c.cmdline())]
        time.sleep(0.2)
    assert children, "the child did not start"
    time.sleep(10)  # until it has imported torch and asked to end with its parent
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()
    assert not alive


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-11, "crashed .signal 11."),
        (1, "failed on this graph in a child process: RuntimeError: no"),
        (3, "exit code 3"),
    ],
)
def test_a_child_that_ends_badly(monkeypatch, code, text):
    stderr = "Traceback\nRuntimeError: no\n" if code == 1 else ""
    monkeypatch.setattr(
        isolate.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, code, stdout="", stderr=stderr),
    )
    with pytest.raises(BackendError, match=text) as caught:
        convert(prepared_for(MLP(), torch.randn(4, 16), backend="ipex"), isolate="always")
    assert 'backend="native"' in str(caught.value)


@pytest.mark.parametrize(
    ("option", "familiar", "expected"),
    [("auto", True, 0), ("auto", False, 1), ("never", False, 0), ("always", True, 1)],
)
def test_when_a_child_is_used(monkeypatch, option, familiar, expected):
    calls = []
    monkeypatch.setattr(lower, "is_tested", lambda module: familiar)
    monkeypatch.setattr(lower, "first_run_in_child", lambda *_: calls.append(1))
    convert(prepared_for(MLP(), torch.randn(4, 16), backend="ipex"), isolate=option)
    assert len(calls) == expected


# ---- side effects ----


def test_two_threads_leave_the_process_as_it_was():
    """Warning filters, standard streams and a model's training flags belong to the whole process."""
    model, x = MLP().train(), torch.randn(4, 16)
    filters, failures = list(warnings.filters), []

    def work():
        try:
            for _ in range(5):
                prepared = prepare(model, StaticQuantConfig(), example_inputs=x, backend="ipex")
                prepared(x)
                convert(prepared, isolate="never")
        except Exception:  # the assertion below shows it
            failures.append(traceback.format_exc())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inside = list(warnings.filters)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(warnings.filters) == inside
    assert not failures, "\n".join(failures)
    assert all(m.training for m in model.modules())
    assert list(warnings.filters) == filters


def test_one_thread_at_a_time_is_quiet():
    entered = threading.Event()

    def enter():
        with quiet():
            entered.set()

    thread = threading.Thread(target=enter)
    with quiet():
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(20)
    thread.join()


def test_what_another_thread_prints_meanwhile_is_shown(capfd):
    with quiet():
        os.write(1, b"from elsewhere\n")
    assert "from elsewhere" in capfd.readouterr().err


def test_nothing_reaches_the_console(capfd):
    x = torch.randn(2, 3, 8, 8)
    q = quantized(ResidualCNN(), x, backend="ipex")
    q(x)
    q(torch.randn(3, 3, 8, 8))
    q.report()
    assert capfd.readouterr() == ("", "")


QUIET = """
import torch
from models import MLP, prepared_for
from nc import convert
x = torch.randn(4, 16)
q = convert(prepared_for(MLP(), x, backend="ipex"), isolate="never")
q(x)
q.report()
"""


def test_nothing_reaches_the_console_of_a_new_process_and_nothing_is_left_in_its_folder(tmp_path):
    """The first import of IPEX prints most."""
    done = subprocess.run(
        [sys.executable, "-c", QUIET],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_output_of_a_failing_block_is_shown_after_all(capfd):
    with pytest.raises(KeyError), quiet():
        os.write(2, b"the last words\n")
        raise KeyError
    assert "the last words" in capfd.readouterr().err


def test_another_backend_at_convert():
    x = torch.randn(4, 16)
    prepared = prepared_for(MLP(), x, backend="reference")
    q = convert(prepared, backend="ipex", isolate="never")
    assert q.report().backend == "ipex"
    assert worst_db(convert(prepared)(x), q(x)) > 30  # not equal: without VNNI the weights of one have 7 bits


def test_auto_is_ipex_where_it_was_measured_to_be_faster(monkeypatch):
    cpu_kind = next(name for name, feature in auto_order.CPUS.items() if feature in cpu.machine_features())
    race = auto_order.Race(cpu_kind, auto_order.LINEARS, "ipex", "native", 1.2, ("a model",))
    monkeypatch.setattr(auto_order, "RACES", (race,))
    assert prepare(MLP().eval(), StaticQuantConfig(), example_inputs=torch.randn(2, 16)).backend == "ipex"
    monkeypatch.setattr(auto_order, "RACES", ())
    assert prepare(MLP().eval(), StaticQuantConfig(), example_inputs=torch.randn(2, 16)).backend == "native"


def test_an_empty_batch_gives_an_empty_result():
    x = torch.randn(4, 16)
    q = quantized(MLP(), x, backend="ipex")
    assert q(torch.randn(0, 16)).shape == (0, 8)
    assert worst_db(q.reference(x), q(x)) > 30


def test_a_model_whose_additions_mask_scores_is_not_asked_to_add_in_int8():
    x, mask = torch.randn(2, 6, 32), torch.zeros(2, 1, 6, 6)
    q = quantized(Attention(), (x, mask), backend="ipex")
    assert "add" not in {op.kind for op in q.report().ops if op.asked == "int8"}
    assert worst_db(call(q.reference, (x, mask)), call(q, (x, mask))) > 30


TWICE = """
import sys
import torch
import nc
torch.manual_seed(0)
norm, x = torch.nn.LayerNorm(384), torch.randn(4, 64, 384)
model = torch.nn.Sequential(torch.nn.Linear(384, 384), norm, torch.nn.Linear(384, 64)).eval()
prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=x)
prepared(x)
first, second = (nc.convert(prepared, isolate="never").graph for _ in range(2))
constants = dict(second.module.named_buffers())
print(first.sqnr_vs_fp32_db == second.sqnr_vs_fp32_db and all(torch.equal(t, constants[name]) for name, t in first.module.named_buffers()))
"""


def test_two_conversions_of_one_calibration_are_equal_to_the_last_bit(tmp_path):
    """IPEX replaces torch's layer norm when it is imported.

    Bias correction must not see the one first, then the other.
    """
    done = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


BESIDE = """
import sys, torch, nc
import intel_extension_for_pytorch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LayerNorm([4, 8]), torch.nn.Linear(8, 8)).eval()
torch.nn.init.normal_(model[0].weight)
x = torch.randn(2, 5, 4, 8)
expected = model(x).detach()
q = nc.quantize(model, nc.StaticQuantConfig(), lambda m: m(x), example_inputs=x, backend=sys.argv[1], measure=False)
print(q.backend, bool((q(x) - expected).abs().max() < 0.1), bool((q.reference(x) - expected).abs().max() < 0.1))
"""


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_other_backends_are_right_beside_ipex(backend, tmp_path):
    """IPEX changes the layer norm of the whole process.

    A graph for another engine, calibration and the model itself run with it too.
    """
    done = subprocess.run(
        [sys.executable, "-c", BESIDE, backend],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == (f"{backend} True True", 0), done.stderr


@pytest.mark.parametrize("shape", [[4, 8], [3, 8, 8]])
@pytest.mark.parametrize("config", [StaticQuantConfig(), DynamicQuantConfig()], ids=["static", "dynamic"])
def test_layer_norms_over_several_dimensions(shape, config):
    """IPEX replaces torch's by one that reads past the end of their weights."""
    model = nn.Sequential(nn.LayerNorm(shape), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 2)
        model[0].bias.uniform_(-1, 1)
    x = torch.randn(2, 5, *shape)
    with torch.enable_grad():
        expected = model(x).detach()
    q = quantized(model, x, config, "ipex")
    assert worst_db([expected], [q(x)]) > 30
    assert worst_db([q.reference(x[:1])], [q(x[:1])]) > 60

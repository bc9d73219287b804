"""`python -m nc`: what each command prints, and one clear line with exit code 2 for what can't be done."""

import dataclasses
import errno
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from suites.small_llama import random_llama

import nc
from nc import DynamicQuantConfig, StaticQuantConfig, available_backends
from nc.api.artefact import load
from nc.backends import get_backend
from nc.cli import inputs
from nc.cli.main import main
from nc.kernels import cpu
from nc.profiling import latency
from nc.storage import store

SETUP = pathlib.Path(__file__).parents[2] / "setup.py"
MODELS = """
import torch

def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)

    def forward(self, left, right):
        return {"sum": self.a(left) + self.b(right)}

def broken():
    raise ValueError("the weights are gone")

def text():
    return "no model"
"""


def module_name(folder):
    """Another one for each test, since Python imports a module once."""
    return f"models_of_{folder.name}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a module of factories and calibration data."""
    (tmp_path / f"{module_name(tmp_path)}.py").write_text(MODELS)
    numbers = np.random.default_rng(0)

    def array(rows, columns):
        return numbers.standard_normal((rows, columns), dtype=np.float32)

    np.savez(tmp_path / "one.npz", array(20, 8))
    np.savez(tmp_path / "two.npz", left=array(20, 8), right=array(20, 6))
    np.savez(tmp_path / "unequal.npz", left=array(20, 8), right=array(19, 6))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def no_width(monkeypatch):
    """Processes that run tests in parallel have the width of a terminal in their environment."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(folder):
    """Run a command; "MODELS" in it stands for the module of factories."""

    def invoke(*words):
        return CliRunner().invoke(main, [str(w).replace("MODELS", module_name(folder)) for w in words])

    return invoke


def quantize(run, factory="mlp", calib="one.npz", *options):
    words = ("quantize", f"MODELS:{factory}", "--calib", calib, "--out", "out", "--backend", "reference")
    return run(*words, *options)


def quantize_static(run, *words):
    StaticQuantConfig().to_json_file("static.json")
    return quantize(run, *(words or ("mlp", "one.npz")), "--config", "static.json")


def refused(result):
    """The one line on stderr."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("nc: error: ")
    return lines[0]


@pytest.mark.parametrize(("options", "measure"), [((), True), (("--no-measure",), False)])
def test_measuring_is_passed_on(run, monkeypatch, options, measure):
    seen = []
    convert = nc.convert
    monkeypatch.setattr(
        nc, "convert", lambda *args, **given: seen.append(given["measure"]) or convert(*args, **given)
    )
    assert quantize(run, "mlp", "one.npz", *options).exit_code == 0
    assert seen == [measure]


def test_quantize_saves_what_load_reads_and_prints_the_report(run, folder):
    result = quantize(run)
    assert result.exit_code == 0, result.output
    assert "Sequential on reference: " in result.stdout
    assert result.stdout.splitlines()[-1] == "saved to out"
    x = torch.from_numpy(np.load("one.npz")["arr_0"])
    sys.modules.pop(module_name(folder))
    loaded = load("out", backend="reference")
    factory = __import__(module_name(folder)).mlp()
    noise = loaded(x) - factory(x)
    assert 0 < noise.abs().max() < 0.05  # int8, and calibrated


def test_quantize_gives_named_arrays_to_the_arguments_of_that_name(run):
    assert quantize(run, "Two", "two.npz").exit_code == 0
    arrays = {name: torch.from_numpy(array) for name, array in np.load("two.npz").items()}
    out = load("out", backend="reference")(right=arrays["right"], left=arrays["left"])
    assert list(out) == ["sum"]
    assert out["sum"].shape == (20, 4)


def test_arrays_without_names_are_positional_in_their_order():
    arrays = {f"arr_{i}": np.full((1,), i, dtype=np.float32) for i in (10, 2, 0, 1)}
    assert [float(tensor) for tensor in inputs.as_inputs(arrays)] == [0, 1, 2, 10]


def test_quantize_reads_a_configuration(run, folder):
    config = StaticQuantConfig().set_local("2", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    config.to_json_file("config.json")
    result = quantize(run, "mlp", "one.npz", "--config", "config.json")
    assert result.exit_code == 0, result.output
    assert '- 1 x fp32 was asked for: "2"\n' in result.stdout


def test_quantize_calibrates_with_every_sample(run, folder):
    few = np.zeros((33, 8), dtype=np.float32)
    few[-1] = 7.0  # only the last, incomplete batch holds it
    np.savez("last.npz", few)
    assert quantize_static(run, "mlp", "last.npz", "--batch-size", "16").exit_code == 0
    model = load("out", backend="reference")
    assert (model.graph.example[0].shape[0], float(model.graph.example[0].abs().max())) == (1, 0.0)
    scales = [n.args[1] for n in model.graph.module.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert pytest.approx(7.0 / 255, rel=1e-3) in scales


def test_quantize_tries_what_suits_the_model(run, folder):
    np.savez("some.npz", np.random.default_rng(0).standard_normal((33, 8), dtype=np.float32))
    result = quantize(run, "mlp", "some.npz", "--batch-size", "16")
    assert result.exit_code == 0, result.output
    assert "rows held out" in " ".join(result.stdout.split())
    assert any("chosen: " in a.text for a in load("out", backend="reference").report().algorithms)


def test_quantize_takes_example_inputs_of_their_own(run, folder):
    np.savez("example.npz", np.ones((5, 8), dtype=np.float32))
    assert quantize(run, "mlp", "one.npz", "--example", "example.npz").exit_code == 0
    assert load("out", backend="reference").graph.example[0].shape == (5, 8)


def test_quantize_needs_no_calibration_data_where_the_plan_needs_none(run, folder):
    DynamicQuantConfig().to_json_file("dynamic.json")
    np.savez("example.npz", np.ones((5, 8), dtype=np.float32))
    words = ("quantize", "MODELS:mlp", "--out", "out", "--backend", "reference", "--example", "example.npz")
    result = run(*words, "--config", "dynamic.json")
    assert result.exit_code == 0, result.output
    model = load("out", backend="reference")
    assert [d.operator for d in model.graph.plan.quantized] == ["0", "2"]
    assert model.graph.example[0].shape == (5, 8)


@pytest.mark.parametrize("local", [False, True])
def test_quantize_says_which_operators_need_calibration_data(run, folder, local):
    """By default all; in a mixture those that are static."""
    (
        StaticQuantConfig() if not local else DynamicQuantConfig().set_local("2", StaticQuantConfig())
    ).to_json_file("config.json")
    np.savez("example.npz", np.ones((5, 8), dtype=np.float32))
    words = ("quantize", "MODELS:mlp", "--out", "out", "--backend", "reference", "--example", "example.npz")
    line = refused(run(*words, "--config", "config.json"))
    assert f"--calib is missing: operators that need calibration data: {'1' if local else '2'}, " in line
    assert f"e.g. {'2' if local else '0'!r}" in line
    assert "such as DynamicQuantConfig" in line
    assert not (folder / "out").exists()
    assert refused(run(*words)).startswith("nc: error: --calib is missing")


def test_quantize_needs_some_inputs(run):
    line = refused(run("quantize", "no_such_module:mlp", "--out", "out", "--backend", "reference"))
    assert "Give --calib FILE.npz" in line
    assert "--example FILE.npz" in line


def test_quantize_replaces_an_artefact_but_no_other_folder(run, folder):
    assert quantize(run).exit_code == 0
    assert quantize(run).exit_code == 0
    (folder / "out" / "checksums.json").unlink()
    assert "out contains other files" in refused(quantize(run))


def test_a_folder_that_cannot_be_made_is_one_line(run):
    pathlib.Path("afile").write_text("x")
    assert "afile is a file" in refused(
        run("quantize", "MODELS:mlp", "--calib", "one.npz", "--out", "afile/out")
    )


def test_calibration_data_that_does_not_suit_the_model_is_one_line(run):
    np.savez("wide.npz", np.ones((20, 9), dtype=np.float32))
    assert "itself fails on example_inputs" in refused(quantize(run, "mlp", "wide.npz"))
    np.savez("named.npz", pixels=np.ones((20, 8), dtype=np.float32))
    line = refused(quantize(run, "mlp", "named.npz"))
    assert "do not fit" in line
    assert line.endswith("The example inputs are from named.npz, which has the arrays pixels.")
    np.savez("swapped.npz", np.ones((20, 8), dtype=">f4"))
    assert quantize(run, "mlp", "swapped.npz").exit_code == 0


def test_quantize_reads_float64_as_float32_and_says_so(run, folder):
    np.savez("double.npz", np.random.default_rng(0).standard_normal((20, 8)))
    result = quantize(run, "mlp", "double.npz")
    assert result.exit_code == 0, result.output
    assert "'arr_0' is float64 and is read as float32" in result.stderr


def test_quantize_writes_nothing_but_the_artefact(run, folder):
    before = {path.name for path in folder.iterdir()}
    assert quantize(run).exit_code == 0
    assert {path.name for path in folder.iterdir()} - before - {"__pycache__"} == {"out"}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("MODELS", "Expected PKG.MODULE:FACTORY"),
        ("no_such_module:mlp", "there is no module 'no_such_module'"),
        ("MODELS:mpl", "has no 'mpl'; did you mean mlp?"),
        ("MODELS:broken", "ValueError: the weights are gone; --debug shows the traceback"),
        ("MODELS:text", "to return a torch.nn.Module, but got str"),
    ],
)
def test_a_bad_factory_is_one_line(run, factory, message):
    line = refused(run("quantize", factory, "--calib", "one.npz", "--out", "out", "--backend", "reference"))
    assert message in line


def test_debug_shows_the_traceback(run):
    result = quantize(run, "broken", "one.npz", "--debug")
    assert result.exit_code == 2
    assert "in broken" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("nc: error: ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: np.savez(path), "no arrays at all"),
        (lambda path: np.savez(path, x=np.zeros((0, 8))), "x: 0"),
        (lambda path: np.savez(path, x=np.float32(1)), "x: 0"),
        (
            lambda path: np.savez(path, np.zeros((2, 8)), right=np.zeros((2, 8))),
            "for all, but got arr_0, right",
        ),
        (lambda path: np.savez(path, x=np.array(["a"])), "expected numbers, but got dtype <U1"),
        (lambda path: np.savez(path, x=np.array([{}])), "not an .npz file of plain arrays"),
        (lambda path: path.write_text("hello"), "not an .npz file of plain arrays"),
        (lambda path: path.write_bytes(b""), "not an .npz file of plain arrays"),
        (lambda path: np.save(path.open("wb"), np.zeros((2, 8))), "not an .npz file of plain arrays"),
    ],
)
def test_bad_calibration_data_is_one_line(run, folder, make, message):
    make(folder / "bad.npz")
    assert message in refused(quantize(run, "mlp", "bad.npz"))


def test_unequal_lengths_are_one_line(run):
    assert "left: 20, right: 19" in refused(quantize(run, "Two", "unequal.npz"))


def test_missing_calibration_data_is_an_error(run):
    result = quantize(run, "mlp", "none.npz")
    assert result.exit_code == 2
    assert "'none.npz' does not exist" in result.stderr


def test_arrays_that_the_model_has_no_argument_for_are_one_line(run):
    assert "'input'" in refused(quantize(run, "mlp", "two.npz"))


def test_example_inputs_for_other_arguments_are_one_line(run):
    line = refused(quantize(run, "Two", "two.npz", "--example", "one.npz"))
    assert "left, right" in line
    assert "got arr_0" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "to be a configuration ("),
        ('{"global": {"act_algoo": "minmax"}}', "did you mean 'act_algo'"),
        ('{"global": {}, "local": [{"key": "9", "config": {}}]}', "The closest names: "),
    ],
)
def test_a_bad_configuration_is_one_line(run, folder, text, message):
    (folder / "config.json").write_text(text)
    line = refused(quantize(run, "mlp", "one.npz", "--config", "config.json"))
    assert message in line
    assert "config.json" in line or "Rule" in line


def test_nan_in_calibration_data_is_one_line_and_leaves_nothing(run, folder):
    array = np.ones((20, 8), dtype=np.float32)
    array[10:] = np.nan
    np.savez("nan.npz", array)
    assert "operator '0'" in refused(quantize(run, "mlp", "nan.npz"))
    assert not (folder / "out").exists()


def test_an_unknown_backend_is_one_line(run):
    line = refused(run("quantize", "MODELS:mlp", "--calib", "one.npz", "--out", "out", "--backend", "cuda"))
    assert "known: auto, ipex, native, openvino, reference" in line


def test_our_warnings_are_lines_without_source_code(run, folder):
    config = StaticQuantConfig().set_local(torch.nn.Conv2d, StaticQuantConfig(act_sym=True))
    config.to_json_file("config.json")
    result = quantize(run, "mlp", "one.npz", "--config", "config.json")
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("nc: warning: Rule for type 'Conv2d' matches no operator")


def test_inspect_lists_operators_sizes_versions_and_features(run):
    assert quantize_static(run).exit_code == 0
    result = run("inspect", "out")
    assert result.exit_code == 0, result.output
    facts = dict(line.split(maxsplit=1) for line in result.stdout.split("\n\n")[1].splitlines())
    assert facts["operators"] == "2 of 3 are quantized"
    assert f"torch {torch.__version__}" in result.stdout
    assert "input float32[" in result.stdout
    (first,) = [line for line in result.stdout.splitlines() if line.startswith("0 ")]
    assert first.split() == ["0", "linear", "uint8", "affine", "int8", "sym", "per_channel", "global"]


def test_inspect_prints_json(run, folder):
    assert quantize(run).exit_code == 0
    contents = json.loads(run("inspect", "out", "--json").stdout)
    assert [op["operator"] for op in contents["operators"]] == ["0", "1", "2"]
    assert contents["backend"] == "reference"
    assert contents["cpu_features"] == []
    assert contents["versions"]["nc"] == importlib.metadata.version("nc-quant")
    assert contents["bytes_by_dtype"]["I8"] == 8 * 16 + 16 * 4
    assert contents["bytes_by_dtype"]["example inputs"] == 4 * 8
    assert contents["fp32_bytes"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert contents["files"] == {p.name: p.stat().st_size for p in sorted((folder / "out").iterdir())}


class TestLowBitWeights:
    @pytest.fixture
    def saved(self, folder):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 8)).eval()
        nc.save(nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=16)), folder / "low")

    def test_inspect(self, run, saved):
        result = run("inspect", "low")
        assert result.exit_code == 0, result.output
        assert [line.split() for line in result.stdout.splitlines()[2:4]] == [
            ["0", "linear", "16", "x", "32", "int4", "sym", "per_group", "16", "fp32", "rtn"],
            ["1", "linear", "8", "x", "16", "int4", "sym", "per_group", "16", "fp32", "rtn"],
        ]
        assert "Sequential: give nc.load a model of it" in result.stdout
        contents = json.loads(run("inspect", "low", "--json").stdout)
        assert [layer["shape"] for layer in contents["layers"]] == [[16, 32], [8, 16]]
        assert contents["bytes_by_dtype"]["U8"] == (16 * 32 + 8 * 16) // 2

    def test_doctor(self, run, saved):
        assert "its 2 low-bit layers need no special CPU features" in run("doctor", "low").stdout

    def test_bench_says_what_to_do(self, run, folder):
        model = random_llama(num_hidden_layers=1)
        nc.save(nc.quantize(model, nc.WeightOnlyConfig("int4", group_size=16)), folder / "low")
        result = run("bench", "low")
        assert result.exit_code == 2, result.output
        assert "LlamaForCausalLM with low-bit weights and no example inputs to time" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "bench", "doctor"])
def test_what_is_no_artefact_is_an_error(run, folder, command):
    for name in ("nowhere", "."):
        result = run(command, name)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("nc: error: ")


def test_bench_names_what_it_times(run):
    assert quantize(run).exit_code == 0
    before = torch.get_num_threads()
    try:
        result = run("bench", "out", "--rounds", "3", "--threads", "1", "--backend", "reference")
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.output
    head, row = result.stdout.splitlines()
    assert head == "example inputs (1, 8); 1 threads; median of 3 rounds"
    assert float(row.split()[0]) > 0
    assert row.endswith("simulation in eager PyTorch (not the fp32 model)")


@pytest.mark.ipex
def test_bench_compares_the_engine_with_the_simulation(run):
    assert run("quantize", "MODELS:mlp", "--calib", "one.npz", "--out", "out").exit_code == 0
    result = run("bench", "out", "--rounds", "3")
    assert result.exit_code == 0, result.output
    assert [line.split(" ms  ")[-1] for line in result.stdout.splitlines()[1:]] == [
        "int8 on native",
        "simulation in eager PyTorch (not the fp32 model)",
    ]
    fits, none = run("doctor", "out").stdout.splitlines()[-2:]
    assert fits.startswith("out fits this CPU: it needs ")
    assert none == "load changes none of its 2 quantized layers here."


def test_candidates_take_turns_after_their_warm_up():
    calls = []
    candidates = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    rounds = list(latency.interleaved(candidates, rounds=3, warm_up=2))
    assert "".join(calls) == "aabb" + 3 * "ab"
    assert [sorted(r) for r in rounds] == 3 * [["a", "b"]]


def test_times_are_milliseconds():
    (times,) = latency.interleaved({"nap": lambda: time.sleep(0.02)}, rounds=1, warm_up=0)
    assert 20 <= times["nap"] < 2000


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 30.0, "b": 10.0}, {"a": 2.0, "b": 2.0}]
    assert latency.median(rounds) == {"a": 2.0, "b": 2.0}
    assert latency.ratio(rounds, slow="a", fast="b") == 2.0


def doctor_rows(result):
    return {line[:27].strip(): line[27:].strip() for line in result.stdout.splitlines() if line}


def test_doctor_tells_machine_versions_and_backends():
    result = CliRunner().invoke(
        main, ["doctor"], env={"COLUMNS": "200"}
    )  # the features of a CPU with AMX take two lines of 80
    rows = doctor_rows(result)
    assert rows["torch"] == importlib.metadata.version("torch")
    assert rows["features"].partition(" (limited by")[0].split(", ") == list(cpu.machine_features())
    assert rows["threads"].split()[0] == str(torch.get_num_threads())
    backends = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines() if line.split()[1:]}
    for name, why in available_backends().items():
        assert backends[name] == ("no" if why else "yes")


@pytest.mark.parametrize(
    ("ipex", "reason"),
    [(None, "intel-extension-for-pytorch is not installed"), ("2.7.0", "needs torch 2.7, but torch is")],
)
def test_doctor_works_without_a_usable_ipex(monkeypatch, ipex, reason):
    real = importlib.metadata.version

    def version(name):
        if name != "intel-extension-for-pytorch":
            return real(name)
        if ipex is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return ipex

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert doctor_rows(result)["intel-extension-for-pytorch"] == (ipex or "not installed")
    assert re.search(r"^ipex +no +", result.stdout, re.MULTILINE)
    words = " ".join(result.stdout.split())  # the table breaks lines
    assert reason in words
    assert "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0" in words
    assert (
        'backend="auto" begins with native. "auto" takes the first of native, ipex that can run here\n'
        in result.stdout
    )
    monkeypatch.setattr("nc.backends.native.NativeBackend.why_unavailable", lambda self: "no kernels")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert 'backend="auto" finds no engine. No int8 engine can run here. ' in result.stdout


def test_doctor_says_what_an_artefact_needs_and_this_cpu_lacks(run, monkeypatch):
    assert quantize(run).exit_code == 0
    assert "out fits this CPU: it needs no special CPU features" in run("doctor", "out").stdout
    plan = store.read("out").plan
    monkeypatch.setattr(store.StoredGraph, "plan", dataclasses.replace(plan, isa=("amx_int8", "avx9")))
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "avx512_vnni"))
    result = run("doctor", "out")
    assert result.exit_code == 1
    # how products are summed is proven layer by layer
    assert "needs amx_int8, avx9, and this CPU lacks avx9." in result.stdout


def test_doctor_lists_the_layers_that_load_would_change(run, monkeypatch):
    assert quantize_static(run).exit_code == 0
    monkeypatch.setattr(
        "nc.cli.doctor.available_backends", lambda: {"ipex": "", "native": "", "reference": ""}
    )
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2",))
    result = run("doctor", "out")
    assert result.exit_code == run("doctor").exit_code  # load succeeds
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["layer", "type", "ipex", "native"] in rows
    assert ["2", "linear", *2 * ["weights", "quantized", "again"]] in rows
    assert "load quantizes 2 of 2 quantized layers again, from their int8 codes" in result.stdout
    assert "needs no special CPU features" in result.stdout
    monkeypatch.setattr(cpu, "machine_features", lambda: ("avx2", "amx_int8"))
    assert "load changes none of its 2 quantized layers here." in run("doctor", "out").stdout


#: To rich, the first two are markup and the third an emoji.
BRACKETS = ("[red]", "a[0]", "a:b:c", ":smile:", "[/]")


def test_tables_print_brackets_as_they_are(run, monkeypatch):
    """Commands hold extras, operator names indices."""
    assert quantize(run).exit_code == 0
    why = f"{' '.join(BRACKETS)} pip install 'nc-quant[ipex]'"
    stored = store.read("out")
    names = dict(zip(("0", "1", "2"), BRACKETS, strict=False))
    monkeypatch.setattr("nc.backends.available_backends", lambda: {"[bold]": why, "reference": ""})
    for console in (False, True):  # a file, a terminal
        monkeypatch.setenv("COLUMNS", "300")
        if console:
            monkeypatch.setenv("FORCE_COLOR", "1")
        lines = run("doctor").stdout.splitlines()
        assert any("[bold]" in line and why in line for line in lines)
    decisions = tuple(dataclasses.replace(d, operator=names[d.operator]) for d in stored.plan.decisions)
    graph = dataclasses.replace(stored.graph(), plan=dataclasses.replace(stored.plan, decisions=decisions))
    monkeypatch.setattr(store.StoredGraph, "graph", lambda self: graph)
    monkeypatch.setattr("nc.cli.doctor.available_backends", lambda: {"native": ""})
    monkeypatch.setattr("nc.cli.doctor.saturating", lambda *_: frozenset(BRACKETS))
    first = [
        line.split()[0]
        for line in run("doctor", "out").stdout.splitlines()
        if "weights quantized again" in line
    ]
    assert first == ["[red]", "a:b:c"]


def test_a_path_with_brackets_is_printed_as_it_is(run, folder):
    result = run(
        "quantize", "MODELS:mlp", "--calib", "one.npz", "--out", "[red]a[0]", "--backend", "reference"
    )
    assert result.stdout.splitlines()[-1] == "saved to [red]a[0]"
    assert run("doctor", "[red]a[0]").stdout.count("[red]a[0] fits this CPU") == 1


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_inspect_keeps_to_the_width_it_is_given(run, monkeypatch, columns):
    assert quantize(run).exit_code == 0
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run("inspect", "out").stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("inspect", "out").stdout.splitlines()
    assert max(map(len, lines)) <= columns
    letters = [
        sorted("".join(text.split()).replace("-", "").replace("─", "")) for text in (whole, "".join(lines))
    ]
    assert letters[0] == letters[1], "nothing is cut off"
    if columns == 300:
        assert "\n".join(lines) == whole.rstrip("\n")


@pytest.mark.parametrize(
    "command",
    [["inspect", "out"], ["inspect", "out", "--json"], ["doctor"], ["doctor", "--json"]],
    ids=" ".join,
)
def test_a_reader_that_goes_away_is_no_error(run, command):
    if "out" in command:
        assert quantize(run).exit_code == 0
    with subprocess.Popen(
        [sys.executable, "-m", "nc", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == ""
    assert process.returncode in (1, 141)


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_json_holds_what_is_printed(run, monkeypatch, command):
    assert quantize(run).exit_code == 0
    words = [command, "out", *(["--rounds", "2", "--backend", "reference"] if command == "bench" else [])]
    shown, facts = run(*words), json.loads(run(*words, "--json").stdout)
    assert shown.exit_code == 0
    if command == "bench":
        assert facts["example_inputs"] == [[1, 8]]
        assert (facts["rounds"], facts["threads"]) == (2, torch.get_num_threads())
        assert facts["median_ms"]["engine"]["milliseconds"] > 0
        return
    assert {name: found["can_run"] for name, found in facts["backends"].items()} == {
        n: not why for n, why in available_backends().items()
    }
    assert facts["machine"]["torch"] == importlib.metadata.version("torch")
    assert facts["healthy"] is True
    unchanged = {
        "folder": "out",
        "fits": True,
        "needs": [],
        "missing": [],
        "low_bit_layers": 0,
        "quantized_layers": 2,
    }
    found = facts["artefact"]
    changes = found.pop("changes")
    assert found == unchanged
    assert not changes or get_backend("native").capabilities().narrow_sums  # pairs have to fit 16 bits here
    assert all(choice["why"] in shown.stdout for choice in facts["auto"].values())
    monkeypatch.setattr("nc.kernels.cpu.missing", lambda _: ("avx512_vnni",))
    lacking = run(*words, "--json")
    assert lacking.exit_code == 1
    assert json.loads(lacking.stdout)["artefact"]["missing"] == ["avx512_vnni"]


def test_more_threads_than_cores_are_warned_of(run):
    assert quantize(run).exit_code == 0
    before = torch.get_num_threads()
    try:
        many = run("bench", "out", "--rounds", "1", "--threads", "99", "--backend", "reference")
        one = run("bench", "out", "--rounds", "1", "--threads", "1", "--backend", "reference")
    finally:
        torch.set_num_threads(before)
    assert many.exit_code == 0
    assert f"nc: warning: 99 threads share {len(os.sched_getaffinity(0))} cores" in many.stderr
    assert one.stderr == ""


def test_the_names_of_what_a_module_can_make_are_offered(run):
    assert "has no 'mpl'; did you mean mlp?" in refused(quantize(run, "mpl"))
    assert "has no 'resnet99'; it has Two, broken, mlp, text" in refused(quantize(run, "resnet99"))


@pytest.mark.parametrize("out", ["/proc/nc-out", "/proc/a/b"])
@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="no file system that refuses")
def test_a_folder_that_cannot_be_written_is_said_before_the_work(run, monkeypatch, out):
    monkeypatch.setattr(inputs, "make_model", lambda _: pytest.fail("the work has begun"))
    line = refused(
        run("quantize", "MODELS:mlp", "--calib", "one.npz", "--out", out, "--backend", "reference")
    )
    assert line.startswith(f"nc: error: {out} cannot be written: no folder can be made in /proc")


def test_a_failure_to_write_names_the_folder_of_the_user(run, folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/.out.123.tmp")

    monkeypatch.setattr("nc.storage.atomic.flush", full)
    assert refused(quantize(run)).endswith("out cannot be written: No space left on device.")
    assert not list(folder.glob(".nc-*"))


def test_the_command_of_the_package_is_the_same_command_line():
    (entry,) = [line for line in SETUP.read_text().splitlines() if "console_scripts" in line]
    assert "nc-quant = nc.__main__:run" in entry
    named = "import sys; sys.argv[0] = '/bin/nc-quant'; from nc.__main__ import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", named, "inspect", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("Usage: nc-quant inspect [OPTIONS] DIR")
    assert done.returncode == 0


def test_the_module_runs_as_a_process():
    done = subprocess.run([sys.executable, "-m", "nc", "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    assert 'backend="auto" begins with' in done.stdout

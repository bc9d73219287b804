"""`nc.export_runner`, and what nc_run computes with its folders: against native, and against fp32."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from suites.runner_models import MODELS, call, quantized, texts

import nc
from nc.backends.native.only_c import model_of_c

pytestmark = pytest.mark.needs_plans

#: Plans of native that call C alone: the same bits. In others oneDNN computes norms, sums or products.
SAME_PLANS = {("mlp", "dynamic"), ("recurrent", "dynamic")}
CASES = [
    (name, kind)
    for name in MODELS
    for kind in ("dynamic", "static")
    if (name, kind) != ("recurrent", "static")
]


def arrays(inputs):
    return (
        {key: value.numpy() for key, value in inputs.items()} if isinstance(inputs, dict) else inputs.numpy()
    )


def run(model, inputs):
    """Return what nc_run gives, as tensors."""
    given = arrays(inputs)
    found = model(**given) if isinstance(given, dict) else model(given)
    return [torch.from_numpy(value) for value in found.values()]


def decibels(got, wanted):
    error = (got.double() - wanted.double()).square().sum()
    return math.inf if not error else float(10 * torch.log10(wanted.double().square().sum() / error))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_outputs_are_those_of_native_and_near_fp32(nc_run, exported, name, kind):
    model, q_model, example, folder = exported(name, kind)
    runner, of_c = nc_run.load(folder), model_of_c(q_model.graph, [2], "off").runs[0]
    others = (
        [texts(1, 1), texts(20, 40), texts(5, 7)] if isinstance(example, dict) else [torch.rand_like(example)]
    )
    for inputs in (example, *others):
        got = run(runner, inputs)
        plan = of_c(list(inputs.values()) if isinstance(inputs, dict) else [inputs])
        assert all(map(torch.equal, got, plan))
        for mine, native, fp32 in zip(got, call(q_model, inputs), call(model, inputs), strict=True):
            if (name, kind) in SAME_PLANS:
                assert torch.equal(mine, native)
            assert mine.shape == fp32.shape
            if isinstance(inputs, dict) and fp32.shape[:2] == inputs["input_ids"].shape:
                fp32 = fp32 * inputs["attention_mask"][..., None]
            # codes that round otherwise are a few, and only in static models
            assert decibels(mine, native) >= (100 if kind == "dynamic" else 50)
            assert decibels(mine, fp32) >= (30 if kind == "dynamic" else 12)


def test_a_text_has_the_same_bits_in_any_batch_and_on_any_threads(nc_run, exported):
    *_, folder = exported("bert", "dynamic")
    one, two = nc_run.load(folder, threads=1), nc_run.load(folder, threads=2)
    batch = texts(9, 30)
    together = run(two, batch)[0]
    assert torch.equal(together, run(one, batch)[0])
    for i in range(9):
        alone = run(two, {key: value[i : i + 1] for key, value in batch.items()})[0]
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("threads", [0, -1, 1.0, "2", True])
def test_a_number_of_threads_that_is_none(nc_run, exported, threads):
    with pytest.raises(nc_run.errors.InputError, match="Expected threads"):
        nc_run.load(exported("mlp", "dynamic")[-1], threads=threads)


def test_threads_call_one_model_at_once(nc_run, exported):
    *_, example, folder = exported("bert", "dynamic")
    runner = nc_run.load(folder)
    batches = [texts(2 + i, 10 + i) for i in range(4)]
    wanted = [run(runner, each) for each in batches]
    wrong = []

    def work(number):
        for _ in range(20):
            got = run(runner, batches[number])
            if not all(map(torch.equal, got, wanted[number])):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


WITHOUT_TORCH = """
import os, sys
import numpy as np
import nc_run
model = nc_run.load(sys.argv[1], threads=2)
ids = np.arange(5, 29, dtype=np.int64).reshape(2, 12)
given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
before = model(**given)
child = os.fork()
if not child:
    after = model(**given)
    os._exit(0 if all((after[name] == before[name]).all() for name in before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert all((value == before[name]).all() for name, value in model(**given).items())
print(sorted({"torch", "nc", "transformers"} & set(sys.modules)))
"""


def test_it_runs_without_torch_and_in_a_forked_process(package, exported):
    *_, folder = exported("minilm", "dynamic")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_line(package, exported, tmp_path):
    *_, example, folder = exported("mlp", "static")
    np.savez(tmp_path / "in.npz", input=example.numpy())

    def command(*words):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package)}
        words = [sys.executable, "-m", "nc_run", *map(str, words)]
        return subprocess.run(words, capture_output=True, text=True, env=env, timeout=300)

    done = command(folder, tmp_path / "in.npz", tmp_path / "out.npz")
    assert "input -> output_0" in done.stdout, done.stderr
    assert np.load(tmp_path / "out.npz")["output_0"].shape == (16, 32)
    for words in ([tmp_path / "none"], [folder, folder / "plan.json"], [folder, tmp_path / "out.npz"]):
        done = command(*words)
        assert done.returncode == 1
        assert done.stderr.startswith("nc-run: ")


def test_what_it_can_not_take_is_refused_with_the_operator(tmp_path):
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    x = torch.rand(1, 3, 8, 8)
    q_model = nc.quantize(
        torch.nn.Sequential(*layers).eval(),
        nc.StaticQuantConfig(),
        lambda m: m(x),
        example_inputs=x,
        backend="native",
    )
    with pytest.raises(nc.UnsupportedError, match="no function in C computes 0: .*linear or 1 x 1"):
        nc.export_runner(q_model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_model_of_another_backend_is_written_too(nc_run, tmp_path):
    _, q_model, example = quantized("mlp", "static", "reference")
    nc.export_model(q_model, tmp_path / "m", "runner", threads=[1, 3])
    runner = nc_run.load(tmp_path / "m")
    assert decibels(run(runner, example)[0], call(q_model, example)[0]) > 30
    document = json.loads((tmp_path / "m/plan.json").read_text())
    assert [plan["threads"] for plan in document["plans"]] == [1, 3]
    with pytest.raises(nc.ConfigError, match="threads"):
        nc.export_runner(q_model, tmp_path / "m", threads=[0])


def test_inputs_that_do_not_fit(nc_run, exported):
    InputError = nc_run.errors.InputError
    *_, example, folder = exported("mlp", "static")
    runner = nc_run.load(folder)
    x = example.numpy()
    for given in ([x, x], [], [x.astype(np.float64)], [x[:4]], [example]):
        with pytest.raises(InputError):
            runner(*given)
    with pytest.raises(InputError, match="other: unknown"):
        runner(x, other=x)
    *_, folder = exported("bert", "static")
    runner = nc_run.load(folder)
    given = arrays(texts(2, 6))
    ids, mask = given["input_ids"], given["attention_mask"]
    for wrong in (ids[:, :, None], ids[:1], np.zeros((2, 65), np.int64), np.zeros((0, 6), np.int64)):
        with pytest.raises(InputError):
            runner(wrong, mask if wrong.ndim == 3 or len(wrong) == 1 else np.ones_like(wrong))
    for wrong in (mask * 2, mask * 0):
        with pytest.raises(InputError, match="attention_mask"):
            runner(ids, wrong)
    with pytest.raises(IndexError):
        runner(ids + 1000, mask)
    with pytest.raises(InputError, match="There is no memory"):
        nc_run.load(folder, most_bytes=1 << 18)(np.full((60, 60), 9), np.ones((60, 60), np.int64))
    assert runner(ids, mask)["pooler_output"].shape == (2, 48)


def test_a_folder_that_is_replaced_or_damaged(nc_run, exported, tmp_path):
    *_, example, original = exported("mlp", "static")
    folder = tmp_path / "m"
    shutil.copytree(original, folder)
    runner = nc_run.load(folder)
    before = runner(example.numpy())["output_0"]
    *_, other = exported("recurrent", "dynamic")
    folder.rename(tmp_path / "old")
    shutil.copytree(other, folder)
    shutil.rmtree(tmp_path / "old")
    assert (runner(example.numpy())["output_0"] == before).all()
    for name in ("plan.json", "data.bin", "checksums.json"):
        content = (original / name).read_bytes()
        for damaged in (content[: len(content) // 2], content[:-1] + b"!", b""):
            shutil.rmtree(folder)
            shutil.copytree(original, folder)
            (folder / name).write_bytes(damaged)
            with pytest.raises(nc_run.errors.ArtefactCorruptError):
                nc_run.load(folder)
        (folder / name).unlink()
        with pytest.raises(nc_run.errors.ArtefactMissingError):
            nc_run.load(folder)


def rewritten(folder, **values):
    """Change values of plan.json, with its checksum."""
    document = json.loads((folder / "plan.json").read_text()) | values
    content = json.dumps(document).encode()
    (folder / "plan.json").write_bytes(content)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["sha256"]["plan.json"] = hashlib.sha256(content).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))


def test_a_cpu_without_the_instruction_sets(nc_run, exported, monkeypatch):
    *_, folder = exported("mlp", "dynamic")
    monkeypatch.setattr(nc_run.model.library, "_flags", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(nc_run.errors.BackendUnavailableError, match="this CPU lacks f16c"):
        nc_run.load(folder)


def test_folders_of_a_newer_version_and_for_another_machine(nc_run, exported, tmp_path):
    *_, original = exported("mlp", "dynamic")
    folder = tmp_path / "m"
    shutil.copytree(original, folder)
    rewritten(folder, schema=2)
    with pytest.raises(nc_run.errors.ArtefactSchemaError, match="newer"):
        nc_run.load(folder)
    rewritten(folder, schema=1, c_code="0" * 16)
    with pytest.raises(nc_run.errors.ArtefactSchemaError, match="functions of nc"):
        nc_run.load(folder)
    document = json.loads((original / "plan.json").read_text())
    data = bytearray((original / "data.bin").read_bytes())
    (at, _), size = document["probes"][0]["outputs"][0]["at"], 4
    data[at : at + size] = np.float32(1e6).tobytes()
    shutil.rmtree(folder)
    shutil.copytree(original, folder)
    (folder / "data.bin").write_bytes(data)
    with pytest.raises(nc_run.errors.ArtefactCorruptError, match=r"data\.bin"):
        nc_run.load(folder)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["sha256"]["data.bin"] = hashlib.sha256(data).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(nc_run.errors.VerificationError):
        nc_run.load(folder)

"""Artefacts changed on purpose, with correct checksums.

`load` refuses each with an ArtefactError, or it loads and runs.
"""

import copy
import json
import os
import random
import re
import shutil
import warnings

import pytest
import torch
from models import TEST, Attention, quantized
from safetensors.torch import load_file
from suites.artefacts import places, sign

import nc
from nc import ArtefactError, InputError, UnsupportedError, load
from nc.backends import get_backend
from nc.kernels import cpu

KEPT = TEST / "data" / "schema1"
#: `NC_MUTATIONS=1000` tries that many of each model.
COUNT = int(os.environ.get("NC_MUTATIONS", "75"))
VALUES = [
    None,
    True,
    0,
    1,
    -1,
    3,
    300,
    10**12,
    0.5,
    -0.5,
    "",
    "x",
    [],
    [1, 2],
    {"node": "x"},
    {"dtype": "int8"},
    {"dtype": "float64"},
]
VALUES += [
    {"dtype": "bfloat16"},
    {"float": "nan"},
    {"memory_format": "channels_last"},
    {"tuple": []},
    {"slice": [0, 1, None]},
    {},
]


def lacks(name):
    """What this CPU lacks to run an old artefact on "native"; "" for nothing.

    The static one computes in bf16 too.
    """
    return get_backend("native").capabilities().why_no_bf16 if name == "static" else ""


def outputs(model, x):
    result = model(x)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_a_kept_artefact_is_read_and_computes_what_it_did(name, backend):
    if backend == "native" and not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN")
    if backend == "native" and (why := lacks(name)):
        with pytest.raises(UnsupportedError, match=re.escape(why)):
            load(KEPT / name, backend=backend)
        return
    model = load(KEPT / name, backend=backend)
    expected = load_file(KEPT / f"{name}.outputs.safetensors")
    for i, value in enumerate(outputs(model, *model.graph.example)):
        # fp32 kernels of another torch or CPU may add in another order
        narrowed = backend == "native" and not cpu.fbgemm_accumulates_wide()  # some codes are reduced
        torch.testing.assert_close(value, expected[f"output.{i}"], rtol=0, atol=1e-2 if narrowed else 1e-6)


def change_value(document, rng):
    parts = rng.choice([["nodes"], ["nodes"], ["signature"], ["plan"], ["sizes", "memory_order"]])
    found = places({key: document[key] for key in parts})
    container, key, path = rng.choice(found[1:])
    old = container[key]
    if isinstance(old, bool) or not isinstance(old, (int, float)) or rng.random() < 0.5:
        container[key] = copy.deepcopy(rng.choice(VALUES))
    else:
        container[key] = rng.choice([old + 1, old - 1, -old, 2 * old, 0])
    return "value", path, container[key]


def change_arguments(document, rng):
    entry = rng.choice([n for n in document["nodes"] if n["op"] == "call_function"])
    args = entry["args"]
    how = rng.choice(["drop", "double", "swap", "kwarg"])
    i, j = rng.randrange(len(args)), rng.randrange(len(args))
    if how == "drop":
        del args[i]
    elif how == "double":
        args.insert(i, args[i])
    elif how == "swap":
        args[i], args[j] = args[j], args[i]
    else:
        entry["kwargs"] = {rng.choice(["bias", "x", "self", "dtype"]): args.pop()}
    return how, entry["name"], i, j


def change_reference(document, rng):
    found = [(c, k) for c, k, _ in places(document["nodes"]) if k == "node"]
    container, key = rng.choice(found)
    container[key] = rng.choice(document["nodes"])["name"]
    return "reference", container[key]


def change_target(document, rng):
    calls = [n for n in document["nodes"] if n["op"] == "call_function"]
    entry = rng.choice(calls)
    entry["target"] = rng.choice(
        [*(n["target"] for n in calls), "aten.cat.default", "operator.getitem", "aten.sym_size.int"]
    )
    return "target", entry["name"], entry["target"]


def change_nodes(document, rng):
    nodes = document["nodes"]
    i, j = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    how = rng.choice(["drop", "double", "swap", "rename"])
    if how == "drop":
        del nodes[i]
    elif how == "double":
        nodes.insert(i, copy.deepcopy(nodes[i]))
    elif how == "swap":
        nodes[i], nodes[j] = nodes[j], nodes[i]
    else:
        nodes[i]["name"] = rng.choice(["x", "class", "a b", nodes[j]["name"]])
    return how, i, j


def drop_entry(document, rng):
    container, key, path = rng.choice(places(document))
    if path[0] in ("format", "schema", "versions"):
        return "nothing", path
    del container[key]
    return "entry", path


CHANGES = (
    change_value,
    change_value,
    change_arguments,
    change_reference,
    change_target,
    change_nodes,
    drop_entry,
)


class Writes(torch.nn.Module):
    """It writes into a tensor of a dict and into a tensor, adds an entry to a list, and returns a container that it was given."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, table, total):
        y = self.linear(x)
        table["rows"].append(y)
        table["sum"].add_(y)
        total.copy_(y)
        return y, table, total


def arguments():
    return torch.ones(4, 8), {"rows": [torch.zeros(4, 8)], "sum": torch.zeros(4, 8)}, torch.zeros(4, 8)


def change_effects(effects, rng):
    container, key, path = rng.choice(places(effects))
    how = rng.choice(["value", "value", "drop", "double"])
    if how == "value":
        container[key] = copy.deepcopy(
            rng.choice([*VALUES, [0], [[0, 0]], [[[0], [0, 9]]], [[[1], [2]]], -1, 7])
        )
    elif how == "drop":
        del container[key]
    elif isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    return how, path


def test_changed_effects_are_refused_or_run(tmp_path):
    config = nc.StaticQuantConfig()
    model = Writes().eval()
    q = nc.quantize(
        model,
        config,
        lambda p: p(*arguments()),
        example_inputs=arguments(),
        measure=False,
        backend="reference",
    )
    q.save(tmp_path / "saved")
    original = json.loads((tmp_path / "saved" / "model.json").read_text())
    assert original["signature"]["effects"]["written"]
    refused = 0
    for seed in range(max(COUNT, 150)):
        rng = random.Random(f"effects {seed}")  # which change to try
        document = copy.deepcopy(original)
        effects = document["signature"]["effects"]
        whats = [change_effects(effects, rng) for _ in range(rng.choice([1, 1, 2])) if effects]
        sign(tmp_path / "saved", document)
        try:
            load(tmp_path / "saved", backend="reference")(*arguments())
        except (ArtefactError, InputError):
            refused += 1
        except Exception as error:  # anything else is what this test is about
            pytest.fail(f"{whats}: {type(error).__name__}: {error}")
    assert refused > 50
    document = copy.deepcopy(original)
    keys = document["signature"]["effects"]["after"]["items"][1]["keys"]
    for wrong in ([[1]], keys[1]):
        keys[0] = wrong
        sign(tmp_path / "saved", document)
        with pytest.raises(ArtefactError, match="not what nc writes"):
            load(tmp_path / "saved", backend="reference")


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_a_changed_artefact_is_refused_or_runs(name, backend, tmp_path):
    if backend == "native" and (why := lacks(name)):
        pytest.skip(why)
    load(KEPT / name, backend="reference").save(tmp_path / "saved")
    try_changes(name, backend, tmp_path)


@pytest.mark.parametrize("name", ["rows", "rows in bf16"])
def test_a_changed_artefact_with_linears_of_rows_is_refused_or_runs(name, tmp_path):
    if why := get_backend("native").why_unavailable() or (lacks("static") if "bf16" in name else ""):
        pytest.skip(why)
    config = (
        nc.StaticQuantConfig(w_dtype="bf16", act_dtype="bf16") if "bf16" in name else nc.DynamicQuantConfig()
    )
    q = quantized(Attention(32, 4).eval(), torch.randn(2, 9, 32), config, "reference")
    q.save(tmp_path / "saved")
    try_changes(name, "native", tmp_path)


def try_changes(name, backend, tmp_path):
    """Change the artefact `saved` in many ways; each is refused, or runs."""
    original = json.loads((tmp_path / "saved" / "model.json").read_text())
    folder = shutil.copytree(tmp_path / "saved", tmp_path / "changed")
    failures, refused = [], 0
    for seed in range(COUNT):
        rng = random.Random(f"{name} {seed}")  # which change to try
        document = copy.deepcopy(original)
        what = rng.choice(CHANGES)(document, rng)
        sign(folder, document)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = load(folder, backend=backend, verify="off")
                model(*model.graph.example)
                str(model.report())
                model.report().text(details=True)
        except ArtefactError:
            refused += 1
        except Exception as error:  # anything else is what this test is about
            failures.append(f"seed {seed}: {what}: {type(error).__name__}: {str(error)[:160]}")
    assert not failures, "\n".join(failures)
    assert refused > COUNT // 3

"""Files of nc that were damaged, or written to do harm: a typed error or a warning, and nothing is lost.

Bits that flipped, ends that are missing, values of other types, numbers that no float holds, lists inside
lists, other names, no file, or something else in its place.
"""

import contextlib
import json
import os
import random
import shutil
import warnings

import pytest
import torch
from models import MLP, prepared_for, quantized

import nc
import nc.interchange
from nc.cli.inputs import read_config
from nc.hf import checksums
from nc.reports.front_page import section
from nc.tuning.choices import Choices, Taken, _name
from nc.tuning.front import Front, FrontPoint, read_front
from nc.tuning.low_bit_costs import LayerCosts
from nc.tuning.trials import Result, Trials

#: `NC_MUTATIONS=1000` tries that many of each kind.
COUNT = int(os.environ.get("NC_MUTATIONS", "20"))
X = torch.randn(4, 16)
KEY, OTHER = {"model": "a", "threads": 2}, {"model": "b", "threads": 2}
RESULT = Result(metric=0.9, sqnr_db=31.5, fp32_ratio=2.0, ms=1.5, spread=(1.9, 2.1), weight_bytes=100)
COSTS = LayerCosts(noise={"a": {"int4": 1.0}}, sizes={"a": {"int4": 5.0}})
#: Put into the place of a value; none of them is one that json.dumps would write.
RAW = [
    *("null", "true", "false", '"0.9"', "-1", "0", "[]", "{}", '""', "1e400", "-1e400", "NaN", "Infinity"),
    *('"\\ud800"', '"\\u202e\\u001b[2J"', '{"a": 1, "a": 2}', "[1, [2]]", "1.5", "9" * 400, "9" * 5000),
    *("[" * 150 + "]" * 150, "[" * 100_000, '{"a":' * 5000, '"' + "x" * 100_000 + '"', "2024-01-01", "'a'"),
]


def trial(folder):
    trials = Trials(folder)
    found = trials.find(KEY)
    assert found is None or (found.ms >= 0 and found.fp32_ratio >= 0)
    trials.keep(KEY, RESULT)
    trials.read({**KEY, "estimates": 1}, LayerCosts.from_dict)
    trials.write({**KEY, "estimates": 1}, {"noise": {}, "sizes": {}})


def cache(folder):
    choices = Choices(folder / "cache.json")
    choices.find(KEY)
    choices.keep(KEY, Taken(None, "again"))


def config(folder):
    errors = []
    for read in (nc.StaticQuantConfig.from_json_file, nc.WeightOnlyConfig.from_json_file, read_config):
        for path in folder.iterdir():
            with contextlib.suppress(nc.NCError):
                read(path)
                continue
            errors.append(path.name)
    if len(errors) > 2:  # each class refuses the file of the other
        raise nc.ConfigError(str(errors))


def record(folder):
    checksums.is_ours(folder)
    checksums.check(folder)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Folders of whole files, and what reads them."""
    torch.manual_seed(0)
    base = tmp_path_factory.mktemp("whole")
    places = {name: base / name for name in KINDS}
    for place in places.values():
        place.mkdir()
    trials = Trials(places["trials"])
    trials.keep(KEY, RESULT)
    trials.write({**KEY, "estimates": 1}, {"noise": dict(COSTS.noise), "sizes": dict(COSTS.sizes)})
    choices = Choices(places["cache"] / "cache.json")
    choices.keep(KEY, Taken(nc.StaticQuantConfig(), "why"))
    choices.keep(OTHER, Taken(nc.DynamicQuantConfig(), "why"))
    point = FrontPoint(name="fp32", config=nc.StaticQuantConfig.all_float(), result=RESULT, drop=0.0)
    Front(measured=(point,), notes=("a note",)).save(places["front"] / "front.json")
    ruled = nc.StaticQuantConfig(act_algo="mse").set_local("fc1", nc.StaticQuantConfig.all_float())
    ruled.to_json_file(places["config"] / "a.json")
    nc.WeightOnlyConfig("int4", group_size=32, solver=nc.GPTQ()).to_json_file(places["config"] / "b.json")
    for number in range(3):
        (places["record"] / f"{number}.txt").write_text(f"text {number}")
    checksums.write(places["record"])
    prepared = prepared_for(MLP(), X)
    prepared.statistics.save(places["statistics"] / "s.safetensors")
    int8 = nc.WeightOnlyConfig("int8", group_size=-1)
    calls = nc.prepare(MLP().eval(), int8)
    calls(X)
    calls.statistics.save(places["calls"] / "c.safetensors")
    nc.save(quantized(MLP().eval(), X, None, "reference"), places["artefact"] / "m")
    low_bit = nc.quantize(MLP().eval(), int8, measure=False)
    nc.save(low_bit, places["low-bit artefact"] / "m")
    nc.export_weights(low_bit, places["weights"])
    read = {
        "trials": trial,
        "cache": cache,
        "front": lambda folder: section(read_front(folder / "front.json")),
        "config": config,
        "record": record,
        "statistics": lambda folder: prepared.statistics.load(folder / "s.safetensors"),
        "calls": lambda folder: calls.statistics.load(folder / "c.safetensors"),
        "artefact": lambda folder: nc.load(folder / "m", backend="reference"),
        "low-bit artefact": lambda folder: nc.load(folder / "m", model=MLP()),
        "weights": lambda folder: nc.interchange.read_weights(folder),
    }
    return {name: (places[name], read[name]) for name in KINDS}


KINDS = (
    *("trials", "cache", "front", "config", "record", "statistics", "calls", "artefact", "low-bit artefact"),
    "weights",
)


def _places(value, path=()):
    """Return where the values of a JSON document are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


def _changed_json(rng, text):
    """Return a document with another value, without a key, or with another key."""
    document = json.loads(text)
    *above, last = rng.choice(_places(document)[1:] or [(0,)])
    owner = document
    for key in above:
        owner = owner[key]
    how = rng.choice(["value", "value", "value", "removed", "renamed", "more"])
    if how == "value":
        owner[last] = "@here@"
        return json.dumps(document).replace('"@here@"', rng.choice(RAW))
    if how == "removed":
        del owner[last]
    elif isinstance(owner, dict):
        owner[f"{last}x"] = owner.pop(last) if how == "renamed" else 1
    return json.dumps(document)


def _changed_bytes(rng, data):
    data = bytearray(data)
    match rng.randrange(4):
        case 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            at = rng.randrange(len(data))
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        case _:
            at = rng.randrange(len(data))
            del data[at : at + rng.randrange(1, 9)]
    return bytes(data)


def _changed_header(rng, data):
    """Return a safetensors file with another header of the right length."""
    length = int.from_bytes(data[:8], "little")
    header = _changed_json(rng, data[8 : 8 + length]).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def damage(rng, folder):
    """Change one file of a folder, or what has its name."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = path.read_bytes()
    how = rng.randrange(10)
    if how < 5 and path.suffix == ".json":
        path.write_text(_changed_json(rng, data), encoding="utf-8")
    elif how < 5 and path.suffix == ".safetensors":
        path.write_bytes(_changed_header(rng, data))
    elif how < 8:
        path.write_bytes(_changed_bytes(rng, data))
    else:
        path.unlink()
        match rng.randrange(5):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(path)
            case 2:
                os.mkfifo(path)
            case 3:
                path.write_bytes(rng.choice([b"", b"{", b"null", b"[]", b"\xff\xfe", b"\x00" * 4096]))


def contents(folder):
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def check_nothing_is_lost(name, before, after):
    """A damaged trial gets another name; other choices stay; all other files are only read."""
    if name == "trials":
        left = list(after)
        for each in before:
            damaged = each in left
            if damaged:
                left.remove(each)
            assert damaged or json.loads(each)["key"] in (KEY, {**KEY, "estimates": 1})
    elif name == "cache" and before != after:
        old, new = (json.loads(each[0])["choices"] if each else {} for each in (before, after))
        mine = _name(KEY)
        assert all(new[key] == entry for key, entry in old.items() if key != mine)
    else:
        assert before == after


def tried(kinds, name, seed, tmp_path):
    """Damage a copy, and read it; returns what came of it."""
    whole, read = kinds[name]
    folder = tmp_path / f"{seed}"
    shutil.copytree(whole, folder)
    damage(random.Random(f"{name} {seed}"), folder)
    before = contents(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            read(folder)
            found = "read"
        except nc.NCError as error:
            found = f"{type(error).__name__}: {error}"
    assert name not in ("trials", "cache") or found == "read" or str(folder) in found
    check_nothing_is_lost(name, before, contents(folder))
    shutil.rmtree(folder)
    return found, [each for each in said if issubclass(each.category, nc.NCWarning)]


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(kinds, name, tmp_path):
    found = [tried(kinds, name, seed, tmp_path) for seed in range(COUNT)]
    assert any(text != "read" or said for text, said in found), "nothing was damaged"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files(kinds, name, tmp_path):
    for seed in range(2000):
        tried(kinds, name, seed, tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_whole_files_are_read(kinds, name, tmp_path):
    whole, read = kinds[name]
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", nc.NCWarning)
        read(folder)

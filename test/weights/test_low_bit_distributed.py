"""Low-bit weights with several processes.

Three of this machine, started with this file as their program, go through all cases once.

Tensors are those of one process bit for bit: sums over tokens are made in another order, which float64 hides
here.
"""

import datetime
import hashlib
import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from models import run_as_rank, run_ranks
from suites.small_llama import random_llama
from torch import nn

import nc
from nc import (
    GPTQ,
    CalibrationError,
    ConfigError,
    InputError,
    NCError,
    StateError,
    StaticQuantConfig,
    WeightOnlyConfig,
)
from nc.modules.statistics import InputStatistics
from nc.weights.shared_work import add

pytestmark = pytest.mark.once
WORLD = 3
INT4 = {"w_dtype": "int4", "group_size": 32}
CONFIGS = {
    "gptq": WeightOnlyConfig(**INT4, solver=GPTQ(), lm_head="int8", embedding="int8"),
    "gptaq": WeightOnlyConfig("int3", group_size=32, solver=GPTQ(two_sided="gptaq"), scale_dtype="e8m0"),
    "wls": WeightOnlyConfig(**INT4, solver=GPTQ(order="none")).set_local(
        ".*mlp.*", WeightOnlyConfig("nf4", group_size=32)
    ),
    "awq": WeightOnlyConfig(**INT4, solver=GPTQ(), transforms=[nc.AWQ(grid=3, tokens=60)]),
    "smooth-teq": WeightOnlyConfig(**INT4, transforms=[nc.Smooth(), nc.TEQ(steps=3, tokens=60)]),
    "rotation": WeightOnlyConfig(**INT4, solver=GPTQ(), transforms=[nc.Rotation()]),
    "autoround": WeightOnlyConfig(**INT4, solver=nc.AutoRound(steps=10, samples=6, batch=3)),
}
#: Of nine samples the first one of each rank.
SPLITS = {
    "even": (0, 3, 6),
    "uneven": (0, 1, 8),
    "first-empty": (0, 0, 4),
    "last-empty": (0, 5, 9),
    "only-last": (0, 0, 0),
}


def llama():
    model = random_llama(intermediate_size=96, tie_word_embeddings=True)
    with torch.no_grad():  # rows that differ, so that transforms have something to do
        for norm in (m for name, m in model.named_modules() if name.endswith("layernorm")):
            norm.weight.copy_(torch.linspace(0.2, 3, 64))
    return model


def texts():
    """Nine calls: other lengths, and one with padding."""
    generator = torch.Generator().manual_seed(1)
    calls = [{"input_ids": torch.randint(0, 100, (2, 6 + i), generator=generator)} for i in range(9)]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    calls[4]["attention_mask"] = mask
    return calls


def prepared(config, calls, model=None):
    result = nc.prepare(model or llama(), config)
    for call in calls:
        result(**call)
    return result


class Odd(nn.Module):
    """Linears behind one another; the second one only sees inputs with a positive first value."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, x, note=None):
        x = self.blocks[0](x)
        if x[0, 0] > 0:
            x = x + self.blocks[1](x)
        return self.blocks[2](x)


def rows(count=6):
    return torch.randn(count, 16, 32, generator=torch.Generator().manual_seed(2))


class Ranks:
    """The program: what one rank does; what the tests want to know of it goes to `folder`."""

    def __init__(self, rank, folder):
        self.rank, self.folder, self.told = rank, folder, {}

    def run(self):
        torch.set_num_threads(1)
        if self.rank == 0:
            for name, config in CONFIGS.items():
                nc.save(nc.convert(prepared(config, texts())), self.folder / f"{name}-alone")
            self.odd("alone", rows())
        self.start(WORLD)
        for name, config in CONFIGS.items():
            self.converted(name, config, "uneven" if name != "gptq" else "even", WORLD)
        for split in [s for s in SPLITS if s != "even"]:
            self.converted("gptq", CONFIGS["gptq"], split, WORLD)
        self.odd("three", rows()[2 * self.rank : 2 * self.rank + 2])
        self.twice()
        self.no_data_needed()
        self.mixed()
        self.refusals()
        dist.barrier()
        dist.destroy_process_group()
        if self.rank == 2:
            return
        self.start(2)
        self.converted("gptq", CONFIGS["gptq"], "last-empty", 2)
        self.refusals_of_two()

    def start(self, world):
        timeout = datetime.timedelta(seconds=240)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store{world}",
            rank=self.rank,
            world_size=world,
            timeout=timeout,
        )

    def mine(self, split, world=WORLD):
        starts = (*SPLITS[split][:world], 9)
        return texts()[starts[self.rank] : starts[self.rank + 1]]

    def converted(self, name, config, split, world):
        model = prepared(config, self.mine(split, world))
        nc.save(nc.convert(model), self.folder / f"{name}-{split}-{world}-{self.rank}")

    def odd(self, name, data):
        config = WeightOnlyConfig(**INT4, solver=GPTQ())
        model = nc.prepare(Odd().eval(), config)
        for batch in data:
            model(batch, note="a text")
        nc.save(nc.convert(model), self.folder / f"odd-{name}-{self.rank}")

    def twice(self):
        model = prepared(CONFIGS["gptq"], self.mine("even")[:1])
        nc.convert(model)
        for call in self.mine("even")[1:]:
            model(**call)
        nc.save(nc.convert(model), self.folder / f"twice-{self.rank}")

    def no_data_needed(self):
        if self.rank == 1:  # the others do not convert, and nobody waits
            nc.save(nc.quantize(llama(), WeightOnlyConfig(**INT4)), self.folder / "no-data")

    def mixed(self):
        config = StaticQuantConfig() + WeightOnlyConfig(**INT4, solver=GPTQ(), white_list=["0"])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
        both = nc.prepare(model, config, example_inputs=rows()[0], backend="reference")
        for batch in rows()[2 * self.rank : 2 * self.rank + 2]:
            both(batch)
        nc.save(nc.convert(both), self.folder / f"mixed-{self.rank}")

    def refusals(self):
        config, mine, last = CONFIGS["gptq"], self.mine("even"), self.rank == 2
        self.refused(
            "configuration",
            prepared(WeightOnlyConfig(**INT4, solver=GPTQ(damp=0.1)) if last else config, mine),
        )
        model = llama()
        with torch.no_grad():
            model.model.norm.weight[0] += last * 1e-6
        self.refused("weights", prepared(config, mine, model))
        self.refused("nothing", prepared(config, []))
        bad = nc.prepare(Odd().eval(), WeightOnlyConfig(**INT4, solver=GPTQ()))
        for batch in rows()[2 * self.rank : 2 * self.rank + 2]:
            bad(torch.full_like(batch, torch.nan) if last else batch)
        self.refused("nan", bad)
        object_ = nc.prepare(Odd().eval(), WeightOnlyConfig(**INT4, solver=GPTQ()))
        object_(rows()[0], note=Ranks if self.rank == 1 else None)
        self.refused("object", object_)
        solver = nc.prepare(Odd().eval(), WeightOnlyConfig("nf4", group_size=32, solver=Refusing()))
        solver(rows()[0])
        self.refused("solver", solver)
        nc.save(
            nc.convert(prepared(config, mine)), self.folder / f"after-{self.rank}"
        )  # the group still works

    def refusals_of_two(self):
        if self.rank == 0:  # rank 1 ends early
            self.refused("end", prepared(CONFIGS["gptq"], self.mine("last-empty", 2)))

    def refused(self, what, model):
        try:
            nc.convert(model)
        except NCError as error:
            self.told[what] = [type(error).__name__, str(error)]


class Refusing(GPTQ):
    """It solves nothing."""

    def solve(self, problem):
        msg = f"no {problem.name}"
        raise ConfigError(msg)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, WORLD, folder, 900)
    return folder


def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def tensors(folder):
    return safetensors.torch.load_file(folder / "weights.safetensors")


def same_tensors(one, other):
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])] == []


def results(folder):
    layers = json.loads((folder / "model.json").read_text())["layers"]
    return {
        name: (r["solver"], r["tokens"], pytest.approx(r["loss"], rel=1e-9))
        for name, layer in layers.items()
        if (r := layer["result"])
    }


def applied(folder):
    """What transforms did, with the errors that they saw."""
    return json.loads((folder / "model.json").read_text())["record"]["applied"]


CASES = [(name, "even" if name == "gptq" else "uneven") for name in CONFIGS] + [
    ("gptq", s) for s in SPLITS if s != "even"
]


@pytest.mark.parametrize(("name", "split"), CASES)
def test_three_processes_make_what_one_makes(folder, name, split):
    ranks = [folder / f"{name}-{split}-3-{rank}" for rank in range(3)]
    assert digest(ranks[0]) == digest(ranks[1]) == digest(ranks[2])
    assert same_tensors(ranks[0], folder / f"{name}-alone")
    assert results(ranks[0]) == results(folder / f"{name}-alone")
    assert applied(ranks[0]) == applied(folder / f"{name}-alone")


def test_two_processes_make_what_one_makes(folder):
    assert digest(folder / "gptq-last-empty-2-0") == digest(folder / "gptq-last-empty-2-1")
    assert same_tensors(folder / "gptq-last-empty-2-0", folder / "gptq-alone")


def test_the_configurations_make_different_models(folder):
    assert len({json.dumps(digest(folder / f"{name}-alone")) for name in CONFIGS}) == len(CONFIGS)
    for name in ("awq", "smooth-teq"):
        assert any(
            "sets scaled, output the same" in done["text"] for done in applied(folder / f"{name}-alone")
        )


def test_a_layer_that_only_some_processes_reach(folder):
    assert digest(folder / "odd-three-0") == digest(folder / "odd-three-1") == digest(folder / "odd-three-2")
    assert same_tensors(folder / "odd-three-0", folder / "odd-alone-0")
    tokens = {name: result[1] for name, result in results(folder / "odd-three-0").items()}
    assert tokens["blocks.0"] == tokens["blocks.2"] == 96
    assert 0 < tokens["blocks.1"] < 96


def test_converting_twice_counts_nothing_twice(folder):
    assert digest(folder / "twice-0") == digest(folder / "twice-2") == digest(folder / "gptq-even-3-0")


def test_without_data_a_process_converts_alone(folder):
    assert (folder / "no-data").is_dir()


def test_beside_another_strategy(folder):
    assert digest(folder / "mixed-0") == digest(folder / "mixed-1") == digest(folder / "mixed-2")


@pytest.mark.parametrize("case", ["configuration", "weights"])
def test_processes_with_different_models_are_all_told_so(folder, case):
    for rank in range(3):
        kind, text = told(folder, rank)[case]
        assert kind == "StateError"
        assert text.startswith(f"Rank 2 has another {case} than rank 0, so that there is no common model.")


def test_no_data_at_all(folder):
    assert all(
        told(folder, rank)["nothing"][1].startswith("Nothing was calibrated: gptq needs data")
        for rank in range(3)
    )


@pytest.mark.parametrize(
    ("case", "failing", "kind", "text"),
    [
        ("nan", 2, "CalibrationError", "Layer 'blocks.0': its input holds NaN"),
        ("object", 1, "InputError", "cannot be saved, or sent to other processes"),
        ("solver", 0, "ConfigError", "no blocks.0"),
    ],
)
def test_what_fails_on_one_process_fails_on_all(folder, case, failing, kind, text):
    for rank in range(3):
        found, message = told(folder, rank)[case]
        assert text in message
        assert found == (kind if rank == failing else "StateError")
        assert message.startswith(f"Rank {failing} stopped: {kind}: ") is (rank != failing)


def test_the_group_works_after_a_refusal(folder):
    assert digest(folder / "after-0") == digest(folder / "after-2") == digest(folder / "gptq-even-3-0")


def test_a_process_that_ended(folder):
    assert "The ranks could not exchange their statistics" in told(folder, 0)["end"][1]


def told(folder, rank):
    return json.loads((folder / f"told-{rank}.json").read_text())


# ---- sums, in one process ----


def sums(x, y=None):
    found = InputStatistics.empty(x.shape[-1], hessian=True, cross=y is not None)
    found.add(x, y)
    return found


def test_merged_sums_are_those_of_all_tokens_in_float64():
    torch.manual_seed(0)
    x, y = torch.randn(2, 60, 8)
    whole = {"a": sums(x[:7], y[:7])}
    for part in (slice(7, 8), slice(8, 8), slice(8, 60)):
        add(whole, ["a"], sums(x[part], y[part]))
    found, wide, cross = whole["a"], x.double(), (y.double() - x.double()).T @ x.double()
    assert found.tokens == 60
    assert torch.allclose(found.absolute, wide.abs().sum(0), rtol=1e-12)
    assert torch.allclose(found.squares, wide.square().sum(0), rtol=1e-6)
    assert torch.allclose(found.outer, wide.T @ wide, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.cross, cross, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.largest, x.abs().amax(0))


def test_layers_share_sums_as_long_as_they_read_one_tensor_everywhere():
    x = torch.randn(4, 8)
    one = sums(x[:1])
    whole = {"q": one, "k": one, "up": sums(x[:1])}
    add(whole, ["q", "k"], sums(x[1:2]))
    assert whole["q"] is whole["k"] is one
    add(whole, ["q"], sums(x[2:3]))
    add(whole, ["k", "down"], sums(x[3:]))
    assert whole["q"] is not whole["k"]
    expected = {"q": x[:3], "k": x[[0, 1, 3]], "up": x[:1], "down": x[3:]}
    for name, seen in expected.items():
        assert whole[name].tokens == len(seen)
        assert torch.allclose(whole[name].squares, seen.double().square().sum(0), rtol=1e-6)


# ---- files ----


def artefact(model, path):
    nc.save(nc.convert(model), path)
    return digest(path)


def test_saved_and_merged_calls_make_what_one_process_makes(tmp_path):
    config, calls = CONFIGS["gptq"], texts()
    expected = artefact(prepared(config, calls), tmp_path / "one")
    prepared(config, calls[3:]).statistics.save(tmp_path / "second.safetensors")
    first = prepared(config, calls[:3])
    first.statistics.merge(tmp_path / "second.safetensors")
    assert artefact(first, tmp_path / "merged") == expected
    first.statistics.save(tmp_path / "all.safetensors")
    loaded = prepared(config, calls[5:6])
    loaded.statistics.load(tmp_path / "all.safetensors")
    assert artefact(loaded, tmp_path / "loaded") == expected
    both = prepared(config, calls[:5])
    both.statistics.merge(prepared(config, calls[5:]).statistics)
    assert artefact(both, tmp_path / "both") == expected
    assert artefact(prepared(config, calls[:3]), tmp_path / "less") != expected


def test_saved_calls_serve_other_configurations_and_keep_their_arguments(tmp_path):
    model, path = Odd().eval(), tmp_path / "calls.safetensors"
    one = nc.prepare(model, CONFIGS["gptq"])
    one(rows()[0], note=(1, None, 2.5, {"a": [True, "text"]}))
    one.statistics.save(path)
    other = nc.prepare(model, WeightOnlyConfig("int3", group_size=32, solver=GPTQ(two_sided="gptaq")))
    other.statistics.load(path)
    ((x,), kwargs) = other.samples[0].call
    assert torch.equal(x, rows()[0])
    assert kwargs == {"note": (1, None, 2.5, {"a": [True, "text"]})}
    assert nc.convert(other).blocks[0].result.tokens == 16


def test_files_of_other_models_and_damaged_ones_are_refused(tmp_path):
    path = tmp_path / "calls.safetensors"
    one = prepared(CONFIGS["gptq"], texts()[:1])
    one.statistics.save(path)
    other = llama()
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    for call in ("load", "merge"):
        with pytest.raises(
            StateError, match=r"of another model, or of other weights: 'model.norm.weight' differs"
        ):
            getattr(prepared(CONFIGS["gptq"], [], other).statistics, call)(path)
    with pytest.raises(StateError, match=r"statistics in the other model are of another model"):
        one.statistics.merge(prepared(CONFIGS["gptq"], [], other).statistics)
    with pytest.raises(
        InputError, match=r"merge\(\) takes the statistics of another prepared model, or a file, but got int"
    ):
        one.statistics.merge(3)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(nc.ArtefactCorruptError, match="its checksum differs"):
        one.statistics.load(path)
    with pytest.raises(nc.ArtefactMissingError, match="no such file"):
        one.statistics.load(tmp_path / "none")
    static = nc.prepare(Odd().blocks[0], StaticQuantConfig(), example_inputs=rows()[0], backend="reference")
    static(rows()[0])
    path.unlink()
    static.statistics.save(path)
    with pytest.raises(
        nc.ArtefactSchemaError,
        match="expected nc-calibration-calls of schema version 1, but got 'nc-statistics'",
    ):
        one.statistics.load(path)
    assert len(one.samples) == 1


def test_arguments_that_no_file_holds_are_refused(tmp_path):
    one = nc.prepare(Odd().eval(), CONFIGS["gptq"])
    one(rows()[0], note=Odd)
    with pytest.raises(InputError, match=r"Odd.*Call the prepared model with tensors, numbers and strings"):
        one.statistics.save(tmp_path / "calls")
    assert not (tmp_path / "calls").exists()


def test_infinite_inputs_are_refused():
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        sums(torch.tensor([[1.0, torch.inf]]))


if __name__ == "__main__":
    run_as_rank(Ranks, int(sys.argv[1]), Path(sys.argv[2]))

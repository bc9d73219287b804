"""Calibration on several ranks.

Two processes of this machine, started with this file as their program, go through all cases once.
"""

import datetime
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import FP32, MLP, Function, run_as_rank, run_ranks
from torch import nn

from nc import StateError, StaticQuantConfig, convert, prepare, save

RANKS = (0, 1)
ALGORITHMS = ("minmax", "mse", "moving_average")


def data():
    """40 batches, the last of which are wider.

    4 rows each, so that either half is less than what is kept for bias correction.
    """
    torch.manual_seed(1)
    batches = torch.randn(40, 4, 16)
    batches[37:] *= 3
    return batches


def prepared(algo="mse", batches=(), model=None, example=None, config=None):
    torch.manual_seed(0)
    config = config or StaticQuantConfig(act_algo=algo)
    result = prepare(
        (model or MLP()).eval(),
        config,
        example_inputs=torch.ones(2, 16) if example is None else example,
        backend="reference",
    )
    for batch in batches:
        result(batch)
    return result


def content(model):
    found = model.statistics.collected()
    states = {key: {name: t.tolist() for name, t in state.items()} for key, state in found.states.items()}
    return states, found.seen, [[t.tolist() for t in batch] for batch in found.samples]


class Ranks:
    """The program: what one rank does; what the tests want to know of it goes to `folder`."""

    def __init__(self, rank, folder):
        self.rank, self.folder, self.told = rank, folder, {}

    def run(self):
        torch.set_num_threads(1)
        if self.rank == 0:
            for algo in ALGORITHMS:
                save(convert(prepared(algo, data())), self.folder / f"{algo}-alone")
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/store", rank=self.rank, world_size=2, timeout=timeout
        )
        mine = data()[20 * self.rank : 20 * self.rank + 20]
        for algo in ALGORITHMS:
            save(convert(prepared(algo, mine)), self.folder / f"{algo}-{self.rank}")
        self.twice(mine)
        save(convert(prepared("mse", data() if self.rank else ())), self.folder / f"empty-first-{self.rank}")
        save(convert(prepared("mse", () if self.rank else data())), self.folder / f"empty-last-{self.rank}")
        self.differences(mine)
        if self.rank == 1:  # a rank that ends early
            return
        self.refused("end", prepared("mse", mine))

    def twice(self, mine):
        model = prepared("mse", mine[:10])
        before = content(model)
        convert(model)
        self.told["unchanged"] = content(model) == before
        for batch in mine[10:]:
            model(batch)
        save(convert(model), self.folder / f"twice-{self.rank}")

    def differences(self, mine):
        other = self.rank == 1
        more = Function(lambda self, x: self.fc(x).relu(), fc=nn.Linear(16, 8)) if other else MLP()
        self.refused("model", prepared("mse", mine, model=more))
        torch.manual_seed(5 + self.rank)
        self.refused("weights", prepared("mse", mine, model=MLP()))
        self.refused(
            "rule",
            prepared(
                "mse",
                mine,
                config=StaticQuantConfig(act_algo="mse").set_local("fc2", FP32) if other else None,
            ),
        )
        self.refused(
            "post",
            prepared("mse", mine, config=StaticQuantConfig(act_algo="mse", post=()) if other else None),
        )
        self.refused("example", prepared("mse", mine, example=mine[0]))
        self.refused("nothing", prepared("mse"))
        save(convert(prepared("mse", mine)), self.folder / f"after-{self.rank}")  # the group still works

    def refused(self, what, model):
        try:
            convert(model)
        except StateError as error:
            self.told[what] = str(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, len(RANKS), folder, 400)
    return folder


def told(folder, rank):
    return json.loads((folder / f"told-{rank}.json").read_text())


def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_rank_gets_the_same_artefact(folder, algo):
    assert digest(folder / f"{algo}-0") == digest(folder / f"{algo}-1")


@pytest.mark.parametrize("algo", ["minmax", "mse"])
def test_it_is_that_of_one_process_that_saw_all_the_data(folder, algo):
    assert digest(folder / f"{algo}-0") == digest(folder / f"{algo}-alone")
    assert digest(folder / "minmax-0") != digest(folder / "mse-0")
    health = json.loads((folder / f"{algo}-0" / "model.json").read_text())["health"]
    assert "in the last 4 of 40 batches" in next(f["text"] for f in health if f["kind"] == "still_growing")


def test_converting_twice_counts_nothing_twice(folder):
    assert told(folder, 0)["unchanged"] is told(folder, 1)["unchanged"] is True
    assert digest(folder / "twice-0") == digest(folder / "twice-1")
    # each rank's samples come in a row, as in the merge above: convert did not mix the first halves
    assert digest(folder / "twice-0") == digest(folder / "mse-alone")


@pytest.mark.parametrize("which", ["empty-first", "empty-last"])
def test_a_rank_without_data(folder, which):
    assert digest(folder / f"{which}-0") == digest(folder / f"{which}-1") == digest(folder / "mse-alone")


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("model", "model"),
        ("weights", "weights"),
        ("rule", "configuration, backend or CPU"),
        ("post", "configuration, backend or CPU"),
        ("example", "example_inputs"),
    ],
)
def test_ranks_with_different_models_are_all_told_so(folder, case, what):
    for rank in RANKS:
        text = told(folder, rank)[case]
        assert text.startswith(
            f"Rank 1 has another {what} than rank 0, so that there is no common model. Give prepare() the "
            "same"
        )


def test_no_data_at_all(folder):
    for rank in RANKS:
        assert told(folder, rank)["nothing"].startswith("Nothing was calibrated")


def test_the_group_works_after_a_refusal(folder):
    assert digest(folder / "after-0") == digest(folder / "after-1") == digest(folder / "mse-alone")


LIFE_OF_A_GROUP = """
import os, sys, torch, nc
import torch.distributed as dist
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
nc.prepare(torch.nn.Linear(4, 4), nc.DynamicQuantConfig(), example_inputs=torch.ones(2, 4), backend="reference")
before = threads()
dist.destroy_process_group()
print(before - threads())
"""


def test_the_group_can_be_destroyed(tmp_path):
    """Threads of a group that outlives this call can abort the process at its end, as they take the lock of an interpreter that is gone."""
    command = [sys.executable, "-c", LIFE_OF_A_GROUP, str(tmp_path / "store")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 2


def test_a_rank_that_ended(folder):
    assert "The ranks could not exchange their statistics" in told(folder, 0)["end"]
    assert "end" not in told(folder, 1)


if __name__ == "__main__":
    run_as_rank(Ranks, int(sys.argv[1]), Path(sys.argv[2]))

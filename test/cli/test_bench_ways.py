"""`nc bench --cores`: ways to share cores among processes."""

import importlib.util
import json
import os
import shlex

import pytest
import torch
from click.testing import CliRunner

import nc
from nc.cli.main import main
from nc.cli.split import CoreSplit, command

CORES = len(os.sched_getaffinity(0))


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x, y):
        return self.linear(x) + y


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("ways") / "m"
    x = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    q = nc.quantize(Rows().eval(), nc.StaticQuantConfig(), lambda m: m(*x), example_inputs=x, measure=False)
    nc.save(q, place)
    return place


def run(*words):
    return CliRunner().invoke(main, ["bench", *map(str, words)])


@pytest.mark.once
@pytest.mark.skipif(CORES < 2, reason="one core")
def test_each_way_is_measured_and_the_best_is_named(folder, tmp_path):
    (tmp_path / "mix.txt").write_text("8\n16\n\n3x24x16\n")
    done = run(folder, "--cores", 2, "--lengths", tmp_path / "mix.txt", "--seconds", 0.5, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    shown = [(way["engine"] == "openvino", way["instances"], way["cores"]) for way in told["ways"]]
    peer = [(True, 1, 2)] if importlib.util.find_spec("openvino") else []
    assert shown == [(False, 1, 2), (False, 2, 1), *peer]
    assert all(way["per_second"] > 10 and 0 < way["p50_ms"] <= way["p95_ms"] for way in told["ways"])
    ours = [way for way in told["ways"] if way["engine"] != "openvino"]
    assert told["best"] == max(ours, key=lambda way: way["per_second"])
    lines = told["start"].splitlines()
    assert len(lines) == told["best"]["instances"]
    assert all(str(folder) in line for line in lines)


def test_servers_that_are_started_share_no_core_and_no_port(tmp_path):
    lines = command(CoreSplit("native", 2, 2, 1.0, 1.0, 1.0), tmp_path, [0, 1, 4, 5]).splitlines()
    words = [shlex.split(line.removesuffix("&")) for line in lines]
    assert [line[line.index("-c") + 1] for line in words] == ["0,1", "4,5"]
    ports = [line[i + 1] for line in words for i, word in enumerate(line) if word.endswith("_port")]
    assert len(set(ports)) == len(ports) == 4
    assert all(line[0] == "OMP_NUM_THREADS=2" for line in words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cores", 999), "may use"),
        (("--cores", 1, "--threads", 1), "does not go with"),
        (("--instances", "one"), "expected numbers, as 1,2"),
        (("--instances", "999"), "each needs one"),
        (("--instances", "0"), "each needs one"),
        (("--lengths", "long\n"), "line 1: expected a length"),
        (("--lengths", "4\n1x2\n"), "line 2: expected a length"),
        (("--lengths", "\n"), "no line"),
    ],
)
def test_what_can_not_be_measured_is_an_error(folder, tmp_path, words, says):
    option, value, *more = words
    if option == "--lengths":
        value = tmp_path / "mix.txt"
        value.write_text(words[1])
    done = run(folder, option, value, *more, "--seconds", 0.2)
    assert done.exit_code == 2
    assert says in done.stderr

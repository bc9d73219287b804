"""Statistics that outlive a process: saved, loaded, merged, and refused where they do not fit."""

import json
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from models import FP32, MLP, TEST, ResidualCNN, prepared_for
from torch import nn

from nc import (
    ArtefactCorruptError,
    ArtefactMissingError,
    ArtefactSchemaError,
    ConfigError,
    InputError,
    StateError,
    StaticQuantConfig,
    convert,
    prepare,
)
from nc.calibration.statistics import read
from nc.observers import ALGORITHMS, RangeAlgorithm

HISTOGRAMS = [name for name, a in ALGORITHMS.items() if a.statistic.name == "histogram"]


def prepared(model, algo="mse", data=()):
    result = prepare(
        model, StaticQuantConfig(act_algo=algo), example_inputs=torch.ones(2, 16), backend="reference"
    )
    for batch in data:
        result(batch)
    return result


def same_graph(a, b):
    buffers = zip(a.graph.module.named_buffers(), b.graph.module.named_buffers(), strict=True)
    return a.graph.module.code == b.graph.module.code and all(
        n == m and torch.equal(s, t) for (n, s), (m, t) in buffers
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MLP().eval()


@pytest.fixture
def data():
    return list(torch.randn(6, 4, 16))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_what_is_loaded_converts_to_the_same_model(model, data, algo, tmp_path):
    today = prepared(model, algo, data)
    today.statistics.save(tmp_path / "s.safetensors")
    tomorrow = prepared(model, algo)
    tomorrow.statistics.load(tmp_path / "s.safetensors")
    assert same_graph(convert(today), convert(tomorrow))
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


@pytest.mark.parametrize("algo", ["minmax", *HISTOGRAMS])
def test_another_algorithm_without_running_the_data_again(model, data, algo, tmp_path):
    prepared(model, "percentile", data).statistics.save(tmp_path / "s")
    other = prepared(model, algo)
    other.statistics.load(tmp_path / "s")
    assert same_graph(convert(other), convert(prepared(model, algo, data)))


@pytest.mark.parametrize("algo", ["minmax", "mse"])
def test_merged_halves_are_the_whole_bit_for_bit(model, data, algo, tmp_path):
    first, second = prepared(model, algo, data[:2]), prepared(model, algo, data[2:])
    second.statistics.save(tmp_path / "second")
    whole = convert(prepared(model, algo, data))
    first.statistics.merge(tmp_path / "second")
    assert same_graph(convert(first), whole)
    third = prepared(model, algo, data[:2])
    third.statistics.merge(second.statistics)
    assert same_graph(convert(third), whole)


def test_calibration_goes_on_after_loading(model, data, tmp_path):
    prepared(model, "mse", data[:3]).statistics.save(tmp_path / "s")
    resumed = prepared(model, "mse")
    resumed.statistics.load(tmp_path / "s")
    for batch in data[3:]:
        resumed(batch)
    assert same_graph(convert(resumed), convert(prepared(model, "mse", data)))


CHILD = """
import sys, torch
from models import MLP
from nc import StaticQuantConfig, convert, prepare, save
torch.manual_seed(0)
p = prepare(MLP().eval(), StaticQuantConfig(act_algo="mse"), example_inputs=torch.ones(2, 16), backend="reference")
p.statistics.load(sys.argv[1])
save(convert(p), sys.argv[2])
"""


def test_another_process(model, data, tmp_path):
    from nc import save

    today = prepared(model, "mse", data)
    today.statistics.save(tmp_path / "s")
    save(convert(today), tmp_path / "here")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "s", tmp_path / "there"],
        cwd=TEST,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "weights.safetensors").read_bytes() == (
        tmp_path / "there" / "weights.safetensors"
    ).read_bytes()
    assert (tmp_path / "here" / "model.json").read_bytes() == (tmp_path / "there" / "model.json").read_bytes()


# ---- what does not fit ----


def test_minmax_holds_no_histogram(model, data, tmp_path):
    prepared(model, "minmax", data).statistics.save(tmp_path / "s")
    other = prepared(model, "kl", data[:1])
    before = convert(other)
    with pytest.raises(StateError, match=r"holds extremes of the input of operator 'fc1'.*needs 'histogram'"):
        other.statistics.load(tmp_path / "s")
    assert same_graph(convert(other), before)


def test_a_histogram_gives_no_moving_average(model, data, tmp_path):
    prepared(model, "kl", data).statistics.save(tmp_path / "s")
    with pytest.raises(StateError, match="holds histogram of .* needs 'moving_average'"):
        prepared(model, "moving_average").statistics.load(tmp_path / "s")


def test_an_operator_that_the_other_run_left_in_fp32(model, data, tmp_path):
    config = StaticQuantConfig(act_algo="mse").set_local("fc2", FP32)
    part = prepare(model, config, example_inputs=torch.ones(2, 16), backend="reference")
    part(data[0])
    part.statistics.save(tmp_path / "s")
    with pytest.raises(StateError, match="holds nothing of the input of operator 'fc2'"):
        prepared(model, "mse").statistics.load(tmp_path / "s")
    part.statistics.load(tmp_path / "s")
    prepared(model, "mse", data).statistics.save(tmp_path / "all")
    part.statistics.load(tmp_path / "all")  # more than is needed is fine


def test_other_weights_and_other_models_are_refused(model, data, tmp_path):
    prepared(model, "mse", data).statistics.save(tmp_path / "s")
    trained = MLP().eval()
    with pytest.raises(StateError, match="of another model, or of other weights: 'fc1_bias' differs"):
        prepared(trained, "mse").statistics.load(tmp_path / "s")
    with pytest.raises(StateError, match="of another model"):
        prepared_for(ResidualCNN(), torch.randn(2, 3, 8, 8)).statistics.load(tmp_path / "s")


def test_a_missing_file(model, tmp_path):
    with pytest.raises(ArtefactMissingError, match="there is no such file"):
        prepared(model).statistics.load(tmp_path / "none")


def test_any_altered_byte_is_found(model, data, tmp_path):
    prepared(model, "mse", data).statistics.save(tmp_path / "s")
    raw = (tmp_path / "s").read_bytes()
    assert read(tmp_path / "s").states
    step = max(1, len(raw) // 300)
    for at in [*range(0, 1500, 7), *range(0, len(raw), step), len(raw) - 1]:
        (tmp_path / "bad").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises((ArtefactCorruptError, ArtefactSchemaError)):
            read(tmp_path / "bad")
    for size in (0, 5, 100, len(raw) // 2, len(raw) - 1):
        (tmp_path / "bad").write_bytes(raw[:size])
        with pytest.raises(ArtefactCorruptError):
            read(tmp_path / "bad")


def test_a_newer_schema_and_another_format(tmp_path):
    from nc.calibration.tensor_file import checksum

    for document in (
        {"format": "nc-statistics", "schema_version": 2},
        {"format": "other", "schema_version": 1},
    ):
        text = json.dumps(document)
        tensors = {"x": torch.zeros(1)}
        safetensors.torch.save_file(tensors, tmp_path / "s", {"nc": text, "sha256": checksum(text, tensors)})
        with pytest.raises(ArtefactSchemaError, match="expected nc-statistics of schema version 1"):
            read(tmp_path / "s")
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "s")
    with pytest.raises(ArtefactCorruptError, match="not what nc writes"):
        read(tmp_path / "s")


def test_a_failing_write_leaves_the_earlier_file(model, data, tmp_path, monkeypatch):
    today = prepared(model, "mse", data)
    today.statistics.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        today.statistics.save(tmp_path / "s")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s").read_bytes() == before


# ---- an algorithm of the user's own ----


def test_an_algorithm_of_ones_own(model, data):
    half = RangeAlgorithm(
        "half", ALGORITHMS["minmax"].statistic, lambda state, spec: (state["low"] / 2, state["high"] / 2)
    )
    try:
        q = convert(prepared(model, half, data))
        assert "half" in str(q.graph.plan)
        full = convert(prepared(model, "minmax", data))
        halves, wholes = (
            [n.args[1] for n in m.graph.module.graph.nodes if n.name.startswith("quantize")]
            for m in (q, full)
        )
        assert halves == pytest.approx([s / 2 for s in wholes], rel=1e-5)
        config = StaticQuantConfig(act_algo="half")
        assert StaticQuantConfig.from_dict(config.to_dict()) == config
        assert StaticQuantConfig(act_algo=half) == config
        with pytest.raises(ConfigError, match="'half' is the name of another algorithm"):
            StaticQuantConfig(act_algo=RangeAlgorithm("half", half.statistic, lambda state, spec: None))
        with pytest.raises(ConfigError, match="'minmax' is the name of another algorithm"):
            StaticQuantConfig(act_algo=RangeAlgorithm("minmax", half.statistic, half.find_range))
    finally:
        ALGORITHMS.pop("half")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_algorithms_meet_on_one_model(algo, data):
    """Two rules, two algorithms for one tensor: each operator reads codes of its own range."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x):
            return self.a(x), self.b(x)

    config = StaticQuantConfig(act_algo=algo).set_local(
        "b", StaticQuantConfig(act_algo="percentile", percentile=80.0)
    )
    p = prepare(Two().eval(), config, example_inputs=torch.ones(2, 16), backend="reference")
    for batch in data:
        p(batch)
    scales = {n.args[1] for n in convert(p).graph.module.graph.nodes if n.name.startswith("quantize")}
    assert len(scales) == 2


def test_constants_that_are_not_finite(tmp_path):
    """A causal mask is full of -inf."""

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

        def forward(self, x):
            h = self.fc(x)
            return torch.softmax(h @ h.transpose(-1, -2) + self.mask, -1) @ h

    x = torch.randn(2, 8, 16)
    today, tomorrow = (
        prepare(Causal().eval(), StaticQuantConfig(), example_inputs=x, backend="reference") for _ in range(2)
    )
    today.graph.module.load_state_dict(tomorrow.graph.module.state_dict())
    today(x)
    today.statistics.save(tmp_path / "s")
    tomorrow.statistics.load(tmp_path / "s")
    assert tomorrow.statistics.collected().seen == today.statistics.collected().seen


def test_merge_takes_statistics_and_files_only():
    prepared = prepare(
        nn.Linear(4, 4).eval(), StaticQuantConfig(), example_inputs=torch.randn(2, 4), backend="reference"
    )
    with pytest.raises(InputError, match="merge.. takes the statistics of another prepared model"):
        prepared.statistics.merge(3)

"""Small mistakes of users: each message says what was given and what to write."""

import numpy as np
import pytest
import torch
from models import MLP
from torch import nn

import nc
from nc import DynamicQuantConfig, StaticQuantConfig, WeightOnlyConfig

X = torch.randn(8, 16)
LABELS = torch.zeros(8, dtype=torch.long)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, LABELS), batch_size=4)


def prepared():
    return nc.prepare(MLP().eval(), StaticQuantConfig(), example_inputs=X, backend="reference")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda m: [m(batch) for batch in LOADER],
            r"It is a list of 2: if the batch holds labels, call model\(batch\[0\]\)",
        ),
        (
            lambda m: [m(*batch) for batch in LOADER],
            r"takes at most 1 positional argument \(x\), but got 2\. .*labels",
        ),
        (lambda m: m({"x": X}), r"Did you mean model\(\*\*inputs\)\?"),
        (lambda m: m(X.numpy()), r"got ndarray\. Call torch\.from_numpy\(\)"),
        (lambda m: m(X[0]), r"one sample, index it with \[None\]"),
        (lambda m: m(X, output_hidden_states=True), r"'output_hidden_states' was not in example_inputs"),
    ],
)
def test_batches(call, says):
    with pytest.raises(nc.InputError, match=says):
        call(prepared())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            next(iter(LOADER)),
            r"2 were given, and forward takes 1 \(x\).*without labels: example_inputs=batches\[0\]",
        ),
        ([X, X, X], r"3 were given, and forward takes 1 \(x\)"),
        ((8, 16), r"If that is a shape, give a tensor: torch\.randn\(8, 16\)"),
        (X.numpy(), r"got ndarray\. Call torch\.from_numpy\(\)"),
        ({"x": np.ones((2, 16))}, r"hold no tensor; .*torch\.from_numpy\(\)"),
        (LOADER, r"got DataLoader\. For one of its batches: next\(iter\(\.\.\.\)\)"),
        ((X for _ in range(2)), r"got generator\. For one of its batches"),
    ],
)
def test_examples(given, says):
    with pytest.raises(nc.InputError, match=says):
        nc.prepare(MLP().eval(), StaticQuantConfig(), example_inputs=given)


@pytest.mark.parametrize("config", ["auto", StaticQuantConfig()], ids=["auto", "static"])
def test_no_run_fn(config):
    with pytest.raises(
        nc.StateError, match=r"got no run_fn, and this configuration needs calibration data.*run_fn=lambda"
    ):
        nc.quantize(MLP().eval(), config, example_inputs=X, backend="reference")


def test_a_run_fn_that_calls_another_model():
    model = MLP().eval()
    with pytest.raises(nc.StateError, match="run_fn did not call the model that it was given"):
        nc.quantize(model, StaticQuantConfig(), lambda _: model(X), example_inputs=X, backend="reference")


def test_what_needs_no_data_needs_no_run_fn():
    assert nc.quantize(MLP().eval(), DynamicQuantConfig(), example_inputs=X, measure=False)(X).shape[0] == 8
    assert nc.quantize(MLP().eval(), WeightOnlyConfig("int8", group_size=-1), measure=False)(X).shape[0] == 8


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["parallel", "compiled"]
)
def test_wrapped_models(wrap):
    """Names are those of the model inside, so that rules fit; the model itself is compiled by nobody."""
    model = MLP().eval()
    config = StaticQuantConfig().exclude("fc1")
    plan = nc.describe(wrap(model), config, example_inputs=X, backend="reference")
    assert {d.operator for d in plan.decisions} >= {"fc1", "fc2"}
    q = nc.quantize(wrap(model), config, lambda m: m(X), example_inputs=X, backend="reference")
    assert q(X).shape == model(X).shape


def test_a_distributed_model(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plan = nc.describe(
            nn.parallel.DistributedDataParallel(MLP().eval()),
            StaticQuantConfig(),
            example_inputs=X,
            backend="reference",
        )
        assert {d.operator for d in plan.decisions} >= {"fc1", "fc2"}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("fc*", r"write 'fc\.\*'"),
        ("*c1", r"For the glob write '\.\*c1'"),
        ("fc", r"write 'fc\.\*'"),
        ("fc?", r"write 'fc\.'"),
    ],
)
def test_globs_and_beginnings(key, says):
    with pytest.raises((nc.UnmatchedRuleError, nc.PatternError), match=says):
        nc.describe(MLP().eval(), StaticQuantConfig().exclude(key), example_inputs=X)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("int8", r'"auto", or a dict.*Did you mean "auto" or StaticQuantConfig\(\)\?'),
        ("int4", r'Did you mean WeightOnlyConfig\("int4"\)\?'),
        (MLP(), r"but got a MLP\. The model comes first"),
    ],
)
def test_configurations(config, says):
    with pytest.raises(nc.ConfigError, match=says):
        nc.prepare(MLP().eval(), config, example_inputs=X)


def test_a_model_without_weights():
    with torch.device("meta"):
        model = MLP().eval()
    with pytest.raises(nc.InputError, match=r"on device meta, so it has no values: load the weights first"):
        nc.prepare(model, StaticQuantConfig(), example_inputs=X)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("PostTrainingQuantConfig", r"Neural Compressor 2\.x; here write StaticQuantConfig\(\)"),
        ("AccuracyCriterion", r"write TuningConfig\(tolerable_loss=…\)"),
        ("StaticQuantConfg", r"Did you mean 'StaticQuantConfig'\?"),
        ("xyzzy", r"no attribute 'xyzzy'\.$"),
    ],
)
def test_names(name, says):
    with pytest.raises(AttributeError, match=says):
        getattr(nc, name)


def test_a_search_that_calibrates_nothing():
    with pytest.raises(nc.StateError, match="run_fn did not call the prepared model"):
        nc.tune(MLP().eval(), X, lambda _: None, lambda _: 1.0)


def test_only_what_needs_data_is_named():
    config = WeightOnlyConfig("int4", group_size=16, transforms=[nc.AWQ()])
    with pytest.raises(nc.StateError, match="Nothing was calibrated: awq needs data"):
        nc.convert(nc.prepare(MLP().eval(), config))


def test_other_doors(tmp_path):
    """What transformers wrote, and text that is generated, have doors of their own."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(nc.ArtefactMissingError, match="folder of a float model, load it with transformers"):
        nc.load(tmp_path)
    q = nc.quantize(MLP().eval(), DynamicQuantConfig(), example_inputs=X, backend="reference")
    with pytest.raises(AttributeError, match="To generate text take WeightOnlyConfig"):
        q.generate(X)


def test_sizes_to_warm_up(tmp_path):
    nc.save(
        nc.quantize(MLP().eval(), DynamicQuantConfig(), example_inputs=X, backend="reference"), tmp_path / "m"
    )
    with pytest.raises(nc.InputError, match=r"such as \[\(1, 128\), \(8, 64\)\], but one of them is 8"):
        nc.load(tmp_path / "m", warm=[8, 32])


class ByNumPy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MLP()

    def forward(self, x):
        return torch.from_numpy(self.inner(x).detach().numpy() * 2)


def test_numpy_in_a_model():
    with pytest.raises(nc.CaptureError, match="numpy") as caught:
        nc.prepare(ByNumPy().eval(), StaticQuantConfig(), example_inputs=X)
    assert "write that place with operators of torch" in str(caught.value)
    assert "branch or loop" not in str(caught.value)

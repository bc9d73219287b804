"""Small models shared by the tests, and the few helpers that every test file would repeat."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from nc import StaticQuantConfig, convert, prepare
from nc.capture.capture import capture
from nc.errors import BackendUnavailableError
from nc.kernels.onednn.providers import provider
from nc.numerics.metrics import sqnr_db

TEST = Path(__file__).parent


def _why_no_plans():
    try:
        provider()
    except BackendUnavailableError as error:
        return str(error)
    return ""


#: Why `native` has no oneDNN library to make plans with, in its own words; "" where it has. For tests of what
#: only plans do.
WHY_NO_PLANS = _why_no_plans()
FP32 = StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")


class OwnLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2.0


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class ResidualCNN(nn.Module):
    """Stem with a pool, one residual block, average pool and classifier: ResNet in small."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.avg, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)
        settle(self)

    def forward(self, x):
        x = self.pool(F.relu(self.bn(self.stem(x))))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avg(F.relu(x + y)), 1))


class Attention(nn.Module):
    """Self-attention through `scaled_dot_product_attention`, with the mask that the test wants."""

    def __init__(self, dim=32, heads=4, **options):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.heads, self.options = heads, options

    def forward(self, x, mask=None):
        q, k, v = (
            f(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return self.out(self.join(y.transpose(1, 2)))

    def join(self, y):
        """Heads side by side."""
        return y.reshape(*y.shape[:2], -1)


class FlattenedAttention(Attention):
    def join(self, y):
        return y.flatten(2)


class Conv1dNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 6, 3, stride=2)

    def forward(self, x):
        return self.conv2(F.gelu(self.conv1(x)))


class Conv3dNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv2(F.relu(self.conv1(x)))


class TransposeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = (
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        )

    def forward(self, x):
        return self.up(F.relu(self.down(x)))


class Function(nn.Module):
    """A module whose forward is one function of `self` and tensors, with submodules given as keywords."""

    def __init__(self, function, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.forward = types.MethodType(function, self)


def settle(model):
    """Give batch norms statistics and weights as after training, so that folding them changes numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.5)
    return model


def call(model, inputs):
    """Call with a tensor, positional arguments or keywords, as `example_inputs` has it."""
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def tensors(outputs):
    """The float tensors of any output structure."""
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def run_graph(graph, *args, **kwargs):
    with torch.no_grad():
        return graph.signature.unflatten(graph.module(*graph.signature.bind(args, kwargs)))


def graph_of(model, *args, **kwargs):
    return capture(model.eval(), kwargs or args)


def quantizable(graph):
    return [op.name for op in graph.operators if op.quantizable]


def prepared_for(model, inputs, config=None, backend="reference", batches=1, **options):
    """Prepared and calibrated on the example."""
    prepared = prepare(
        model.eval(), config or StaticQuantConfig(), example_inputs=inputs, backend=backend, **options
    )
    for _ in range(batches):
        call(prepared, inputs)
    return prepared


def library():
    """The oneDNN library that plans use; the test is skipped where there is none."""
    if WHY_NO_PLANS:
        pytest.skip(WHY_NO_PLANS)
    return provider()


def assert_planned(report):
    """A plan runs the model; where there is no library for plans, the report says this and nothing else."""
    assert report.details.get("run by", "") == (f"TorchScript: {WHY_NO_PLANS}" if WHY_NO_PLANS else "")


def assert_all_int8(report):
    """All that was asked to be int8 is, by a plan.

    Without plans all but products of two activations and transposed convolutions.
    """
    assert_planned(report)
    others = [
        op
        for op in report.not_int8
        if not (WHY_NO_PLANS and (op.kind == "matmul" or op.kind.startswith("conv_transpose")))
    ]
    assert not others


def quantized(model, inputs, config=None, backend="reference", **options):
    """Prepared, calibrated on the example and converted; the engine's first run is trusted, for speed."""
    prepared = prepared_for(model, inputs, config, backend)
    return (
        convert(prepared, **options)
        if backend == "reference"
        else convert(prepared, **{"isolate": "never", **options})
    )


def worst_db(expected, got):
    """Smallest SQNR over all float outputs."""
    pairs = list(zip(tensors(expected), tensors(got), strict=True))
    assert pairs
    return min(sqnr_db(a, b) for a, b in pairs)


def assert_same_but_for_ties(expected, got):
    """Most rows of a batch to the precision of fp32, and none further away than one code.

    A value within the precision of fp32 of a tie is rounded to either side, one in 10^5 or so, so that a row
    of a batch now and then differs by one code. A kernel that is wrong is wrong in more rows than that.
    """
    rows = [sqnr_db(a, b) for a, b in zip(expected, got, strict=True)]
    assert len(rows) >= 8
    assert sorted(rows)[len(rows) // 4] > 100
    assert min(rows) > 35


def assert_close(expected, got, relative):
    """Every float output within `relative` of the largest expected value."""
    for a, b in zip(tensors(expected), tensors(got), strict=True):
        assert a.shape == b.shape
        assert not a.isnan().any()
        assert (a - b).abs().max() <= relative * a.abs().max().clamp(min=1e-9)


def path():
    """Return `PYTHONPATH` for a child process that imports these modules."""
    return os.pathsep.join([str(TEST), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_as_rank(ranks, rank, folder):
    """Run the program of a test file as one rank; what it was told goes to a file."""
    program = ranks(rank, folder)
    program.run()
    (folder / f"told-{rank}.json").write_text(json.dumps(program.told))
    os._exit(0)  # without the group's farewell, which waits for the other ranks


def run_ranks(file, count, folder, timeout):
    """Run a test file as a program once for each rank, with the rank and a folder as its arguments.

    All must end well.
    """
    options = {
        "env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path()},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    processes = [
        subprocess.Popen([sys.executable, file, str(rank), str(folder)], **options) for rank in range(count)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()

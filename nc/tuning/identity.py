"""What determines the result of a trial: the model, the data, the metric, the machine and versions."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nc._version import __version__
from nc.backends import available_backends, backend_names, get_backend
from nc.calibration.tensor_file import checksum
from nc.capture.capture import Graph
from nc.config import AnyConfig
from nc.config.auto import AutoConfig
from nc.config.document import plain_values
from nc.kernels import cpu
from nc.tuning.described import UntoldError, described

Metric = Callable[[Any], float]
#: Arguments of a call, by position and by keyword.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Sizes of calibration batches that are timed, the most frequent first.
_MOST_SIZES = 4
#: Of so many calls one is held out, to judge by.
_SHARE = 4


class SeenCalls:
    """What a model was called with: a hash of all inputs, and how often each set of sizes came.

    Attributes:
        sizes: as text → how often they came, and the first inputs.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, Call]] = {}
        self._hash = hashlib.sha256()
        self._untold: UntoldError | None = None

    @property
    def hash(self) -> str:
        """In hex; raises UntoldError where a call held what can't be told apart."""
        if self._untold is not None:
            raise self._untold
        return self._hash.hexdigest()

    def note(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call down; a forward pre-hook."""
        tensors = tensors_of((args, kwargs))
        try:
            self._hash.update(hash_of((args, kwargs)).encode())
        except UntoldError as error:
            self._untold = error
        text = str([tuple(t.shape) for t in tensors.values()])
        count, first = self.sizes.get(text, (0, (args, kwargs)))
        self.sizes[text] = count + 1, first

    def frequent(self) -> list[Call]:
        """Return the inputs of the most frequent sizes."""
        found = sorted(self.sizes.values(), key=lambda each: -each[0])
        return [call for _, call in found[:_MOST_SIZES]]


class KeptCalls(SeenCalls):
    """What a model was called with, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Call] = []

    def note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call down; a forward pre-hook."""
        super().note(module, args, kwargs)
        self.all.append(copied((args, kwargs)))

    def split(self) -> tuple[list[Call], list[Call]]:
        """Return the calls to calibrate with, and those to judge by; of few calls, all are both."""
        if len(self.all) < _SHARE:
            return self.all, self.all
        judged = self.all[1::_SHARE]
        return [call for i, call in enumerate(self.all) if i % _SHARE != 1], judged


def copied(call: Call) -> Call:
    """Return a call with cloned tensors, through which derivatives can be taken."""

    def clone(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    with torch.inference_mode(mode=False):
        made: Call = pytree.tree_map(clone, call)
    return made


def hash_of(values: Any) -> str:
    """Return a hash of a structure: its form, its tensors and its other values; raises UntoldError."""
    return described(values)


def tensors_of(values: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a structure, by position."""
    leaves = pytree.tree_leaves(values)
    return {f"{i:06}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def form_of(graph: Graph) -> str:
    """Return what makes a captured model this one, beside its tensors: its graphs, and how it is called."""
    modules = graph.module.named_modules()
    graphs = [f"{name}: {each.graph}" for name, each in modules if isinstance(each, fx.GraphModule)]
    return "\n".join([*graphs, repr(graph.signature)])


def plain_or_described(config: AnyConfig | AutoConfig) -> Any:
    """Return a configuration as JSON has it, or its hash where JSON can't; raises UntoldError."""
    found = plain_values(config)
    return described(config) if found is None else found


def key_of(
    module: torch.nn.Module,
    form: str,
    backend: str,
    metric: str,
    calibration: str,
    mix: Sequence[Call],
) -> dict[str, Any]:
    """Return what determines a result, beside the configuration.

    Args:
        module: the model.
        form: what beside its tensors makes it this model.
        backend: that was asked for.
        metric: from `metric_of`.
        calibration: hash of the calibration data.
        mix: the calls that are timed.

    Raises:
        UntoldError: a call holds what can't be told apart.
    """
    tensors = {**_constants(module), **dict(module.named_buffers()), **dict(module.named_parameters())}
    return {
        "model": checksum(form, tensors),
        "calibration": calibration,
        "metric": metric,
        "mix": hash_of(list(mix)),
        "backend": backend,
        "engines": [name for name, why_not in available_backends().items() if not why_not],
        "isa": list(cpu.detected()),
        "cpu": hashlib.sha256(" ".join([cpu.model_name(), *sorted(cpu.flags())]).encode()).hexdigest(),
        "threads": torch.get_num_threads(),
        "versions": {"nc": __version__, "torch": torch.__version__, **_engine_versions()},
    }


def metric_of(metric: Metric | None, metric_id: str | None) -> str:
    """Return what tells a metric apart: the user's word for it, or all that it reads; raises UntoldError."""
    if metric is None:
        return "distance to fp32"
    return f"metric_id {metric_id}" if metric_id is not None else described(metric)


def _constants(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors of graphs that are attributes, and neither parameters nor buffers."""
    return {
        f"{prefix}.{name}": value
        for prefix, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, torch.Tensor)
    }


def _engine_versions() -> dict[str, str]:
    found = {}
    for package in {package for name in backend_names() for package in get_backend(name).packages}:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found

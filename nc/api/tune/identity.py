"""What determines the result of a trial: the model, the data, the metric, the machine and versions."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc._version import __version__
from nc.backends import available_backends, cpu
from nc.calibration.tensor_file import checksum

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

    @property
    def hash(self) -> str:
        """In hex."""
        return self._hash.hexdigest()

    def note(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call down; a forward pre-hook."""
        tensors = tensors_of((args, kwargs))
        self._hash.update(hash_of((args, kwargs)).encode())
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
    """Return a call with tensors of its own, which derivatives can be taken through."""

    def clone(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    with torch.inference_mode(mode=False):
        made: Call = pytree.tree_map(clone, call)
    return made


def hash_of(values: Any) -> str:
    """Return a hash of a structure: its form, its tensors, and its other values as text."""
    leaves, form = pytree.tree_flatten(values)
    others = [described(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return checksum(f"{form} {others}", tensors_of(values))


#: Values that are described by their text.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
#: How many objects deep a description goes.
_DEPTH = 4


def described(value: Any, depth: int = _DEPTH) -> str:
    """Return what a value is, alike in other processes: of functions the source and what they hold."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return checksum("", {"": value})
    if not depth:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return str([(described(key, depth - 1), described(each, depth - 1)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return str([described(each, depth - 1) for each in value])
    held: list[Any] = []
    if isinstance(value, functools.partial):
        held = [value.func, value.args, value.keywords]
    elif inspect.isroutine(value):
        cells = getattr(value, "__closure__", None) or ()
        held = [getattr(value, "__self__", None), getattr(value, "__defaults__", None)]
        held += [cell.cell_contents for cell in cells]
    elif not isinstance(value, (type, types.ModuleType)):
        held = [getattr(value, "__dict__", {})]
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
    return f"{name} {_source_of(named)} {[described(each, depth - 1) for each in held]}"


def _source_of(value: Any) -> str:
    """Return a hash of the source of a function or class; that of nothing where there is none."""
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()


def tensors_of(values: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a structure, by position."""
    leaves = pytree.tree_leaves(values)
    return {f"{i:06}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def key_of(
    module: torch.nn.Module,
    form: str,
    backend: str,
    metric: Metric | None,
    calibration: str,
    mix: Sequence[Call],
) -> dict[str, Any]:
    """Return what determines a result, beside the configuration.

    Args:
        module: the model.
        form: what beside its tensors makes it this model.
        backend: that was asked for.
        metric: see `tune`.
        calibration: hash of the calibration data.
        mix: the calls that are timed.
    """
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    return {
        "model": checksum(form, tensors),
        "calibration": calibration,
        "metric": "distance to fp32" if metric is None else described(metric),
        "mix": hash_of(list(mix)),
        "backend": backend,
        "engines": [name for name, why_not in available_backends().items() if not why_not],
        "isa": list(cpu.detected()),
        "cpu": hashlib.sha256(" ".join([cpu.model_name(), *sorted(cpu.flags())]).encode()).hexdigest(),
        "threads": torch.get_num_threads(),
        "versions": {"nc": __version__, "torch": torch.__version__},
    }

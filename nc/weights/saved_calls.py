"""Save, load and merge the calls of a prepared model, and gather those of all processes.

Blocks are solved for inputs that come from the quantized blocks before them. Sums over these inputs exist
only while a model is converted, so the calls that they are made from are kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.calibration import tensor_file
from nc.calibration.ranks import Ranks
from nc.calibration.statistics import magnitudes, refuse_other_weights
from nc.calibration.tensor_file import checksum
from nc.errors import ArtefactError, InputError
from nc.modules.block_calls import Sample
from nc.storage import json_values, pytree_json

_KIND = ("nc-calibration-calls", 1)


class RecordedCalls:
    """The calls of one prepared model, with the names that the statistics of other strategies have.

    Args:
        model: the float model.
        samples: its calls; `load` and `merge` change this list.

    Example:
        >>> import nc, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32,
        32)).eval()
        >>> one, other = (nc.prepare(model, nc.WeightOnlyConfig(group_size=32, solver=nc.GPTQ())) for _ in
        range(2))
        >>> _ = one(torch.randn(64, 32)), other(torch.randn(64, 32))
        >>> other.statistics.save("/tmp/calls.safetensors")
        >>> one.statistics.merge("/tmp/calls.safetensors")
        >>> nc.convert(one)[0].result.tokens
        128
    """

    def __init__(self, model: torch.nn.Module, samples: list[Sample]) -> None:
        self._model, self._samples = model, samples

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all calls to one file. If that fails, an earlier file stays as it was.

        Raises:
            InputError: an argument of a call is something that a file cannot hold.
        """
        document, tensors = _unparsed(self._samples)
        tensor_file.write(path, _KIND, {**document, "weights": magnitudes(_tensors_of(self._model))}, tensors)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the calls of this model by those of a file. The configuration may be another one.

        Raises:
            ArtefactMissingError, ArtefactCorruptError, ArtefactSchemaError: the file is missing, damaged, or
            of a newer version.
            StateError: the file belongs to another model.
        """
        self._samples[:] = self._read(path)

    def merge(self, other: RecordedCalls | str | os.PathLike[str]) -> None:
        """Append the calls of another run.

        The result is that of one run over both, bit for bit.

        Args:
            other: the calls of another prepared model, or a file.

        Raises:
            As `load`.
        """
        if isinstance(other, RecordedCalls):
            theirs, mine = (magnitudes(_tensors_of(m)) for m in (other._model, self._model))
            refuse_other_weights(theirs, mine, "the other model")
            self._samples += list(other._samples)
        elif isinstance(other, (str, os.PathLike)):
            self._samples += self._read(other)
        else:
            msg = (
                "merge() takes the statistics of another prepared model, or a file, but got "
                f"{type(other).__name__}."
            )
            raise InputError(msg)

    def of_all(self, ranks: Ranks, configuration: Callable[[], Any]) -> list[Sample]:
        """Return the calls of all ranks, in the order of the ranks. Those of this object do not change.

        Args:
            ranks: all must call it.
            configuration: JSON that must be the same on every rank; called where there are several.

        Raises:
            StateError: a rank has another model or configuration (raised on every rank), or the group fails.
            InputError: an argument of a call is something that cannot be sent.
        """
        if ranks.alone:
            return list(self._samples)

        def same() -> Mapping[str, bytes]:
            tensors = dict(_tensors_of(self._model))
            shapes = [type(self._model).__qualname__, *((name, list(t.shape)) for name, t in tensors.items())]
            config = json.dumps(configuration(), sort_keys=True, default=str)
            return {
                "model": json.dumps(shapes).encode(),
                "configuration": config.encode(),
                "weights": checksum("", tensors).encode(),
            }

        ranks.agree(same)
        data = b""
        with ranks.together():
            data = tensor_file.encode(_KIND, *_unparsed(self._samples))
        parts = (
            tensor_file.decode(_KIND, part, f"rank {rank}", _parsed)
            for rank, part in enumerate(ranks.each(data))
        )
        return [sample for part in parts for sample in part]

    def _read(self, path: str | os.PathLike[str]) -> list[Sample]:
        def parse(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[Any, list[Sample]]:
            return document["weights"], _parsed(document, tensors)

        weights, samples = tensor_file.decode(_KIND, tensor_file.read(path), str(path), parse)
        refuse_other_weights(weights, magnitudes(_tensors_of(self._model)), str(path))
        return samples


def _tensors_of(model: torch.nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    return [(name, t.detach()) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _unparsed(samples: Sequence[Sample]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """JSON and tensors. Tensors have the numbers of their calls and of their places in the structure."""
    calls: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    for i, sample in enumerate(samples):
        leaves, structure = pytree.tree_flatten(sample.call)
        try:
            plain = [
                None if isinstance(leaf, torch.Tensor) else [json_values.encode(leaf, "A call")]
                for leaf in leaves
            ]
            calls.append({"structure": pytree_json.encode(structure, "arguments of a call"), "leaves": plain})
        except ArtefactError as error:
            msg = (
                f"{error} So the calibration data cannot be saved, or sent to other processes. Call the "
                "prepared model with tensors, numbers and strings, in tuples, lists and dicts; or calibrate "
                "and convert in one process."
            )
            raise InputError(msg) from error
        tensors |= {
            f"{i}.{j}": leaf.contiguous() for j, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        }
        if sample.keep is not None:
            tensors[f"{i}.keep"] = sample.keep
    return {"calls": calls}, tensors


def _parsed(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[Sample]:
    samples = []
    for i, call in enumerate(document["calls"]):
        leaves = [
            tensors[f"{i}.{j}"] if leaf is None else json_values.decode(leaf[0])
            for j, leaf in enumerate(call["leaves"])
        ]
        args, kwargs = pytree.tree_unflatten(leaves, pytree_json.decode(call["structure"], inputs=True))
        samples.append(Sample((tuple(args), dict(kwargs)), tensors.get(f"{i}.keep")))
    return samples

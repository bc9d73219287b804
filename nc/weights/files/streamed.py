"""A model whose weights are in files.

Its parts get values while they are needed, and finished parts go to files again.

Parameters without values are on the meta device, with the shapes and dtypes of the files; tied ones are one
parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactMissingError
from nc.modules.layers import is_low_bit
from nc.numerics.packed_weight import PARTS
from nc.process.malloc import give_back_small_pieces
from nc.storage import folder
from nc.storage.atomic import is_staged, staging_path, write_text, writing
from nc.storage.json_file import json_object, json_value
from nc.storage.marks import described
from nc.storage.tensor_file import FLOATS, Source, StoredTensor, stored_in
from nc.text.json_text import built
from nc.weights.files import artefact

_JOB, _FORMAT = "job.json", "nc-job"


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Which job the finished parts in the folder belong to."""

    format: str
    schema: int
    job: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor is held.

    Attributes:
        module: not kept alive by this: a float layer goes when a low-bit one takes its place.
        table: "_parameters" or "_buffers".
        key: the name there.
        tensor: what is held there; for a part with values what is put there when they go.
    """

    module: weakref.ref[torch.nn.Module]
    table: str
    key: str
    tensor: torch.Tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Hold another tensor; setattr would refuse the parts of packed weights."""
        module = self.module()
        if module is not None:
            getattr(module, self.table)[self.key] = tensor


def _is_own(path: Path) -> bool:
    """Return whether a run has made a file or folder; it may have been killed while it wrote."""
    return path.name == _JOB or is_staged(path) or folder.is_artefact(path)


class StreamedWeights:
    """See `nc.weights.driver.Store`.

    Attributes:
        parts: names of the blocks, and of output heads: what gets values on its own.
        files: where the values of parameters and of finished packed weights are stored. Other values are in
            memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        files: Mapping[str, Source],
        parts: Sequence[str],
        directory: Path,
        job: Any,
    ) -> None:
        self.parts, self.files = tuple(parts), dict[str, Source](files)
        self._model, self._directory, self._job = model, directory, job
        self._loaded: dict[str, list[_Slot]] = {}  # of parts with values: what goes back into the slots
        self._values: Any = WeakIdKeyDictionary()  # empty tensor → its value, so that tied ones get one
        if directory.exists() and self._earlier() != job:
            self._discard()  # it is of another model, configuration or data

    def _earlier(self) -> Any:
        """Return the job of an earlier run whose parts are kept.

        Raises:
            ArtefactError: the folder is something else, or has other files.
        """
        if not any(self._directory.iterdir()):
            return None  # its removal was stopped at the end
        try:
            job = built(_Job, json_value(self._directory / _JOB), "the job")
        except ValueError:
            job = None
        if (
            job is None
            or job.format != _FORMAT
            or not all(_is_own(path) for path in self._directory.iterdir())
        ):
            msg = f"{self._directory} exists and is not a part of an earlier run; move it away."
            raise ArtefactError(msg)
        return job.job

    def load(self, name: str) -> bool:
        """See `Store`."""
        if name in self._loaded:
            return False
        slots = {full: slot for full, slot in self._slots(name).items() if slot.tensor.is_meta}
        for full, slot in slots.items():
            slot.put(self._value(full, slot.tensor))
        self._loaded[name] = list(slots.values())
        return True

    def drop(self, name: str) -> None:
        """See `Store`."""
        for slot in self._loaded.pop(name, []):
            slot.put(slot.tensor)
        give_back_small_pieces()

    def finished(self, name: str) -> bool:
        """See `Store`."""
        path = self._directory / name
        if not path.is_dir():
            return False
        built = artefact.read(folder.read(path), self._model.get_submodule(name))
        parent, _, child = name.rpartition(".")
        setattr(self._model.get_submodule(parent), child, built)
        self._in_files(name)
        return True

    def finish(self, name: str) -> None:
        """See `Store`."""
        path = self._directory / _JOB
        if not path.exists():
            write_text(path, described(_FORMAT, 1, {"job": self._job}), lambda _: False)
        artefact.write(self._model.get_submodule(name), self._directory / name)
        self._in_files(name)

    def settle(self) -> None:
        """See `Store`."""
        empty = {
            name
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter.is_meta
        }
        packed = {
            f"{name}.{part}"
            for name, module in self._model.named_modules()
            if is_low_bit(module)
            for part in PARTS
        }
        self.files = {name: stored for name, stored in self.files.items() if name in empty or name in packed}
        self._loaded.clear()

    def remove(self) -> None:
        """Take away what is kept: the result is complete, and what can't be removed does not matter."""
        with contextlib.suppress(ArtefactError):
            if self._directory.exists():
                self._discard()

    def _discard(self) -> None:
        """Remove the folder of an earlier run, or of this one.

        A part gets the name of one that is not complete first, and the job goes last: a folder whose removal
        was stopped is still known as an earlier run's.

        Raises:
            ArtefactWriteError: a file can't be removed.
        """
        with writing(self._directory):
            for path in self._directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path if is_staged(path) else path.rename(staging_path(path)))
                elif path.name != _JOB:
                    path.unlink()
            (self._directory / _JOB).unlink(missing_ok=True)
            self._directory.rmdir()

    def _slots(self, name: str) -> dict[str, _Slot]:
        """Parameters and parts of packed weights of a part by their full names; of "" what is in no part."""
        inside = tuple(f"{part}." for part in self.parts) if not name else ()
        found: dict[str, _Slot] = {}
        for path, module in self._model.get_submodule(name).named_modules(prefix=name):
            if inside and f"{path}.".startswith(inside):
                continue
            for table, key in _held(module):
                found[f"{path}.{key}".lstrip(".")] = _Slot(
                    weakref.ref(module), table, key, getattr(module, table)[key]
                )
        return found

    def _value(self, name: str, empty: torch.Tensor) -> torch.Tensor:
        known = self._values.get(empty)
        value = None if known is None else known()
        if value is None:
            read = self.files[name].read()
            value = (
                torch.nn.Parameter(read, requires_grad=False)
                if isinstance(empty, torch.nn.Parameter)
                else read.view(empty.dtype)
            )
            self._values[empty] = weakref.ref(value)
        found: torch.Tensor = value
        return found

    def _in_files(self, name: str) -> None:
        """Let a part have its values from the folder of finished ones."""
        self.files = {key: stored for key, stored in self.files.items() if not key.startswith(f"{name}.")}
        self.files |= {
            f"{name}.{key}": stored for key, stored in artefact.stored_tensors(self._directory / name).items()
        }
        empties: dict[int, torch.Tensor] = {}
        slots = self._slots(name).values()
        for slot in slots:
            empties.setdefault(id(slot.tensor), _empty_like(slot.tensor, slot.tensor.dtype))
        self._loaded[name] = [dataclasses.replace(slot, tensor=empties[id(slot.tensor)]) for slot in slots]


def _held(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters of a module, and the parts of its packed weight: the table and the name."""
    parameters, buffers = module._parameters, module._buffers  # named_parameters leaves out ties
    yield from (("_parameters", key) for key, value in parameters.items() if value is not None)
    if is_low_bit(module):
        yield from (("_buffers", key) for key in PARTS if buffers[key] is not None)


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else empty


def shards(source: Path) -> dict[Path, dict[str, StoredTensor]]:
    """Return the tensors of each safetensors file of a folder.

    As transformers does, those of model.safetensors, or that its index names.

    Raises:
        ArtefactMissingError: it has none, or lacks one that is in the index.
        ArtefactCorruptError: a file cannot be read.
    """
    files, index = sorted(source.glob("*.safetensors")), source / "model.safetensors.index.json"
    if source / "model.safetensors" in files:  # others are variants (fp16) or of other tools
        files = [source / "model.safetensors"]
    elif index.is_file():
        named = _indexed(index)
        lacking = named - {path.name for path in files}
        if lacking:
            msg = f"{source} has no {min(lacking)}, which {index.name} names."
            raise ArtefactMissingError(msg)
        files = [path for path in files if path.name in named]
    if not files:
        pickles = (
            " It has pickles (*.bin), which nc does not read: load it in transformers and save it again."
            if any(source.glob("*.bin"))
            else ""
        )
        msg = f"{source} has no *.safetensors files.{pickles}"
        raise ArtefactMissingError(msg)
    return {path: stored_in(path) for path in files}


def _indexed(path: Path) -> set[str]:
    """Return the files that an index names."""
    listed = json_object(path).get("weight_map")
    if not isinstance(listed, dict):
        msg = f"{str(path)!r} has no weight_map. Get it again."
        raise ArtefactCorruptError(msg)
    return {str(name) for name in listed.values()}


def _check_fits(name: str, tensor: torch.Tensor, value: Source) -> None:
    """Raise ArtefactCorruptError for a stored tensor of another shape than the model's, or of codes."""
    if tensor.shape != value.shape:
        msg = f"Tensor {name!r} has shape {value.shape}, and config.json makes it {tuple(tensor.shape)}."
        raise ArtefactCorruptError(msg)
    if tensor.is_floating_point() and value.dtype not in FLOATS:
        msg = (
            f"Tensor {name!r} has dtype {value.dtype}; the files are of a quantized model. Give the float "
            "model."
        )
        raise ArtefactCorruptError(msg)


def take_values_from(model: torch.nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Take the values of all parameters out of a model, which get the dtypes of the files.

    Buffers get their values.

    Ties stay unless the files have other values for the names.

    Args:
        model: the model.
        sources: see `nc.weights.files.transformers_files.sources_of`.

    Returns:
        Where each parameter is stored in the files. Of tied ones, one name is enough.

    Raises:
        ArtefactCorruptError: a tensor is missing, has another shape, or holds no floating-point numbers where
            the model does.
    """
    together: dict[int, list[str]] = {}
    optional = tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    held = model.state_dict(keep_vars=True)  # without buffers that the model computes
    for name, tensor in held.items():
        together.setdefault(id(tensor), []).append(name)
    found: dict[str, Source] = {}
    for names in (same for tied in together.values() for same in _same_values(tied, sources)):
        tensor = held[names[0]]
        value = next((sources[name] for name in names if name in sources), None)
        if (
            value is None
            and not tensor.is_meta
            and not isinstance(tensor, torch.nn.Parameter)
            and _is_optional(names[0], optional)
        ):
            continue
        if value is None:
            msg = (
                f"The files have no tensor {names[0]!r}. They may be of another model, or laid out otherwise "
                "than this version of transformers has it in memory. A model that fits into memory needs no "
                "files: nc.quantize in Python."
            )
            raise ArtefactCorruptError(msg)
        _check_fits(names[0], tensor, value)
        table = "_parameters" if isinstance(tensor, torch.nn.Parameter) else "_buffers"
        held_now = _empty_like(tensor, value.dtype) if table == "_parameters" else value.read()
        for name in names:
            path, _, key = name.rpartition(".")
            getattr(model.get_submodule(path), table)[key] = held_now
            if table == "_parameters":
                found[name] = value
    return found


def _is_optional(name: str, patterns: Sequence[str]) -> bool:
    """Return whether files may lack a buffer, which keeps its first value then.

    Transformers says so, or evaluation does not read it.
    """
    return name.rpartition(".")[2] == "num_batches_tracked" or any(
        re.search(pattern, name) for pattern in patterns
    )


def _same_values(names: Sequence[str], sources: Mapping[str, Source]) -> list[list[str]]:
    """Return the names of a tied tensor, apart where the files have other values for them.

    Transformers 5 does not tie these then.
    """
    given = [name for name in names if name in sources]
    groups = [[name for name in names if name not in given]]
    firsts: list[torch.Tensor] = []
    for name in given:
        value = sources[name].read() if len(given) > 1 else torch.empty(0, dtype=torch.float32)
        at = next(
            (
                i
                for i, one in enumerate(firsts)
                if one.shape == value.shape and torch.equal(one, value.to(one.dtype))
            ),
            len(firsts),
        )
        if at == len(firsts):
            firsts.append(value)
            groups += [[]] if at else []
        groups[at].append(name)
    return [[name for name in names if name in group] for group in groups]

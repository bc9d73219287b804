"""A folder of a transformers model → an artefact with low-bit weights, block by block: the float model need not fit into memory.

Finished blocks are kept in a folder beside the result. A run that was stopped goes on behind the last of them, and gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nc._version import __version__
from nc.config import AnyConfig
from nc.errors import ArtefactCorruptError, ArtefactError, ArtefactMissingError, InputError, UnsupportedError
from nc.lowbit import artefact
from nc.lowbit.blocks import Driver, Progress
from nc.lowbit.record import Sample, block_lists
from nc.lowbit.report import Record
from nc.planning.layer_rules import plan_layers
from nc.storage import folder, pretrained_class
from nc.storage.atomic import replaced

_JOB = "job.json"


def quantize_folder(
    source: Path,
    config: AnyConfig,
    out: Path,
    samples: Sequence[torch.Tensor] = (),
    *,
    progress: Progress | None = None,
    strict: bool = True,
) -> torch.nn.Module:
    """Quantize the weights of a saved transformers model and save the result.

    Args:
        source: a folder with config.json and safetensors files, as `save_pretrained` writes it.
        config: weight-only.
        out: the artefact; `out` with ".partial" behind it holds finished blocks until it is complete.
        samples: token ids, each of shape [batch, length].
        progress: see `nc.convert`.
        strict: as for `nc.prepare`.

    Returns:
        The quantized model.

    Raises:
        ArtefactMissingError, ArtefactCorruptError: the folder lacks a file or a tensor, or a file cannot be read.
        ArtefactError: the class of the model is not one of transformers' auto classes; or something else lies at `out`.
        UnsupportedError: a transform needs the whole model.
        InputError: the configuration needs data, and there is none.
    """
    folder.replaceable(out)
    shards = Shards(source)
    model = _empty(source, len(shards.names))
    plan = plan_layers(config, model, strict=strict)
    whole = next((t.name for t in plan.transforms if t.level == "model"), None)
    if whole is not None:
        msg = f"Transform {whole!r} changes the whole model at once, which a run block by block does not have. Use nc.prepare in Python."
        raise UnsupportedError(msg)
    if plan.needs_data and not samples:
        names = ", ".join(dict.fromkeys(step.algorithm for step in plan.algorithms))
        msg = f"{names} needs calibration data; give some texts."
        raise InputError(msg)
    job = {
        "nc": __version__,
        "torch": torch.__version__,
        "config": config.to_dict(),
        "source": shards.identity,
        "samples": _digest(samples),
    }
    store = Blocks(model, shards, out.with_name(out.name + ".partial"), job)
    lists = block_lists(model, [d.operator for d in plan.quantized])
    store.load_rest([name for names in lists for name in names])
    driver = Driver(model, plan, [Sample(((ids,), {})) for ids in samples], progress, store)
    for one in (model.config, model.generation_config):  # blocks are called several times, so none may keep keys and values
        one.use_cache = False
    driver.run()
    for one in (model.config, model.generation_config):
        one.use_cache = True
    model.__dict__["nc_record"] = Record(plan=plan.to_dict(), applied=tuple(driver.applied), config=config.to_dict())
    artefact.write(model.eval(), out)
    store.remove()
    quantized: torch.nn.Module = model
    return quantized


class Shards:
    """The tensors of a folder's safetensors files, read one by one.

    Attributes:
        names: of all tensors → the file.
        identity: name, size and time of each file; another identity is another model.
    """

    def __init__(self, source: Path) -> None:
        files = sorted(source.glob("*.safetensors"))
        if not files:
            pickles = (
                " It has pickles (*.bin), which nc does not read: load it in transformers and save it again."
                if any(source.glob("*.bin"))
                else ""
            )
            msg = f"{source} has no *.safetensors files.{pickles}"
            raise ArtefactMissingError(msg)
        self.names = {name: path for path in files for name in _names(path)}
        self.identity = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in (*files, source / "config.json")]

    def find(self, name: str, prefix: str) -> torch.Tensor | None:
        """A tensor by its name in the model; files of a base model have names without its prefix."""
        for key in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            if key in self.names:
                with safe_open(self.names[key], "pt") as opened:
                    found: torch.Tensor = opened.get_tensor(key)
                    return found
        return None


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        msg = f"{path} cannot be read: {error}."
        raise ArtefactCorruptError(msg) from error


class Blocks:
    """Fills blocks from shards, and keeps finished ones; see `nc.lowbit.blocks.Store`."""

    def __init__(self, model: torch.nn.Module, shards: Shards, directory: Path, job: dict[str, Any]) -> None:
        self._model, self._shards, self._directory = model, shards, directory
        self._prefix = str(getattr(model, "base_model_prefix", "model"))
        self._loaded: set[str] = set()
        path = directory / _JOB
        if directory.exists() and (not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != job):
            if not path.is_file():
                msg = f"{directory} exists and is not a part of an earlier run; move it away."
                raise ArtefactError(msg)
            shutil.rmtree(directory)  # of another model, configuration or data
        self._job = job

    def load_rest(self, blocks: Sequence[str]) -> None:
        """Fill everything outside of some blocks; tied weights stay tied."""
        inside = tuple(f"{name}." for name in blocks)
        tied: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # the first one is kept, so that no other gets its id
        for name, module in self._model.named_modules():
            if f"{name}.".startswith(inside or ("\0",)):
                continue
            for part, parameter in module._parameters.items():  # noqa: SLF001 - named_parameters leaves out ties
                if parameter is not None and id(parameter) not in tied:
                    full = f"{name}.{part}" if name else part
                    tied[id(parameter)] = parameter, self._parameter(full, module, part)
                if parameter is not None:
                    module._parameters[part] = tied[id(parameter)][1]  # noqa: SLF001

    def load(self, name: str, module: torch.nn.Module) -> None:
        """See `Store`."""
        if name in self._loaded:
            return
        self._loaded.add(name)
        for path, part in list(module.named_modules()):
            for key in [k for k, p in part._parameters.items() if p is not None]:  # noqa: SLF001
                part._parameters[key] = self._parameter(".".join(filter(None, (name, path, key))), part, key)  # noqa: SLF001

    def _parameter(self, name: str, module: torch.nn.Module, part: str) -> torch.nn.Parameter:
        found = self._shards.find(name, self._prefix)
        if found is None:
            msg = f"The files have no tensor {name!r}. They may be of another model, or laid out as another version of transformers had it."
            raise ArtefactCorruptError(msg)
        expected = module._parameters[part]  # noqa: SLF001
        if expected is not None and expected.shape != found.shape:
            msg = f"Tensor {name!r} has shape {tuple(found.shape)}, and config.json makes it {tuple(expected.shape)}."
            raise ArtefactCorruptError(msg)
        return torch.nn.Parameter(found.clone(), requires_grad=False)  # out of the file's mapping

    def finished(self, name: str, module: torch.nn.Module) -> torch.nn.Module | None:
        """See `Store`."""
        path = self._directory / name
        return artefact.read(folder.read(path), module) if path.is_dir() else None

    def finish(self, name: str, module: torch.nn.Module) -> None:
        """See `Store`."""
        path = self._directory / _JOB
        if not path.exists():
            with replaced(path) as staged:
                staged.write_text(json.dumps(self._job), encoding="utf-8")
        artefact.write(module, self._directory / name)

    def remove(self) -> None:
        """Take away what is kept: the result is complete."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _empty(source: Path, tensors: int) -> Any:
    """The model of a folder's config.json, without weights."""
    path = source / "config.json"
    if not path.is_file():
        msg = f"{source} has no config.json; give a folder that transformers' save_pretrained wrote."
        raise ArtefactMissingError(msg)
    data = json.loads(path.read_text(encoding="utf-8"))
    classes = data.get("architectures") or []
    if len(classes) != 1:
        msg = f"{path} names no single class under 'architectures', but {classes}."
        raise ArtefactError(msg)
    generation = source / "generation_config.json"
    description = {
        "class": classes[0],
        "config": data,
        "generation_config": json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else None,
        "attention": None,
    }
    return pretrained_class.build(description, tensors)


def _digest(samples: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for ids in samples:
        digest.update(str(tuple(ids.shape)).encode() + ids.to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()

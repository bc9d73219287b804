"""Models of transformers ↔ the name of their class and their configuration.

A model is rebuilt without weights.

Only a model class that a file of transformers' own package defines is accepted, so what is called is
transformers' own code, never that of an artefact or of a hub. Options that would fetch something (weights of
a backbone, kernels, quantizers) are left out or refused.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nc.errors import ArtefactError
from nc.process.lock import LOCK
from nc.text.json_text import parsed

_TABLES = "transformers.models.auto.modeling_auto"
#: Files of transformers that define models. Classes of the auto tables are found by their names alone.
_FILE = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
_ATTENTION = ("sdpa", "eager")
#: Keys of configurations that name code, or say how weights are read.
_LEFT_OUT = ("auto_map", "quantization_config", "attn_implementation", "experts_implementation")
#: Floats that JSON has not, as objects with this key: so transformers 5 writes them.
_FLOAT = "__float__"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
#: No model has more blocks, heads or labels than this; building one could take forever.
_MOST = 1_000_000


def description(model: torch.nn.Module) -> dict[str, Any] | None:
    """Return what `build` needs for a model: class, configuration, generation configuration, attention.

    None is returned for unlisted classes.
    """
    cls = type(model)
    config: Any = getattr(model, "config", None)
    if type(config) is not _config_class(cls) or _fetches(config):
        return None
    is_listed = cls.__module__.startswith("transformers.models.") and cls.__name__ in _listed()
    if not is_listed and not _is_model_of(cls, cls.__module__):
        return None
    generation = getattr(model, "generation_config", None)
    attention = getattr(config, "_attn_implementation", None)
    return {
        "class": cls.__name__,
        **({} if is_listed else {"module": cls.__module__}),
        "config": _description_of(config),
        "generation_config": None if generation is None else _description_of(generation),
        "attention": attention if attention in _ATTENTION else None,
    }


def build(data: dict[str, Any], tensors: int) -> torch.nn.Module:
    """Return the model of a description, in eval mode.

    Its parameters are on the meta device or hold first values; nothing is read.

    Args:
        data: a result of `description`.
        tensors: how many parameters and buffers it is known to have.

    Raises:
        ArtefactError: transformers is missing, does not list the class, or cannot build it.
        ValueError, KeyError, TypeError: it is not what `description` writes.
    """
    name, attention = data["class"], data["attention"]
    try:
        cls = _class_named(name, data.get("module"))
    except ImportError as error:
        msg = (
            f"The artefact holds a {name} of transformers, which is not installed here: {error}. Install it, "
            "or give model=…"
        )
        raise ArtefactError(msg) from error
    if cls is None:
        msg = (
            f"transformers {_version()} has no model class {name!r}; use the version that saved it, or give "
            "model=…"
        )
        raise ArtefactError(msg)
    if attention is not None and attention not in _ATTENTION:
        msg = f"attention {attention!r}"
        raise ValueError(msg)
    _check_counts(data["config"])
    try:
        config = _config_class(cls).from_dict(_without_code(data["config"]))
        if _fetches(config):
            msg = "its configuration asks for weights of another model"
            raise ValueError(msg)
        if (
            attention == "eager"
        ):  # "sdpa" is what transformers takes itself, for those parts of a model that have it
            config._attn_implementation = attention  # there is no public setter in all versions
        with LOCK, torch.random.fork_rng(devices=[]), _WithoutWeights(most=4 * tensors + 1000):
            model: torch.nn.Module = cls(config)
        if data["generation_config"] is not None and hasattr(model, "generation_config"):
            generation: Any = type(model.generation_config)
            model.generation_config = generation.from_dict(_without_code(data["generation_config"]))
    except Exception as error:
        msg = (
            f"transformers {_version()} cannot build the {name} of the artefact ({type(error).__name__}: "
            f"{error}). Use the version that saved it, or give model=…, a model of that class."
        )
        raise ArtefactError(msg) from error
    return model.eval()


class _WithoutWeights(TorchFunctionMode):
    """Puts memory that nothing initialises yet on the meta device.

    It is what modules make their parameters of.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            self.left -= 1
            if self.left < 0:
                msg = "its configuration describes a much larger model than was saved"
                raise ValueError(msg)
            options["device"] = "meta"
        return func(*args, **options)


def _listed() -> frozenset[str]:
    """Names of the classes in the tables of transformers' auto classes."""
    tables = importlib.import_module(_TABLES)
    found: set[str] = set()
    for table in (value for name, value in vars(tables).items() if name.endswith("_MAPPING_NAMES")):
        for entry in table.values():
            found.update((entry,) if isinstance(entry, str) else entry)
    return frozenset(
        name for name in found if "timm" not in name.lower()
    )  # these are classes of another package


def _class_named(name: object, file: object) -> Any:
    """Return the class of a description; None if this version of transformers has none.

    Raises:
        ImportError: transformers, or something that its file needs, is not installed.
    """
    if not isinstance(name, str):
        return None
    if file is None:
        return getattr(importlib.import_module("transformers"), name) if name in _listed() else None
    importlib.import_module("transformers")
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        return None
    try:
        found = getattr(importlib.import_module(file), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and (file == error.name or file.startswith(f"{error.name}.")):
            return None  # of another version
        raise
    return found if _is_model_of(found, file) else None


def _is_model_of(cls: Any, file: str) -> bool:
    """Tell whether a class is a model that a file of transformers defines itself.

    It must also be made of a configuration alone.
    """
    if not isinstance(cls, type) or cls.__module__ != file or not _FILE.fullmatch(file):
        return False
    if (
        not issubclass(cls, importlib.import_module("transformers").PreTrainedModel)
        or "timm" in cls.__name__.lower()
    ):
        return False
    others = list(inspect.signature(cls).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not inspect.Parameter.empty or p.kind in kinds for p in others)


def _config_class(cls: Any) -> Any:
    return getattr(cls, "config_class", None)


def _version() -> str:
    return str(importlib.import_module("transformers").__version__)


def _fetches(config: Any) -> bool:
    """Return whether building a model of this configuration reads weights of another one."""
    parts = (config, *(value for value in vars(config).values() if hasattr(value, "to_json_string")))
    options = ("use_pretrained_backbone", "use_timm_backbone", "backbone")
    return any(getattr(part, option, None) for part in parts for option in options)


def _description_of(config: Any) -> Any:
    return _with_names(_without_code(parsed(config.to_json_string(use_diff=True), finite=False)))


def _with_names(data: Any) -> Any:
    """Return the same with infinite floats and NaN as JSON can hold them."""
    if isinstance(data, dict):
        return {key: _with_names(value) for key, value in data.items()}
    if isinstance(data, float) and not math.isfinite(data):
        return {_FLOAT: next(name for name, value in _FLOATS.items() if str(value) == str(data))}
    return [_with_names(value) for value in data] if isinstance(data, list) else data


def _without_code(data: Any) -> Any:
    """Return a configuration without private keys and those in `_LEFT_OUT`, at every depth.

    Named floats are floats again.
    """
    if isinstance(data, dict) and data.keys() == {_FLOAT} and data[_FLOAT] in list(_FLOATS):
        return _FLOATS[data[_FLOAT]]
    if isinstance(data, dict):
        return {
            key: _without_code(value)
            for key, value in data.items()
            if not key.startswith("_") and key not in _LEFT_OUT
        }
    return [_without_code(value) for value in data] if isinstance(data, list) else data


def _check_counts(data: Any) -> None:
    for key, value in _entries(data):
        if (
            isinstance(value, (int, float))
            and abs(value) > _MOST
            and (key.startswith(("num_", "n_")) or key.endswith(("layer", "layers")))
        ):
            msg = f"{key} is {value}"
            raise ValueError(msg)


def _entries(data: Any) -> Iterator[tuple[str, Any]]:
    for key, value in data.items() if isinstance(data, dict) else ():
        yield key, value
        yield from _entries(value)

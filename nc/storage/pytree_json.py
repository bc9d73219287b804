"""Structures of inputs and outputs (`TreeSpec`) ↔ JSON, without the classes of the user's model.

Tuples, lists, dicts and OrderedDicts come back as themselves, a named tuple as a new class with the same name
and fields. An object with named members (transformers' `ModelOutput`, a registered dataclass) comes back as
its own class only if transformers defines that class and the process has imported transformers; else as an
`OutputDict`. No name from a file is imported but those that `_TRANSFORMERS` matches, and caches.MEMBERS.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.errors import ArtefactError
from nc.graph import caches
from nc.graph.effects import children
from nc.graph.output_names import member_names
from nc.storage import json_values

_LEAF = "*"
_PLAIN: dict[str, type] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered_dict": collections.OrderedDict}
#: torch's own named tuples, such as the result of `torch.max(x, 1)`.
_RETURN_TYPES: dict[str, type] = {cls.__name__: cls for cls in torch.return_types.all_return_types}
#: The only names that are ever imported: modules of transformers that define outputs, and one class each.
_TRANSFORMERS = re.compile(
    r"(transformers\.(?:modeling_outputs|models(?:\.[a-z0-9_]+)+\.modeling_(?!tf_|flax_)[a-z0-9_]+))\.([A-Z]\w*)",
    re.ASCII,
)


class OutputDict(collections.OrderedDict[str, Any]):
    """Outputs by name, where the class that a model returned does not exist.

    Members can be read as items (`out["logits"]`), as attributes (`out.logits`) and by position (`out[0]`),
    as transformers' outputs can.

    Example:
        >>> out = OutputDict(logits=1, hidden=2)
        >>> out.logits, out["hidden"], out[0], out.to_tuple()
        (1, 2, 1, (1, 2))
    """

    def __getattr__(self, name: str) -> Any:
        """Return the member of that name."""
        if name in self:
            return self[name]
        msg = f"The outputs have no member {name!r}; they have {', '.join(self)}."
        raise AttributeError(msg)

    def __getitem__(self, key: Any) -> Any:
        """Return the member of that name, or at that position."""
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """All members in order."""
        return tuple(self.values())


def _flatten(out: OutputDict) -> tuple[list[Any], list[str]]:
    return list(out.values()), list(out)


def _flatten_with_keys(out: OutputDict) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(k), v) for k, v in out.items()], list(out)


def _unflatten(members: Iterable[Any], keys: list[str]) -> OutputDict:
    return OutputDict(zip(keys, members, strict=True))


pytree.register_pytree_node(
    OutputDict,
    _flatten,
    _unflatten,
    serialized_type_name=f"{__name__}.OutputDict",
    flatten_with_keys_fn=_flatten_with_keys,
)


class ModelOutputs:
    """A placeholder in a structure for a class of transformers, whose import takes half of a cold start.

    It is for caches, and for artefacts that are loaded before transformers. It has no instances. Each call
    returns an instance of the class itself if the process has imported transformers, else an `OutputDict`.
    """


def _flatten_outputs(_: ModelOutputs) -> tuple[list[Any], Any]:
    msg = "ModelOutputs has no instances"
    raise TypeError(msg)


def _unflatten_outputs(members: Iterable[Any], context: tuple[str, list[str]]) -> Any:
    name, keys = context
    if name in caches.MEMBERS and "transformers" in sys.modules:
        return caches.build(name, members, keys)
    cls = (_class_of(name, keys) if "transformers" in sys.modules else None) or OutputDict
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(members, keys)


pytree.register_pytree_node(ModelOutputs, _flatten_outputs, _unflatten_outputs)


def encode(spec: pytree.TreeSpec, where: str) -> json_values.Json:
    """Return a structure as JSON.

    Args:
        spec: the structure.
        where: "inputs" or "outputs", for the message.

    Raises:
        ArtefactError: it holds a container that an artefact can't describe.
    """
    if spec.is_leaf():
        return _LEAF
    cls, context = spec.type, spec.context
    items = [encode(child, where) for child in children(spec)]
    for name, plain in _PLAIN.items():
        if cls is plain:
            return {"type": name, "items": items}
    for name, mapping in _MAPPINGS.items():
        if cls is mapping:
            return {
                "type": name,
                "keys": [json_values.encode(k, f"A key in the {where}") for k in context],
                "items": items,
            }
    if cls is collections.namedtuple:
        return {
            "type": "namedtuple",
            "name": context.__name__,
            "fields": list(context._fields),
            "items": items,
        }
    if cls in _RETURN_TYPES.values():
        return {"type": "return_type", "name": cls.__name__, "items": items}
    if cls is ModelOutputs:
        return {"type": "object", "name": context[0], "keys": context[1], "items": items}
    keys = member_names(context, len(items))
    if keys is None:
        msg = (
            f"The {where} hold a {cls.__module__}.{cls.__qualname__}, which an artefact can't describe; use "
            "tuples, lists, dicts, named tuples or registered dataclasses."
        )
        raise ArtefactError(msg)
    return {"type": "object", "name": f"{cls.__module__}.{cls.__qualname__}", "keys": keys, "items": items}


def decode(data: json_values.Json, *, inputs: bool = False) -> pytree.TreeSpec:
    """Return the inverse of `encode`.

    Args:
        data: parsed JSON.
        inputs: it is the structure of inputs. A named tuple then is a plain tuple: callers can't have the
            class that is made here.

    Raises:
        ValueError, KeyError, TypeError: it is not what `encode` writes.
    """
    if data == _LEAF:
        return pytree.tree_structure(0)
    if not isinstance(data, dict):
        msg = f"{data!r} is not a structure"
        raise TypeError(msg)
    kind = data["type"]
    items = [decode(item, inputs=inputs) for item in data["items"]]
    if kind in _PLAIN:
        return pytree.TreeSpec(_PLAIN[kind], None, items)
    if kind == "return_type":
        return pytree.TreeSpec(_RETURN_TYPES[data["name"]], None, items)
    names = data["fields" if kind == "namedtuple" else "keys"]
    if len(names) != len(items):
        msg = f"{len(names)} names for {len(items)} items"
        raise ValueError(msg)
    if kind in _MAPPINGS:
        return pytree.TreeSpec(_MAPPINGS[kind], _decode_keys(names), items)
    if kind == "namedtuple" and inputs:
        return pytree.TreeSpec(tuple, None, items)
    if kind == "namedtuple":  # takes identifiers only: a name can't smuggle code into the class that it makes
        return pytree.TreeSpec(collections.namedtuple, collections.namedtuple(data["name"], names), items)
    if kind != "object" or not all(isinstance(n, str) for n in names):
        msg = f"unknown structure {kind!r}"
        raise ValueError(msg)
    return _decode_object(data["name"], names, items, inputs=inputs)


def _decode_keys(names: Sequence[json_values.Json]) -> list[Any]:
    """Return the keys of a dict.

    Raises:
        ValueError: two keys are equal.
        TypeError: a key is a list.
    """
    keys = [json_values.decode(name) for name in names]
    if len(set(keys)) < len(keys):
        msg = f"keys {keys!r} of one dict"
        raise ValueError(msg)
    return keys


def _decode_object(
    name: str, members: list[str], items: list[pytree.TreeSpec], *, inputs: bool
) -> pytree.TreeSpec:
    """Return the structure of an output of transformers, of a cache, or of an object.

    The class of the object is one that is not known here.
    """
    is_cache = tuple(members) == caches.MEMBERS.get(name)
    is_late = is_cache or (_TRANSFORMERS.fullmatch(name) and "transformers" not in sys.modules)
    if not inputs and is_late:
        return pytree.TreeSpec(ModelOutputs, (name, members), items)
    if is_cache:
        return pytree.TreeSpec(caches.class_of(name) or OutputDict, members, items)
    return pytree.TreeSpec(_class_of(name, members) or OutputDict, members, items)


def _class_of(name: str, members: Sequence[str]) -> type | None:
    """Return the class of that name, if it is an output of transformers with these members.

    None is returned for all else.
    """
    match = _TRANSFORMERS.fullmatch(name)
    if match is None:
        return None
    try:
        from transformers.utils import ModelOutput  # type: ignore[attr-defined] # it is loaded lazily

        cls = vars(importlib.import_module(match[1])).get(match[2])
    except Exception:  # not installed, or this module of it does not import here: outputs are an OutputDict
        return None
    if not isinstance(cls, type) or cls.__module__ != match[1] or cls not in pytree.SUPPORTED_NODES:
        return None
    if not issubclass(cls, ModelOutput) or not dataclasses.is_dataclass(cls):
        return None
    return cls if set(members) <= {f.name for f in dataclasses.fields(cls)} else None

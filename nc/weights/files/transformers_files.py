"""Where the values of a transformers model are stored in files.

Names and layout of the files need not be those that the model has in memory. Newer versions of transformers
rename tensors while they read them, and join some: the experts of a layer, which files hold one by one,
become one parameter. What it does for a model is its own data; it is asked for here, so a model gets what
`from_pretrained` gives it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nc.errors import ArtefactCorruptError
from nc.storage.tensor_file import FLOATS, Source, StoredTensor

#: What transformers does to experts that files hold one by one; an expert can be read alone then.
_BY_EXPERT = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A tensor that is made of stored ones.

    Attributes:
        name: of the parameter.
        shape: what it must have.
        dtype: of the stored ones, the widest; one that is not of `FLOATS` if any of them has such a dtype.
        make: reads them and makes it.
        expert: one of a stack, if it can be read alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    expert: Callable[[int], torch.Tensor] | None = None

    def read(self) -> torch.Tensor:
        """Return the values.

        Raises:
            ArtefactCorruptError: the files do not have the tensor, or it has another shape.
        """
        try:
            made = self.make()
        except (RuntimeError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            msg = (
                f"Tensor {self.name!r} cannot be made of those in the files ({type(error).__name__}: "
                f"{error})."
            )
            raise ArtefactCorruptError(msg) from error
        if made.shape != self.shape:
            msg = (
                f"Tensor {self.name!r} has shape {tuple(made.shape)}, and config.json makes it {self.shape}."
            )
            raise ArtefactCorruptError(msg)
        return made.to(self.dtype)


class _Experts:
    """The experts of a stack that can only be made whole.

    The stack is made once for all of them, as they are read in sequence.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left: dict[int, torch.Tensor] = {}

    def take(self, index: int) -> torch.Tensor:
        """Return one expert, in its own memory."""
        if index not in self._left:
            self._left = {i: one.clone() for i, one in enumerate(self._source.read())}
        return self._left.pop(index)


class _Shapes:
    """Stands for the model as it was, of which conversions ask for shapes.

    Its stacks are taken apart before they are read.
    """

    def __init__(self, wanted: Mapping[str, torch.Tensor]) -> None:
        self._empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in wanted.items()
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return the tensor without values."""
        return self._empty[name]


def sources_of(model: torch.nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, Source]:
    """Return where values are stored, by the names that the model has for them.

    Args:
        model: of transformers, nothing changed.
        stored: tensors by their names in the files. Files of a base model have names without its prefix, and
            the other way round.

    Returns:
        The sources. Tensors that the model has no name for are left out.
    """
    wanted = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "model")
    loading = _loading(model)
    if loading is None:  # transformers 4: names are those of the model
        return _by_older_versions(model, stored, wanted, prefix)
    rename, order, converters = loading
    found: dict[str, Source] = {}
    joined: dict[str, dict[str, list[str]]] = {}
    for key in sorted(stored, key=order):
        name, pattern = rename(key, prefix, wanted)
        if pattern is None and name in wanted:
            found.setdefault(name, stored[key])
        elif pattern is not None:
            joined.setdefault(name, {}).setdefault(pattern, []).append(key)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    shapes = _Shapes(wanted)
    for name, keys in joined.items():
        converter = by_pattern[next(iter(keys))]
        for target in converter.target_patterns:  # several if it takes a tensor apart
            full = name.replace(converter.target_patterns[0], target, 1)
            if full in wanted:
                parts = {pattern: [(key, stored[key]) for key in mine] for pattern, mine in keys.items()}
                found[full] = _computed(
                    model.config, shapes, name, full, tuple(wanted[full].shape), converter, parts
                )
    return found


def experts_of(source: Source, *, transposed: bool) -> list[Source]:
    """Return the weights of the experts as linears have them, [N, K].

    Args:
        source: of the stack, [E, N, K], or [E, K, N] if it is transposed.
        transposed: see `source`.
    """
    if isinstance(source, StoredTensor) and not transposed:
        return [source.part(index) for index in range(source.shape[0])]
    shape = tuple(source.shape[:0:-1] if transposed else source.shape[1:])
    whole = _Experts(source)

    def make(index: int) -> torch.Tensor:
        if isinstance(source, StoredTensor):
            one = source.part(index).read()
        elif isinstance(source, Computed) and source.expert is not None:
            one = source.expert(index)
        else:
            one = whole.take(index)
        return one.t() if transposed else one

    name = getattr(source, "name", "experts")
    return [
        Computed(f"{name}.{i}", shape, source.dtype, functools.partial(make, i))
        for i in range(source.shape[0])
    ]


def _by_older_versions(
    model: Any, stored: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor], prefix: str
) -> dict[str, Source]:
    """Return what transformers 4 finds: it renames some, joins none, and of tied ones takes the first."""
    fix = getattr(
        model, "_fix_state_dict_key_on_load", None
    )  # no version has public ones, and early ones none at all
    patterns = getattr(model, "_checkpoint_conversion_mapping", None) or {}

    def renamed(key: str) -> str:
        fixed = key if fix is None else fix(key)
        key = fixed if isinstance(fixed, str) else fixed[0]
        for pattern, replacement in patterns.items():
            key, count = re.subn(pattern, replacement, key)
            if count:
                break
        return key

    named = {**stored, **{renamed(key): one for key, one in stored.items()}}
    found: dict[str, Source] = {}
    first: dict[int, str] = {}
    for name, tensor in wanted.items():
        key = next(
            (key for key in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if key in named), None
        )
        if key is not None and first.setdefault(id(tensor), name) == name:
            found[name] = named[key]
    return found


def _loading(
    model: torch.nn.Module,
) -> tuple[Callable[..., tuple[str, str | None]], Callable[[str], Any], list[Any]] | None:
    """Return what transformers does to a name, the order, and its converters for this model.

    The order is that in which it takes names. For older versions None is returned.
    """
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        core = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None
    changes = mapping.get_model_conversion_mapping(model)
    converters = [one for one in changes if isinstance(one, core.WeightConverter)]
    renamings = [one for one in changes if not isinstance(one, core.WeightConverter)]

    def rename(key: str, prefix: str, wanted: Mapping[str, Any]) -> tuple[str, str | None]:
        name, pattern = core.rename_source_key(key, renamings, converters, prefix, wanted)
        return (key, None) if name not in wanted and key in wanted else (name, pattern)

    return rename, core.dot_natural_key, converters


def _computed(
    config: Any,
    shapes: _Shapes,
    name: str,
    full: str,
    shape: tuple[int, ...],
    converter: Any,
    parts: Mapping[str, Sequence[tuple[str, StoredTensor]]],
) -> Source:
    """Return the value of a converter; raises ArtefactCorruptError if an expert is missing."""

    def make() -> torch.Tensor:
        used = copy.deepcopy(converter)
        for pattern, pieces in parts.items():
            for key, piece in pieces:
                used.add_tensor(name, key, pattern, piece.read)
        value = used.convert(name, model=shapes, config=config)[full]
        made: torch.Tensor = value[0] if isinstance(value, list) else value
        return made

    def expert(index: int) -> torch.Tensor:
        return torch.cat([parts[pattern][index][1].read() for pattern in converter.source_patterns])

    steps = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    by_expert = steps in _BY_EXPERT
    counts = {pattern: len(parts.get(pattern, ())) for pattern in converter.source_patterns}
    if by_expert and set(counts.values()) != {shape[0]}:
        msg = f"The files have not all of the {shape[0]} experts of {full!r}, but {counts}."
        raise ArtefactCorruptError(msg)
    dtypes = [piece.dtype for pieces in parts.values() for _, piece in pieces]
    dtype = next((one for one in dtypes if one not in FLOATS), None) or functools.reduce(
        torch.promote_types, dtypes
    )
    return Computed(full, shape, dtype, make, expert if by_expert else None)

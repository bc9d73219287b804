"""What a call of a model changes in its arguments, beside what it returns.

A graph changes nothing: it works on copies, and gives what the model would have put into its arguments as
further outputs. Each call then writes these into the caller's own tensors, lists, dicts and caches, so
engines need to know nothing of it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.errors import InputError
from nc.graph import caches

Path = tuple[int, ...]


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Return what a structure holds; torch renamed it after 2.8."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """See the module text.

    A graph returns the values of all changes after its own outputs: first entries, then tensors.

    Attributes:
        written: the flat inputs whose tensors the model writes.
        after: structure of the arguments, by name, after a call that replaces entries of containers; None
            if no entry is replaced.
        sources: for each leaf of `after`, the flat input at that place; None: the next value.
        returned: (flat output, value) where the model returns a value itself; a graph does not give such an
            output twice.
        objects: (where in the outputs, where in the arguments) the model returns a container that it was
            given.
    """

    written: tuple[int, ...] = ()
    after: pytree.TreeSpec | None = None
    sources: tuple[int | None, ...] = ()
    returned: tuple[tuple[int, int], ...] = ()
    objects: tuple[tuple[Path, Path], ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.written) or self.after is not None

    @property
    def entries(self) -> int:
        """How many new entries containers get."""
        return self.sources.count(None)

    @property
    def values(self) -> int:
        """How many outputs of the graph are none of the model's."""
        return self.entries + len(self.written)

    def names(self, arguments: Sequence[str], paths: Sequence[str]) -> list[str]:
        """For each value the argument that it goes into.

        Args:
            arguments: names of the arguments, in the order of `after`.
            paths: where each flat input sits in the arguments.
        """
        below = [] if self.after is None else zip(arguments, children(self.after), strict=True)
        owners = [name for name, spec in below for _ in range(spec.num_leaves)]
        entries = [owner for owner, source in zip(owners, self.sources, strict=True) if source is None]
        return [*entries, *(paths[i] for i in self.written)]

    def spread(self, own: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """All flat outputs of the model: a graph's `own`, and in between those that are `values`."""
        given, rest = dict(self.returned), iter(own)
        return [values[given[i]] if i in given else next(rest) for i in range(len(own) + len(given))]

    def apply(
        self, arguments: Mapping[str, Any], flat: Sequence[Any], paths: Sequence[str], values: Sequence[Any]
    ) -> list[Any]:
        """Change the caller's arguments.

        Args:
            arguments: the caller's own, by name, in the order of `after`.
            flat: their leaves.
            paths: where each of them sits, for messages.
            values: what the graph gave.

        Returns:
            The values; for each of `written` the caller's tensor.

        Raises:
            InputError: torch can't write into a tensor, or a container can't be changed.
        """
        entries = list(values[: self.entries])
        tensors = [flat[i] for i in self.written]
        for index, tensor, value in zip(self.written, tensors, values[self.entries :], strict=True):
            _write(tensor, value, paths[index])
        if self.after is not None:
            new = iter(entries)
            leaves = iter([next(new) if source is None else flat[source] for source in self.sources])
            for argument, spec in zip(arguments.values(), children(self.after), strict=True):
                _become(argument, spec, leaves)
        return [*entries, *tensors]

    def build(self, flat: Sequence[Any], spec: pytree.TreeSpec, arguments: Mapping[str, Any]) -> Any:
        """Return the outputs in their structure, with the containers that the model returns itself."""
        if not self.objects:
            return pytree.tree_unflatten(list(flat), spec)
        return _built(
            spec, iter(flat), (), {out: container_at(arguments, where) for out, where in self.objects}
        )

    def check_memory(self, flat: Sequence[Any], paths: Sequence[str]) -> None:
        """Raise InputError where a written input shares elements with another one.

        The model may then read what it wrote.
        """
        for index in self.written:
            for other, value in enumerate(flat):
                if other != index and isinstance(value, torch.Tensor) and share_elements(flat[index], value):
                    msg = (
                        f"Arguments {paths[index]!r} and {paths[other]!r} share memory, and the model writes "
                        f"into {paths[index]!r}. The captured graph takes them as two tensors: give a "
                        ".clone() of one."
                    )
                    raise InputError(msg)


def containers(arguments: Mapping[str, Any]) -> dict[int, Path]:
    """By the id of each list, dict, cache or object among arguments where it is.

    Places are positions in what is around it, from the outside.
    """
    found: dict[int, Path] = {}

    def visit(value: Any, path: Path) -> None:
        members = _members(value)
        if members is not None and not isinstance(value, tuple):
            found.setdefault(id(value), path)
        for i, member in enumerate(members or ()):
            visit(member, (*path, i))

    for i, argument in enumerate(arguments.values()):
        visit(argument, (i,))
    return found


def same_objects(outputs: Any, known: Mapping[int, Path]) -> Iterator[tuple[Path, Path]]:
    """Where outputs are, or hold, containers that are `known` by their ids, and what is known of them."""
    waiting: list[tuple[Any, Path]] = [(outputs, ())]
    while waiting:
        value, path = waiting.pop()
        if id(value) in known:
            yield path, known[id(value)]
        else:
            waiting += [(member, (*path, i)) for i, member in enumerate(_members(value) or ())]


def container_at(arguments: Mapping[str, Any], path: Path) -> Any:
    """Return the container at a place that `containers` found."""
    value: Any = list(arguments.values())
    for i in path:
        value = (_members(value) or ())[i]
    return value


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common."""
    if not (a.numel() and b.numel()) or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (start_a, end_a), (start_b, end_b) = _extent(a), _extent(b)
    if end_a <= start_b or end_b <= start_a:
        return False
    start = min(start_a, start_b)
    marks = torch.zeros(max(end_a, end_b) - start, dtype=torch.uint8, device="cpu")
    for part in _bytes(marks, a, start_a - start):
        part.fill_(1)
    return any(bool(part.any()) for part in _bytes(marks, b, start_b - start))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets in its storage of a tensor's first byte and of the byte after its last."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start), int(start + (reach + 1) * size)


def _bytes(marks: torch.Tensor, tensor: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
    """Yield the marks of the first bytes of all elements, then those of their second bytes, and so on."""
    strides = [stride * tensor.element_size() for stride in tensor.stride()]
    for offset in range(tensor.element_size()):
        yield marks.as_strided(tensor.shape, strides, start + offset)


def _write(tensor: torch.Tensor, value: torch.Tensor, path: str) -> None:
    try:
        with torch.no_grad():
            if tensor.shape != value.shape:
                msg = f"its new value has the shape {tuple(value.shape)}, not {tuple(tensor.shape)}"
                raise RuntimeError(msg)
            tensor.copy_(value)
    except RuntimeError as error:
        msg = f"The model writes into argument {path!r}, and torch can't write into this tensor: {error}"
        raise InputError(msg) from error


def _members(value: Any) -> list[Any] | None:
    """Return what a container holds, in the order of its structure; None for a leaf."""
    flatten = pytree.SUPPORTED_NODES.get(pytree._get_node_type(value))
    return None if flatten is None else list(flatten.flatten_fn(value)[0])


def _become(value: Any, spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """Give a container the structure and leaves that it has after a call.

    Returns the container itself if it can be changed, else its replacement.

    Raises:
        InputError: nc can't change a container of this type.
    """
    if spec.is_leaf():
        return next(leaves)
    old = _members(value) if not isinstance(value, dict) else [value.get(key) for key in spec.context]
    held = [*(old or ()), *[None] * len(children(spec))]
    new = [_become(member, below, leaves) for member, below in zip(held, children(spec), strict=False)]
    if value is None or isinstance(value, torch.Tensor):
        return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(new, spec.context)
    if caches.is_cache(value):
        caches.become(value, new)
    elif type(value) in (dict, collections.OrderedDict):
        if list(value) != list(spec.context) or not _identical(new, old):
            value.clear()
            value.update(zip(spec.context, new, strict=True))
    elif type(value) is list:
        value[:] = new
    elif not _identical(new, old):
        return _with_members(value, spec, new)
    return value


def _with_members(value: Any, spec: pytree.TreeSpec, new: Sequence[Any]) -> Any:
    """Return a tuple with other members, or a dataclass after its own were set; raises as `_become`."""
    if isinstance(value, tuple):
        return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
    if not dataclasses.is_dataclass(value):
        kind = type(value).__name__
        msg = f"The model replaces entries of a {kind}, which nc can't change. Use a list or a dict."
        raise InputError(msg)
    names = spec.context[0] if isinstance(spec.context[0], list) else spec.context
    for name, member in zip(names, new, strict=True):
        setattr(value, name, member)
    return value


def _identical(new: Sequence[Any], old: Sequence[Any] | None) -> bool:
    return old is not None and len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _built(spec: pytree.TreeSpec, leaves: Iterator[Any], path: Path, objects: Mapping[Path, Any]) -> Any:
    """Return a structure around leaves, with the objects that are known at some places of it."""
    if path in objects:
        for _ in range(spec.num_leaves):
            next(leaves)
        return objects[path]
    if spec.is_leaf():
        return next(leaves)
    members = [_built(below, leaves, (*path, i), objects) for i, below in enumerate(children(spec))]
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(members, spec.context)

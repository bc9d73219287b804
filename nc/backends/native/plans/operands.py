"""Values of a graph while a plan is recorded.

They are tensors with the memory that will hold them, nodes that wait, and weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.backends.native.plans.execution_plan import Block, Slot
from nc.graph.schemas import schema_of
from nc.kernels.onednn.descriptions import Desc
from nc.kernels.onednn.primitives import Layout

_SIZES = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "numel"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlanTensor:
    """A tensor of this run, and the memory that will hold it.

    That memory is a block or a slot; None for a constant, which holds itself.
    """

    tensor: torch.Tensor
    root: Block | Slot | None

    @property
    def desc(self) -> Desc:
        """Its layout."""
        return Desc.of(self.tensor)


def check_sizes(fit: bool, node: fx.Node, *shapes: Sequence[int]) -> None:
    """Raise ValueError if tensors do not fit each other.

    Kernels compute addresses from sizes, and read whatever is there.

    Args:
        fit: whether they fit.
        node: what is computed.
        shapes: of the tensors, for the message.
    """
    if not fit:
        msg = (
            f"{operator_name(node)}: sizes {' and '.join(str(tuple(shape)) for shape in shapes)} do not fit "
            "each other"
        )
        raise ValueError(msg)


def operator_name(node: fx.Node) -> str:
    """Return the operator of the user's model that a node computes, or its own name."""
    return str(next(iter(node.meta.get("operators", ())), node.meta.get("operator", node.name)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A node that its readers may take into their own kernels; computed where one does not.

    Attributes:
        node: the node.
        args: its arguments by position, evaluated.
        kwargs: those by name.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def named(self) -> Mapping[str, Any]:
        """Its arguments by the names of the operator's schema."""
        return by_name(self.node, self.args, self.kwargs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WeightToPack:
    """A weight that kernels want packed.

    Attributes:
        name: of the constant, or of the node that computes it.
        tensor: the codes; on torch's device "meta", which has shapes only, where the memory was given back.
    """

    name: str
    tensor: torch.Tensor


class PackedWeights:
    """Packed weights of a model, shared by its plans."""

    def __init__(self) -> None:
        self._packed: dict[tuple[str, Desc], list[tuple[Layout, torch.Tensor]]] = {}
        self._formed: dict[tuple[str, str], tuple[torch.Tensor, ...]] = {}
        #: What takes each of them away, in the order in which they were made.
        self._undo: list[Callable[[], object]] = []
        #: Makes the lowered graph again, with the codes that `forget` gave back.
        self.again: Callable[[], fx.GraphModule] | None = None

    def known(self, weight: WeightToPack, desc: Desc) -> list[tuple[Layout, torch.Tensor]]:
        """Return the layouts that there are of a weight."""
        return list(self._packed.get((weight.name, desc), ()))

    def add(self, weight: WeightToPack, desc: Desc, layout: Layout, packed: torch.Tensor) -> None:
        """Keep a weight in one more layout."""
        layouts = self._packed.setdefault((weight.name, desc), [])
        layouts.append((layout, packed))
        self._undo.append(layouts.pop)

    def formed(
        self, weight: WeightToPack, form: str, make: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Return what a function in C reads of a weight in this form; made once."""
        key = weight.name, form
        if key not in self._formed:
            self._formed[key] = make()
            self._undo.append(lambda: self._formed.pop(key))
        return self._formed[key]

    def made(self) -> int:
        """How many there are, for `give_up`."""
        return len(self._undo)

    def give_up(self, made: int) -> None:
        """Drop those that were made after there were so many."""
        while len(self._undo) > made:
            self._undo.pop()()

    def size(self) -> int:
        """Bytes."""
        packed = [packed for layouts in self._packed.values() for _, packed in layouts]
        return sum(tensor.nbytes for tensors in (packed, *self._formed.values()) for tensor in tensors)


def by_name(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return evaluated arguments by the names of the operator's schema, with its defaults."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(i): value for i, value in enumerate(args)} | dict(kwargs)
    schema = schema_of(node.target)
    values = {argument.name: argument.default_value for argument in schema}
    return (
        values | {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    )


def reads_inputs(value: Any) -> bool:
    """Return whether an argument depends on the inputs of the call."""
    if isinstance(value, PlanTensor):
        return value.root is not None
    if isinstance(value, Later):
        return reads_inputs((value.args, value.kwargs))
    if isinstance(value, Mapping):
        return any(reads_inputs(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(reads_inputs(v) for v in value)


def reads_blocks(arguments: Any) -> bool:
    """Return whether an argument is what a primitive writes."""
    return any(isinstance(value.root, Block) for value in _flat(arguments))


def is_view(result: Any, arguments: Any) -> bool:
    """Return whether a result has no separate memory.

    All its tensors are views of arguments, or it is about sizes and has none.
    """
    found = [
        r for r in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(r, torch.Tensor)
    ]
    return all(alias(tensor, arguments) is not None for tensor in found)


def tensors(value: Any) -> Any:
    """Arguments with tensors in the place of values."""
    if isinstance(value, PlanTensor):
        return value.tensor
    if isinstance(value, (list, tuple)):
        return type(value)(tensors(v) for v in value)
    return value


def is_gather(target: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator is indexing by positions.

    By a mask, the number of results depends on its values.
    """
    return target is torch.ops.aten.index.Tensor and all(
        value is None or value.tensor.dtype in (torch.int32, torch.int64) for value in args[1]
    )


def is_about_sizes(target: Any) -> bool:
    """Return whether an operator reads sizes of tensors only."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.partition("::")[2] in _SIZES


def alias(tensor: torch.Tensor, arguments: Any) -> PlanTensor | None:
    """Return a result as a view of an argument; None if it has separate memory."""
    if tensor.is_conj() or tensor.is_neg():
        return None  # sizes and strides do not tell that
    address = tensor.untyped_storage().data_ptr()
    for value in _flat(arguments):
        if value.tensor.layout is not torch.strided:
            continue  # a packed weight, whose memory torch does not show
        if (
            address
            and value.tensor.untyped_storage().data_ptr() == address
            and value.tensor.dtype == tensor.dtype
        ):
            return PlanTensor(tensor, value.root)
    return None


def _flat(value: Any) -> list[PlanTensor]:
    if isinstance(value, PlanTensor):
        return [value]
    values = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return [found for v in values for found in _flat(v)]

"""Names of a model's flat outputs, as programs of other runtimes call them."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils import _pytree as pytree

from nc.graph.effects import children
from nc.graph.signature import Signature


def output_names(signature: Signature, tensors: Sequence[bool] | None = None) -> list[str]:
    """Return a name for each output of a graph that is a tensor, all different, and none that of an input.

    Members of dicts, of named tuples and of objects such as transformers' outputs give their names, nested
    ones joined by dots, as in "logits" or "past.0". All others, and those that are taken, are called
    "output_<position among the tensors>".

    Args:
        signature: of the graph.
        tensors: whether each output is a tensor; None: all are.
    """
    own = _paths(signature.out_spec, "")
    returned = dict(signature.effects.returned)
    names = [path for i, path in enumerate(own) if i not in returned]
    names += [""] * (signature.outputs - len(names))
    if tensors is not None:
        names = [name for name, is_tensor in zip(names, tensors, strict=True) if is_tensor]
    taken = {leaf.path for leaf in signature.leaves}
    found: list[str] = []
    for position, name in enumerate(names):
        chosen = name if name and name not in taken else f"output_{position}"
        while chosen in taken:
            chosen += "_"
        found.append(chosen)
        taken.add(chosen)
    return found


def member_names(context: object, count: int) -> list[str] | None:
    """Return names of an object's members; None when the context that it is registered with does not tell.

    Args:
        context: as pytree has it: a list of names (transformers' `ModelOutput`), a list of names and another
            one (`pytree.register_dataclass`), a name and a list of names, or the class of a named tuple.
        count: how many members it has.
    """
    parts = context if isinstance(context, (list, tuple)) else ()
    for names in (context, *parts[:2], getattr(context, "_fields", None)):
        if (
            isinstance(names, (list, tuple))
            and len(names) == count
            and all(isinstance(name, str) for name in names)
        ):
            return list(names)
    return None


def _paths(spec: pytree.TreeSpec, path: str) -> Sequence[str]:
    """Return where the leaves of a structure sit; "" below a top that has no names."""
    if spec.is_leaf():
        return [path]
    items = children(spec)
    names = member_names(spec.context, len(items))
    if names is None:
        names = [str(i) for i in range(len(items))] if path else [""] * len(items)
    joined = [f"{path}.{name}" if path else name for name in names]
    return [leaf for item, name in zip(items, joined, strict=True) for leaf in _paths(item, name)]

"""Models that read values of tensors in Python, such as `if mask.any():` or `range(int(lengths.max()))`.

`torch.export` can't follow them: the path through the code depends on values that it does not have. Here the
path that the example takes is captured, and every value that was read becomes one more output of the graph.
Each call compares these outputs with what was read for the example (`Signature.unflatten`), so that a call
for which the model would take another path fails instead of giving wrong numbers. That is of use where values
are about the form of the inputs (masks, lengths, sizes); a path that depends on data is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from nc.capture.export_guards import other_forward
from nc.graph.catalogue import is_float_tensor, op_name
from nc.graph.signature import ValueRead
from nc.graph.views import returned
from nc.process.error_texts import is_of_data_dependence

#: More values that can change are a loop over data, not a path.
MOST_READS = 64
#: Reads of constants and of sizes among them.
_MOST_NOTED = 4096
_READS = frozenset({"item", "__bool__", "__int__", "__float__", "__index__"})
#: What Python expects of them.
_AS: dict[str, Callable[[Any], Any]] = {"__int__": int, "__float__": float, "__index__": int}
#: Functions that read the value of a tensor where it stands for a size, and have no other use for integer
#: tensors without dimensions.
_TAKE_SIZES = frozenset(
    {
        "view",
        "reshape",
        "expand",
        "repeat",
        "pad",
        "narrow",
        "unflatten",
        "as_strided",
        "split",
        "split_with_sizes",
        "chunk",
        "new_zeros",
    }
    | {"new_ones", "new_empty", "new_full", "interpolate", "tile", "permute", "roll"}
)
#: The same, beginning with the first argument.
_MAKE_SIZES = frozenset({"arange", "zeros", "ones", "empty", "eye"})
_OWN = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


class UnfitReadError(RuntimeError):
    """A value that can't be compared at each call."""


def depends_on_values(error: BaseException | None) -> bool:
    """Return whether an export failed because the model read a value."""
    while error is not None:
        if is_of_data_dependence(error):
            return True
        error = error.__cause__
    return False


def reads_of(run: Callable[[], object]) -> tuple[ValueRead, ...]:
    """Return the values that a call of the model reads in Python, in order.

    Raises:
        UnfitReadError: there are too many.
    """
    reads: list[ValueRead] = []

    def note(tensor: torch.Tensor) -> Any:
        value, where = tensor.item(), _caller()
        if len(reads) == _MOST_NOTED:
            msg = f"the model reads more than {_MOST_NOTED} values, the last at {where}"
            raise UnfitReadError(msg)
        reads.append(ValueRead(value, where))
        return value

    with _Reader(note):
        run()
    return tuple(reads)


@contextlib.contextmanager
def reading(model: torch.nn.Module, reads: Sequence[ValueRead], done: list[ValueRead]) -> Iterator[None]:
    """Give the model these values inside, where it reads some.

    It then returns (its output, the tensors that it read them from).

    Args:
        model: its `forward` is another one inside.
        reads: found by `reads_of`. Those at places that the model does not reach while it is exported are
            left out.
        done: afterwards, what was read, in the order of the tensors.

    Raises:
        UnfitReadError: while the model runs inside, if it reads at another place than those.
    """
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        waiting, tensors = list(reads), []
        done.clear()

        def give(tensor: torch.Tensor) -> Any:
            where = _caller()
            found = next((r for r in waiting if r.where == where), None)
            if found is None:
                msg = f"the model reads a value at {where} only while it is exported"
                raise UnfitReadError(msg)
            waiting.remove(found)
            done.append(found)
            tensors.append(tensor.clone())  # the model may change it later
            return found.value

        with _Reader(give):
            output = original(*args, **kwargs)
        return output, tuple(tensors)

    with other_forward(model, forward, inspect.signature(original)):
        yield


def keep_reads(module: fx.GraphModule, reads: Sequence[ValueRead]) -> tuple[ValueRead, ...]:
    """Take the outputs out of a graph that can't change from call to call; the reads of those that stay.

    Raises:
        UnfitReadError: a value comes from a floating-point input, so that nearly every call has another one;
            or it is a fraction that can change, which no two engines compute alike; or more than `MOST_READS`
            can change.
    """
    node, outputs = next(iter(reversed(module.graph.nodes))), returned(module)
    own, kept = list(outputs[: len(outputs) - len(reads)]), []
    for read, output in zip(reads, outputs[len(own) :], strict=True):
        if _can_change(read, _sources(output) if isinstance(output, fx.Node) else set()):
            kept.append((read, output))
    if len(kept) > MOST_READS:
        msg = f"the model reads {len(kept)} values, the last at {kept[-1][0].where}"
        raise UnfitReadError(msg)
    node.args = ((*own, *(output for _, output in kept)),)
    return tuple(read for read, _ in kept)


def _can_change(read: ValueRead, sources: Collection[fx.Node]) -> bool:
    """Whether a value, computed from some nodes, can change from call to call; raises as `keep_reads`."""
    inputs = [source for source in sources if source.op == "placeholder"]
    if any(is_float_tensor(source) for source in inputs):
        msg = f"the model reads a value that depends on floating-point inputs, at {read.where}"
        raise UnfitReadError(msg)
    is_free = bool(inputs) or any(_is_free_size(source) or _is_random(source) for source in sources)
    if is_free and isinstance(read.value, float):
        msg = f"the model reads a floating-point value, at {read.where}"
        raise UnfitReadError(msg)
    return is_free


def check_reads(module: fx.GraphModule, reads: Sequence[ValueRead], layers: Container[str]) -> None:
    """Raise UnfitReadError when a value comes out of a layer or is random.

    The int8 form of the layer may give another one.

    Args:
        module: after all rewrites.
        reads: those whose tensors are the graph's last outputs.
        layers: names of the nodes that could compute in int8.
    """
    outputs = returned(module)
    for read, output in zip(reads, outputs[len(outputs) - len(reads) :], strict=True):
        sources = _sources(output) if isinstance(output, fx.Node) else set()
        computed = any(source.name in layers for source in sources)
        if computed or any(map(_is_random, sources)):
            msg = (
                f"the model reads {'a value that its layers compute' if computed else 'a random value'}, at "
                f"{read.where}"
            )
            raise UnfitReadError(msg)


def _sources(node: fx.Node) -> set[fx.Node]:
    """All nodes that a value is computed from; of a size, not what the sized tensor is computed from."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if not op_name(node).startswith("sym_"):
            waiting += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
    return seen


def _is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers.

    Before the rewrites also attention counts, which could drop some of its weights.
    """
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_free_size(node: fx.Node) -> bool:
    """Return whether a node is a size that may change; export notes fixed ones apart from the graph."""
    size = node.meta.get("val")
    return op_name(node).startswith("sym_") and isinstance(size, torch.SymInt) and not _is_fixed(size)


def _is_fixed(size: torch.SymInt) -> bool:
    return bool(size.node.shape_env.replace(size.node.expr).is_number)


class _Reader(TorchFunctionMode):
    """Hands each tensor whose value Python reads to `read`.

    This also works where torch reads it from an argument that is a size.
    """

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            value = self.read(args[0].bool() if name == "__bool__" else args[0])
            return _AS.get(name, lambda v: v)(value)
        if name == "tolist":  # fake tensors read their elements one by one
            return self._list(args[0])
        if name in _TAKE_SIZES or name in _MAKE_SIZES:
            first = 1 if name in _TAKE_SIZES else 0
            args = (*args[:first], *(self._sizes(a) for a in args[first:]))
            kwargs = {key: self._sizes(value) for key, value in (kwargs or {}).items()}
        elif name in ("__getitem__", "__setitem__"):
            args = args[0], self._slices(args[1]), *args[2:]
        return func(*args, **(kwargs or {}))

    def _list(self, tensor: torch.Tensor) -> Any:
        return [self._list(element) for element in tensor] if tensor.dim() else self.read(tensor)

    def _sizes(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._sizes(v) for v in value) if type(value) in (list, tuple) else value
        whole = isinstance(value, torch.Tensor) and not value.dim() and not value.is_floating_point()
        return self.read(value) if whole else value

    def _slices(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(self._slices(i) for i in index)
        if isinstance(index, slice):
            return slice(*(self._sizes(i) for i in (index.start, index.stop, index.step)))
        return index


def _caller() -> str:
    """File, line and function of the innermost frame that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return (
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        if frame is not None
        else "unknown"
    )

"""The call contract of a captured model.

It says how arguments become a flat list of tensors, and flat outputs the user's structure.

It is plain data (names, `TreeSpec`s, shapes), so that it can be written to JSON and used where the user's
model class does not exist.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from nc.errors import BackendError, InputError, NCError, UnsupportedError
from nc.graph.effects import Effects, children
from nc.graph.size_conditions import NAME, SizeCondition
from nc.process.error_texts import is_of_index

Dim = int | str


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model's `forward`.

    Attributes:
        name: its name.
        positional: may be given by position.
        captured: the example inputs had it, so the graph has inputs for it.
        variadic: it is `*args`.
        keyword: may be given by name.
    """

    name: str
    positional: bool
    captured: bool
    variadic: bool = False
    keyword: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One flat input.

    Attributes:
        path: where it sits in the arguments, e.g. "input_ids" or "inputs[0]".
        dtype: torch dtype of a tensor; None for a plain Python value.
        dims: per dimension its size if fixed, or the name of a free symbol (equal names must have equal
            sizes).
        value: the plain Python value that the graph was specialised to.
        used: whether the graph reads it.
        held: the dimensions that are fixed without the model being asked whether they can be free.
    """

    path: str
    dtype: torch.dtype | None
    dims: tuple[Dim, ...] = ()
    value: Any = None
    used: bool = True
    held: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRead:
    """A value of a tensor that the model's Python code read while it was captured.

    Attributes:
        value: what it was for the example inputs.
        where: file, line and function that read it.
    """

    value: bool | int | float
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """See the module text.

    Attributes:
        parameters: those of `forward`, in order.
        in_spec: structure of the captured arguments, a dict by parameter name.
        leaves: the flat inputs in the order of `in_spec`.
        out_spec: structure of the outputs.
        reads: what the model's Python code read from tensors; the graph's last outputs are those tensors, in
            this order.
        conditions: on the sizes of the flat inputs. For others the model would take another path through its
            Python code.
        effects: what the model changes in its arguments. The graph returns these values after its own
            outputs and before those of `reads`.
        model: name of the model's class; "" where it is not known.
        plain: the number of captured arguments, where each is one value and calls may give them by position;
            else -1. Calls are bound without looking into structures then, which takes longer than a small
            model.
    """

    parameters: tuple[Parameter, ...]
    in_spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    out_spec: pytree.TreeSpec
    reads: tuple[ValueRead, ...] = ()
    conditions: tuple[SizeCondition, ...] = ()
    effects: Effects = Effects()
    model: str = ""
    plain: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Decide which calls are plain."""
        count = sum(p.captured for p in self.parameters)
        first = self.parameters[:count]
        is_plain = all(p.captured and p.positional and not p.variadic for p in first) and all(
            c.is_leaf() for c in children(self.in_spec)
        )
        object.__setattr__(self, "plain", count if is_plain and len(self.leaves) == count else -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Signature:
        """Return the same: it never changes, and torch warns of each leaf of a structure that is copied."""
        return self

    @property
    def outputs(self) -> int:
        """How many outputs the graph has."""
        return self.out_spec.num_leaves - len(self.effects.returned) + self.effects.values + len(self.reads)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the flat tensors that the graph reads, in its order.

        Raises:
            InputError: an argument is missing, unknown, of another structure, dtype, device, rank or fixed
                size than captured, or the model would take another path through its Python code for these
                sizes than for the example.
        """
        flat = args if self._is_plain(args, kwargs) else self._flat(self._by_name(args, kwargs))
        sizes: dict[str, int] = {}
        tensors = []
        for leaf, value in zip(self.leaves, flat, strict=True):
            check_leaf(leaf, value, sizes)
            if leaf.used:
                # engines read memory, where a lazy sign or conjugate is not yet; each question gives Python's
                # lock up and takes it back
                tensors.append(_read(value))
        if self.conditions:
            self._check_sizes(flat)
        if self.effects:
            self.effects.check_memory(flat, [leaf.path for leaf in self.leaves])
        return tensors

    def _is_plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the arguments of a call are the flat inputs."""
        return len(args) == self.plain and not kwargs and all(type(value) is torch.Tensor for value in args)

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Return the user's output structure around the flat outputs of a graph.

        What the model writes into its arguments is left out.

        Raises:
            InputError: the model would take another path through its Python code for these inputs than for
                the example.
        """
        own, values = self._parts(outputs)
        if len(own) == 1 and not self.effects and self.out_spec.is_leaf():
            return own[0]
        return pytree.tree_unflatten(self.effects.spread(own, values), self.out_spec)

    def result(self, outputs: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a call of the model returns, once what it writes is in the caller's own arguments.

        Args:
            outputs: the flat outputs of the graph.
            args: of the call, as `bind` had them.
            kwargs: likewise.

        Raises:
            InputError: as `unflatten`, or torch can't write into an argument.
        """
        if not self.effects:
            return self.unflatten(outputs)
        own, values = self._parts(outputs)
        arguments = self._by_name(args, kwargs)
        values = self.effects.apply(
            arguments, self._flat(arguments), [leaf.path for leaf in self.leaves], values
        )
        return self.effects.build(self.effects.spread(own, values), self.out_spec, arguments)

    def _flat(self, arguments: dict[str, Any]) -> list[Any]:
        """Return the flat inputs, in the captured structure."""
        flat, spec = pytree.tree_flatten(arguments)
        if spec != self.in_spec:
            arguments = _fitted(arguments, self.in_spec)
            flat, spec = pytree.tree_flatten(arguments)
        if spec != self.in_spec:
            self._explain_structure(arguments)
        return flat

    def _parts(self, outputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the graph's own outputs, and the values of `effects`; raises as `unflatten`."""
        last = len(outputs) - len(self.reads)
        own = last - self.effects.values
        for read, tensor in zip(self.reads, outputs[last:], strict=True):
            value = tensor.item()
            if value != read.value:
                msg = (
                    f"The model reads a value of its inputs in Python, at {read.where}, and the path that "
                    f"follows depends on it. It was captured with {read.value} and is {value} for these "
                    "inputs. Give such inputs in example_inputs to prepare(), or rewrite that place with "
                    "torch.where."
                )
                raise InputError(msg)
        return outputs[:own], outputs[own:last]

    def without_conditions(self, example: Sequence[torch.Tensor]) -> Signature:
        """Return the contract of a program that checks no conditions.

        Sizes that could silently be wrong are fixed to those of the example.

        Args:
            example: the flat inputs that are used.
        """
        tensors = iter(example)
        shapes = [tuple(next(tensors).shape) if leaf.used else None for leaf in self.leaves]
        names = [
            NAME.fullmatch(name)
            for condition in self.conditions
            if condition.silent
            for name in condition.names()
        ]
        symbols = {
            symbol
            for match in names
            if match
            for symbol in _symbols(self.leaves[int(match[1])].dims[int(match[2])])
        }

        def fixed(leaf: Leaf, shape: tuple[int, ...] | None) -> Leaf:
            if shape is None:
                return leaf
            return dataclasses.replace(
                leaf,
                dims=tuple(s if _symbols(d) & symbols else d for d, s in zip(leaf.dims, shape, strict=True)),
            )

        leaves = tuple(fixed(leaf, shape) for leaf, shape in zip(self.leaves, shapes, strict=True))
        return dataclasses.replace(self, leaves=leaves, conditions=())

    def _check_sizes(self, flat: Sequence[Any]) -> None:
        names = {name: NAME.fullmatch(name) for condition in self.conditions for name in condition.names()}
        sizes = {name: flat[int(match[1])].shape[int(match[2])] for name, match in names.items() if match}
        broken = next((condition for condition in self.conditions if not condition.holds(sizes)), None)
        if broken is None:
            return
        paths = [leaf.path for leaf in self.leaves]
        given = " and ".join(
            f"{SizeCondition(name, '').described(paths)} is {sizes[name]}" for name in broken.names()
        )
        what = (
            f"The model asks for sizes in Python, at {broken.where}, and the path that follows depends on "
            "the answer. It was captured with"
            if broken.where
            else "The captured operators do not fit inputs of these sizes: expected"
        )
        msg = (
            f"{what} {broken.described(paths)}, but {given}. Give inputs of such sizes in example_inputs to "
            "prepare()."
        )
        raise InputError(msg)

    def _by_name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = self._by_position(args, kwargs)
        known = {p.name for p in self.parameters}
        for name, value in kwargs.items():
            if name in given:
                msg = f"Got argument {name!r} twice, by position and by keyword."
                raise InputError(msg)
            if name not in known and value is not None:
                msg = (
                    f"Argument {name!r} was not in example_inputs: the model was captured with "
                    f"{', '.join(self._captured())}. If its forward takes it, give it in example_inputs to "
                    "prepare()."
                )
                raise InputError(msg)
            given[name] = value
        captured = self._captured()
        for name in set(given) - set(captured):
            value = given.pop(name)
            if value is not None and not (isinstance(value, tuple) and not value):
                msg = (
                    f"Argument {name!r} was not in example_inputs, so the captured graph has no input for "
                    f"it. Captured: {', '.join(captured)}. Give it in example_inputs to prepare()."
                )
                raise InputError(msg)
        for name in captured:
            if name not in given:
                hint = _hint_of_stars(name, next(iter(args), None))
                msg = (
                    f"Argument {name!r} is missing; the model was captured with {', '.join(captured)}.{hint}"
                )
                raise InputError(msg)
        return {name: given[name] for name in captured}

    def _by_position(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that are given by position, by name.

        Raises:
            InputError: there are too many.
        """
        given: dict[str, Any] = {}
        positional = [p for p in self.parameters if p.positional]
        rest = list(args)
        for parameter in positional:
            if parameter.variadic:
                if rest or parameter.name not in kwargs:
                    given[parameter.name] = tuple(rest)
                rest = []
            elif rest:
                given[parameter.name] = rest.pop(0)
        if rest:
            names = f" ({', '.join(p.name for p in positional)})" if positional else ""
            count = f"{len(positional)} positional argument{'s' * (len(positional) != 1)}"
            msg = (
                f"The model takes at most {count}{names}, but got {len(args)}. If a batch holds labels, "
                "leave them out: model(batch[0])."
            )
            raise InputError(msg)
        return given

    def _captured(self) -> list[str]:
        return [p.name for p in self.parameters if p.captured]

    def _explain_structure(self, values: dict[str, Any]) -> None:
        expected = dict(zip(self.in_spec.context, children(self.in_spec), strict=True))
        for name, value in values.items():
            got = pytree.tree_structure(value)
            if got != expected[name]:
                hint = _hint_of_one_value(name, value) if expected[name].is_leaf() else ""
                msg = (
                    f"Argument {name!r}: expected {_shape_of(expected[name])}, as in example_inputs, but got "
                    f"{_shape_of(got)}.{hint}"
                )
                raise InputError(msg)


def _shape_of(spec: pytree.TreeSpec) -> str:
    """Return a structure, for messages."""
    return "one value" if spec.is_leaf() else f"the structure {_layout(spec)}"


def _layout(spec: pytree.TreeSpec) -> str:
    """Return a structure as Python writes it, with `_` for each value."""
    if spec.is_leaf():
        return "_"
    parts = [_layout(child) for child in children(spec)]
    if spec.type in (dict, collections.OrderedDict):
        return f"{{{', '.join(f'{key!r}: {part}' for key, part in zip(spec.context, parts, strict=True))}}}"
    if spec.type is list:
        return f"[{', '.join(parts)}]"
    if spec.type is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    cls = spec.context if spec.type is collections.namedtuple else spec.type
    return f"{getattr(cls, '__name__', cls)}({', '.join(parts)})"


def parameters_of(forward: Any, captured: dict[str, Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a `forward`; those in `captured` were given as examples."""
    kinds = inspect.Parameter
    parameters = []
    names = set()
    for p in inspect.signature(forward).parameters.values():
        if p.kind is kinds.VAR_KEYWORD:
            continue
        positional = p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
        keyword = p.kind not in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL)
        parameters.append(
            Parameter(p.name, positional, p.name in captured, p.kind is kinds.VAR_POSITIONAL, keyword)
        )
        names.add(p.name)
    parameters += [
        Parameter(name, False, True) for name in captured if name not in names
    ]  # went into **kwargs
    order = {name: i for i, name in enumerate(captured)}
    # bind() relies on the captured parameters standing in the order of in_spec
    assert [p.name for p in parameters if p.captured] == sorted(order, key=order.__getitem__)
    return tuple(parameters)


#: Dicts that stand for each other in arguments.
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


def _symbols(dim: Dim) -> set[str]:
    """Return the free sizes that a dimension is computed from."""
    return set(re.findall(r"[A-Za-z_]\w*", dim)) if isinstance(dim, str) else set()


def _fitted(value: Any, spec: pytree.TreeSpec) -> Any:
    """Return a value in the captured structure, as far as it fits.

    The order of a dict's keys does not matter. An artefact knows a named tuple as a tuple, and a dataclass by
    the names of its members.
    """
    if spec.is_leaf():
        return value
    names, below = spec.context, children(spec)
    items = _items(value, spec)
    if items is None or len(items) != len(below):
        return value
    if spec.type is collections.namedtuple and type(value) is not names:
        return value
    fitted = [_fitted(item, each) for item, each in zip(items, below, strict=True)]
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(fitted, names)


def _items(value: Any, spec: pytree.TreeSpec) -> list[Any] | None:
    """Return what a container holds, in the order of a structure; None where it does not fit into it."""
    if isinstance(value, tuple) and spec.type in (tuple, collections.namedtuple):
        return list(value)
    if type(value) is list and spec.type is list:
        return value
    if type(value) in _DICTS and spec.type in (dict, collections.OrderedDict):
        return [value[key] for key in spec.context] if set(value) == set(spec.context) else None
    if dataclasses.is_dataclass(value) and _is_object(spec):
        members = {f.name for f in dataclasses.fields(value)}
        return [getattr(value, name) for name in spec.context] if members == set(spec.context) else None
    return None


def _is_object(spec: pytree.TreeSpec) -> bool:
    """Return whether it is what an artefact has for an object: a mapping by the names of its members."""
    return (
        isinstance(spec.type, type)
        and issubclass(spec.type, Mapping)
        and all(isinstance(name, str) for name in spec.context)
    )


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without a lazy sign or conjugate; dynamo can't ask for the sign, and keeps both."""
    if torch.compiler.is_dynamo_compiling() or not (tensor.dtype.is_complex or tensor.is_neg()):
        return tensor
    return tensor.resolve_conj().resolve_neg()


def check_leaf(leaf: Leaf, value: Any, sizes: dict[str, int]) -> None:
    """Raise InputError when a flat input is not what was captured.

    Args:
        leaf: what was captured.
        value: the input.
        sizes: free sizes seen so far; those of `value` are added.
    """
    if leaf.dtype is None:
        if not _equal(value, leaf.value):
            msg = (
                f"Argument {leaf.path!r} was captured as the constant {leaf.value!r} and can't be "
                f"{_describe(value)}; give that value in example_inputs to prepare()."
            )
            raise InputError(msg)
        return
    if not isinstance(value, torch.Tensor):
        is_array = type(value).__module__.partition(".")[0] == "numpy"
        hint = " Call torch.from_numpy() on it." if is_array else ""
        msg = f"Argument {leaf.path!r}: expected a tensor, but got {type(value).__name__}.{hint}"
        raise InputError(msg)
    if not value.is_cpu:
        msg = f"Argument {leaf.path!r} is on device {value.device}; expected the CPU. Call .cpu() on it."
        raise InputError(msg)
    if value.is_nested or value.layout is not torch.strided:
        kind, call = (
            ("nested", ".to_padded_tensor(padding)")
            if value.is_nested
            else (f"of layout {value.layout}", ".to_dense()")
        )
        msg = f"Argument {leaf.path!r} is {kind}; expected a dense tensor. Call {call} on it."
        raise InputError(msg)
    if value.dtype != leaf.dtype:
        msg = (
            f"Argument {leaf.path!r}: expected dtype {leaf.dtype}, but got {value.dtype}. Call "
            f".to({leaf.dtype})."
        )
        raise InputError(msg)
    if value.dim() != len(leaf.dims):
        hint = (
            " For a batch of one sample, index it with [None]." if value.dim() + 1 == len(leaf.dims) else ""
        )
        msg = (
            f"Argument {leaf.path!r}: expected {len(leaf.dims)} dimensions, but got shape "
            f"{tuple(value.shape)}.{hint}"
        )
        raise InputError(msg)
    for axis, (dim, size) in enumerate(zip(leaf.dims, value.shape, strict=True)):
        expected = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if size != expected:
            why, advice = (
                "the size it was captured with",
                " The model fixes it: call prepare() for each size.",
            )
            if isinstance(dim, str):
                why, advice = "as another input has", ""
            elif axis in leaf.held and expected == 1:
                advice = (
                    " torch.export takes a size of 1 for a constant: if the model takes other sizes, give "
                    "prepare() example_inputs with 2 or more there."
                )
            elif axis in leaf.held:
                advice = (
                    " torch.export.Dim.AUTO for it, in dynamic_shapes= of prepare(), asks the model whether "
                    "it can be free."
                )
            msg = (
                f"Argument {leaf.path!r}: expected size {expected} in dimension {axis}, {why}, but got "
                f"{tuple(value.shape)}.{advice}"
            )
            raise InputError(msg)


def _equal(value: Any, constant: Any) -> bool:
    """Return whether a value is the constant; tensors and arrays are none."""
    try:
        return not isinstance(value, torch.Tensor) and bool(value == constant)
    except ValueError:  # an array has no truth value
        return False


def call_error(
    error: Exception,
    who: str,
    tensors: Sequence[torch.Tensor],
    example: Sequence[torch.Tensor],
    *,
    engine: bool = False,
    instead: str = "",
) -> NCError:
    """Return what to raise for an error that came up inside a captured graph.

    It may also have come up inside the engine that runs it.

    Args:
        error: what was raised.
        who: what raised it, for the message.
        tensors: the flat inputs.
        example: those that the graph was captured with.
        engine: an engine raised it.
        instead: what a user can do who wants to trace or export the model, as a sentence; for an engine.

    Returns:
        UnsupportedError where torch gives an engine tensors without memory; BackendError where an engine
        fails on inputs of the example's sizes, except for values out of range; else InputError.
    """
    if engine and (why := _without_memory(tensors, instead)):
        return UnsupportedError(f"{who} reads the memory of its inputs, {why}")
    text = f"{who} fails on these inputs: {type(error).__name__}: {str(error).strip() or '-'}"
    given, captured = ([tuple(t.shape) for t in each] for each in (tensors, example))
    if given != captured:
        sizes = (
            f"Their shapes are {', '.join(map(str, given))}; the model was captured with "
            f"{', '.join(map(str, captured))}"
        )
        return InputError(
            f"{text}\n{sizes}. If the original model takes these inputs, give them in example_inputs to "
            "prepare()."
        )
    return BackendError(text) if engine and not is_of_index(error) else InputError(text)


def _without_memory(tensors: Sequence[torch.Tensor], instead: str) -> str:
    """Return which of torch's transforms gives tensors without memory, and what to do; "" for none.

    One that does not see what is done there counts too.
    """
    if torch._C._is_tracing():
        return f"which torch.jit.trace() can't record: {instead}"
    if are_fake(tensors):
        return f"and torch.export.export(), or FakeTensorMode, gives it tensors that have none: {instead}"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return (
            "and torch.func gives it tensors that have none: instead of vmap() give it a larger batch; it "
            "has no derivatives."
        )
    return ""


def are_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors, or those that torch makes now, have sizes only."""
    is_on = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return is_on or any(type(tensor) is not torch.Tensor and is_fake(tensor) for tensor in tensors)


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def at_least_two(
    inputs: Sequence[torch.Tensor], dims: Sequence[Sequence[int | str]]
) -> Iterator[torch.Tensor]:
    """Yield the inputs, contiguous, with each free dimension of size 1 doubled: strides say nothing there.

    Args:
        inputs: flat inputs.
        dims: for each, its fixed sizes and the names of its free ones; a name that others are computed from
            (`4*s0`) keeps its size.
    """
    names = {dim for leaf in dims for dim in leaf if isinstance(dim, str)}
    computed = [name for name in names if not name.isidentifier()]
    bound = {name for name in names if any(name in expression for expression in computed)}
    for tensor, sizes in zip(inputs, dims, strict=True):
        single = [
            isinstance(dim, str) and dim not in bound and size == 1
            for dim, size in zip(sizes, tensor.shape, strict=True)
        ]
        yield tensor.repeat([2 if one else 1 for one in single]) if any(single) else tensor.contiguous()


def _hint_of_one_value(name: str, given: object) -> str:
    """Return what to say where something else than one value was given for an argument."""
    if isinstance(given, dict) and name in given:
        return " Did you mean model(**inputs)?"
    if isinstance(given, (tuple, list)):
        count = f"a {type(given).__name__} of {len(given)}"
        return f" It is {count}: if the batch holds labels, call model(batch[0])."
    return ""


def _hint_of_stars(name: str, first: object) -> str:
    """Return what to say where all arguments may have been given as one value, the first.

    It is "" if it does not look so.
    """
    if isinstance(first, dict) and name in first:
        stars = "**"
    elif isinstance(first, (tuple, list)):
        stars = "*"
    else:
        return ""
    return f" The first argument is a {type(first).__name__}: did you mean model({stars}inputs)?"

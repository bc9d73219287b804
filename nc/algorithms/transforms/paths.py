"""The paths that a block can take, and what reads the results of its norms on each.

Code that depends on values of tensors (a router, a mask, `if x.any()`) takes the path of the tokens that it
gets. Other tokens may take one that calibration never took. So the decisions of such a block are taken for
it: all of them yes, all no, and at random. A block that decides nothing has one path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nc.modules.block_calls import BlockCall, run

#: Operators that give an order or a place: the decision is in their integers.
_ORDERS = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "mode"})
#: Operators beside views whose result has values of their input, each as it was.
_COPIES = frozenset(
    {"clone", "_to_copy", "index", "index_select", "gather", "cat", "stack", "repeat", "_unsafe_view"}
    | {"lift_fresh", "contiguous", "constant_pad_nd", "view_copy", "embedding"}
)
#: Methods of tensors that leave torch without an operator.
_LEAVING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
#: More decisions in one call mean a loop that the decisions taken for it do not end.
_MOST = 20_000
_YES, _NO, _MIXED = "yes", "no", "mixed"


class Decisions(TorchDispatchMode):
    """Sees the decisions of a call.

    Attributes:
        depends: whether what was called, or a size, depended on values.
        unknown: an operator after which Python decides by a number; "" where there is none.
        of_inputs: whether a mask that came as an argument decided.
        kept: the results of all decisions, in order.
    """

    def __init__(self, constants: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self.depends, self.of_inputs, self.unknown = False, False, ""
        self.kept: list[Any] = []
        self._constants = {address(t) for t in constants}
        self._decided: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operator."""
        given = _tensors((args, kwargs))
        if reads_values(func, given) and not all(address(t) in self._constants for t in given):
            self.depends = True
            masks = [t for t in given if t.dtype == torch.bool]
            self.of_inputs |= any(id(t) not in self._decided for t in masks)
            if func is torch.ops.aten._local_scalar_dense.default and given[0].is_floating_point():
                self.unknown = "item()"
        result = func(*args, **(kwargs or {}))
        if is_decision(func, given, result):
            result = self.decided(func, args, kwargs or {}, result)
            self.kept.append(result)
        self._remember(given, result)
        return result

    def decided(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return the result of a decision: its own."""
        return result

    def _remember(self, given: Sequence[torch.Tensor], result: Any) -> None:
        """Keep what follows from decisions apart from masks that were given."""
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool:
            own = [t for t in given if t.dtype == torch.bool]
            if not own or any(id(t) in self._decided for t in own):
                self._decided[id(result)] = result


class Forced(Decisions):  # type: ignore[no-untyped-call] # as above
    """Takes the decisions in the place of a block.

    Args:
        how: "yes", "no" or "mixed". Orders are random in each case.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how, self._random = how, torch.Generator().manual_seed(len(how))

    def decided(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return another result of the same kind; RuntimeError where the decisions never end."""
        if len(self.kept) > _MOST:
            msg = "its decisions never end"
            raise RuntimeError(msg)
        if isinstance(result, bool):
            return self._how == _YES
        name = func.overloadpacket.__name__
        if name == "nonzero":  # of numbers; of bools, who made them has decided
            return torch.nonzero(self.mask(args[0].shape))
        if name in _ORDERS:
            places = [i for i, a in enumerate(func._schema.arguments) if a.name == "dim"]
            dim = kwargs.get("dim", args[places[0]] if places and len(args) > places[0] else -1)
            return pytree.tree_map(lambda part: self._order(args[0], dim, part), result)
        return self.mask(result.shape)

    def mask(self, shape: Sequence[int]) -> torch.Tensor:
        """Return bools of that shape."""
        if self._how == _MIXED:
            return torch.rand(shape, generator=self._random, dtype=torch.float32) < 0.5
        return torch.full(tuple(shape), self._how == _YES, dtype=torch.bool)

    def _order(self, x: torch.Tensor, dim: int | None, part: Any) -> Any:
        if not isinstance(part, torch.Tensor) or part.dtype != torch.int64:
            return part
        if dim is None or part.dim() != x.dim() or x.dim() == 0:  # one place
            count = x.numel() if dim is None else x.shape[dim]
            return torch.randint(0, count, part.shape, generator=self._random, dtype=torch.int64)
        order = torch.rand(x.shape, generator=self._random, dtype=torch.float32).argsort(dim)
        return order.narrow(dim, 0, part.shape[dim]).contiguous()


class Repeated(Decisions):  # type: ignore[no-untyped-call] # as above
    """Decides as an earlier call of the same code did.

    Args:
        kept: of `Decisions` in that call.

    Attributes:
        differs: whether the code itself would have decided otherwise.
    """

    def __init__(self, kept: Sequence[Any]) -> None:
        super().__init__()
        self._before, self.differs = kept, False

    def decided(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return what was decided then, if it was about the same sizes."""
        place = len(self.kept)
        before = self._before[place] if place < len(self._before) else result
        self.differs |= _choices(before) != _choices(result)
        return before if _sizes(before) == _sizes(result) or _is_nonzero(func) else result


def _is_nonzero(func: Any) -> bool:
    return bool(func.overloadpacket.__name__ == "nonzero")


def _choices(result: Any) -> list[Any]:
    """Return what a decision chose, as plain values; floats beside an order are not a choice."""
    parts = pytree.tree_leaves(result)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return [part.tolist() for part in tensors if not part.is_floating_point()] if tensors else parts


def _sizes(result: Any) -> list[Any]:
    return [getattr(part, "shape", type(part)) for part in pytree.tree_leaves(result)]


def reads_values(func: Any, given: Sequence[torch.Tensor]) -> bool:
    """Return whether Python, or the size of a result, depends on values of tensors after an operator."""
    if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def is_decision(func: Any, given: Sequence[torch.Tensor], result: Any) -> bool:
    """Return whether an operator makes a choice of numbers: bools, places or an order."""
    if not given:
        return False
    if isinstance(result, torch.Tensor) and result.dtype == torch.bool:
        # a single integer is a count or a place that earlier decisions gave
        return any(t.is_floating_point() or (t.dtype != torch.bool and t.dim()) for t in given)
    name = func.overloadpacket.__name__
    if name == "nonzero":
        return given[0].dtype != torch.bool
    return name == "equal" or (
        name in _ORDERS
        and any(isinstance(t, torch.Tensor) and t.dtype == torch.int64 for t in pytree.tree_leaves(result))
        and given[0].is_floating_point()
    )


class _Reads(TorchFunctionMode):
    """Sees values that leave torch without an operator, as `tolist()` does."""

    def __init__(self, seen: Decisions) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _LEAVING:
            self._seen.depends = True
            if args[0].is_floating_point():
                self._seen.unknown = f"{func.__name__}()"
        return func(*args, **(kwargs or {}))


class _Readers(TorchDispatchMode):
    """Sees what reads the results of norms, and which parameters were used.

    Args:
        parameters: names by address.

    Attributes:
        others: for each norm an operator beside the linears that reads its result.
        linears: norms whose result a linear reads.
        used: addresses of the parameters that took part in a result with elements.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._parameters = parameters
        self.others: dict[str, str] = {}
        self.linears: set[str] = set()
        self.used: set[int] = set()
        self._inside = 0
        self._results: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}

    @contextlib.contextmanager
    def watching(
        self, norms: Mapping[str, torch.nn.Module], linears: Mapping[str, torch.nn.Module]
    ) -> Iterator[None]:
        self._inside = 0
        handles = [m.register_forward_hook(self._result_of(name)) for name, m in norms.items()]
        for linear in linears.values():
            handles.append(linear.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(linear.register_forward_hook(self._leave))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _result_of(self, name: str) -> Any:
        def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
            self._results |= {id(part): (part, frozenset({name})) for part in _tensors(output)}

        return hook

    def _enter(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.linears |= self._norms_of(pytree.tree_leaves((args, kwargs)))
        self._inside += 1

    def _leave(self, *_: Any) -> None:
        self._inside -= 1

    def unread(self, outside: tuple[str, ...]) -> str:
        """Return what reads a parameter that took no part, except in some modules; "" where all did."""
        name = next(
            (n for a, n in self._parameters.items() if a not in self.used and not n.startswith(outside)), ""
        )
        return name and f"nothing called {name.rpartition('.')[0] or name!r}, which may read it"

    def _norms_of(self, given: Sequence[Any]) -> frozenset[str]:
        """Names of the norms of which some tensors hold results."""
        return frozenset().union(*(self._results[id(t)][1] for t in given if id(t) in self._results))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made, given = _tensors(result), _tensors((args, kwargs))
        if not func.is_view and any(t.numel() for t in made):
            self.used |= {address(t) for t in given}
        norms = self._norms_of(given)
        if norms and not self._inside:
            self._follow(func, norms, given, made)
        return result

    def _follow(
        self, func: Any, norms: frozenset[str], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """See what an operator makes of the results of some norms."""
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):
            return  # of their sizes alone
        if func.is_view or (name in _COPIES and all(t.is_floating_point() for t in made)):
            self._results |= {id(t): (t, norms) for t in made}
            return
        beside = [self._parameters[a] for t in given if (a := address(t)) in self._parameters]
        self.others |= dict.fromkeys(norms, " with ".join([name, *beside]))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    """Equal for tensors and their views."""
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class Path:
    """One path of a block.

    Attributes:
        call: arguments that it is called with.
        how: what takes its decisions; None: it does itself.
    """

    call: BlockCall
    how: str | None = None

    def taking(self) -> contextlib.AbstractContextManager[Any]:
        """Take this path; the same decisions each time."""
        return contextlib.nullcontext() if self.how is None else Forced(self.how)


@dataclass(frozen=True, slots=True)
class Paths:
    """What is known of the paths of a block.

    Attributes:
        all: each of them.
        others: for each norm that a linear reads, an operator that reads its result too on some path.
        why: why there may be more paths, or other readers; "" where all are known.
    """

    all: tuple[Path, ...]
    others: Mapping[str, str]
    why: str = ""


def paths_of(
    module: torch.nn.Module,
    call: BlockCall,
    norms: Mapping[str, torch.nn.Module],
    linears: Mapping[str, torch.nn.Module],
    outside: Sequence[str] = (),
) -> Paths:
    """Return the paths of a block.

    Args:
        module: the block, in eval mode.
        call: a sample that reaches it.
        norms: in the block, by name.
        linears: likewise.
        outside: modules whose paths do not matter.
    """
    seen = _decisions(module, call, () if not outside else tuple(norms.values()))
    ways: tuple[Path, ...] = (Path(call),)
    if seen.unknown:
        return Paths(ways, {}, f"a number that {seen.unknown} reads may decide what is called")
    if seen.depends:
        ways = tuple(
            Path(_with_masks(call, how) if seen.of_inputs else call, how) for how in (_YES, _NO, _MIXED)
        )
    readers = _Readers({address(p): name for name, p in module.named_parameters() if p.numel()})
    for way in ways:
        why = _walk(module, way, readers, norms, linears)
        if why:
            return Paths(ways, {}, f"what it calls depends on values, and with others it {why}")
    why = readers.unread(tuple(f"{name}." for name in outside) or ("\0",))
    others = {name: other for name, other in readers.others.items() if name in readers.linears}
    return Paths(ways, others, why)


def _walk(
    module: torch.nn.Module,
    way: Path,
    readers: _Readers,
    norms: Mapping[str, torch.nn.Module],
    linears: Mapping[str, torch.nn.Module],
) -> str:
    """Take a path, and return why it can't be taken; "" where it can."""
    try:
        with way.taking(), readers.watching(norms, linears):
            output = run(module, way.call)
    except Exception as error:  # user code, on a path that nc forces, can raise anything
        if way.how is None:
            raise
        return f"fails: {(str(error) or type(error).__name__).splitlines()[0]}"
    return "" if way.how is None or bool(output.isfinite().all()) else "gives NaN"


def _decisions(module: torch.nn.Module, call: BlockCall, behind: Sequence[torch.nn.Module]) -> Decisions:
    """Return the decisions of a call; those before the first module of `behind` do not count."""
    seen = Decisions((*module.parameters(), *module.buffers()))
    started = not behind

    def start(*_: Any) -> None:
        nonlocal started
        if not started:
            started, seen.depends, seen.of_inputs, seen.unknown = True, False, False, ""

    handles = [part.register_forward_pre_hook(start) for part in behind]
    try:
        with _Reads(seen), seen:
            run(module, call)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _with_masks(call: BlockCall, how: str) -> BlockCall:
    """Return arguments with other masks."""
    forced = Forced(how)

    def part(value: Any) -> Any:
        is_mask = isinstance(value, torch.Tensor) and value.dtype == torch.bool
        return forced.mask(value.shape) if is_mask else value

    args, kwargs = call
    return pytree.tree_map(part, args), {name: pytree.tree_map(part, v) for name, v in kwargs.items()}

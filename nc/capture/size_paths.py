"""Models that ask for sizes in Python, such as `if height % 2:` or `max(kernel - width % stride, 0)`.

Export keeps sizes free and takes the way of the example at each such place; what that needs of the sizes it
notes as a guard. A call with sizes for which the model would take another way would get wrong numbers, so a
guard becomes a condition of the graph's signature.

Most guards do not matter: operators ask whether a size is 1 or whether a tensor is contiguous, and compute
the same either way. So each one is tried: the model and the graph run with sizes that do not fulfil it. If
both give the same outputs, the guard does not become a condition.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.graph.size_conditions import SizeCondition, parsed

#: Sizes are tried that differ by less than this, and so many of them; a guard that was not tried is a
#: condition.
FARTHEST, MOST_TRIED = 2100, 24
#: In its own files, but for those of its layers, torch asks for sizes to choose among memory formats, or to
#: check them; and in ours, where one of our modes calls an operator for the model.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_LAYERS = f"{_TORCH}nn{os.sep}"

PathSizes = Mapping[str, int]


class UnfitGuardError(RuntimeError):
    """A guard that no condition can express."""


@dataclasses.dataclass(frozen=True, slots=True)
class Guards:
    """What an exported program needs of the sizes of its inputs.

    Attributes:
        axes: free dimension of an input → its size, computed from the names of those that are free of each
            other.
        relations: between sizes, such as one that is twice another.
        asked: what the model's Python code asked.
        needed: what operators ask, such as a product whether its sides fit.
    """

    axes: Mapping[str, str]
    relations: tuple[SizeCondition, ...] = ()
    asked: tuple[SizeCondition, ...] = ()
    needed: tuple[SizeCondition, ...] = ()


def guards_of(shapes: Sequence[Sequence[int | torch.SymInt]]) -> Guards:
    """Return the guards of an exported program.

    Args:
        shapes: of each flat input, with symbols as free sizes; empty for an input that is not a tensor.

    Raises:
        UnfitGuardError: a guard can't be expressed in sizes of inputs.
    """
    free = {
        f"in{i}_{d}": size
        for i, shape in enumerate(shapes)
        for d, size in enumerate(shape)
        if isinstance(size, torch.SymInt)
    }
    if not free:
        return Guards({})
    env = next(iter(free.values())).node.shape_env
    sizes = {
        name: size for name, symint in free.items() if not (size := env.replace(symint.node.expr)).is_number
    }
    if not sizes:
        return Guards({})
    symbols, relations = _symbols(sizes)
    axes = {
        name: _printed(size.xreplace(symbols))
        for name, size in sizes.items()
        if size.free_symbols <= set(symbols)
    }
    conditions = [SizeCondition(text, where) for text, where in _conditions(env, symbols).items()]
    return Guards(
        axes,
        tuple(relations),
        tuple(c for c in conditions if c.where),
        tuple(c for c in conditions if not c.where),
    )


def _conditions(env: Any, symbols: Mapping[Any, Any]) -> dict[str, str]:
    """Return the conditions that export found, and for each where the model asks for it.

    That is "" where it does not ask itself.

    Args:
        env: the shape environment.
        symbols: those that sizes of inputs are expressed in.

    Raises:
        UnfitGuardError: one that the model asks for can't be expressed in them.
    """
    found: dict[str, str] = {}
    for guard in env.guards:
        where, condition = _place(guard.sloc), env.replace(guard.expr)
        is_equation = getattr(condition, "rel_op", "") == "==" and condition.free_symbols <= set(symbols)
        if condition.free_symbols and (where or is_equation):
            text = _text(condition, symbols, where)
            found[text] = found.get(text) or where
    for claim in itertools.chain.from_iterable(
        env.deferred_runtime_asserts.values()
    ):  # torch 2.8 keeps there what later ones guard
        condition = env.replace(claim.expr)
        if condition.free_symbols and condition.free_symbols <= set(symbols):
            found.setdefault(_text(condition, symbols, ""), "")
    return found


def _symbols(sizes: Mapping[str, Any]) -> tuple[dict[Any, Any], list[SizeCondition]]:
    """Return for each symbol of sizes what it is in terms of names.

    The relations that then remain between names are returned too.
    """
    symbol = type(next(symbol for size in sizes.values() for symbol in size.free_symbols))
    names = {name: symbol(name, integer=True, positive=True) for name in sizes}
    symbols: dict[Any, Any] = {}
    relations = []
    for name, size in sizes.items():  # a size that is a symbol is what the symbol stands for
        if size.is_Symbol:
            symbols.setdefault(size, names[name])
    for name, size in sizes.items():
        unknown = sorted(size.free_symbols - set(symbols), key=str)
        if size.is_Symbol:
            continue
        if not unknown:
            relations.append(SizeCondition(f"{name} == {_printed(size.xreplace(symbols))}", ""))
            continue
        factor, offset = size.coeff(unknown[0]), size.subs(unknown[0], 0)
        if (
            len(size.free_symbols) == 1
            and factor.is_Integer
            and offset.is_Integer
            and size == factor * unknown[0] + offset
        ):
            relations.append(SizeCondition(f"{_printed(names[name] - offset)} % {factor} == 0", ""))
            symbols[unknown[0]] = (names[name] - offset) / factor
    return symbols, relations


def _text(condition: Any, symbols: Mapping[Any, Any], where: str) -> str:
    text = _printed(condition.xreplace(symbols)) if condition.free_symbols <= set(symbols) else str(condition)
    try:
        parsed(text)
    except ValueError as error:
        msg = (
            f"the model asks for {condition}, at {where}, which can't be computed from the sizes of its "
            "inputs"
        )
        raise UnfitGuardError(msg) from error
    return text


def _printed(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter  # imports sympy, which `nc.load` does without

    if expression.is_Relational:  # `a - b <= 0` is easier to read as `a <= b`
        difference = expression.lhs - expression.rhs
        negative = sum(-term for term in difference.as_ordered_terms() if term.could_extract_minus_sign())
        expression = type(expression)(difference + negative, negative, evaluate=False)
    text: str = PythonPrinter().doprint(expression)
    return text


def _place(location: Any) -> str:
    """Return the place that asked, out of a guard's; "" for an operator of torch."""
    frame = location.framework_loc
    if not isinstance(frame, traceback.FrameSummary) or (
        frame.filename.startswith((_TORCH, _OURS)) and not frame.filename.startswith(_LAYERS)
    ):
        return ""
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"


class PathsSeen(enum.Enum):
    """What was seen of sizes for which the model may take another way."""

    SAME = "the graph gives what the model gives"
    OTHER = "both run, and the graph gives something else"
    REFUSED = "the model does not take them"
    FAILED = "the graph does not take them"


def those_that_matter(
    guards: Guards, example: PathSizes, outcome: Callable[[PathSizes], PathsSeen]
) -> tuple[SizeCondition, ...]:
    """Return the guards for which other sizes were seen to be no `SAME`, or could not be tried.

    Args:
        guards: to choose from.
        example: the sizes of the example, by the names in `axes`; model and graph are known to agree for
            them.
        outcome: runs model and graph with other sizes.
    """
    waiting = [guard for guard in (*guards.asked, *guards.needed) if guard.holds(example)]
    kept: list[SizeCondition] = []
    tried: dict[tuple[int, ...], PathsSeen] = {}

    def attempt(sizes: PathSizes) -> PathsSeen | None:
        key = tuple(sizes.values())
        if key not in tried and len(tried) < MOST_TRIED:
            tried[key] = outcome(sizes)
        return tried.get(key)

    while waiting:
        guard = waiting.pop(0)
        others = [*waiting, *kept]
        sizes = _unfulfilled(guard, guards, others, example)
        seen = attempt(sizes) if sizes else PathsSeen.FAILED  # no sizes that a user may have
        if sizes and seen is PathsSeen.FAILED and not guard.where:
            # perhaps for another reason: sizes that are too small for an operator say nothing of larger ones
            beyond = _unfulfilled(
                guard, guards, others, example, larger=sum(sizes.values()) < sum(example.values())
            )
            if beyond and attempt(beyond) is PathsSeen.SAME:
                sizes, seen = beyond, PathsSeen.SAME
        if seen is PathsSeen.SAME:
            assert sizes is not None
            waiting = [other for other in waiting if other.holds(sizes)]
        elif guard.where or (sizes and seen):  # an operator asks much that never fails
            kept.append(dataclasses.replace(guard, silent=seen in (PathsSeen.OTHER, None)))
    return (*kept, *_ones(guards, kept, example, outcome))


def _ones(
    guards: Guards,
    kept: Sequence[SizeCondition],
    example: PathSizes,
    outcome: Callable[[PathSizes], PathsSeen],
) -> Iterator[SizeCondition]:
    """Sizes that must not be 1.

    Export takes each free size as larger, and notes no guard where the model asks whether it is 1.
    """
    free = [name for name, text in guards.axes.items() if text == name and example[name] != 1]
    for group in dict.fromkeys(tuple(_alike(name, example)) for name in free):
        sizes = _with(group, 1, guards.axes, example)
        if not all(condition.holds(sizes) for condition in (*guards.relations, *kept)):
            continue
        seen = outcome(sizes)
        if seen in (PathsSeen.OTHER, PathsSeen.REFUSED):  # where the graph fails, its error says more
            for name in (name for name in group if name in free):
                yield SizeCondition(
                    f"{name} != 1", "a place that export does not name", silent=seen is PathsSeen.OTHER
                )


def _unfulfilled(
    guard: SizeCondition,
    guards: Guards,
    others: Sequence[SizeCondition],
    example: PathSizes,
    larger: bool | None = None,
) -> PathSizes | None:
    """Sizes near the example's that do not fulfil a guard, and of the others as many as possible.

    None is returned when there are none.

    With `larger` only those that are larger, or only those that are smaller.
    """
    found = (sizes for sizes in _near(guard.names(), guards.axes, example) if not guard.holds(sizes))
    if larger is not None:
        total = sum(example.values())
        found = (
            sizes
            for sizes in found
            if sum(sizes.values()) != total and (sum(sizes.values()) > total) is larger
        )
    possible = (sizes for sizes in found if all(relation.holds(sizes) for relation in guards.relations))
    return min(
        itertools.islice(possible, 64),
        key=lambda sizes: sum(not other.holds(sizes) for other in others),
        default=None,
    )


def _near(names: Sequence[str], axes: Mapping[str, str], example: PathSizes) -> Iterator[PathSizes]:
    """All sizes when one of these differs from the example's, together with those alike or alone.

    The nearest come first.
    """
    groups = {(*_alike(name, example),): None for name in names} | {(name,): None for name in names}
    for distance in range(1, FARTHEST):
        for group in groups:
            yield _with(group, example[group[0]] + distance, axes, example)
            if example[group[0]] > distance:
                yield _with(group, example[group[0]] - distance, axes, example)


def _alike(name: str, example: PathSizes) -> list[str]:
    """Return the names that probably change together, such as the batch of two inputs.

    They have the same dimension and the same size.
    """
    dim = name.rpartition("_")[2]
    return [
        other for other, size in example.items() if size == example[name] and other.rpartition("_")[2] == dim
    ]


def _with(names: Sequence[str], size: int, axes: Mapping[str, str], example: PathSizes) -> PathSizes:
    """All sizes when those names have another one."""
    sizes = {**example, **dict.fromkeys(names, size)}
    return {**sizes, **{other: int(parsed(text)(sizes)) for other, text in axes.items() if text != other}}

"""Whether a block loses more by rounding to nearest with a transform, on tokens that were held out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.algorithms.collect import Collector
from nc.algorithms.solvers import RTN
from nc.algorithms.solvers.base import InputNeeds, Problem
from nc.algorithms.transforms.paths import Decisions, Repeated
from nc.modules.block_calls import BlockCall, run
from nc.modules.copies import sharing
from nc.modules.layers import layers_of
from nc.planning.layer_plan import LayerDecision
from nc.weights.swap import replace

#: Held-out tokens that are compared, and tokens whose statistics the range rules get.
_TOKENS = 1024
#: Tokens among which so many are held out: the first process has their samples, as a single one would.
LOOKED_AT = 5 * _TOKENS
#: With fewer the report says that they are few.
_FEW = 64
#: Float outputs whose sizes differ by more are scaled by the transform, and their errors with them.
_SAME_SIZE = 1e-3

_Parameters = dict[str, dict[str, torch.nn.Parameter | None]]
_Keeps = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Calls of a block with the positions of each that are not padding (None: all).

    Attributes:
        calls: calls that transforms are fitted to.
        keeps: positions that are not padding, of `calls`.
        counted: number of calls, from the first, in the statistics of this process.
        held: calls that transforms are judged by.
        held_keeps: positions that are not padding, of `held`.
        are_others: whether `held` differs from `calls`; one sample of one row can't be divided.
    """

    calls: Sequence[BlockCall]
    keeps: _Keeps
    counted: int
    held: Sequence[BlockCall] = ()
    held_keeps: _Keeps = ()
    are_others: bool = True


def held_out(count: int) -> set[int]:
    """Which of some samples are held out: every fourth, the last of two or three, none of one."""
    return set(range(3, count, 4)) or set(range(max(count - 1, 1), count))


def divided(
    module: torch.nn.Module, calls: Sequence[BlockCall], keeps: _Keeps, counted: int, held: set[int]
) -> Tokens:
    """Divide the calls of a block, or the rows of a single one.

    Rows are divided only if a block that gets some of them gives these rows of its output.

    Args:
        module: the block.
        calls: of one process.
        keeps: of the calls.
        counted: the first so many are in the statistics of this process.
        held: indices of those that are held out.
    """
    held = {i for i in held if 0 <= i < len(calls)}
    rest = [i for i in range(len(calls)) if i not in held]
    fit, others = ((_Some(calls, some), [keeps[i] for i in some]) for some in (rest, sorted(held)))
    mine = sum(i < counted for i in rest)
    if held and rest:
        return Tokens(*fit, mine, *others)
    halves = _rows_of(module, calls[0], keeps[0]) if len(calls) == counted == 1 else None
    if halves is None:
        return Tokens(*fit, mine, *fit, are_others=False)
    (first, first_keep), (second, second_keep) = halves
    return Tokens([first], [first_keep], 1, [second], [second_keep])


class _Some(Sequence[BlockCall]):
    """Some of the calls, which are read when they are needed."""

    def __init__(self, calls: Sequence[BlockCall], indices: Sequence[int]) -> None:
        self._calls, self._indices = calls, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        found = self._indices[index]
        return [self._calls[i] for i in found] if isinstance(index, slice) else self._calls[found]


def _rows_of(
    module: torch.nn.Module, call: BlockCall, keep: torch.Tensor | None
) -> tuple[tuple[BlockCall, torch.Tensor | None], ...] | None:
    """Return three quarters of a call's rows and the others; None where rows depend on each other."""
    batch = next((t.shape[0] for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim()), 0)
    if batch < 2:
        return None
    end = batch - max(batch // 4, 1)
    whole = run(module, call)
    parts = []
    for rows in (slice(0, end), slice(end, batch)):

        def part(value: Any, rows: slice = rows) -> Any:
            is_whole = isinstance(value, torch.Tensor) and value.shape[:1] == (batch,)
            return value[rows] if is_whole else value

        some: BlockCall = pytree.tree_map(part, call)
        try:
            output = run(module, some)
        except Exception:  # user code, with sizes that nc chose, can raise anything
            return None
        expected = whole[rows]
        if output.shape != expected.shape or not torch.allclose(
            output, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())
        ):
            return None
        parts.append((some, None if keep is None else keep[rows]))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Loss:
    """What rounding to nearest loses.

    Attributes:
        output: squared error of the block's output over its square, where every token takes the path that it
            takes in the float block.
        chosen: the same where the rounded block chooses: a token that a router sends elsewhere can lose more
            than all others by rounding.
        parts: of layers that only some tokens reach, the same of their outputs, the square, and how many
            tokens that were.
        tokens: how many were compared.
    """

    output: float
    chosen: float
    parts: Mapping[str, tuple[float, float, int]]
    tokens: int

    def text(self, after: Loss) -> str:
        """Return what the block's output loses, and loses after a change."""
        text = f"{self.output:.1e} → {after.output:.1e}"
        if (self.chosen, after.chosen) == (self.output, after.output):
            return text
        return f"{text}, and {self.chosen:.1e} → {after.chosen:.1e} where rounded layers choose the path"

    @property
    def few(self) -> str:
        """A word on what a comparison of few tokens is worth; "" for others."""
        return "" if self.tokens >= _FEW else ", too few to know what others lose"

    def why_worse(self, before: Loss) -> str:
        """In what it is more than another one; "" where it is not.

        A layer that n tokens reach may lose 1 / sqrt(n) more.
        """
        if not self.output <= before.output:
            return f"the block's output loses {self.output:.1e} of its square in place of {before.output:.1e}"
        if not self.chosen <= before.chosen:
            return (
                f"the block's output loses {self.chosen:.1e} of its square in place of {before.chosen:.1e}, "
                "because other tokens take another path than in the float block"
            )
        for name, (lost, size, rows) in self.parts.items():
            old, old_size, _ = before.parts.get(name, (lost, size, rows))
            if abs(size - old_size) <= _SAME_SIZE * old_size and lost > old * (1 + rows**-0.5):
                return f"{name!r}, which {rows} of the tokens reach, loses {lost:.1e} in place of {old:.1e}"
        return ""


class BlockValidation:
    """Rounds the layers of a block to nearest.

    Args:
        module: the block.
        prefix: its name in the model.
        decisions: of its linears, by their name in the model.
        tokens: see `divided`.
    """

    def __init__(
        self, module: torch.nn.Module, prefix: str, decisions: Mapping[str, LayerDecision], tokens: Tokens
    ) -> None:
        start = f"{prefix}." if prefix else ""
        self.module, self.tokens = module, tokens
        self._full = {name.removeprefix(start): name for name in decisions}
        self._decisions = decisions

    def loss(self, clips: Mapping[str, torch.Tensor]) -> Loss:
        """Compare the block as it is with what it is after rounding.

        Args:
            clips: of layers, by their name in the model, see `Problem.clip`.
        """
        rounded = self._rounded(clips)
        lost = chosen = total = 0.0
        tokens = 0
        parts: dict[str, tuple[float, float, int]] = {}
        for call, keep in zip(self.tokens.held, self.tokens.held_keeps, strict=True):
            if tokens >= _TOKENS:
                break
            own = Decisions()
            with _outputs(self.module, self._full, call) as expected, own:
                output = run(self.module, call)
            with _outputs(rounded, self._full, call) as found, Repeated(own.kept) as repeated:
                other = run(rounded, call)
            free = run(rounded, call) if repeated.differs else other
            for name, values in expected.items():
                for one, two in zip(values, found.get(name, ()), strict=False):
                    if one.shape == two.shape and one.numel():
                        error, size, rows = parts.get(name, (0.0, 0.0, 0))
                        parts[name] = (
                            error + float((two - one).double().square().sum()),
                            size + float(one.double().square().sum()),
                            rows + one.numel() // one.shape[-1],
                        )
            if keep is not None and output.shape[:2] == keep.shape:
                output, other, free = output[keep], other[keep], free[keep]
            lost += float((other - output).double().square().sum())
            chosen += float((free - output).double().square().sum())
            total += float(output.double().square().sum())
            tokens += output.numel() // max(output.shape[-1], 1)
        relative = {name: (error / size, size, n) for name, (error, size, n) in parts.items() if size > 0}
        square = total if total > 0 else math.inf
        return Loss(lost / square, chosen / square, relative, tokens)

    def _rounded(self, clips: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """Return a copy of the block with rounded layers."""
        collector = Collector(
            {name: self.module.get_submodule(name) for name in self._full}, InputNeeds(squares=True)
        )
        tokens = 0
        for call, keep in zip(self.tokens.calls, self.tokens.keeps, strict=True):
            if tokens >= _TOKENS:
                break
            with collector.watching(keep):
                output = run(self.module, call)
            tokens += output.numel() // max(output.shape[-1], 1)
        holder = torch.nn.ModuleList([sharing(self.module)])  # a block may be a linear itself
        for layer in layers_of(holder):
            name = layer.name.removeprefix("0").removeprefix(".")
            if name not in self._full:
                continue
            full = self._full[name]
            decision = self._decisions[full]
            assert decision.form is not None
            problem = Problem(
                name=full,
                weight=layer.weight.float().contiguous(),
                form=decision.form,
                rule=decision.rule,
                inputs=collector.of.get(name),
                clip=clips.get(full),
            )
            replace(holder, layer, decision, RTN().solve(problem), None)
        return holder[0]


@contextlib.contextmanager
def _outputs(
    module: torch.nn.Module, names: Mapping[str, str], call: BlockCall
) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect the outputs of the layers that get fewer rows than the block, by their name in the model."""
    whole = max((t.numel() // t.shape[-1] for t in pytree.tree_leaves(call) if _has_channels(t)), default=0)
    found: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            if output.numel() // max(output.shape[-1], 1) < whole:
                found.setdefault(name, []).append(output)

        return keep

    handles = [module.get_submodule(name).register_forward_hook(hook(full)) for name, full in names.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _has_channels(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() > 1
        and value.numel() > 0
    )


def parameters_of(module: torch.nn.Module) -> _Parameters:
    """Return the parameters of all modules in a module, also None."""
    return {
        name: dict(part._parameters)
        for name, part in module.named_modules()
        if not isinstance(part, torch.jit.ScriptModule)
    }


def put(module: torch.nn.Module, parameters: _Parameters) -> None:
    """Give a module the parameters that it had."""
    for name, own in parameters.items():
        held = module.get_submodule(name)._parameters  # ties have no other way
        held.clear()
        held.update(own)

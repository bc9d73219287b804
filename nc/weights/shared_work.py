"""Quantizing one model with several processes.

Each runs its part of the calibration data, rank 0 solves, and all get its bits.

So processes may run on different CPUs, whose kernels round differently: no decision is made twice.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from nc.algorithms.solvers.base import InputNeeds
from nc.calibration.ranks import Ranks
from nc.formats.tensor_format import TensorFormat
from nc.graph.plan import Applied
from nc.modules.block_calls import Sample
from nc.modules.statistics import InputStatistics
from nc.nn.result import LayerResult
from nc.numerics.packed_weight import PackedWeight

#: (module, name of a parameter, parameter)
_Parameters = list[tuple[str, str, torch.nn.Parameter | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The part of one process.

    Attributes:
        samples: that it runs. Those of rank 0 are the first ones, and at least those that transforms and
            block solvers look at.
        counted: the first so many of them go into the statistics: each sample of the whole is counted by one
            process.
        ranks: the processes.
    """

    samples: Sequence[Sample]
    counted: int
    ranks: Ranks = Ranks()  # it is frozen

    @classmethod
    def of(cls, samples: Sequence[Sample], ranks: Ranks, looking: Iterable[InputNeeds]) -> Share:
        """Neighbouring samples for each rank, as many for one as for another.

        Args:
            samples: of all ranks.
            ranks: the processes.
            looking: what the transforms and block solvers need.
        """
        start, end = (len(samples) * r // ranks.count for r in (ranks.rank, ranks.rank + 1))
        held = max(end, *(_looked_at(needs, samples) for needs in looking), 0) if ranks.is_first else end
        return cls(samples[start:held], end - start, ranks)

    def merged(self, mine: dict[str, InputStatistics]) -> dict[str, InputStatistics]:
        """Sum the statistics of all ranks, in the order of the ranks.

        Args:
            mine: of the samples that this rank counts, by layer; layers that read one tensor have the same
                object.

        Returns:
            On rank 0 those of all samples; on the others `mine`.
        """
        if self.ranks.alone:
            return mine
        objects = list({id(found): found for found in mine.values()}.values())
        names = [[name for name, found in mine.items() if found is one] for one in objects]
        parts = [part for one in objects for part in one.tensors().values()]
        document = [
            [[str(n) for n in group], one.tokens, list(one.tensors())]
            for group, one in zip(names, objects, strict=True)
        ]
        result = dict(mine)
        for theirs, tensors in self.ranks.on_first(document, parts):
            rest = list(tensors)
            for group, tokens, kinds in theirs:
                add(result, group, InputStatistics(tokens, **{kind: rest.pop(0) for kind in kinds}))
        return result

    def transformed(
        self, module: torch.nn.Module, apply: Callable[[], Applied], *, everywhere: bool = False
    ) -> Applied:
        """Change the float weights of a module on rank 0; the others get the same ones.

        Args:
            module: the block, or the model.
            apply: replaces parameters of `module`.
            everywhere: the other ranks apply it too, for what it changes beside weights.
        """
        before = [] if self.ranks.alone else _parameters(module)
        applied = Applied("", (), "")
        with self.ranks.together():
            if self.ranks.is_first or everywhere:
                applied = apply()
        return applied if self.ranks.alone else self._as_on_first(module, before, applied)

    def _as_on_first(self, module: torch.nn.Module, before: _Parameters, applied: Applied) -> Applied:
        old = {(name, key): parameter for name, key, parameter in before}
        rows: list[list[str]] = []
        new: dict[int, tuple[str, torch.nn.Parameter]] = {}  # those that several modules share are sent once
        for name, key, parameter in _parameters(module):
            if parameter is not None and parameter is not old.get((name, key)):
                rows.append([name, key, new.setdefault(id(parameter), (str(len(new)), parameter))[0]])
        told = [
            rows,
            [p.requires_grad for _, p in new.values()],
            [applied.algorithm, list(applied.operators), applied.text],
        ]
        (rows, flags, text), tensors = self.ranks.from_first(
            told, {number: p.data for number, p in new.values()}
        )
        if not self.ranks.is_first:
            made = {
                number: torch.nn.Parameter(t, flag)
                for (number, t), flag in zip(tensors.items(), flags, strict=True)
            }
            for (name, key), parameter in old.items():
                module.get_submodule(name)._parameters[key] = parameter  # ties have no other way
            for name, key, number in rows:
                module.get_submodule(name)._parameters[key] = made[number]
        return Applied(text[0], tuple(text[1]), text[2])

    def solved(
        self, form: TensorFormat, solve: Callable[[], tuple[PackedWeight, LayerResult]]
    ) -> tuple[PackedWeight, LayerResult]:
        """Codes that rank 0 finds, on every rank.

        Args:
            form: of the weight.
            solve: called on rank 0 only.
        """
        found: tuple[PackedWeight, LayerResult] | None = None
        with self.ranks.together():
            if self.ranks.is_first:
                found = solve()
        if self.ranks.alone:
            assert found is not None
            return found
        told = None if found is None else [list(found[0].shape), found[1].to_dict()]
        (shape, result), tensors = self.ranks.from_first(told, {} if found is None else found[0].tensors())
        return found or (
            PackedWeight(form=form, shape=(shape[0], shape[1]), **tensors),
            LayerResult.from_dict(result),
        )


def add(sums: dict[str, InputStatistics], names: Sequence[str], part: InputStatistics) -> None:
    """Add statistics of layers that read one tensor; layers that did so everywhere keep sharing one object.

    Args:
        sums: by layer; changed.
        names: of the layers.
        part: their statistics in another process.
    """
    absent = [name for name in names if name not in sums]
    for one in list({id(sums[name]): sums[name] for name in names if name in sums}.values()):
        inside = [name for name in names if sums.get(name) is one]
        outside = [name for name, found in sums.items() if found is one and name not in names]
        whole = copy.deepcopy(one) if outside else one
        whole.merge(part)
        sums.update(dict.fromkeys(inside, whole))
    sums.update(dict.fromkeys(absent, part))


def _parameters(module: torch.nn.Module) -> _Parameters:
    return [(name, key, p) for name, part in module.named_modules() for key, p in part._parameters.items()]


def _looked_at(needs: InputNeeds, samples: Sequence[Sample]) -> int:
    """How many of the first samples a transform or block solver looks at."""
    if needs.samples is None:
        return len(samples)
    count = tokens = 0
    while count < len(samples) and tokens < needs.tokens:
        tokens += _tokens(samples[count])
        count += 1
    return max(count, min(needs.samples, len(samples)))


def _tokens(sample: Sample) -> int:
    """At least how many tokens a sample has: token ids are counted, of other inputs the rows."""
    if sample.keep is not None:
        return int(sample.keep.sum())
    tensors = [
        v for v in (*sample.call[0], *sample.call[1].values()) if isinstance(v, torch.Tensor) and v.dim()
    ]
    ids = [t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    return min(ids or [t.shape[0] for t in tensors] or [1])

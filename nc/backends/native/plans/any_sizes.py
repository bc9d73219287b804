"""Run a graph over rows of texts for any number of both, by a family of plans for each number of threads."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from nc.backends.native.plans.affine import Sizes, Unfit
from nc.backends.native.plans.execution_plan import ExecutionPlan
from nc.backends.native.plans.family import FamilyInstance, FamilyKernels, PlanFamily, family_of
from nc.errors import BackendError
from nc.kernels.c_code import openmp
from nc.kernels.onednn.primitives import Maker
from nc.kernels.onednn.runner import CompiledRunner

#: Sizes for which plans are recorded: enough to choose the kernels of many rows, and few enough for what has
#: to be computed meanwhile.
RECORDED: tuple[Sizes, ...] = ((256, 16), (320, 16), (256, 32), (384, 48))
#: Sizes at which the family is compared with a separate plan, which has the kernels of many rows and texts,
#: and how many of these texts are computed again without the others.
_COMPARED: Sizes = (320, 128)
_WITHOUT_OTHERS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SampleInputs:
    """Inputs of a graph over rows of texts.

    Attributes:
        sizes: inputs → rows and texts.
        make: rows and texts → inputs.
        first: inputs and a number of texts → inputs that are only these first texts.
        longest: the most rows of a text.
    """

    sizes: Callable[[Sequence[torch.Tensor]], Sizes]
    make: Callable[[int, int], Sequence[torch.Tensor]]
    first: Callable[[Sequence[torch.Tensor], int], Sequence[torch.Tensor]]
    longest: int


class _Memory(threading.local):
    """The instances of a thread, by the key of their family."""

    def __init__(self) -> None:
        self.instances: dict[Hashable, FamilyInstance] = {}


class AnySizes:
    """Runs one graph for any input sizes, by a family of plans for each number of threads; thread-safe.

    Args:
        samples: makes inputs of the graph for given sizes.
        record: inputs → a new plan.
        by_plan: inputs → the outputs of a plan for their sizes, compared with the quantized graph.
        maker: makes oneDNN primitives.
        runner: calls the primitives.
        lock: held while plans are recorded.
    """

    def __init__(
        self,
        samples: SampleInputs,
        record: Callable[[Sequence[torch.Tensor]], ExecutionPlan],
        by_plan: Callable[[Sequence[torch.Tensor]], Sequence[Any]],
        maker: Maker,
        runner: CompiledRunner,
        lock: threading.RLock,
    ) -> None:
        self._samples, self._record, self._by_plan = samples, record, by_plan
        self._maker, self._runner, self._lock = maker, runner, lock
        self._families: dict[Hashable, tuple[PlanFamily, FamilyKernels]] = {}
        self._memory = _Memory()

    def prepare(self) -> None:
        """Make the family for this number of threads.

        Raises:
            BackendError: no family fits the plans of this graph.
        """
        self._family(_key())

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Return the outputs, which the next call of this thread overwrites.

        Raises:
            BackendError: a kernel failed, or no family can be made for this number of threads.
            IndexError: an index among the inputs is out of range.
        """
        rows, texts = self._samples.sizes(inputs)
        return self._instance(rows, texts).run(inputs, rows, texts)

    def _instance(self, rows: int, texts: int) -> FamilyInstance:
        key = _key()
        found = self._memory.instances.get(key)
        if found is None or rows > found.rows or texts > found.texts:
            most = (rows, texts)
            if found is not None:  # by half at least, as what it has is made anew
                most = max(rows, found.rows * 3 // 2), max(texts, found.texts * 3 // 2)
            self._memory.instances.pop(key, None)
            found = None  # before there is more
            with torch.inference_mode(False):  # operators of torch write into this memory in any mode
                found = FamilyInstance(*self._family(key), self._runner, *most)
            self._memory.instances[key] = found
        return found

    def _family(self, key: Hashable) -> tuple[PlanFamily, FamilyKernels]:
        found = self._families.get(key)
        if found is None:
            with self._lock:
                found = self._families.get(key)  # of a thread that was here first
                if found is None:
                    found = self._families[key] = self._made()
        return found

    def _made(self) -> tuple[PlanFamily, FamilyKernels]:
        """Return a new family that computes what a plan for other sizes computes, bit by bit."""
        kernels = FamilyKernels(self._maker)
        with torch.no_grad():
            try:
                plans = [self._record(self._samples.make(*sizes)) for sizes in RECORDED]
                family = family_of(plans, RECORDED)
            except Unfit as error:
                msg = f"its plans depend on sizes in a way that is not known: {error}"
                raise BackendError(msg) from None
            except IndexError as error:
                msg = f"it does not take texts of other lengths made of the example's tokens: {error}"
                raise BackendError(msg) from None
            kernels.prepare(family)
            self._compare(family, kernels)
        return family, kernels

    def _compare(self, family: PlanFamily, kernels: FamilyKernels) -> None:
        """Raise BackendError if the outputs of a family differ from a plan's, or change with fewer texts.

        Each run has memory for no more rows than it needs.
        """
        rows, texts = _COMPARED
        inputs = self._samples.make(rows, max(texts, math.ceil(rows / self._samples.longest)))
        fewer = self._samples.first(inputs, _WITHOUT_OTHERS)
        got, of_fewer = (self._computed(family, kernels, given) for given in (inputs, fewer))
        for a, b, part in zip(self._by_plan(inputs), got, of_fewer, strict=True):
            if not torch.equal(a, b):
                msg = "a plan for any number of rows computes something else than one for its own"
                raise BackendError(msg)
            if not torch.equal(b[tuple(slice(n) for n in part.shape)], part):
                msg = "a plan for any number of rows computes something else for fewer texts"
                raise BackendError(msg)

    def _computed(
        self, family: PlanFamily, kernels: FamilyKernels, inputs: Sequence[torch.Tensor]
    ) -> list[Any]:
        rows, texts = self._samples.sizes(inputs)
        with torch.inference_mode(False):
            return FamilyInstance(family, kernels, self._runner, rows, texts).run(inputs, rows, texts)


def _key() -> Hashable:
    """Return what a family is made for: kernels divide their work when they are made."""
    return openmp.threads()

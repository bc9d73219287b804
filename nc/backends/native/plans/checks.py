"""Compare each plan with the quantized graph when it is made, and remember which sizes were compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from nc.errors import ArtefactCorruptError, VerificationError
from nc.process.warn import warn
from nc.proof.kernels import Fault, KernelCheck

#: Sizes of which it is remembered that they were compared: plans that were given up are made again without.
_MOST_SIZES = 4096

#: Names of values → the outputs of one call of a plan, and the values inside of it by these names.
Look = Callable[[frozenset[str]], tuple[Sequence[Any], Mapping[str, torch.Tensor]]]


class PlanJudge(Protocol):
    """What compares plans with the graph that was lowered; see `nc.backends.native.judge`."""

    names: frozenset[str]
    new_sizes: bool

    def kernels(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[Any],
        values: Mapping[str, torch.Tensor],
        *,
        example: bool,
    ) -> KernelCheck:
        """Compare the values inside of one call."""

    def why_unlike_for(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> str:
        """Why outputs are not what the graph computes; "" where they are."""


class PlanChecks:
    """The comparisons of one model's plans.

    Args:
        judge: compares them; None: nothing is compared.
        otherwise: flat tensors → flat outputs, for sizes whose plan is wrong.

    Attributes:
        first: what the comparison of the first plan, that for the example, found; None where there was none.
        others: number of other sizes that were compared.
        wrong: number of those whose plan is wrong.
        why_stopped: why new sizes can't be compared any more; "" where they can.
    """

    def __init__(self, judge: PlanJudge | None, otherwise: Callable[..., Sequence[Any]]) -> None:
        self._judge, self._otherwise = judge, otherwise
        self._known: dict[Hashable, str] = {}
        self.first: KernelCheck | None = None
        self.others = self.wrong = 0
        self.why_stopped = ""

    def why_wrong(self, key: Hashable, inputs: Sequence[torch.Tensor], look: Look) -> str:
        """Why the plan for these inputs must not be used; "" where it may be.

        Raises:
            VerificationError: neither the plan nor what takes its place computes what the quantized graph
                computes for new sizes.
        """
        judge = self._judge
        if judge is None or (self.first is not None and not judge.new_sizes):
            return ""
        if key in self._known:
            return self._known[key]
        if self.first is None:
            self.first = judge.kernels(inputs, *look(judge.names), example=True)
            return self._remember(key, self.first)
        if self.why_stopped:
            return ""
        try:
            check = judge.kernels(inputs, *look(judge.names), example=False)
        except ArtefactCorruptError as error:  # the packed weights are whole, so the model goes on
            self.why_stopped = str(error)
            warn(f"Kernels for new input sizes can't be compared any more: {error}")
            return ""
        self.others += 1
        self.wrong += bool(check.faults)
        if check.faults:
            self._warn_of(check.faults[0], inputs, judge)
        return self._remember(key, check)

    def _remember(self, key: Hashable, check: KernelCheck) -> str:
        """Keep why a plan must not be used, and return it."""
        faults = check.faults
        why = (
            "oneDNN primitives compute something else than the quantized graph, the first time at "
            f"{faults[0]}"
            if faults
            else ""
        )
        self._known[key] = why
        if len(self._known) > _MOST_SIZES:
            del self._known[next(iter(self._known))]
        return why

    def _warn_of(self, fault: Fault, inputs: Sequence[torch.Tensor], judge: PlanJudge) -> None:
        """Say that the plan for new sizes is not used, once what takes its place is known to be right."""
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        what = (
            f"Kernels for inputs of sizes {sizes} compute something else than the quantized graph, the first "
            f"time at {fault}"
        )
        with torch.no_grad():
            why = judge.why_unlike_for(inputs, self._otherwise(*(tensor.clone() for tensor in inputs)))
        if why:
            msg = f"{what}. What would take their place {why}."
            raise VerificationError(msg)
        warn(f"{what}. torch's own operators, which agree with it, compute these sizes; they are slower.")

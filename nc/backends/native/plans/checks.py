"""Compare each plan with the quantized graph when it is made, and remember which sizes were compared.

All of the first one is compared, and of the others a few places of what kernels make that were not compared
for such sizes yet. That happens in the call that wants the plan, whose outputs are those of the caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from nc.backends.native.plans.execution_plan import Constant, ExecutionPlan, MemoryPart, Slot, Watched
from nc.backends.native.plans.plan_instance import See
from nc.backends.native.plans.proven import Kernel, Proven, Showing, desc_of, kernel_of, shown_by
from nc.errors import ArtefactCorruptError, VerificationError
from nc.kernels.onednn.descriptions import Desc
from nc.process.torch_settings import on_cpu
from nc.process.warn import warn
from nc.proof.kernels import Fault, KernelCheck

#: Sizes of which it is remembered that they were compared: plans that were given up are made again without.
_MOST_SIZES = 4096


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A plan that was made, and how to look into a call of it.

    Attributes:
        plan: the plan.
        watched: its tensors that stand for values of the graph that was lowered.
        threads: that it was made for.
        look: runs it on some inputs, shows those of the values that are named, and returns the outputs.
    """

    plan: ExecutionPlan
    watched: Sequence[Watched]
    threads: int
    look: Callable[[Sequence[torch.Tensor], Collection[str], See], Sequence[Any]]


class PlacesCheck(Protocol):
    """A comparison of values at a few places; see `nc.proof.few_places`."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the values that it wants to see."""

    def see(self, names: tuple[str, ...], value: torch.Tensor) -> None:
        """Keep what is wanted of a value."""

    def check(self, outputs: Sequence[Any]) -> KernelCheck:
        """Return what it found."""


class PlanReference(Protocol):
    """What compares plans with the graph that was lowered; see `nc.backends.native.references`."""

    names: frozenset[str]
    new_sizes: bool
    always: bool

    def kernels(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any], values: Mapping[str, torch.Tensor]
    ) -> KernelCheck:
        """Compare the values inside of one call."""

    def few_places(
        self,
        inputs: Sequence[torch.Tensor],
        values: Mapping[str, Desc],
        outputs: Sequence[Desc | None],
        wanted: Sequence[Showing] | None,
    ) -> PlacesCheck:
        """Return a comparison of a few places of the values that show whether kernels are right.

        Args:
            inputs: flat inputs.
            values: name → how the plan has it in memory.
            outputs: layouts of the outputs; None for an output that is not a tensor.
            wanted: of kernels, what shows whether they are right; outputs always do. None: all values.
        """

    def why_unlike_for(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> str:
        """Why outputs are not what the graph computes; "" where they are."""


class PlanChecks:
    """The comparisons of one model's plans.

    Args:
        reference: compares them; None: nothing is compared.
        otherwise: flat tensors → flat outputs, for sizes whose plan is wrong.

    Attributes:
        first: what the comparison of the first plan, that for the example, found; None where there was none.
        others: number of other sizes that were compared.
        wrong: number of those whose plan is wrong.
        why_stopped: why new sizes can't be compared any more; "" where they can.
        wholes: number of other sizes that are right and of which all places were compared.
        why_whole: the last error of a comparison of few places; "" where there was none.
    """

    def __init__(self, reference: PlanReference | None, otherwise: Callable[..., Sequence[Any]]) -> None:
        self._reference, self._otherwise = reference, otherwise
        self._known: dict[Hashable, str] = {}
        self._proven = Proven()
        self.first: KernelCheck | None = None
        self.others = self.wrong = self.wholes = 0
        self.why_stopped = self.why_whole = ""

    def compare(
        self, key: Hashable, inputs: Sequence[torch.Tensor], made: Made
    ) -> tuple[str, Sequence[Any] | None]:
        """Compare a new plan.

        Returns:
            Why the plan for these inputs must not be used, "" where it may be; and its outputs for them, None
            where they are not known.

        Raises:
            VerificationError: neither the plan nor what takes its place computes what the quantized graph
                computes for new sizes.
        """
        reference, is_first = self._reference, self.first is None
        if reference is None or (not is_first and not reference.new_sizes):
            return "", None
        if key in self._known:
            return self._known[key], None
        if self.why_stopped:
            return "", None
        try:
            check, outputs = self._compared(reference, inputs, made, all_places=is_first and reference.always)
        except ArtefactCorruptError as error:  # the packed weights are whole, so the model goes on
            if is_first:
                raise
            self.why_stopped = str(error)
            warn(f"Kernels for new input sizes can't be compared any more: {error}")
            return "", None
        if is_first:
            self.first = check
            return self._remember(key, check), outputs
        self.others += 1
        self.wrong += bool(check.faults)
        if check.faults:
            self._warn_of(check.faults[0], inputs, reference)
        return self._remember(key, check), outputs

    def _compared(
        self, reference: PlanReference, inputs: Sequence[torch.Tensor], made: Made, *, all_places: bool
    ) -> tuple[KernelCheck, Sequence[Any] | None]:
        """Return what a comparison found, and the outputs of the plan where it is right."""
        kernels = [kernel_of(entry, made.threads) for entry in made.plan.entries]
        found = None if all_places else self._at_few_places(reference, inputs, made, kernels)
        if found is not None and not found[0].faults:
            self._proven.add(kernels)
            return found
        values: dict[str, torch.Tensor] = {}

        def see(names: tuple[str, ...], value: torch.Tensor) -> None:
            values.update(dict.fromkeys(names, value.clone()))

        outputs = made.look([tensor.clone() for tensor in inputs], reference.names, see)
        check = reference.kernels(inputs, outputs, values)
        if not check.faults:
            self._proven.add(kernels)
            self.wholes += self.first is not None
        return check, None

    def _at_few_places(
        self, reference: PlanReference, inputs: Sequence[torch.Tensor], made: Made, kernels: Sequence[Kernel]
    ) -> tuple[KernelCheck, Sequence[Any]] | None:
        """Return what few places of what new kernels make, and of the outputs, are: of all in the first plan.

        None is returned where few places can't be told apart from the others; then all are compared.
        """
        values = {name: desc_of(each.ref) for each in made.watched for name in each.names}
        refs = (ref if isinstance(ref, (Constant, Slot, MemoryPart)) else None for ref in made.plan.outputs)
        outputs = [None if ref is None else desc_of(ref) for ref in refs]
        wanted = None
        if self.first is not None:
            comparable = [each for each in made.watched if not reference.names.isdisjoint(each.names)]
            wanted = shown_by(made.plan.entries, self._proven.new(kernels), comparable)
        try:
            comparison = reference.few_places(inputs, values, outputs, wanted)
        except ArtefactCorruptError:
            raise
        except Exception as error:  # an operator that it reads otherwise: the call must not depend on that
            self._note_whole(error)
            return None
        failed: list[Exception] = []

        def see(names: tuple[str, ...], value: torch.Tensor) -> None:
            try:
                comparison.see(names, value)
            except Exception as error:  # likewise; the run goes on
                failed.append(error)

        found = made.look(inputs, comparison.names, see)
        if failed:
            self._note_whole(failed[0])
            return None
        try:
            with torch.no_grad(), on_cpu():
                return comparison.check(found), found
        except Exception as error:  # likewise
            self._note_whole(error)
            return None

    def _note_whole(self, error: Exception) -> None:
        """Note for reports why all places are compared."""
        self.why_whole = f"{type(error).__name__}: {error}"

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

    def _warn_of(self, fault: Fault, inputs: Sequence[torch.Tensor], reference: PlanReference) -> None:
        """Say that the plan for new sizes is not used, once what takes its place is known to be right."""
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        what = (
            f"Kernels for inputs of sizes {sizes} compute something else than the quantized graph, the first "
            f"time at {fault}"
        )
        with torch.no_grad():
            why = reference.why_unlike_for(inputs, self._otherwise(*(tensor.clone() for tensor in inputs)))
        if why:
            msg = f"{what}. What would take their place {why}."
            raise VerificationError(msg)
        warn(f"{what}. torch's own operators, which agree with it, compute these sizes; they are slower.")

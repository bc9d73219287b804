"""Weight-only quantization under calibration.

It holds the user's float model, and the calibration samples that reach it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.algorithms.transforms import TEQ
from nc.api.preparation.base import Conversion, Preparation
from nc.backends.low_bit.engine import engine as low_bit_engine
from nc.backends.low_bit.engine import set_backend
from nc.calibration.ranks import Ranks
from nc.capture.state import changes_of, kept_in
from nc.config import AnyConfig
from nc.errors import NotCalibratedError, StateError
from nc.graph.caches import is_cache
from nc.modules.block_calls import Sample
from nc.modules.copies import own_tensors, sharing
from nc.modules.layers import is_low_bit, settle_layers
from nc.nn.origin import QuantizationRun
from nc.planning.layer_plan import WeightPlan, others_text
from nc.process.modes import PlainPath, evaluating
from nc.process.progress import Progress
from nc.process.warn import warn
from nc.reports.weight_verdict import measure as low_bit_verdict
from nc.reports.weight_verdict import warn_if_slower
from nc.weights.accuracy import FirstCall, accuracy_db, first_call, goes_on, hopeless_layers, hopeless_text
from nc.weights.driver import Driver
from nc.weights.encoders import zeros_at_padding
from nc.weights.history import note
from nc.weights.saved_calls import RecordedCalls


class _Refused(torch.autograd.Function):
    """The identity for outputs of a model that can't be trained: its backward raises StateError."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        msg = (
            "TEQ learns its scales in convert(), from the calls of the prepared model, and has nothing to "
            "train in a loop of your own: take the loss and the optimizer out, call the prepared model with "
            "the data, and then convert()."
        )
        raise StateError(msg)


def _refusing(output: torch.Tensor) -> torch.Tensor:
    """Return an output from which a derivative is an error that says what to do."""
    if not output.is_floating_point():
        return output
    found: torch.Tensor = _Refused.apply(output, torch.zeros((), dtype=torch.float32, requires_grad=True))  # type: ignore[no-untyped-call]
    return found


class PreparedWeights(Preparation):
    """The float model. Call it with calibration data; it returns what the float model returns.

    Attributes:
        model: the float model, unchanged.
        plan: the decisions; `print(prepared.plan)` shows them.
        quant_config: the configuration.
        samples: the calls so far, if the configuration needs data.
        first: the first call that changed nothing in the model, to compare outputs with; None where there was
            none.
        asked: the backend that `prepare` was asked for.
    """

    saved_by = "save what it was called with by prepared.statistics.save()"
    cast_by = "cast the float model, and call prepare() with it"
    plan: WeightPlan

    def __init__(
        self,
        model: torch.nn.Module,
        plan: WeightPlan,
        quant_config: AnyConfig,
        *,
        inplace: bool = False,
        asked: str = "auto",
    ) -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        self.quant_config = quant_config
        self.inplace = inplace
        self.asked = asked
        self.samples: list[Sample] = []
        self.first: FirstCall | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the float model's outputs.

        The inputs are kept for `convert`, if the configuration needs data.
        """
        is_first = self.first is None and not goes_on(args, kwargs)
        wanted = self.plan.needs_data or is_first
        sample = _sample(args, kwargs) if wanted else None  # before the model can change its inputs in place
        before = kept_in(self.model) if is_first else {}
        with evaluating(self.model), torch.no_grad():
            output = self.model(*args, **kwargs)
        if sample is not None and self.plan.needs_data:
            self.samples.append(sample)
        if sample is not None and is_first and not changes_of(self.model, before, kept_in(self.model)):
            self.first = first_call(sample, output)
        trains = torch.is_grad_enabled() and any(isinstance(t, TEQ) for t in self.plan.transforms)
        if not trains:
            return output
        return pytree.tree_map_only(torch.Tensor, _refusing, output, is_leaf=is_cache)  # which stays as it is

    @property
    def statistics(self) -> RecordedCalls:
        """The calls so far, to save, load or merge."""
        return RecordedCalls(self.model, self.samples)

    def convert(self, asked: Conversion) -> torch.nn.Module:
        """Return a model of the user's class, whose layers hold low-bit weights.

        It warns where the model is far from the float one, or slower.

        Raises:
            As `quantized`; and if the backend has no kernels for low-bit weights.
        """
        name = asked.backend or self.asked
        low_bit_engine(name)  # refused before the work, not after it
        model, run = self._solved(asked.progress)
        set_backend(model, name)
        decibels = self._compared(model)
        verdict = low_bit_verdict(model) if asked.measure else None
        if verdict is not None:
            warn_if_slower(verdict)
        self._note(model, dataclasses.replace(run, sqnr_db=decibels, verdict=verdict))
        return model

    def _compared(self, low_bit: torch.nn.Module) -> float | None:
        """Return the SQNR of the outputs against the float model's in dB, if that was called.

        It warns where the model is far from it.
        """
        decibels = None
        if self.first is not None:
            try:
                decibels = accuracy_db(low_bit, self.first)
            except Exception as error:  # any model can raise anything; what was quantized is kept
                warn(
                    "The quantized model fails on the inputs of the first call of the prepared model: "
                    f"{type(error).__name__}: {error}"
                )
        hopeless = hopeless_text(decibels, hopeless_layers(low_bit))
        if hopeless:
            warn(hopeless)
        return decibels

    def _note(self, model: torch.nn.Module, run: QuantizationRun) -> None:
        note(model, run, {decision.operator for decision in self.plan.quantized})

    def _users_model(self) -> torch.nn.Module | None:
        return self._modules.get("model")

    def _dtypes(self) -> set[torch.dtype]:
        return {
            tensor.dtype
            for tensor in (*self.model.parameters(), *self.model.buffers())
            if tensor.is_floating_point()
        }

    def quantized(self, progress: Progress | None = None) -> torch.nn.Module:
        """Return the model with low-bit weights: a copy, or with `inplace` the user's own.

        It is the same one on all ranks of a group.

        Raises:
            StateError: the configuration needs calibration data, and there is none; another rank has another
                model, or stopped; or the model was quantized in place before, perhaps in a run that stopped.
        """
        model, run = self._solved(progress)
        self._note(model, run)
        return model

    def _solved(self, progress: Progress | None) -> tuple[torch.nn.Module, QuantizationRun]:
        """Return the model with low-bit weights, and what was done; raises as `quantized`."""
        if self.inplace and any(
            is_low_bit(self.model.get_submodule(decision.operator)) for decision in self.plan.quantized
        ):
            msg = (
                "convert() has replaced layers of the model itself, because inplace=True: call prepare() "
                "with the float model again."
            )
            raise StateError(msg)
        ranks = (
            Ranks.current() if self.plan.needs_data else Ranks()
        )  # without data, each process can convert alone
        calls = self.statistics.of_all(ranks, lambda: [self.quant_config.to_dict(), self.plan.to_dict()])
        samples = [sample for sample in calls if _has_data(sample)]
        if self.plan.needs_data and not samples:
            names = ", ".join(self.plan.needing_data)
            empty = (
                f" (the {len(calls)} calls so far had empty tensors, or nothing but padding)" if calls else ""
            )
            msg = (
                f"Nothing was calibrated: {names} needs data{empty}. Call the prepared model with batches "
                "(e.g. 128 texts) before convert()."
            )
            raise NotCalibratedError(msg)
        model = self.model if self.inplace else sharing(self.model)
        settle_layers(model, [decision.operator for decision in self.plan.quantized])
        with evaluating(model), without_cache(model), PlainPath():
            driver = Driver(model, self.plan, samples, progress, ranks=ranks)
            driver.run()
        if not self.inplace:
            own_tensors(model)
        zeros_at_padding(model)
        run = QuantizationRun(
            plan=self.plan.to_dict(), applied=tuple(driver.applied), config=self.quant_config.to_dict()
        )
        return model.eval(), run


def _sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
    """Return a copy of the inputs of a call, without what only training needs, and without a cache."""

    def copied(value: Any) -> Any:
        # row-major, as in a file: kernels round differently on another layout
        return (
            value.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(value, torch.Tensor)
            else value
        )

    mask = kwargs.get("attention_mask")
    keep = (
        mask.bool()
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_floating_point()
        else None
    )
    kept = {
        k: pytree.tree_map(copied, v)
        for k, v in kwargs.items()
        if k not in ("cache", "past_key_values", "use_cache")
    }
    return Sample(
        (pytree.tree_map(copied, args), kept), None if keep is None or bool(keep.all()) else keep.clone()
    )


def _has_data(sample: Sample) -> bool:
    """Return whether a call has a token: its first tensor holds something, and not all of it is padding."""
    if sample.keep is not None and not bool(sample.keep.any()):
        return False
    tensors = (
        leaf for leaf in pytree.tree_leaves(sample.call) if isinstance(leaf, torch.Tensor) and leaf.dim()
    )
    first = next(tensors, None)
    return first is None or first.numel() > 0


@contextlib.contextmanager
def without_cache(model: torch.nn.Module) -> Iterator[None]:
    """Let transformers' models keep no keys and values of earlier calls: blocks are called several times."""
    config = getattr(model, "config", None)
    configs = [
        c
        for c in (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
        if getattr(c, "use_cache", None)
    ]
    for one in configs:
        one.use_cache = False  # type: ignore[union-attr] # it has one
    try:
        yield
    finally:
        for one in configs:
            one.use_cache = True  # type: ignore[union-attr]


def warn_of_float_weights(plan: WeightPlan) -> None:
    """Warn where most of a model, or all of it, stays float: users would take it for quantized."""
    count, others = (
        sum(math.prod(shape) for shape in shapes)
        for shapes in ([d.shape for d in plan.quantized], [s for _, s in plan.others])
    )
    if not count:
        reasons = "; ".join(dict.fromkeys(d.reason for d in plan.decisions))
        warn(f"No layer gets a low-bit weight: {reasons}.")
    elif others > count:
        warn(f"Most weights of this model stay as they are. {others_text(plan.others)}.")

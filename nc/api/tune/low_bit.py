"""`nc.tune` with `target_bits`: how many bits the weights of each layer get, for an average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.algorithms.solvers import GPTQ
from nc.api.preparation.make import preparation
from nc.api.preparation.weights import PreparedWeights, without_cache
from nc.api.tune.calibrate import request_of
from nc.api.tune.distance import closeness, none_lost
from nc.api.tune.front import REFERENCE, Front, front_of_points
from nc.api.tune.identity import Call, KeptCalls, Metric, copied
from nc.api.tune.low_bit_layers import (
    bytes_of,
    groups_of_layers,
    joined,
    size_of_plan,
    stored,
    weight_of,
    without_solvers,
)
from nc.api.tune.low_bit_noise import noise_of
from nc.api.tune.measure import doubts, score, timed
from nc.api.tune.mixed import float_config
from nc.api.tune.run import CTRL_C, Run
from nc.api.tune.solve import Assignment, Cost, within
from nc.api.tune.trials import Result
from nc.backends.low_bit.engine import set_backend
from nc.config import AnyConfig, WeightOnlyConfig
from nc.errors import ArtefactError, ConfigError, NCError
from nc.planning.layer_plan import WeightPlan
from nc.planning.layer_rules import plan_layers
from nc.process.modes import evaluating

#: Bits that a layer may have by default.
BITS = (2, 3, 4, 5, 6, 8)
#: Rows of activations for the estimate.
_ROWS = 4096
#: How far from the target further averages are, in bits.
_AROUND = (0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0)


def default_candidates(model: torch.nn.Module) -> dict[str, AnyConfig]:
    """Return GPTQ with 2 to 8 bits, in groups that all linears of a model have."""
    sizes = {d.shape[1] for d in plan_layers(WeightOnlyConfig(group_size=-1), model).quantized}
    group = next((g for g in (64, 32, 16) if all(size % g == 0 for size in sizes)), -1)
    return {
        f"int{bits}": WeightOnlyConfig(f"int{bits}", group_size=group, scale_dtype="fp16", solver=GPTQ())
        for bits in BITS
    }


def plans_of(model: torch.nn.Module, candidates: Mapping[str, AnyConfig]) -> dict[str, WeightPlan]:
    """Return the plans of candidates by name.

    Raises:
        ConfigError: they quantize nothing.
    """
    plans = {name: plan_layers(config, model, strict=False) for name, config in candidates.items()}
    if not any(plan.quantized for plan in plans.values()):
        msg = "candidates: none of them quantizes a layer of this model."
        raise ConfigError(msg)
    return plans


class LowBitSearch:
    """One call of `tune` with `target_bits`.

    Args:
        model: the float model.
        candidates: weight-only configurations by name.
        plans: of these, from `plans_of`.
        metric: see `nc.tune`; None: the negative KL divergence in nats per row of logits, or for outputs
            without logits the part of their power that is right.
        calls: of the calibration.
        mix: calls that are timed.
        backend: as for `prepare`.
        run: where points go.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        candidates: Mapping[str, AnyConfig],
        plans: Mapping[str, WeightPlan],
        metric: Metric | None,
        calls: KeptCalls,
        mix: Sequence[Call],
        backend: str,
        run: Run,
    ) -> None:
        self._model, self._candidates, self._metric = model, candidates, metric
        self._mix, self._backend, self._run = mix, backend, run
        self._calibration, self._judged = calls.split()
        if self._judged is self._calibration:
            run.note("There are too few calls to hold some out: those that calibrate judge too.")
        self._plans = plans
        # transforms change what other layers read: two layers can't have one and the other
        self._mixable = [name for name, plan in self._plans.items() if not plan.transforms]
        for name in candidates:
            if name not in self._mixable:
                run.note(
                    f"{name} has transforms: it is measured for the whole model, and not mixed with others."
                )
        self._layers = list(
            dict.fromkeys(d.operator for plan in self._plans.values() for d in plan.quantized)
        )
        weights = [weight_of(model, name) for name in self._layers]
        self._count = sum(weight.numel() for weight in weights)
        self._float_bits = 8.0 * sum(w.numel() * w.element_size() for w in weights) / self._count

    def front(self, target: float, points: int) -> Front:
        """Return the front, by size."""
        run = self._run
        run.total = points + 1
        try:
            self._reference()
            table, groups = self._table() if self._mixable else ([], [])
            self._points(target, points, table, groups)
        except KeyboardInterrupt:
            run.note(CTRL_C)
        run.settle()
        return front_of_points(run.points, run.notes, by_size=True)

    def _points(
        self,
        target: float,
        points: int,
        table: Sequence[Mapping[str, Cost]],
        groups: Sequence[Sequence[str]],
    ) -> None:
        """Measure the target's assignment, the candidates near to it, and averages around it."""
        uniform = {
            name: self._bits(size_of_plan(plan, self._model, self._layers))
            for name, plan in self._plans.items()
        }
        best = within(table, target * self._count / 8)
        is_mixed = bool(table) and best is not None
        if is_mixed:
            assert best is not None
            self._mixed(best, groups)
        elif table:
            least = self._bits(sum(min(c.price for c in row.values()) for row in table))
            self._run.note(f"No assignment has {target:g} bits on average; the least is {least:.2f}.")
        ordered = sorted(
            uniform, key=lambda name: (uniform[name] > target + 0.005, abs(uniform[name] - target))
        )
        wanted: list[Callable[[], None]] = [lambda name=name: self._uniform(name) for name in ordered]  # type: ignore[misc]
        around = [
            each
            for step in _AROUND
            if table
            and min(uniform.values()) < target + step < max(uniform.values())
            and (each := within(table, (target + step) * self._count / 8)) is not None
        ]
        others: list[Callable[[], None]] = [lambda each=each: self._mixed(each, groups) for each in around]  # type: ignore[misc]
        # what lies beside the target in size tells most, then the picture of the whole
        first, rest = wanted[:2], [call for pair in _alternate(others, wanted[2:]) for call in pair]
        for measure in (*first, *rest)[: points - is_mixed]:
            measure()

    def _bits(self, size: float) -> float:
        return 8 * size / self._count

    # ---- estimates ----

    def _table(self) -> tuple[list[dict[str, Cost]], list[list[str]]]:
        """Return what each candidate costs each group of layers, and the groups."""
        options: dict[str, dict[str, torch.nn.Module]] = {name: {} for name in self._layers}
        for name in self._mixable:
            config = self._candidates[name]
            if self._run.is_over():
                return [], []
            self._run.say(f"{name}, rounded to nearest")
            rounded = preparation(self._model, request_of(without_solvers(config), self._backend))
            assert isinstance(rounded, PreparedWeights)
            quantized = rounded.quantized()
            for layer in self._layers:
                options[layer][name] = quantized.get_submodule(layer)
        self._run.say("what each layer costs")
        with without_cache(self._model):
            noise = noise_of(self._model, _some(self._calibration), options)
            groups = groups_of_layers(self._model, self._calibration[0], self._layers)
        table = []
        for group in groups:
            sizes = {name: sum(stored(options[layer][name]) for layer in group) for name in self._mixable}
            known = all(layer in noise for layer in group)
            names = self._mixable if known else [max(sizes, key=lambda name: sizes[name])]
            table.append(
                {
                    name: Cost(sum(noise[layer][name] for layer in group) if known else 0.0, sizes[name])
                    for name in names
                }
            )
        unknown = [layer for layer in self._layers if layer not in noise]
        if unknown:
            self._run.note(
                f"Calibration tells nothing of {len(unknown)} layers, which have the most bits: "
                f"{', '.join(unknown[:4])}{', …' if len(unknown) > 4 else ''}."
            )
        return table, groups

    # ---- points ----

    def _reference(self) -> None:
        run = self._run
        run.say(REFERENCE)
        result = run.find(float_config())
        if result is None:
            with evaluating(self._model):
                value = (
                    none_lost(self._model, self._judged[0])
                    if self._metric is None
                    else score(self._metric, self._model)
                )
            times = [timed(self._model, entry, None) for entry in self._mix]
            result = Result(
                metric=value,
                sqnr_db=None,
                fp32_ratio=1.0,
                ms=sum(each.fp32 for each in times),
                spread=(1.0, 1.0),
                weight_bytes=bytes_of(self._model),
                note=doubts(times),
                bits=self._float_bits,
            )
        run.add(REFERENCE, float_config(), result)
        self._fp32_ms = result.ms

    def _uniform(self, name: str) -> None:
        self._measured(name, self._candidates[name], None)

    def _mixed(self, assignment: Assignment, groups: Sequence[Sequence[str]]) -> None:
        chosen = {
            layer: option for group, option in zip(groups, assignment.options, strict=True) for layer in group
        }
        if len(set(assignment.options)) == 1:
            self._uniform(assignment.options[0])
            return
        name = f"{self._bits(assignment.price):.2f} bits"
        options = {name: self._candidates[name] for name in self._mixable}
        config = joined(self._model, chosen, options)
        if config is None:
            self._run.note(
                f"{name} is left out: rules by name do not give each layer what it is meant to have."
            )
            return
        self._measured(name, config, (assignment.error, assignment.price))

    def _measured(self, name: str, config: AnyConfig, estimated: tuple[float, float] | None) -> None:
        """Convert and measure a point, where it is new and there is time."""
        run = self._run
        if run.same_as(config) is not None or run.is_over():
            return
        run.say(name)
        result = run.find(config)
        model = None
        if result is None:
            try:
                q_model = self._converted(config)
            except NCError as error:
                run.note(f"{name} could not be converted: {error}")
                return
            result = self._result(q_model, scored=run.elsewhere is None)
            if not math.isfinite(result.metric) and run.elsewhere is None:
                run.note(f"{name} is left out: its outputs on calibration data hold NaN or infinite values.")
                return
            model = None if run.elsewhere is None else q_model
        try:
            run.add(name, config, result, estimated=estimated, model=model)
        except ArtefactError as error:
            run.note(f"{name} is left out: {error}")

    def _converted(self, config: AnyConfig) -> torch.nn.Module:
        prepared = preparation(self._model, request_of(config, self._backend))
        assert isinstance(prepared, PreparedWeights)
        if prepared.plan.needs_data:
            for call in self._calibration:
                args, kwargs = copied(call)
                prepared(*args, **kwargs)
        quantized = prepared.quantized()  # what is wrong shows in the metric
        set_backend(quantized, self._backend)
        return quantized

    def _result(self, q_model: torch.nn.Module, *, scored: bool) -> Result:
        value = math.nan
        if scored:
            value = (
                closeness(self._model, q_model, self._judged)
                if self._metric is None
                else score(self._metric, q_model)
            )
        times = [timed(self._model, entry, q_model) for entry in self._mix]
        fp32, own = sum(each.fp32 for each in times), sum(each.own for each in times)
        return Result(
            metric=value,
            sqnr_db=None,
            fp32_ratio=fp32 / own,
            ms=own * (self._fp32_ms / fp32),
            spread=times[0].quartiles,
            weight_bytes=bytes_of(q_model),
            note=doubts(times),
            bits=self._bits(sum(stored(q_model.get_submodule(name)) for name in self._layers)),
        )


def _alternate(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield pairs of two rows, and what is left of the longer one."""
    for index in range(max(len(one), len(other))):
        yield (*one[index : index + 1], *other[index : index + 1])


def _some(calls: Sequence[Call]) -> list[Call]:
    """Return the first calls that have rows enough for the estimate."""
    found, rows = [], 0
    for call in calls:
        if rows >= _ROWS:
            break
        found.append(call)
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        # of numbers the last dimension is what a row holds, of token ids each one is a row
        sizes = [t.numel() // (max(1, t.shape[-1]) if t.is_floating_point() else 1) for t in tensors]
        rows += max(sizes, default=1)
    return found

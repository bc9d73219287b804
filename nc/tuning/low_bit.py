"""`nc.tune` with `target_bits`: how many bits the weights of each layer get, for an average."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from nc.algorithms.solvers import GPTQ
from nc.api.preparation.graphs import Request
from nc.api.preparation.routes import prepared_by
from nc.api.preparation.weights import PreparedWeights, without_cache
from nc.backends.low_bit.engine import set_backend
from nc.config import AnyConfig, WeightOnlyConfig
from nc.errors import ArtefactError, ConfigError, InputError, NCError
from nc.planning.layer_plan import WeightPlan
from nc.planning.layer_rules import plan_layers
from nc.process.modes import evaluating
from nc.tuning.distance import closeness, none_lost
from nc.tuning.front import REFERENCE
from nc.tuning.identity import Call, KeptCalls, Metric, copied
from nc.tuning.low_bit_costs import LayerCosts
from nc.tuning.low_bit_layers import (
    bytes_of,
    groups_of_layers,
    joined,
    size_of_plan,
    stored,
    weight_of,
)
from nc.tuning.low_bit_noise import noise_of
from nc.tuning.measure import doubts, score, spread_of, timed
from nc.tuning.mixed import float_config
from nc.tuning.run import Run
from nc.tuning.solve import Assignment, Cost, within
from nc.tuning.trials import Result

#: Bits that a layer may have by default.
BITS = (2, 3, 4, 5, 6, 8)
#: Candidates that are enough for a mixture, and the part of the budget after which no more are converted.
_ENOUGH, _PART_OF_CANDIDATES = 3, 0.5
#: Rows of activations for the estimate, and how often labels are drawn for each where there are fewer.
_ROWS, _MOST_DRAWS = 4096, 8
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
        target: bits of a weight, on average.
        points: of the front.
        fused: see `nc.tune`.
    """

    by_size = True

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
        target: float,
        points: int,
        *,
        fused: bool,
    ) -> None:
        self._target, self._points, self.total = target, points, len(candidates) + points + 1
        self._model, self._candidates, self._metric = model, candidates, metric
        self._mix, self._backend, self._run, self._fused = mix, backend, run, fused
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

    def measure(self) -> None:
        """See `PointSearch`."""
        self._reference()
        self._mixed_points(self._target, self._points, self._estimates(self._target))

    def _mixed_points(self, target: float, points: int, estimates: LayerCosts) -> None:
        """Measure the target's assignment, and averages around it."""
        table, groups = self._table(estimates)
        if not table:
            return
        first = within(table, target * self._count / 8)
        if first is None:
            least = self._bits(sum(min(c.price for c in row.values()) for row in table))
            self._run.note(f"No assignment has {target:g} bits on average; the least is {least:.2f}.")
        ends = [self._bits(sum(end(c.price for c in row.values()) for row in table)) for end in (min, max)]
        around = (
            within(table, (target + step) * self._count / 8)
            for step in _AROUND
            if ends[0] < target + step < ends[1]
        )
        for each in itertools.islice(filter(None, itertools.chain([first], around)), points):
            self._mixed(each, groups)

    def _bits(self, size: float) -> float:
        return 8 * size / self._count

    # ---- estimates ----

    def _estimates(self, target: float) -> LayerCosts:
        """Measure each candidate for the whole model, and return what it costs each layer."""
        configs = {name: self._candidates[name] for name in self._mixable}
        known = self._run.find_estimates(configs)
        models: dict[str, torch.nn.Module] = {}
        bits = {n: self._bits(size_of_plan(p, self._model, self._layers)) for n, p in self._plans.items()}
        left_out = []
        for name in sorted(bits, key=lambda name: abs(bits[name] - target)):
            if len(models) >= _ENOUGH and self._run.spent() > _PART_OF_CANDIDATES:
                left_out.append(name)
                continue
            wanted = known is None and name in configs
            found = self._measured(name, self._candidates[name], None, wanted=wanted)
            if found is not None:
                models[name] = found
        if left_out:
            self._run.note(f"Half of the budget went into candidates; left out: {', '.join(left_out)}.")
        if known is not None or not models or self._run.is_over():
            return known or LayerCosts()
        self._run.say("what each layer costs")
        calls, draws = _some(self._calibration)
        options = {n: {o: m.get_submodule(n) for o, m in models.items()} for n in self._layers}
        with without_cache(self._model):
            noise = noise_of(self._model, calls, options, draws=draws)
        sizes = {n: {o: float(stored(m.get_submodule(n))) for o, m in models.items()} for n in self._layers}
        estimates = LayerCosts(noise=noise, sizes=sizes).finite()
        for name in sorted(set(models) - estimates.candidates()):
            self._run.note(f"{name} is not mixed with others: it gives NaN or infinite values in a layer.")
        if estimates.candidates() == set(configs):
            self._run.keep_estimates(configs, estimates)
        return estimates

    def _table(self, estimates: LayerCosts) -> tuple[list[dict[str, Cost]], list[list[str]]]:
        """Return what each candidate costs each group of layers, and the groups."""
        if not estimates.sizes:
            return [], []
        noise, table = estimates.noise, []
        groups = [[name] for name in self._layers]
        if self._fused:
            with without_cache(self._model):
                groups = groups_of_layers(self._model, self._calibration[0], self._layers)
        for group in groups:
            options = estimates.sizes[group[0]]
            sizes = {name: sum(estimates.sizes[layer][name] for layer in group) for name in options}
            known = all(layer in noise for layer in group)
            names = list(options) if known else [max(sizes, key=lambda name: sizes[name])]
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

    def _mixed(self, assignment: Assignment, groups: Sequence[Sequence[str]]) -> None:
        chosen = {
            layer: option for group, option in zip(groups, assignment.options, strict=True) for layer in group
        }
        name = f"{self._bits(assignment.price):.2f} bits"
        options = {name: self._candidates[name] for name in self._mixable}
        config = joined(self._model, chosen, options)
        if config is None:
            self._run.note(
                f"{name} is left out: rules by name do not give each layer what it is meant to have."
            )
            return
        self._measured(name, config, (assignment.error, assignment.price))

    def _measured(
        self, name: str, config: AnyConfig, estimated: tuple[float, float] | None, *, wanted: bool = False
    ) -> torch.nn.Module | None:
        """Convert and measure a point, where it is new and there is time.

        Args:
            name: for people.
            config: of the point.
            estimated: see `FrontPoint`.
            wanted: return the model, even if its result is known.

        Returns:
            The model; None where it is not wanted, can't be had or is of no use.
        """
        run = self._run
        if run.same_as(config) is not None or run.is_over():
            return None
        run.say(name)
        result = run.find(config)
        q_model = None
        if wanted or result is None:
            try:
                q_model = self._converted(config)
            except NCError as error:
                run.note(f"{name} could not be converted: {error}")
                return None
        here = run.elsewhere is None
        try:
            if result is not None:
                run.add(name, config, result, estimated=estimated)
            else:
                assert q_model is not None
                try:
                    result = self._result(q_model, scored=here)
                except InputError as error:  # the metric gives no number of it
                    run.note(f"{name} is left out: {error}")
                    return None
                if here and not math.isfinite(result.metric):
                    run.note(
                        f"{name} is left out: its outputs on calibration data hold NaN or infinite values."
                    )
                    return None
                run.add(name, config, result, estimated=estimated, model=None if here else q_model)
        except ArtefactError as error:
            run.note(f"{name} is left out: {error}")
            return None
        return q_model if wanted else None

    def _converted(self, config: AnyConfig) -> torch.nn.Module:
        prepared = prepared_by(self._model, config, Request(backend=self._backend, strict=False))
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
            spread=spread_of(times),
            weight_bytes=bytes_of(q_model),
            note=doubts(times),
            bits=self._bits(sum(stored(q_model.get_submodule(name)) for name in self._layers)),
        )


def _some(calls: Sequence[Call]) -> tuple[list[Call], int]:
    """Return the first calls that have rows enough for the estimate, and how often each is drawn from."""
    found, rows = [], 0
    for call in calls:
        if rows >= _ROWS:
            break
        found.append(call)
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        # of numbers the last dimension is what a row holds, of token ids each one is a row
        sizes = [t.numel() // (max(1, t.shape[-1]) if t.is_floating_point() else 1) for t in tensors]
        rows += max(sizes, default=1)
    return found, min(_MOST_DRAWS, max(1, _ROWS // max(rows, 1)))

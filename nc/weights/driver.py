"""The driver, which solves a model block after block.

For each block it collects statistics, applies transforms, solves the layers and runs the quantized block. So
each block is solved for the inputs that the quantized blocks before it give, and the memory needed is that of
one block, its statistics and its activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from nc.algorithms.collect import Collector, inputs_of
from nc.algorithms.solvers import RTN
from nc.algorithms.solvers.base import BlockProblem, BlockSolver, InputNeeds, Problem
from nc.algorithms.solvers.best import keep_best, solve_best
from nc.algorithms.transforms import Scope, Target, Transform
from nc.calibration.ranks import Ranks
from nc.errors import ConfigError
from nc.graph.plan import Applied
from nc.modules.activations import Activations
from nc.modules.block_calls import (
    BlockCall,
    Sample,
    block_lists,
    called,
    filled,
    record,
    run,
    with_forwards,
)
from nc.modules.copies import sharing
from nc.modules.layers import Layer, layers_of
from nc.modules.statistics import InputStatistics
from nc.nn import QuantEmbedding, QuantLinear
from nc.nn.result import LayerResult
from nc.numerics.group_ranges import refuse_underflow
from nc.numerics.packed_weight import PackedWeight
from nc.planning.layer_plan import WeightPlan
from nc.process.malloc import give_back_small_pieces
from nc.process.progress import Progress
from nc.weights.block_validation import (
    LOOKED_AT,
    BlockValidation,
    Tokens,
    divided,
    held_out,
    parameters_of,
    put,
)
from nc.weights.experts import is_expert
from nc.weights.shared_work import Share
from nc.weights.swap import replace


class Calls(Sequence[BlockCall]):
    """The calls of a block, whose hidden states are filled in as they are read.

    Args:
        recorded: one per sample.
        hidden: outputs of the block in front; None where calls are whole.
    """

    def __init__(self, recorded: Sequence[BlockCall], hidden: Activations | None = None) -> None:
        self._recorded, self._hidden = recorded, hidden

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._recorded)

    def __getitem__(self, index: Any) -> Any:
        """(args, kwargs) of a sample, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return filled(self._recorded[index], None if self._hidden is None else self._hidden[index])


class Store(Protocol):
    """Gives a model its weights part by part, for models that are larger than the memory.

    See `nc.weights.files.streamed`.

    Attributes:
        parts: names of the blocks, and of output heads outside of them.
    """

    parts: tuple[str, ...]

    def load(self, name: str) -> bool:
        """Give a module's parameters their values; "" is all that is in no part.

        False: it has them already.
        """

    def drop(self, name: str) -> None:
        """Let the values go that `load` gave, or those of a finished block."""

    def finished(self, name: str) -> bool:
        """Put the quantized block in its place if an earlier run finished it."""

    def finish(self, name: str) -> None:
        """Keep a quantized block on disk, for later runs and for the result."""

    def settle(self) -> None:
        """Give what has values outside of finished blocks those of the result."""


class Driver:
    """Quantizes a model in place; see `quantize_layers`."""

    def __init__(
        self,
        model: torch.nn.Module,
        plan: WeightPlan,
        samples: Sequence[Sample],
        progress: Progress | None = None,
        store: Store | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008 - it is frozen
    ) -> None:
        self.model, self.plan, self.all_samples, self.store = model, plan, samples, store
        self.progress = progress or (lambda *_: None)
        self.asked = {d.operator: d for d in plan.quantized}
        self.applied: list[Applied] = []
        self._clips: dict[str, torch.Tensor] = {}
        self._packed: dict[str, tuple[PackedWeight, LayerResult]] = {}
        self._find_ties()
        needs = InputNeeds()
        for wanted in (
            *(d.solver.needs for d in plan.quantized if d.solver is not None),
            *(t.needs for t in plan.transforms),
        ):
            needs |= wanted
        self.needs = needs
        block_solvers = [d.solver for d in plan.quantized if isinstance(d.solver, BlockSolver)]
        looking = [s.needs for s in block_solvers] + [t.needs for t in plan.transforms if t.level == "block"]
        if plan.transforms:
            looking.append(InputNeeds(samples=0, tokens=LOOKED_AT))
        self.share = Share.of(samples, ranks, looking)
        self.samples = self.share.samples
        #: Whether the float model's hidden states are needed too.
        self.with_float = needs.float_inputs or (bool(block_solvers) and ranks.is_first)

    def _find_ties(self) -> None:
        """Find layers that share a weight and ask for the same, of which only the first is solved."""
        owners: dict[Any, str] = {}
        self._first = {
            name: owners.setdefault(
                (id(self.model.get_submodule(name).weight), d.form, d.rule, d.solver, d.transforms), name
            )
            for name, d in self.asked.items()
        }
        self._first_of_several = {first for name, first in self._first.items() if name != first}

    def run(self) -> None:
        """Quantize all layers of the plan."""
        for transform in self.plan.transforms:
            if transform.level == "model":
                self._everywhere(transform)
        self._find_ties()  # a transform may have given tied layers separate weights
        lists = block_lists(self.model, self.asked)
        total = sum(map(len, lists)) + 1
        done = 0
        for names in lists:
            blocks = [self.model.get_submodule(name) for name in names]
            hidden, float_hidden = (
                Activations(len(self.samples) if wanted else 0) for wanted in (True, self.with_float)
            )

            def first(
                index: int, tensor: torch.Tensor, of: Sequence[Activations] = (hidden, float_hidden)
            ) -> None:
                for activations in of[: 1 + self.with_float]:
                    activations.put(index, tensor)

            with self.share.ranks.together(), self._callable():
                recorded = record(self.model, blocks, self.samples, first)
            if not self.share.ranks.all(recorded is not None) or recorded is None:
                continue  # its blocks are not called in sequence: they are solved with the rest
            for index, name in enumerate(names):
                self.progress(done, total, name)
                behind = self._block(name, [calls[index] for calls in recorded], hidden, float_hidden)
                float_hidden.close()
                float_hidden = behind
                done += 1
            hidden.close()
            float_hidden.close()
        rest = [name for name in self.asked if not self._is_done(name)]
        self.progress(total - 1, total, "the other layers")
        self._rest(rest)
        self.progress(total, total, "")

    def _everywhere(self, transform: Transform) -> None:
        """Apply a transform of the whole model."""
        calls, keeps = [s.call for s in self.all_samples], [s.keep for s in self.all_samples]
        tokens = Tokens(calls, keeps, len(calls))
        if self.share.ranks.is_first and not any(p.is_meta for p in self.model.parameters()):
            tokens = divided(self.model, calls, keeps, len(calls), held_out(len(calls)))
        scope = self._scope("", self.model, self._targets(self.asked, transform, None), tokens)
        config = getattr(self.model, "config", None)
        tied = getattr(config, "tie_word_embeddings", None)
        judged = partial(self._judged, transform, scope, tokens, [*self.asked])
        apply = judged if self.share.ranks.is_first else partial(transform.apply, scope)
        applied = self.share.transformed(self.model, apply, everywhere=True)
        if tied is not None and not applied.operators:
            config.tie_word_embeddings = tied  # type: ignore[union-attr]
        self.applied.append(applied)

    def _judged(self, transform: Transform, scope: Scope, tokens: Tokens, inside: Sequence[str]) -> Applied:
        """Apply a transform, and undo it if the scope then loses more by rounding to nearest."""
        module, where = scope.module, scope.prefix or "the model"
        before = parameters_of(module)
        applied = transform.apply(scope)
        if not applied.operators:
            return applied
        if not tokens.held:
            text = f"{applied.text}; without data it is not known what rounding to nearest loses by it"
            return Applied(applied.algorithm, applied.operators, text)
        after = parameters_of(module)
        linears = {name: self.asked[name] for name in inside if self.asked[name].kind == "linear"}
        validation = BlockValidation(module, scope.prefix, linears, tokens)
        put(module, before)
        plain = validation.loss(self._clips)
        put(module, after)
        changed = validation.loss(self._clips | scope.clips)
        on = f"{plain.tokens} tokens" + (" that were held out" if tokens.are_others else ", none held out")
        on += plain.few
        why = changed.why_worse(plain)
        text = f"rounding to nearest on {on}: {plain.text(changed)}"
        others = {d.solver.name for d in linears.values() if d.solver not in (None, RTN())}
        if why and others and transform.level == "model":
            # orthogonal matrices make errors alike, and those solvers then make up for them
            why, text = "", f"{text}, for which {', '.join(sorted(others))} may make up"
        if not why:
            return Applied(applied.algorithm, applied.operators, f"{applied.text}; {text}")
        put(module, before)
        scope.clips.clear()
        return Applied(applied.algorithm, (), f"{where}: undone: {why}, with rounding to nearest on {on}")

    @contextlib.contextmanager
    def _callable(self) -> Iterator[None]:
        """With a store: what is in no part has values, and a part has them while it is called."""
        store = self.store
        if store is None or not (self.samples or self.plan.transforms):
            yield
            return

        def with_values(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                mine = store.load(store.parts[index])
                try:
                    return forward(*args, **kwargs)
                finally:
                    if mine:
                        store.drop(store.parts[index])

            return called

        store.load("")
        with with_forwards([self.model.get_submodule(name) for name in store.parts], with_values):
            yield
        store.drop("")

    def _rest(self, rest: Sequence[str]) -> None:
        """Solve the layers that are in no block."""
        store = self.store
        if store is not None and not self.samples and not self.plan.transforms:
            for name in rest:
                store.load(name)
                self._solve([name], {}, {})
        elif rest:
            with self._callable():
                if store is not None:
                    for name in rest:
                        store.load(
                            next((part for part in store.parts if f"{name}.".startswith(f"{part}.")), "")
                        )
                self._block_of("", self.model, rest, Calls([sample.call for sample in self.samples]), None)
                if store is not None:
                    store.settle()

    def _block(
        self, name: str, recorded: Sequence[BlockCall], hidden: Activations, float_hidden: Activations
    ) -> Activations:
        """Solve a block, and replace its input hidden states by its outputs.

        The outputs of the float model's block are returned.
        """
        block = self.model.get_submodule(name)
        if self.store is not None:
            self.store.load(name)
        calls = Calls(recorded, hidden)
        float_calls = Calls(recorded, float_hidden) if self.with_float else None
        float_out = Activations(0 if float_calls is None else len(float_calls))
        with self.share.ranks.together():
            for i in range(len(float_out)):
                float_out.put(i, run(block, Calls(recorded, float_hidden)[i]))
        if self.store is None or not self.store.finished(name):
            inside = [layer for layer in self.asked if layer.startswith(f"{name}.")]
            if inside:
                self._block_of(name, block, inside, calls, float_calls, float_out)
            if self.store is not None:
                self.store.finish(name)
        block = self.model.get_submodule(name)
        with self.share.ranks.together():
            for i, call in enumerate(calls):
                hidden.put(i, run(block, call))
        if self.store is not None:
            self.store.drop(name)
        return float_out

    def _block_of(
        self,
        prefix: str,
        module: torch.nn.Module,
        inside: Sequence[str],
        calls: Calls,
        float_calls: Calls | None,
        targets: Sequence[torch.Tensor] = (),
    ) -> None:
        inputs = self._transformed(prefix, module, inside, calls, float_calls)
        solvers = [self.asked[name].solver for name in inside]
        if float_calls is None or not any(
            solver is not None and solver.needs.float_inputs for solver in solvers
        ):
            self._solve_together(prefix, module, inside, inputs, calls, targets)
            return
        # layers correct the error that earlier layers left: if all were solved at once, each would correct
        # all of the block's error again
        whole = sharing(module)
        stages, _ = self.share.ranks.from_first(_stages(inside, inputs), {})
        for stage in stages:
            if stage is not stages[0]:
                inputs = self._collect(module, stage, calls, float_calls, whole, prefix)
            self._solve_together(prefix, module, stage, inputs, calls, targets)

    def _transformed(
        self,
        prefix: str,
        module: torch.nn.Module,
        inside: Sequence[str],
        calls: Calls,
        float_calls: Calls | None,
    ) -> dict[str, InputStatistics]:
        """Apply the transforms that layers of a block ask for.

        Returns:
            Statistics of the layers' inputs after the transforms. If the block is unchanged, only the ones
            that solvers need, so that its codes are the same as without transforms.
        """
        applied = len(self.applied)
        asking = {
            t: [name for name in inside if t in self.asked[name].transforms] for t in self.plan.transforms
        }
        asking = {transform: names for transform, names in asking.items() if names}
        if asking and (prefix or len(inside) == len(self.asked)):
            self._transform(prefix, module, inside, list(asking), calls)
        else:
            self.applied += [
                Applied(transform.name, (), f"nothing outside the stacks of blocks: {', '.join(names)}")
                for transform, names in asking.items()
            ]
        changed = any(one.operators for one in self.applied[applied:])
        solvers = [solver for name in inside if (solver := self.asked[name].solver) is not None]
        if not changed and not any(s.needs.data or isinstance(s, BlockSolver) for s in solvers):
            return {}
        return self._collect(module, inside, calls, float_calls)

    def _transform(
        self,
        prefix: str,
        module: torch.nn.Module,
        inside: Sequence[str],
        transforms: Sequence[Transform],
        calls: Calls,
    ) -> None:
        """Apply transforms to a block, fitted to the tokens that are not held out."""
        keeps, ranks = [sample.keep for sample in self.samples], self.share.ranks
        start = len(self.all_samples) * ranks.rank // ranks.count
        held = {i - start for i in held_out(len(self.all_samples))}
        with ranks.together():
            tokens = divided(module, calls, keeps, self.share.counted, held)
        for transform in transforms:
            inputs = self._fitted(module, inside, transform.needs, tokens)
            scope = self._scope(prefix, module, self._targets(inside, transform, inputs), tokens)
            judged = partial(self._judged, transform, scope, tokens, inside)
            self.applied.append(self.share.transformed(module, judged))
            self._clips |= scope.clips

    def _fitted(
        self, module: torch.nn.Module, inside: Sequence[str], needs: InputNeeds, tokens: Tokens
    ) -> dict[str, InputStatistics]:
        """Statistics of the inputs of some layers, of the tokens that a transform may see."""
        layers = {
            name: self.model.get_submodule(name) for name in inside if self.asked[name].kind == "linear"
        }
        collector = Collector(layers, needs)
        with self.share.ranks.together():
            for i in range(tokens.counted):
                with collector.watching(tokens.keeps[i]):
                    run(module, tokens.calls[i])
        return self.share.merged(collector.of)

    def _solve_together(
        self,
        prefix: str,
        module: torch.nn.Module,
        inside: Sequence[str],
        inputs: dict[str, InputStatistics],
        calls: Calls,
        targets: Sequence[torch.Tensor],
    ) -> None:
        learned: dict[str, PackedWeight] = {}
        with self.share.ranks.together():
            if self.share.ranks.is_first:
                learned = self._learned(prefix, module, inside, inputs, calls, targets)
        self._solve(inside, inputs, learned)

    def _learned(
        self,
        name: str,
        module: torch.nn.Module,
        inside: Sequence[str],
        inputs: Mapping[str, InputStatistics],
        calls: Calls,
        targets: Sequence[torch.Tensor],
    ) -> dict[str, PackedWeight]:
        """Return what block solvers find for the layers of a block that data reaches."""
        by_solver: dict[BlockSolver, list[str]] = {}
        for layer in inside:
            solver = self.asked[layer].solver
            if isinstance(solver, BlockSolver) and targets and layer in inputs:
                by_solver.setdefault(solver, []).append(layer)
        layers = {layer.name: layer for layer in layers_of(self.model)}
        found: dict[str, PackedWeight] = {}
        for solver, mine in by_solver.items():
            problems = {
                layer.removeprefix(f"{name}."): self._problem(layers[layer], inputs) for layer in mine
            }
            solved = solver.solve_block(
                BlockProblem(
                    name=name,
                    module=module,
                    layers=problems,
                    samples=calls,
                    targets=targets,
                    run=partial(called, module),
                )
            )
            found |= {f"{name}.{layer}": packed for layer, packed in solved.items()}
        return found

    def _problem(self, layer: Layer, inputs: Mapping[str, InputStatistics]) -> Problem:
        decision = self.asked[layer.name]
        assert decision.form is not None
        weight = layer.weight.float().contiguous()
        clip = self._clips.get(layer.name)
        return Problem(
            name=layer.name,
            weight=weight,
            form=decision.form,
            rule=decision.rule,
            inputs=inputs.get(layer.name),
            clip=clip,
        )

    def _collect(
        self,
        module: torch.nn.Module,
        inside: Sequence[str],
        calls: Calls,
        float_calls: Calls | None,
        float_module: torch.nn.Module | None = None,
        prefix: str = "",
    ) -> dict[str, InputStatistics]:
        """Statistics of the inputs of some layers.

        `float_module` is `module` as it was before some of its layers were quantized.
        """
        layers = {
            name: self.model.get_submodule(name) for name in inside if self.asked[name].kind == "linear"
        }
        float_layers = layers
        if float_module is not None:
            float_layers = {
                name: float_module.get_submodule(name.removeprefix(f"{prefix}.")) for name in layers
            }
        # an expert may get other tokens than in the float model
        float_layers = {n: layer for n, layer in float_layers.items() if not is_expert(self.model, n)}
        collector = Collector(layers, self.needs)
        with self.share.ranks.together():
            for i in range(self.share.counted):
                found, keep = None, self.samples[i].keep
                if float_calls is not None and self.needs.float_inputs:
                    with inputs_of(float_layers) as found:
                        run(module if float_module is None else float_module, float_calls[i])
                with collector.watching(keep, found):
                    run(module, calls[i])
        return self.share.merged(collector.of)

    def _targets(
        self, names: Iterable[str], transform: Transform, inputs: Mapping[str, InputStatistics] | None
    ) -> dict[str, Target]:
        targets = {}
        for name in names:
            decision = self.asked[name]
            assert decision.form is not None
            found = None if inputs is None else inputs.get(name)
            asked = transform.level == "model" or transform in decision.transforms
            module = self.model.get_submodule(name)
            targets[name] = Target(
                module=module, form=decision.form, rule=decision.rule, inputs=found, asked=asked
            )
        return targets

    def _scope(
        self,
        prefix: str,
        module: torch.nn.Module,
        targets: dict[str, Target],
        tokens: Tokens,
    ) -> Scope:
        return Scope(
            model=self.model,
            module=module,
            prefix=prefix,
            targets=targets,
            samples=tokens.calls,
            keeps=tokens.keeps,
        )

    def _is_done(self, name: str) -> bool:
        return isinstance(self.model.get_submodule(name), (QuantLinear, QuantEmbedding))

    def _solve(
        self, names: Sequence[str], inputs: dict[str, InputStatistics], learned: Mapping[str, PackedWeight]
    ) -> None:
        """Solve layers and replace them. A layer's statistics and weights are freed once it is solved."""
        if self.store is not None:
            give_back_small_pieces()
        layers = {layer.name: layer for layer in layers_of(self.model) if layer.name in names}
        for name in names:
            decision, layer, first = self.asked[name], layers.pop(name), self._first[name]
            if first not in self._packed:
                assert decision.form is not None
                self._packed[first] = self.share.solved(
                    decision.form, partial(self._solved, layer, inputs, learned.get(name))
                )
            inputs.pop(name, None)
            replace(self.model, layer, decision, *self._packed[first])
            if first not in self._first_of_several:
                del self._packed[first]
            if self.store is not None:
                give_back_small_pieces()

    def _solved(
        self, layer: Layer, inputs: Mapping[str, InputStatistics], learned: PackedWeight | None
    ) -> tuple[PackedWeight, LayerResult]:
        solver = self.asked[layer.name].solver
        assert solver is not None
        problem = self._problem(layer, inputs)
        try:
            refuse_underflow(problem.weight, problem.form)
            return solve_best(problem, solver) if learned is None else keep_best(problem, learned, solver)
        except ConfigError as error:
            way_out = f"For this layer alone: config.set_local({layer.name!r}, WeightOnlyConfig(…))."
            msg = f"Layer {layer.name!r}: {error} {way_out}"
            raise ConfigError(msg) from error


def _stages(inside: Sequence[str], inputs: Mapping[str, InputStatistics]) -> list[list[str]]:
    """Group layers that read the same tensor, in the order in which a block calls them.

    Layers that no call reaches are the last group.
    """
    stages: dict[int, list[str]] = {}
    for name, found in inputs.items():
        stages.setdefault(id(found), []).append(name)
    rest = [name for name in inside if name not in inputs]
    return [*stages.values(), *([rest] if rest else [])]

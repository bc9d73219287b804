"""Model → Graph: one flat fx graph of ATen operators, with every operator named as the user would name it.

`torch.export` does the tracing; what follows is a list of rewrites (`rewrites.py`) that leave plain inference
operators: no dropout, no checks, batch norm folded, attention decomposed, every constant weight in the form
of its kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nc.capture import rewrites
from nc.capture.calls import Caller, Ran, check_same, copied, giving_entries, run_graph
from nc.capture.examples import (
    another_batch,
    bind_examples,
    holds_tensors,
    with_batch,
    with_second,
    with_sizes,
)
from nc.capture.export_guards import (
    eval_mode,
    exportable,
    named_keywords,
    one_list_of_weights,
    usable_tensors,
    without_causal_hint,
    zeros_at_padding,
)
from nc.capture.flatten import Unused, flatten_program, own_constants
from nc.capture.naming import Operator, name_operators
from nc.capture.precautions import NO_PRECAUTIONS, Precautions
from nc.capture.rounding import rounding_layers, unrounded, unrounded_graph
from nc.capture.same_outputs import LostEffectError, OtherOutputError, picks_of
from nc.capture.size_paths import Guards, PathsSeen, guards_of, those_that_matter
from nc.capture.state import State, changed, changes_of, state_of
from nc.capture.value_reads import (
    UnfitReadError,
    check_reads,
    depends_on_values,
    keep_reads,
    reading,
    reads_of,
)
from nc.errors import CaptureError, InputError
from nc.graph import caches
from nc.graph.effects import Effects, children
from nc.graph.signature import Leaf, Signature, ValueRead, parameters_of
from nc.graph.tensor_meta import dim_of
from nc.process.error_texts import is_of_unknown_output
from nc.process.lock import LOCK
from nc.process.torch_settings import without_autocast
from nc.process.warn import warn


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A captured model.

    Attributes:
        module: flat fx module; placeholders are the used input leaves, the output is a flat tuple, constants
            are its buffers.
        signature: the call contract.
        operators: every named operator, in execution order.
        submodules: paths of the model's modules, for error messages about rules.
        example: the flat example tensors.
    """

    module: fx.GraphModule
    signature: Signature
    operators: tuple[Operator, ...]
    submodules: tuple[str, ...]
    example: tuple[torch.Tensor, ...]

    def operator(self, name: str) -> Operator:
        """Return the operator of that name."""
        return next(op for op in self.operators if op.name == name)


def capture(
    model: torch.nn.Module,
    example_inputs: Any,
    dynamic_shapes: Any = None,
    *,
    share_weights: bool = False,
    precautions: Precautions = NO_PRECAUTIONS,
) -> Graph:
    """Capture a model.

    Args:
        model: any module in any mode; captured in eval mode, its flags are restored.
        example_inputs: a tensor, a tuple or list (positional), or a dict (keywords).
        dynamic_shapes: as for `torch.export.export`, by argument name. With None every dimension is free that
            the model allows to be free. Height and width of images stay fixed for models with tokens (layer
            norm, attention, embeddings).
        share_weights: use the model's own tensors as constants instead of copies.
        precautions: what engines need that may be in this process.

    Raises:
        InputError: example_inputs are missing, do not fit `forward`, or are not on the CPU.
        CaptureError: torch.export cannot express the model. The message names the user's line.
    """
    caches.register()
    given, positional = bind_examples(model, example_inputs)
    values = pytree.tree_map(copied, given)  # the model may work in place
    run = Caller(model, parameters_of(model.forward, values), positional, precautions)
    failures: list[Exception] = []
    with LOCK, eval_mode(model), usable_tensors(model), torch.no_grad(), without_autocast():
        before = state_of(model)
        expected = _first_run(model, run, values)
        _check_outputs(model, expected.outputs)
        kept = _kept_at_each_call(run, values, before)
        wide = _wide(run, values) if dynamic_shapes is None else None
        for attempt in _all_attempts(values, dynamic_shapes, _takes_any_image(model), failures, wide):
            try:
                graph, guards = _attempt(run, values, attempt, share_weights, expected)
                graph = _checked(run, graph, guards, values, expected)
            except CaptureError:
                raise
            except (
                Exception
            ) as error:  # torch.export raises dozens of types; the first becomes a CaptureError
                failures.append(error)
                continue
            graph.signature.effects.check_memory(
                pytree.tree_leaves(given), [leaf.path for leaf in graph.signature.leaves]
            )
            if kept:
                msg = (
                    f"{type(model).__name__}.forward changes {kept} at each call. The captured model changes "
                    "nothing there, and computes what the model computes in the state that it has now."
                )
                warn(msg)
            warning = " ".join(
                filter(None, (attempt.warning, _reading_warning(model, graph.signature.reads)))
            )
            if warning:
                warn(f"{warning} Reason: {_first_line(failures[0])}")
            return graph
        telling = _telling(failures)
        cause = _cause(run, values, expected, kept) if kept or isinstance(telling, OtherOutputError) else ""
    unfit = next(
        (
            f"\nThe path that the example takes can't be captured: {f}."
            for f in failures
            if isinstance(f, UnfitReadError)
        ),
        "",
    )
    raise CaptureError(_capture_message(model, telling, cause) + unfit) from telling


def _kept_at_each_call(run: Caller, values: dict[str, Any], before: State) -> str:
    """Return what each call changes beside buffers, for messages.

    What only the first call sets is a result that is kept for later ones.
    """
    after = state_of(run.model)
    if not changed(before, after):
        return ""
    run(values)
    last = state_of(run.model)
    return " and ".join(changes_of(run.model, after, last))


def _cause(run: Caller, values: dict[str, Any], expected: Ran, kept: str) -> str:
    """Why the graph can't give what the model gives, where the model itself says so; else ""."""
    if kept:
        return (
            f"forward changes {kept} at each call, and a graph keeps nothing between calls. Give what it "
            "needs of earlier calls as an argument, and return what later calls need."
        )
    if _gives_the_same(run, values, expected):
        return ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seeded = run(values)
        torch.manual_seed(0)
        draws = _gives_the_same(run, values, seeded)
    why = (
        "it draws random numbers. Give them as an argument"
        if draws
        else (
            "it keeps something from call to call that nc does not see, or draws random numbers of Python "
            "or NumPy. Give it as an argument"
        )
    )
    return f"The model gives another output for the same inputs in each call: {why}."


def _gives_the_same(run: Caller, values: dict[str, Any], expected: Ran) -> bool:
    try:
        check_same(expected, run(values), ())
    except RuntimeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to export.

    Attributes:
        values: example arguments, perhaps with a larger batch.
        shapes: dynamic_shapes for torch.export.
        oblivious: let sizes 0 and 1 stay symbols.
        warning: what the user must know when this attempt is the one that works.
        reads: give the model the values that it reads in Python, see `value_reads`.
        hint: torch's encoders may ask whether a mask is causal, see `without_causal_hint`.
    """

    values: dict[str, Any]
    shapes: Any
    oblivious: bool
    warning: str = ""
    reads: bool = False
    hint: bool = True


def _wide(run: Caller, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments `with_second` of another size, where the model takes them; else None."""
    wide = with_second(values, 5)
    if wide is None:
        return None
    try:
        run(wide)
    except Exception:  # the model's own errors: it fixes this dimension
        return None
    return wide


def _all_attempts(
    values: dict[str, Any],
    dynamic_shapes: Any,
    images: bool,
    failures: list[Exception],
    wide: dict[str, Any] | None,
) -> Iterator[_Attempt]:
    """Return all ways to export.

    Once they failed because the model reads values, the same ways come again with the values that it reads,
    and then once more without those that are a hint alone.
    """
    yield from _attempts(values, dynamic_shapes, images, wide)
    if any(depends_on_values(failure) for failure in failures):
        for hint in (True, False):
            for attempt in _attempts(values, dynamic_shapes, images, wide):
                yield dataclasses.replace(attempt, reads=True, hint=hint)


def _attempts(
    values: dict[str, Any], dynamic_shapes: Any, images: bool, wide: dict[str, Any] | None
) -> Iterator[_Attempt]:
    """Yield the ways to export, in order: first with all dimensions free, at last with none.

    Each result is checked against the model.

    An example with a batch of 1 is repeated before it is traced, because export treats a size of 1 as a
    constant. `oblivious` makes export treat it as free. But in some models (Llama, DistilBert) the batch then
    still becomes a constant argument of `expand`. The same is true of the second dimension, see `_wide`.
    """
    repeated = with_batch(values, 7)
    if dynamic_shapes is not None:
        yield _Attempt(repeated or values, dynamic_shapes, False)
        yield _Attempt(values, dynamic_shapes, True)
        return
    for dims, warning in (
        (functools.partial(_auto_dims, images=images, lengths=_lengths(values)), ""),
        (_batch_dim, "Only the first dimension of the inputs stays free; all of them could not."),
    ):
        shapes = _shapes(values, dims)
        if wide is not None and not warning:
            yield _Attempt(with_batch(wide, 7) or wide, shapes, False)
        if repeated is not None:
            yield _Attempt(repeated, shapes, False, warning)
        yield _Attempt(values, shapes, True, warning)
    yield _Attempt(
        values,
        None,
        False,
        "The captured model takes inputs of exactly the example's shapes; no dimension could stay free.",
    )


def _attempt(
    run: Caller, values: dict[str, Any], attempt: _Attempt, share_weights: bool, seen: Ran
) -> tuple[Graph, Guards]:
    """Export once; `seen` is the model's own call with `values`."""
    model = run.model
    args, kwargs = run.split(attempt.values)
    reads: list[ValueRead] = []
    with contextlib.ExitStack() as stack:
        if not attempt.hint:
            stack.enter_context(without_causal_hint())
        expected = reads_of(lambda: run(attempt.values)) if attempt.reads else ()
        stack.enter_context(exportable(attempt.oblivious))
        stack.enter_context(zeros_at_padding(model))
        stack.enter_context(one_list_of_weights(model))
        stack.enter_context(named_keywords(model, kwargs))
        stack.enter_context(giving_entries(model, list(values), seen.replaced))
        if attempt.reads:
            stack.enter_context(reading(model, expected, reads))
        program = torch.export.export(model, args, kwargs, dynamic_shapes=attempt.shapes, strict=False)
    module, placeholders = flatten_program(program)
    out_spec = program.call_spec.out_spec
    for more in (attempt.reads, seen.replaced is not None):
        out_spec = children(out_spec)[0] if more else out_spec
    leaves, in_spec = _leaves(attempt, placeholders)
    guards = guards_of([node.meta["val"].shape if node is not None else () for node in placeholders])
    kept = keep_reads(module, reads)
    written, returned = rewrites.normalise(module, out_spec.num_leaves, len(kept), run.precautions.rewrites)
    if not share_weights:
        own_constants(module, program)
    operators = name_operators(module, model)
    check_reads(module, kept, {op.node for op in operators if op.quantizable})
    leaf_of = {node: i for i, node in enumerate(placeholders)}
    effects = _effects(tuple(leaf_of[node] for node in written), returned, seen)
    signature = Signature(
        run.parameters, in_spec, leaves, out_spec, kept, effects=effects, model=type(model).__name__
    )
    example = tuple(
        v.detach().clone() for v, leaf in zip(pytree.tree_leaves(values), leaves, strict=True) if leaf.used
    )
    return Graph(
        module, signature, operators, tuple(n for n, _ in model.named_modules() if n), example
    ), guards


def _effects(written: tuple[int, ...], returned: tuple[tuple[int, int], ...], example: Ran) -> Effects:
    replaced = example.replaced
    if replaced is None:
        return Effects(written, returned=returned)
    return Effects(written, replaced.after, replaced.sources, returned, example.objects)


def _checked(run: Caller, graph: Graph, guards: Guards, values: dict[str, Any], expected: Ran) -> Graph:
    """Return the graph with conditions on the sizes of its inputs, once it computes what the model computes.

    Raises:
        RuntimeError: see `check_captured`.
    """
    layers = rounding_layers(run.model)
    if not layers:
        check_captured(run, graph, values, expected)
        return _conditioned(graph, guards, run, values)
    compared = dataclasses.replace(graph, module=unrounded_graph(graph.module))
    with unrounded(layers):
        check_captured(run, compared, values, run(values))
        compared = _conditioned(compared, guards, run, values)
    return dataclasses.replace(graph, signature=compared.signature)


def check_captured(run: Caller, graph: Graph, values: dict[str, Any], expected: Ran) -> None:
    """Check that the graph computes what the model computes, also for another batch size.

    Args:
        run: calls the model with arguments by name.
        graph: the captured model.
        values: the example's arguments.
        expected: the model's own call with them.

    Raises:
        RuntimeError: it computes something else. The caller then tries another way to export.
    """
    picks = picks_of(graph.module)
    check_same(expected, run_graph(graph.module, graph.signature, values), picks)
    resized = another_batch(values)
    if resized is None or not _batch_is_free(graph):
        return
    try:
        other = run(resized)
    except Exception:  # the model itself cannot take this batch, so there is nothing to compare
        return
    check_same(other, run_graph(graph.module, graph.signature, resized), picks)


def _conditioned(graph: Graph, guards: Guards, run: Caller, values: dict[str, Any]) -> Graph:
    """Return the graph with conditions on the sizes of its inputs.

    For sizes that they exclude the model is seen to compute something else.
    """
    picks = picks_of(graph.module)

    def outcome(sizes: Mapping[str, int]) -> PathsSeen:
        resized = with_sizes(values, sizes)
        try:
            got = run_graph(graph.module, graph.signature, resized)
        except Exception:  # as a call with these sizes will say
            return PathsSeen.FAILED
        try:
            expected = run(resized)
        except Exception:  # the model's own errors
            return PathsSeen.REFUSED
        try:
            check_same(expected, got, picks)
        except Exception:  # other values, or another number of them
            return PathsSeen.OTHER
        return PathsSeen.SAME

    tensors = enumerate(pytree.tree_leaves(values))
    sizes = {
        f"in{i}_{d}": size
        for i, t in tensors
        if isinstance(t, torch.Tensor)
        for d, size in enumerate(t.shape)
    }
    example = {name: sizes[name] for name in guards.axes}
    with warnings.catch_warnings():  # what a model says of sizes that nobody asked for
        warnings.simplefilter("ignore")
        conditions = (*guards.relations, *those_that_matter(guards, example, outcome))
    return dataclasses.replace(graph, signature=dataclasses.replace(graph.signature, conditions=conditions))


def _reading_warning(model: torch.nn.Module, reads: tuple[ValueRead, ...]) -> str:
    if not reads:
        return ""
    return (
        f"{type(model).__name__} reads values of its inputs in Python ({reads[0].where}). The captured graph "
        "holds the path that example_inputs take; a call that would take another path raises InputError."
    )


def _batch_is_free(graph: Graph) -> bool:
    return all(isinstance(leaf.dims[0], str) for leaf in graph.signature.leaves if leaf.used)


#: Where the package's own files are. No frame in them is the user's code.
_HERE = str(Path(__file__).parents[1])


def _telling(failures: Sequence[Exception]) -> Exception:
    """Return the failure that says most: of an attempt that got far, or else the first."""
    return next(
        (f for f in reversed(failures) if isinstance(f, (OtherOutputError, LostEffectError))), failures[0]
    )


def _first_run(model: torch.nn.Module, run: Caller, values: dict[str, Any]) -> Ran:
    try:
        return run(values)
    except Exception as error:
        if is_of_unknown_output(error):
            raise CaptureError(_capture_message(model, error)) from error
        given = ", ".join(f"{name}: {_shown(value)}" for name, value in values.items())
        msg = (
            f"{type(model).__name__} itself fails on example_inputs ({given}): {type(error).__name__}: "
            f"{_first_line(error)}"
        )
        raise InputError(msg) from error


def _check_outputs(model: torch.nn.Module, outputs: Any) -> None:
    """Raise CaptureError for an object with tensors that torch does not see into."""
    unknown = next(
        (
            type(leaf)
            for leaf in pytree.tree_leaves(outputs)
            if dataclasses.is_dataclass(leaf) or holds_tensors(leaf)
        ),
        None,
    )
    if unknown is None:
        return
    name = unknown.__name__
    if dataclasses.is_dataclass(unknown):
        advice = f"call torch.export.register_dataclass({name}) before prepare()"
    else:
        advice = (
            "return its tensors as a tuple, list, dict or dataclass; a Hugging Face model leaves its cache "
            "out with use_cache=False"
        )
    msg = f"{type(model).__name__} returns a {name}, and torch.export does not know its members: {advice}."
    raise CaptureError(msg)


def _shown(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _shapes(value: Any, dims: Callable[[Any, bool], Any], depth: int = 0) -> Any:
    """Return the free dimensions, in the structure of the arguments.

    torch.export expects a list there for each object.

    Args:
        value: the arguments by name, or a part of them.
        dims: (leaf, whether it is itself an argument) → its free dimensions.
        depth: how many containers are around `value`.
    """
    if pytree.tree_structure(value).is_leaf():
        return dims(value, depth == 1)
    members, spec = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    below = [_shapes(member, dims, depth + 1) for member in members]
    return pytree.tree_unflatten(below, spec) if spec.type in pytree.BUILTIN_TYPES else below


def _auto_dims(leaf: Any, alone: bool, images: bool, lengths: frozenset[int]) -> Any:
    """Return all dimensions as free; of images and videos only the batch, unless `images` is set.

    A mask over `lengths` is not an image, and neither is a tensor in a list or a key-value cache.
    """
    if not isinstance(leaf, torch.Tensor):
        return None
    free = leaf.dim() < 4 or images or not alone or set(leaf.shape[-2:]) <= lengths
    return dict.fromkeys(range(leaf.dim() if free else 1), torch.export.Dim.AUTO)


def _lengths(values: dict[str, Any]) -> frozenset[int]:
    """Sizes of the second dimension of the inputs that are sequences."""
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    return frozenset(t.shape[1] for t in tensors if t.dim() in (2, 3))


def _takes_any_image(model: torch.nn.Module) -> bool:
    """Return whether a model has convolutions and no tokens.

    Models that cut images into tokens fix the image size, or take minutes to export.
    """
    tokens = (torch.nn.LayerNorm, torch.nn.MultiheadAttention, torch.nn.Embedding)
    return not any(isinstance(m, tokens) for m in model.modules())


def _batch_dim(leaf: Any, _: bool) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, torch.Tensor) and leaf.dim() else None


def _leaves(
    attempt: _Attempt, placeholders: list[fx.Node | Unused | None]
) -> tuple[tuple[Leaf, ...], pytree.TreeSpec]:
    """Return the flat inputs.

    Args:
        attempt: what was exported.
        placeholders: one entry per leaf, None where the graph does not read it.
    """
    shapes = None if attempt.warning else attempt.shapes  # None: asking for more has failed
    if isinstance(shapes, (tuple, list)):
        shapes = dict(zip(attempt.values, shapes, strict=False))
    paths, in_spec = pytree.tree_flatten_with_path(attempt.values)
    leaves = []
    for (path, value), node in zip(paths, placeholders, strict=True):
        first, *others = (getattr(p, "key", getattr(p, "idx", p)) for p in path)
        name = str(first) + "".join(f"[{other!r}]" for other in others)
        if not isinstance(value, torch.Tensor):
            leaves.append(Leaf(name, None, value=value, used=False))
            continue
        shape = node.meta["val"].shape if node is not None else value.shape
        dims = tuple(map(dim_of, shape))
        held = () if others or not isinstance(shapes, dict) else _not_asked(shapes.get(str(first)), dims)
        if not attempt.oblivious:  # then export takes a size of 1 for a constant
            held = tuple(sorted({*held, *(d for d, dim in enumerate(dims) if dim == 1)}))
        leaves.append(Leaf(name, value.dtype, dims, used=node is not None and bool(node.users), held=held))
    return tuple(leaves), in_spec


def _not_asked(asked: Any, dims: tuple[int | str, ...]) -> tuple[int, ...]:
    """Return the fixed dimensions of an argument that torch.export was not asked to leave free.

    Args:
        asked: by dimension, or a list of all; an integer, None or `Dim.STATIC` does not ask.
        dims: sizes, or names of free ones.
    """
    given = asked if isinstance(asked, dict) else dict(enumerate(asked or ()))
    wishes = {
        d
        for d, wish in given.items()
        if wish not in (None, torch.export.Dim.STATIC) and not isinstance(wish, int)
    }
    return tuple(d for d, dim in enumerate(dims) if isinstance(dim, int) and d not in wishes)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _capture_message(model: torch.nn.Module, error: Exception, cause: str = "") -> str:
    where = _user_line(error)
    advice = (
        "A branch or loop that depends on tensor values can't be exported: rewrite it with torch.where / "
        "torch.cond, or quantize the submodules around it one by one."
    )
    if is_of_unknown_output(error):
        advice = (
            "Return tensors, in tuples, lists or dicts: call torch.export.register_dataclass with a "
            "dataclass of your own. A Hugging Face model leaves its cache out when example_inputs say "
            "use_cache=False."
        )
    elif "numpy" in _first_line(error):
        advice = "NumPy's functions can't be exported: write that place with operators of torch."
    text = f"{type(model).__name__} can't be captured as one graph: {_first_line(error)}"
    if _asks_too_much(error):
        return (
            f"{text}\nThe model fixes a dimension that dynamic_shapes says is free. torch.export.Dim.AUTO "
            "leaves that to the model."
        )
    if cause:
        return f"{text}\n{cause}"
    if isinstance(error, OtherOutputError) and error.picks:
        return (
            f"{text}\nThe model picks among its values ({', '.join(error.picks)}). Where two are nearly "
            "equal, rounding decides, and then outputs can't be compared. Quantize the part before "
            "that, for example model.backbone, and call the rest in fp32."
        )
    if isinstance(error, LostEffectError):
        return (
            f"{text}\nReturn what it writes there as a further output, and put it into the argument outside "
            "of the model; or quantize its submodules one by one."
        )
    if isinstance(error, OtherOutputError):
        return (
            f"{text}\nThe model draws random numbers, bakes a size in, or takes another path while it is "
            "exported (some do where an input is left out: give all of them, attention_mask too). Or "
            "quantize its submodules one by one."
        )
    return f"{text}\n  at {where}\n{advice}" if where else f"{text}\n{advice}"


def _asks_too_much(error: Exception) -> bool:
    """Return whether torch.export says that the model fixes what dynamic_shapes names."""
    from torch._dynamo.exc import UserError, UserErrorType  # export has loaded it; `load` needs no tracer

    if isinstance(error, torch.fx.experimental.symbolic_shapes.ConstraintViolationError):
        return True
    return isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION


def _user_line(error: Exception) -> str:
    """File, line and source of the innermost frame that is not torch's own."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and not f.filename.startswith(_HERE)
    ]
    return (
        f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"
        if frames
        else ""
    )

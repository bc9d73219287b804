"""Executors that run the lowered graph, in the order in which they are tried.

TorchScript needs no Python between the calls.

The kernels of small models take less time than Python needs to call them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from nc.backends.native.packing import HELPERS, SPELLING, packed, refused, refused_sizes
from nc.backends.native.planned import planned, why_not
from nc.backends.native.plans.any_sizes import SampleInputs
from nc.backends.native.plans.checks import PlanChecks
from nc.backends.native.qdq_rewrites import CONVERTERS, dequantize, quantize
from nc.backends.native.references import Reference
from nc.backends.torchscript import script
from nc.errors import BackendError
from nc.graph.fx_utils import GIVES, run_with
from nc.numerics.metrics import worst_sqnr_db
from nc.ops import from_bf16, to_bf16
from nc.process.lock import LOCK
from nc.profiling.nodes import node_steps, profile_nodes
from nc.profiling.profile import EngineCall, Profile
from nc.proof.kernels import KernelCheck

_SPELLING: dict[Callable[..., object], str] = {
    quantize: "self._codes(torch.quantize_per_tensor({}, {}, {}, torch.quint8))",
    dequantize: "torch._make_per_tensor_quantized_tensor({}, {}, {}).dequantize()",
    to_bf16: "{}.to(torch.bfloat16)",
    from_bf16: "{}.to(torch.float32)",
    torch.ops.aten.reshape.default: "{}.reshape({})",  # not the copy that a fuser needs
    **SPELLING,
}
#: Executors of torch's operators run the same kernels; bits differ at most where memory is aligned otherwise.
_SAME_DB = 60.0
# `int_repr` copies them
_CODES = """
def _codes(self, q: Tensor) -> Tensor:
    if q.is_contiguous():
        return torch.empty([0], dtype=torch.uint8).set_(q, 0, q.size(), q.stride())
    return q.int_repr()
"""

#: Flat tensors in, outputs back; safe to call from several threads.
Call = Callable[..., Sequence[Any]]
#: The lowered graph with or without kernels for products of two activations; it packs the weights of torch's
#: operators itself.
Lowered = Callable[[bool], fx.GraphModule]


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """What runs a lowered graph.

    Attributes:
        call: flat tensors → flat outputs; safe to call from several threads.
        weight_bytes: bytes of the constants that it holds.
        profile: see `EngineModel.profile`.
        steps: see `EngineModel.steps`.
        kernels: names of the kernels of operators, where it knows them without running.
        details: what the report says of it, beside its name.
        refused: names of the operators that the graph computes in int8 and it in fp32, for the example, and
            why.
        passed_over: names of operators with the kernels that other ones take the place of, and why.
        products: whether it runs the graph with kernels for products of two activations.
        multiplied: names of the products that such kernels compute.
        forget: gives back memory of weights that it needs for new sizes of inputs only, and gets what makes
            the lowered graph again.
        values: flat tensors → its outputs and the values inside of one call, by the nodes of the QDQ graph
            that they stand for; None where it compares itself.
        checked: what the comparison of its kernels with the QDQ graph found for the example; None where there
            was none.
    """

    call: Call
    weight_bytes: Callable[[], int]
    profile: Callable[[Sequence[torch.Tensor]], Profile]
    steps: Callable[[Sequence[torch.Tensor]], Sequence[EngineCall]]
    kernels: Callable[[], Mapping[str, str]] = dict
    details: Callable[[], Mapping[str, str]] = dict
    refused: Callable[[], Mapping[str, str]] = dict
    passed_over: Callable[[], Mapping[str, tuple[tuple[str, str], ...]]] = dict
    products: bool = False
    multiplied: Callable[[], Collection[str]] = tuple
    forget: Callable[[Callable[[], fx.GraphModule]], None] = lambda _: None
    values: (
        Callable[[Sequence[torch.Tensor], Collection[str]], tuple[Sequence[Any], Mapping[str, torch.Tensor]]]
        | None
    ) = None
    checked: KernelCheck | None = None


class Executor(Protocol):
    """Something that can run a lowered graph."""

    name: str
    #: Whether it has kernels for products of two activations.
    products: bool

    def why_not(self, module: fx.GraphModule) -> str:
        """Why it can't run this graph here, as far as that is known without building; "" when it may."""

    def build(
        self, lowered: Lowered, example: Sequence[torch.Tensor], reference: Reference | None = None
    ) -> Running:
        """Return what runs the graph.

        Args:
            lowered: gives the graph, which stays as it is.
            example: flat inputs.
            reference: for executors that compare what they make themselves; the others are compared by
                `executable`.

        Raises:
            BackendError: it can't run this graph.
        """


class PlanExecutor:
    """Kept oneDNN primitives, made once for each set of input sizes.

    There is no torch and no set-up between the kernels.
    """

    name = "oneDNN primitives"
    products = True

    def why_not(self, module: fx.GraphModule) -> str:
        """No oneDNN library to call, or operators that work in place."""
        return why_not(module)

    def build(
        self, lowered: Lowered, example: Sequence[torch.Tensor], reference: Reference | None = None
    ) -> Running:
        """See `Executor.build`."""
        return self.build_for_rows(lowered, example, reference, None)

    def build_for_rows(
        self,
        lowered: Lowered,
        example: Sequence[torch.Tensor],
        reference: Reference | None,
        samples: SampleInputs | None,
    ) -> Running:
        """Return the same for a graph over rows of texts, with one plan for any number of them."""
        rest = [each for each in EXECUTORS if each is not self]
        model = planned(
            lowered(self.products),
            lambda: executable(lowered, example, executors=rest)[0],
            reference,
            samples,
        )
        model.check(example)

        def details() -> Mapping[str, str]:
            more = {
                "wrong sums, so not taken": model.wrong_kernels(),
                "not planned": model.unplanned(),
                "computed by torch": model.refusals(),
            }
            known = {"kernels": model.how()} | {key: "; ".join(texts) for key, texts in more.items() if texts}
            return known | sizes_compared(model.checks)

        return Running(
            model,
            weight_bytes=model.weight_bytes,
            profile=model.profile,
            steps=model.steps,
            kernels=model.kernels,
            passed_over=model.passed_over,
            details=details,
            products=True,
            multiplied=model.multiplied,
            forget=model.forget,
            checked=model.checks.first,
        )


class TorchScriptExecutor:
    """TorchScript's interpreter, in which threads don't wait for each other."""

    name = "TorchScript"
    products = False

    def why_not(self, module: fx.GraphModule) -> str:
        """PyTorch deprecates it."""
        return "" if hasattr(torch.jit, "script") else f"torch {torch.__version__} has no TorchScript"

    def build(
        self, lowered: Lowered, example: Sequence[torch.Tensor], reference: Reference | None = None
    ) -> Running:
        """See `Executor.build`."""
        module = packed(lowered(self.products), example)
        with (
            LOCK,
            warnings.catch_warnings(),
        ):  # torch 2.13 deprecates TorchScript, which users can do nothing about
            warnings.simplefilter("ignore")
            scripted = script(module, _SPELLING, _CODES + HELPERS).module

        def run(*inputs: torch.Tensor) -> Sequence[Any]:
            # nothing is left to fuse; optimized, the first calls would be slow, and IPEX, where it is
            # imported, would rewrite the graph
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined] # not in its __all__
                outputs: Sequence[Any] = scripted(*inputs)
                return outputs

        why = _why_unlike_python(run, module, example)
        if why:
            msg = f"{self.name} {why}"
            raise BackendError(msg)
        return _of_nodes(run, module)


class PythonExecutor:
    """Python, call by call: it runs every graph, and is what TorchScript is compared with."""

    name = "Python"
    products = False

    def why_not(self, module: fx.GraphModule) -> str:
        """Return "": it runs every graph."""
        return ""

    def build(
        self, lowered: Lowered, example: Sequence[torch.Tensor], reference: Reference | None = None
    ) -> Running:
        """Return the graph itself."""
        module = packed(lowered(self.products), example)
        return _of_nodes(module, module)


PYTHON = PythonExecutor()
#: In the order in which they are tried. Python is not among them: it runs what none of them can.
EXECUTORS: tuple[Executor, ...] = (PlanExecutor(), TorchScriptExecutor())


def executable(
    lowered: Lowered,
    example: Sequence[torch.Tensor],
    reference: Reference | None = None,
    executors: Sequence[Executor] | None = None,
) -> tuple[Running, Sequence[Any], str]:
    """Return what runs the graph: the first executor whose outputs for the example are right.

    Args:
        lowered: gives the graph.
        example: flat inputs.
        reference: what they are compared with; None: they are right.
        executors: those to try; None: all.

    Returns:
        What runs it; its outputs for the example; and, unless the first executor runs it, who does and why
        not those before it, else "".
    """
    passed_over: list[str] = []
    for executor in EXECUTORS if executors is None else executors:
        why = executor.why_not(lowered(executor.products))
        if not why:
            try:
                running, outputs = _compared(executor.build(lowered, example, reference), example, reference)
                found = _why_wrong(running, outputs, reference)
            except BackendError as error:
                why = str(error).splitlines()[0]
            except RuntimeError as error:
                why = f"{executor.name} fails: {str(error).strip().splitlines()[-1]}"
            else:
                if not found:
                    return (
                        running,
                        outputs,
                        f"{executor.name}: {'; '.join(passed_over)}" if passed_over else "",
                    )
                why = f"{executor.name} {found}"
        passed_over.append(why)
    running, outputs = _compared(PYTHON.build(lowered, example), example, reference)
    return running, outputs, f"{PYTHON.name}: {'; '.join(passed_over) or 'there is no other executor'}"


def executable_for_rows(
    lowered: Lowered, example: Sequence[torch.Tensor], reference: Reference | None, samples: SampleInputs
) -> tuple[Running, Sequence[Any]]:
    """Return what runs a graph over rows of texts for any number of them, and its outputs for the example.

    Raises:
        BackendError: there is no plan for any number of rows, or it computes something else.
    """
    executor = PlanExecutor()
    why = executor.why_not(lowered(executor.products))
    if why:
        raise BackendError(why)
    running, outputs = _compared(
        executor.build_for_rows(lowered, example, reference, samples), example, reference
    )
    why = _why_wrong(running, outputs, reference)
    if why:
        raise BackendError(why)
    return running, outputs


def _compared(
    running: Running, example: Sequence[torch.Tensor], reference: Reference | None
) -> tuple[Running, Sequence[Any]]:
    """Return what runs a graph, with a comparison of its kernels for the example; and its outputs for it."""
    outputs = called(running, example)
    if reference is None or running.values is None:
        return running, outputs
    check = reference.kernels(example, *running.values(example, reference.names))
    return dataclasses.replace(running, checked=check), outputs


def _why_wrong(running: Running, outputs: Sequence[Any], reference: Reference | None) -> str:
    """Why what runs a graph is not taken; "" where it computes what the QDQ graph computes."""
    why = "" if reference is None else reference.why_unlike(outputs)
    faults = () if running.checked is None else running.checked.faults
    return why or (f"computes something else at {faults[0]}" if faults else "")


def sizes_compared(checks: PlanChecks) -> dict[str, str]:
    """Return what a report says about comparisons for sizes other than the example's.

    {} if there were none.
    """
    if not checks.others and not checks.why_stopped:
        return {}
    found = f"{checks.wrong} of them wrong: torch's operators compute those" if checks.wrong else "none wrong"
    why = f" ({checks.why_whole})" if checks.why_whole else ""
    whole = f", {checks.wholes} of them at all places{why}" if checks.wholes else ""
    stopped = f"; no more are: {checks.why_stopped}" if checks.why_stopped else ""
    return {"sizes compared": f"{checks.others} beside the example's, {found}{whole}{stopped}"}


def called(running: Running, example: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return the outputs for copies of the inputs, which a graph may work in."""
    with torch.no_grad():
        return running.call(*(t.clone() for t in example))


def _why_unlike_python(call: Call, module: fx.GraphModule, example: Sequence[torch.Tensor]) -> str:
    """Return what is wrong with a call that should compute what Python computes.

    TorchScript may read a graph otherwise than Python does: to it `True` as an argument for a number is 1,
    and `2 ** 2` is 4.0.
    """
    with torch.no_grad():
        expected, got = module(*(t.clone() for t in example)), call(*(t.clone() for t in example))
    same = [_kind(v) for v in got] == [_kind(v) for v in expected] and worst_sqnr_db(
        expected, got
    ) >= _SAME_DB
    return "" if same else "computes something else"


def _of_nodes(call: Call, module: fx.GraphModule) -> Running:
    """Return a graph of torch's operators, which are profiled one by one."""
    return Running(
        call,
        lambda: sum(t.numel() * t.element_size() for t in module.buffers()),
        functools.partial(profile_nodes, module, call, CONVERTERS),
        functools.partial(node_steps, module, CONVERTERS),
        details=functools.partial(refused_sizes, module),
        refused=functools.partial(refused, module),
        values=functools.partial(_values, module),
    )


def _values(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], names: Collection[str]
) -> tuple[Sequence[Any], Mapping[str, torch.Tensor]]:
    """Return the outputs of a lowered graph and copies of values inside.

    These are the values that stand for nodes of these names.
    """
    found: dict[str, torch.Tensor] = {}

    def note(node: fx.Node, value: Any, _: Mapping[fx.Node, Any]) -> Any:
        """Copy a value: a later operator may write into its memory."""
        stands_for = [name for name in node.meta.get(GIVES, ()) if name in names]
        if stands_for and isinstance(value, torch.Tensor):
            found.update(dict.fromkeys(stands_for, value.clone()))
        return value

    outputs = run_with(module, [tensor.clone() for tensor in inputs], note)
    return outputs, found


def _kind(value: object) -> object:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else (type(value), value)

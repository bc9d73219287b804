"""The protocol of a backend: a name, capabilities as data, and a function that lowers a QDQ graph.

A backend never reads a configuration: the QDQ graph contains everything.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from nc.backends.passes import Rewrite
from nc.backends.profiling.profile import Profile, Step
from nc.capture.precautions import Precautions
from nc.errors import BackendError, BackendUnavailableError, NCError, UnsupportedError
from nc.formats import Capabilities
from nc.graph.qdq import QDQGraph
from nc.nn import KernelChoice


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpRun:
    """What really ran for one operator.

    Attributes:
        operator: its name.
        ran: "int8", "bf16" or "fp32", read from what the engine executes; "int8" also for what an int8 kernel computes along.
        reason: why it is not int8 although that was asked, or where it went; "" when there is nothing to say.
        primitive: the oneDNN kernel that computes it, with its instruction set; "" where the engine does not know without running it.
        kernels: what computes a linear with low-bit weights; None for all others.
    """

    operator: str
    ran: str
    reason: str = ""
    primitive: str = ""
    kernels: KernelChoice | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """What a backend says of a lowered model.

    Attributes:
        backend: its name.
        ops: one entry per operator of the plan that the backend could find again.
        groups: number of fused int8 groups; None where the word means nothing.
        quantize_outside: quantize nodes that run on their own.
        dequantize_outside: dequantize nodes that run on their own.
        weight_bytes: bytes of all constants that the engine model holds.
        rewrites: what the backend rewrote to avoid engine faults.
        sqnr_db: engine against reference on the example inputs, in dB; None when it was not measured.
        details: anything else worth printing.
    """

    backend: str
    ops: tuple[OpRun, ...]
    groups: int | None = None
    quantize_outside: int = 0
    dequantize_outside: int = 0
    weight_bytes: int = 0
    rewrites: tuple[Rewrite, ...] = ()
    sqnr_db: float | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """A lowered model.

    Attributes:
        run: flat input tensors → flat outputs; safe to call from several threads.
        report: builds the proof of what runs.
        script: the TorchScript module, where the engine has one.
        profile: flat input tensors → the kernels that run and their times. It takes over the standard output of the process, so it is
            called in one of its own, on a model lowered there; None: the engine can't be profiled.
        steps: flat input tensors → the calls that the engine makes, each with the time that it took this once. It runs in this process, and
            its steps have no kernels; None: the engine can't be taken apart here.
        verified: it has computed its example, and the outputs have the shapes that the graph's have.
    """

    run: Callable[[Sequence[torch.Tensor]], Sequence[Any]]
    report: Callable[[], EngineReport]
    script: torch.jit.ScriptModule | None = None
    profile: Callable[[Sequence[torch.Tensor]], Profile] | None = None
    steps: Callable[[Sequence[torch.Tensor]], Sequence[Step]] | None = None
    verified: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option of `lower` that an engine has beside `verify`.

    Attributes:
        values: those that it takes.
        protects: it guards against a fault of this engine, so engines without it do what it asks for anyway.
    """

    values: tuple[object, ...]
    protects: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Exporter:
    """How a model is written as a program of some format.

    Attributes:
        write: (the quantized graph, the engine model or None, further options by keyword) → content of the file; for several files, which
            have one name but for its suffix, their contents by suffix, the file that users name first.
        from_graph: it needs the quantized graph only, so that a model of any backend can be written by this one.
    """

    write: Callable[..., bytes | Mapping[str, bytes]]
    from_graph: bool = False


def write_script(graph: QDQGraph, engine: EngineModel) -> bytes:
    """Write the TorchScript program of an engine that runs one; raises UnsupportedError where this model has none."""
    if engine.script is None:
        msg = "The engine runs this model without a TorchScript program, so there is none to write."
        raise UnsupportedError(msg)
    buffer = io.BytesIO()  # a file's own name would become part of its bytes
    torch.jit.save(engine.script, buffer)
    return buffer.getvalue()


class Backend(Protocol):
    """See the module text.

    Attributes:
        name: how users call it.
        options: what `lower` takes beside `verify`, by name. A backend that leaves it out takes `isolate`.
        exports: what it can write, by name of the format. A backend that leaves it out writes the TorchScript program of its models.

    A backend with kernels for low-bit weights has a method `low_bit_kernels()`, which gives rows of
    `nc.backends.low_bit.kernel.LowBitKernel`, the preferred ones first.

    A backend whose models do not read the graph's codes of weights again, or only after a call of `QDQGraph.intact`, has a true attribute
    `packs_weights`: `load` then leaves them in the artefact's file instead of in memory.

    An engine whose import changes torch's kernels in the whole process has two more attributes:

    * `capture_passes`, a sequence of `Pass`: rewrites of a captured fp32 graph, so that these kernels compute it correctly. Every captured
      graph gets them, whatever backend it is for, since any model of the process may run with these kernels.
    * `around_model`: fp32 model → a context in which the model computes what torch alone would compute.
    """

    name: str
    options: Mapping[str, Option]
    exports: Mapping[str, Exporter]

    def why_unavailable(self) -> str:
        """Why it can't run here and what to do about it; "" when it can."""

    def capabilities(self) -> Capabilities:
        """Return what it can run on this CPU; needs no engine to be installed."""

    def start(self) -> None:
        """Import the engine, if it is not yet: it may bring kernels of its own for fp32 operators, so this comes before anything runs."""

    def lower(self, graph: QDQGraph, **options: Any) -> EngineModel:
        """Return an engine model of the graph.

        Raises:
            BackendUnavailableError: the engine can't run here.
            VerificationError: the engine computes something else than the graph.
        """


def check_available(backend: Backend) -> None:
    """Raise BackendUnavailableError, with what to do, when a backend can't run here."""
    why = backend.why_unavailable()
    if why:
        msg = f"Backend {backend.name!r} can't run here: {why}"
        raise BackendUnavailableError(msg)


def check_bf16(backend: Backend, graph: QDQGraph) -> None:
    """Raise UnsupportedError when a graph computes in bf16, and a backend can't on this CPU."""
    why = backend.capabilities().why_no_bf16
    if why and any(d.spec.bf16 for d in graph.plan.decisions):
        msg = f"This model computes in bf16, which backend {backend.name!r} can't here: {why}."
        raise UnsupportedError(msg)


_UNDECLARED: Mapping[str, Option] = {"isolate": Option(("auto", "always", "never"), protects=True)}


def options_of(backend: Backend) -> Mapping[str, Option]:
    """Return the options that a backend declares; one without a declaration has `isolate`."""
    return getattr(backend, "options", _UNDECLARED)


def exports_of(backend: Backend) -> Mapping[str, Exporter]:
    """Return the formats that a backend declares. One without a declaration can write the TorchScript module that its models have."""
    return getattr(backend, "exports", {"torchscript": Exporter(write_script)})


def precautions_for(backends: Iterable[Backend]) -> Precautions:
    """Return what capture has to do because of these backends."""
    backends = tuple(backends)
    passes = [each for backend in backends for each in getattr(backend, "capture_passes", ())]
    around = [backend.around_model for backend in backends if hasattr(backend, "around_model")]
    return Precautions(tuple(each.run for each in passes), tuple(around))


def lower(backend: Backend, graph: QDQGraph, **options: Any) -> EngineModel:
    """Return an engine model of the graph.

    Args:
        backend: what lowers it.
        graph: the quantized model.
        options: `verify`, and what `nc.backends.engine_options` found to be options of this backend.

    Raises:
        UnsupportedError: the graph computes in bf16, and the backend can't.
        BackendUnavailableError, VerificationError: see `Backend.lower`.
        BackendError: the engine fails on this graph.
    """
    check_bf16(backend, graph)
    try:
        with torch.autocast("cpu", enabled=False):  # the plan says what computes in which precision, not where the call happens to stand
            return backend.lower(graph, **options)
    except NCError:
        raise
    except Exception as error:
        msg = (
            f"Backend {backend.name!r} fails on this model: {type(error).__name__}: {str(error).strip() or '-'}\nThis is a defect of nc or "
            'of the engine, please report it. backend="reference" computes the quantized graph without an engine.'
        )
        raise BackendError(msg) from error

"""What every backend is: a name, declarations as data, and a method that lowers a QDQ graph."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from nc.backends.passes import Pass, Rewrite
from nc.capture.precautions import Precautions
from nc.errors import BackendError, BackendUnavailableError, ConfigError, NCError, UnsupportedError
from nc.formats import Capabilities
from nc.graph.qdq import QDQGraph
from nc.kernels.low_bit.kernel import LowBitKernel
from nc.nn import KernelChoice, QuantLinear
from nc.profiling.profile import EngineCall, Profile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpRun:
    """What really ran for one operator.

    Attributes:
        operator: its name.
        ran: "int8", "bf16" or "fp32", read from what the engine executes; "int8" also for what an int8 kernel
            computes along.
        reason: why it is not int8 although that was asked, or where it went; "" when there is nothing to say.
        primitive: the oneDNN kernel that computes it, with its instruction set; "" where the engine does not
            know without running it.
        kernels: what computes a linear with low-bit weights; None for all others.
        refused: (kernel, why it does not compute this operator) of the kernels that would be preferred.
    """

    operator: str
    ran: str
    reason: str = ""
    primitive: str = ""
    kernels: KernelChoice | None = None
    refused: tuple[tuple[str, str], ...] = ()


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


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedTexts:
    """What an engine does that computes rows of real tokens instead of padded texts, of any sizes.

    Attributes:
        mask: number of the flat input that masks tokens; None: there is none.
        of_tokens: for each flat output, whether it has a row for each token; else it has one for each text.
        without_padding: flat inputs, and outputs for them → the same outputs with zeros for padding.
    """

    mask: int | None
    of_tokens: tuple[bool, ...]
    without_padding: Callable[[Sequence[torch.Tensor], Sequence[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """A lowered model.

    Attributes:
        run: flat input tensors → flat outputs; safe to call from several threads.
        report: builds the proof of what runs.
        script: the TorchScript module, where the engine has one.
        profile: flat input tensors → the kernels that run and their times. It captures the standard output of
            the process, so call it in a separate process, on a model lowered there; None: the engine can't
            be profiled.
        steps: flat input tensors → the calls that the engine makes, each with the time that it took this
            once. It runs in this process, and its steps have no kernels; None: the engine can't be taken
            apart here.
        verified: it has computed its example, and the outputs have the shapes that the graph's have.
        texts: what it does with padded texts; None: it computes padding like all else.
    """

    run: Callable[[Sequence[torch.Tensor]], Sequence[Any]]
    report: Callable[[], EngineReport]
    script: torch.jit.ScriptModule | None = None
    profile: Callable[[Sequence[torch.Tensor]], Profile] | None = None
    steps: Callable[[Sequence[torch.Tensor]], Sequence[EngineCall]] | None = None
    verified: bool = False
    texts: PaddedTexts | None = None

    def comparable(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> Sequence[Any]:
        """Return outputs of another engine, or of the fp32 model, with zeros where this one gives zeros."""
        return outputs if self.texts is None else self.texts.without_padding(inputs, outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option of `lower` that an engine has beside `verify`, or one of an export.

    Attributes:
        values: those that it takes.
        protects: it guards against a fault of this engine, so engines without it do what it asks for anyway.
    """

    values: tuple[object, ...]
    protects: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise ConfigError for a value that the option called `name` does not take."""
        if value not in self.values:
            msg = f"Expected {name} to be one of {', '.join(map(repr, self.values))}, but got {value!r}."
            raise ConfigError(msg)


class ThreadCounts(Option):
    """An option that takes numbers of threads, or None."""

    __slots__ = ()

    def check(self, name: str, value: object) -> None:
        """Raise ConfigError for a value that is not None or some numbers from 1 to 1024."""
        counts = value if isinstance(value, (list, tuple)) and value else (None,)
        if value is not None and not all(type(count) is int and 1 <= count <= 1024 for count in counts):
            msg = f"Expected {name} to be None or a list of numbers from 1 to 1024, but got {value!r}."
            raise ConfigError(msg)


#: The option `verify` of exports that compare the file with the quantized graph.
VERIFY = Option(("raise", "warn", "off"))


@dataclasses.dataclass(frozen=True, slots=True)
class Exporter:
    """How a model is written as a program of some format.

    Attributes:
        write: (the quantized graph, the engine model or None, the path of a file, options by keyword) → what
            is worth telling, or None. It writes the file, and beside it whatever else belongs to the program,
            into a folder that holds nothing else. All of it gets to the user's folder, under the same names,
            when `write` has returned.
        suffix: how the file's name must end; "" for any.
        options: those of `write`, by name.
        from_graph: it needs the quantized graph only, so that a model of any backend can be written by this
            one.
        folder: it writes into an empty folder, of whose plan.json this is the format; "" where it writes
            files.
    """

    write: Callable[..., object]
    suffix: str = ""
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    from_graph: bool = False
    folder: str = ""


def write_script(graph: QDQGraph, engine: EngineModel, file: Path) -> None:
    """Write the TorchScript program of an engine.

    Raises:
        UnsupportedError: the engine runs this model without a TorchScript program.
    """
    if engine.script is None:
        msg = "The engine runs this model without a TorchScript program, so there is none to write."
        raise UnsupportedError(msg)
    buffer = io.BytesIO()  # a file's own name would become part of its bytes
    torch.jit.save(engine.script, buffer)
    file.write_bytes(buffer.getvalue())


class Backend:
    """What an engine declares, and how it computes a quantized graph.

    An engine is a class that derives from this one.

    All that is declared can be read without the engine installed. What a class leaves out is as here:
    nothing.

    Attributes:
        name: how users call it.
        runs_models: False: it only writes files for another runtime, so no model can be converted or loaded
            for it.
        options: what `lower` takes beside `verify`, by name.
        exports: what it can write, by name of the format.
        packs_weights: its models do not read the graph's codes of weights again, or only after a call of
            `QDQGraph.intact`: `load` then leaves them in the artefact's file instead of in memory.
        capture_passes: for an engine whose import changes torch's kernels in the whole process: rewrites of a
            captured fp32 graph, so that these kernels compute it correctly. Every captured graph gets them,
            whatever backend it is for, since any model of the process may run with these kernels.
        packages: distributions that it needs beside torch; `doctor` shows their versions.
        remark: what `doctor` says where it can run.
    """

    name: str
    runs_models: bool = True
    options: Mapping[str, Option] = MappingProxyType({})
    exports: Mapping[str, Exporter] = MappingProxyType({})
    packs_weights: bool = False
    capture_passes: Sequence[Pass] = ()
    packages: Sequence[str] = ()
    remark: str = ""

    def why_unavailable(self) -> str:
        """Return why it can't run here and what to do about it; "" when it can."""
        return ""

    def capabilities(self) -> Capabilities:
        """Return what it can run on this CPU; needs no engine to be installed."""
        return Capabilities(backend=self.name, ops=())

    def around_model(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Return a context in which a fp32 model computes what torch alone would.

        See `capture_passes`.
        """
        return contextlib.nullcontext()

    def low_bit_kernels(self) -> tuple[LowBitKernel, ...]:
        """Return its kernels for linears with low-bit weights, the preferred ones first."""
        return ()

    def plan_token(
        self, module: fx.GraphModule, layers: Sequence[QuantLinear]
    ) -> Callable[..., Sequence[torch.Tensor]] | None:
        """Return what runs a graph that computes one token of a language model.

        The graph may change its inputs in place.

        Args:
            module: flat graph, which may be changed.
            layers: the low-bit linears of the model that it was captured from; what their kernels packed can
                be shared.

        Returns:
            flat inputs → flat outputs; None where the engine has no such plans.

        Raises:
            BackendUnavailableError: it has, but not on this machine.
        """
        return None

    def start(self) -> None:
        """Import the engine if it is not imported yet.

        The engine may register its own kernels for fp32 operators, so call this before anything runs.

        Raises:
            BackendUnavailableError: it can't run here.
        """
        check_available(self)

    def lower(self, graph: QDQGraph, **options: Any) -> EngineModel:
        """Return an engine model of the graph.

        Args:
            graph: the quantized model. The backend never sees a configuration: the graph contains everything.
            options: `verify`, and those of `options`.

        Raises:
            BackendUnavailableError: the engine can't run here.
            VerificationError: the engine computes something else than the graph.
        """
        msg = f"Backend {self.name!r} runs no models: its class has no `lower`."
        raise UnsupportedError(msg)


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


def precautions_for(backends: Iterable[Backend]) -> Precautions:
    """Return what capture has to do because of these backends."""
    backends = tuple(backends)
    passes = [each for backend in backends for each in backend.capture_passes]
    return Precautions(
        tuple(each.run for each in passes), tuple(backend.around_model for backend in backends)
    )


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
        with torch.autocast(
            "cpu", enabled=False
        ):  # the plan says what computes in which precision, not where the call happens to stand
            return backend.lower(graph, **options)
    except NCError:
        raise
    except Exception as error:
        msg = (
            f"Backend {backend.name!r} fails on this model: {type(error).__name__}: "
            f"{str(error).strip() or '-'}\nThis is a defect of nc or "
            'of the engine, please report it. backend="reference" computes the quantized graph without an '
            "engine."
        )
        raise BackendError(msg) from error

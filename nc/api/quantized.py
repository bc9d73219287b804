"""The quantized model.

It is an engine model with the user's signature, its reference, its report and its artefact.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch

from nc.api.compiled import call_model, is_operator, number
from nc.api.flattened import MASK, STARTS, of_tokens, padded
from nc.backends import get_backend
from nc.backends.base import EngineModel
from nc.backends.profile_process import profile_in_child
from nc.backends.verdict import Verdict
from nc.errors import InputError, NCError, StateError, UnsupportedError
from nc.formats.checks import kind_of
from nc.graph.fixed_module import FixedModule
from nc.graph.fx_utils import call_graph
from nc.graph.qdq import QDQGraph
from nc.graph.signature import call_error
from nc.kernels.c_code.openmp import leave_threads_of_parent
from nc.modules.layers import has_low_bit
from nc.process.torch_settings import without_autocast
from nc.reports.report import Report, build
from nc.storage.store import write
from nc.text.html_page import preformatted

#: What to do instead of tracing or exporting an engine's model.
_INSTEAD = (
    'nc.export_pt2(), nc.export_onnx(), nc.export_openvino(), or with backend="ipex" '
    "nc.export_torchscript(), writes a program."
)


class ReferenceModule(FixedModule):
    """The QDQ graph as a plain module with the user's signature.

    It simulates the integers in fp32, on any CPU.
    """

    what = "The reference of a quantized model"
    saved_by = "save the quantized model with nc.save(), and load it with nc.load()"

    def __init__(self, graph: QDQGraph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return outputs of the QDQ graph in the user's structure.

        Raises:
            InputError: the inputs do not fit the captured model.
            ArtefactCorruptError: the file of the artefact was written into since it was loaded.
        """
        graph = self.graph
        graph.intact()
        tensors = graph.signature.bind(args, kwargs)
        try:
            with torch.no_grad(), without_autocast():
                outputs = call_graph(graph.module, tensors)
        except Exception as error:
            raise call_error(error, "The quantized graph", tensors, graph.example) from error
        return graph.signature.result(outputs, args, kwargs)


class QuantizedModel(FixedModule):
    """The result of `convert` and `load`: runs on the chosen engine, thread-safe.

    Attributes:
        engine: the lowered model.
        backend: name of the backend.
        chosen: why "auto" chose this engine; "" if the user named it.
        verdict: the speed relative to fp32, measured by `convert`; None if it was not measured. It is not
            saved.
    """

    what = "A quantized model"
    saved_by = "save it with nc.save(), and load it with nc.load()"

    def __init__(
        self,
        graph: QDQGraph,
        engine: EngineModel,
        backend: str,
        chosen: str = "",
        verdict: Verdict | None = None,
    ) -> None:
        super().__init__()
        self._graph = graph
        self.engine = engine
        self.backend = backend
        self.chosen = chosen
        self.verdict = verdict
        self._number, self._is_operator = number(self), is_operator(graph)
        self.eval()

    if TYPE_CHECKING:
        # `convert` and `load` may return the user's class, whose methods type checkers accept by this
        def __getattr__(self, name: str) -> Any: ...

    def extra_repr(self) -> str:
        """Return what `print` shows between the brackets."""
        return f"backend={self.backend!r}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the report."""
        return preformatted(str(self.report()))

    @property
    def graph(self) -> QDQGraph:
        """The QDQ graph that was lowered.

        Raises:
            ArtefactCorruptError: its artefact's file was written into since it was loaded.
        """
        self._graph.intact()
        return self._graph

    @graph.setter
    def graph(self, graph: QDQGraph) -> None:
        self._graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return outputs in the user's structure.

        Raises:
            InputError: the inputs do not fit the captured model.
            BackendError: the engine fails on inputs of the example's sizes.
            UnsupportedError: torch.jit.trace, torch.export or torch.func calls it, and the engine can't
                compute with their tensors.
        """
        if torch.compiler.is_compiling():  # torch.compile would look into the engine
            return self._compiled(args, kwargs)
        leave_threads_of_parent()
        return self._call(args, kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs by one operator in a graph of `torch.compile`, or by a call outside of a graph.

        Torch 2.8 takes `is_exporting()` for true in `torch.compile` too.
        """
        signature = self._graph.signature
        in_graph = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        if in_graph and self._is_operator and STARTS not in kwargs:
            outputs = call_model(signature.bind(args, kwargs), self._number)
            return signature.result(outputs, args, kwargs)
        return torch.compiler.disable(self._call)(args, kwargs)  # type: ignore[no-untyped-call]

    def _call_flattened(self, kwargs: dict[str, Any], names: Sequence[str]) -> Any:
        """Return the outputs for texts in one row: rows of tokens in one row, and one row for each text."""
        signature, texts = self._graph.signature, self.engine.texts
        mask = MASK if MASK in names else None
        if texts is not None and texts.mask is not None:
            mask = [leaf.path for leaf in signature.leaves if leaf.used][texts.mask]
        given = padded(kwargs, names, mask)
        outputs = self.run(signature.bind((), dict(given.inputs)))
        has_rows = of_tokens(self._graph.module)
        outputs = [given.row(v) if rows else v for v, rows in zip(outputs, has_rows, strict=True)]
        return signature.result(outputs, (), dict(given.inputs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self._graph.signature
        if kwargs.get(STARTS) is not None and not args:
            names = [p.name for p in signature.parameters if p.captured]
            if STARTS not in names:
                return self._call_flattened(kwargs, names)
        outputs = self.run(signature.bind(args, kwargs))
        return signature.result(outputs, args, kwargs)

    def run(self, tensors: list[torch.Tensor]) -> Sequence[Any]:
        """Return the flat outputs for the flat inputs of the signature; raises as `forward`."""
        try:
            with without_autocast():
                return self.engine.run(tensors)
        except NCError:
            raise
        except Exception as error:
            example = self._graph.example
            raise call_error(
                error, f"Backend {self.backend!r}", tensors, example, engine=True, instead=_INSTEAD
            ) from error

    def __copy__(self) -> QuantizedModel:
        """Return a new model with the same engine, which never changes."""
        return QuantizedModel(self._graph, self.engine, self.backend, self.chosen, self.verdict)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        """Return the same."""
        return copy.copy(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse what pickle and `torch.save` call: an engine holds addresses of this process.

        Raises:
            StateError: always.
        """
        msg = (
            "A quantized model can't be pickled, nor saved with torch.save(): use nc.save() and nc.load(), "
            "also for another process."
        )
        raise StateError(msg)

    def report(self, profile_inputs: Any = None, *, details: bool = False) -> Report:
        """Return what runs for each operator, read from the engine; `print` shows what matters in 25 lines.

        Args:
            details: let `print` show all steps and operators.
            profile_inputs: a tensor, a tuple or list (positional) or a dict (keywords). The engine is timed
                on them in a child process, and the report names the kernel of each operator and its share of
                the time.

        Raises:
            InputError: the inputs do not fit the captured model.
            UnsupportedError: the backend cannot profile this model.
            ArtefactError: the model cannot be saved; the child process loads it from an artefact.
            BackendError: the child process failed.
        """
        if profile_inputs is None:
            return build(
                self.graph, self.engine.report(), self.chosen, verdict=self.verdict, detailed=details
            )
        inputs = self.graph.signature.bind(*as_call(profile_inputs, "profile_inputs"))
        if self.engine.profile is None:
            msg = (
                f"Backend {self.backend!r} cannot profile this model: its engine model has no `profile` "
                "(nc.backends.base.EngineModel). Models converted with compile=True have none: convert "
                "without it."
            )
            raise UnsupportedError(msg)
        profile = profile_in_child(self.graph, get_backend(self.backend), inputs)
        if [x.shape for x in inputs] != [x.shape for x in self.graph.example]:
            profile = dataclasses.replace(profile, limits=None)
        return build(self.graph, self.engine.report(), self.chosen, profile, self.verdict, detailed=details)

    def save(self, output_dir: str | Path = "saved_results", example_inputs: Any = None) -> None:
        """Save as a directory without code, as `nc.save`. `nc.load` reads it.

        Args:
            output_dir: created with its parents; an earlier artefact there is replaced.
            example_inputs: for scripts written for Neural Compressor; ignored, because the model has those of
                `prepare`.
        """
        write(self.graph, self.backend, output_dir)

    @property
    def reference(self) -> ReferenceModule:
        """The QDQ graph as a plain module. Every engine is compared with it."""
        return ReferenceModule(self.graph)


def checked(model: object, step: str) -> QuantizedModel:
    """Return a model that has a quantized graph; `step` is the public function that needs one.

    Raises:
        StateError: it is something else.
    """
    if isinstance(model, QuantizedModel):
        return model
    name = type(model).__name__
    if has_low_bit(model):
        msg = (
            f"{step}() needs a captured graph, and this {name} with low-bit weights is a plain module. Write "
            "its weights with export_weights(), or prepare() and convert() it with another strategy, e.g. "
            "StaticQuantConfig, which keeps these layers."
        )
    else:
        msg = f"{step}() expects the result of convert() or load(), but got {name}."
    raise StateError(msg)


def as_call(inputs: Any, name: str = "example_inputs") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of inputs that are given as one value.

    Args:
        inputs: the value.
        name: the argument that it was given for.

    Raises:
        InputError: it is not a tensor, tuple, list or dict.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    msg = f"Expected {name} to be a tensor, a tuple, a list or a dict, but got {kind_of(inputs)}."
    raise InputError(msg)

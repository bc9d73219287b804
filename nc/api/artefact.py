"""Save and load quantized models as directories without code. docs/concepts/the-artefact.md."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nc.api.quantized import QuantizedModel, checked
from nc.api.warm import warm_up
from nc.backends import choose_backend, engine_options, first_that_can, why_chosen
from nc.backends.auto_order import kind_of_graph
from nc.backends.base import Backend, EngineModel, lower
from nc.backends.low_bit.engine import engine as low_bit_engine
from nc.backends.low_bit.engine import set_backend
from nc.backends.narrowing import narrowed
from nc.backends.reference import NAME as REFERENCE
from nc.errors import ArtefactError, ConfigError, InputError, NCError, UnsupportedError
from nc.formats.checks import checked_path
from nc.graph.qdq import QDQGraph, in_memory
from nc.kernels import cpu
from nc.kernels.c_code.openmp import keep_threads_in_forks
from nc.modules.layers import has_low_bit
from nc.ops import RECURRENT
from nc.process.cores import fit_threads
from nc.process.torch_settings import check_default_device, without_autocast
from nc.reports.card import model_card
from nc.reports.weight_report import weight_report
from nc.storage import folder, store
from nc.weights.files import artefact as low_bit


def save(
    model: torch.nn.Module,
    checkpoint_dir: str | os.PathLike[str] = "saved_results",
    format: str = "default",
    *,
    card: bool = False,
) -> None:
    """Save a quantized model as a directory of three files.

    They hold weights, graph (or how low-bit weights are read) and checksums.

    The directory is written under another name and then renamed, so it is never incomplete. Saving the same
    model again gives the same bytes. The example inputs of `prepare` are saved too, because `load` warms up
    and verifies the engine with them.

    Args:
        model: the result of `convert` or `load`.
        checkpoint_dir: created with its parents; an earlier artefact there is replaced.
        format: "default", the only one.
        card: also write README.md: a model card with the report, for people and for model hubs. Once you
            have edited it, the folder is not replaced any more.

    Raises:
        ConfigError: another format.
        StateError: not a quantized model.
        ArtefactError: the directory contains other files, or a part of the model cannot be saved; the message
            names it.
        ArtefactOperatorError: the model uses an operator that `load` would not accept.
    """
    if format != "default":
        msg = f'Expected format="default", but got {format!r}.'
        raise ConfigError(msg)
    checked_path("checkpoint_dir", checkpoint_dir)
    if has_low_bit(model):
        text = model_card(weight_report(model), checkpoint_dir) if card else ""
        low_bit.write(model, checkpoint_dir, card=text)
        return
    q_model = checked(model, "save")
    text = model_card(q_model.report(), checkpoint_dir) if card else ""
    store.write(q_model.graph, q_model.backend, checkpoint_dir, text)


def load(
    model_name_or_path: str | os.PathLike[str],
    original_model: torch.nn.Module | None = None,
    format: str = "default",  # Neural Compressor's name
    device: str = "cpu",
    *,
    model: torch.nn.Module | None = None,
    backend: str = "auto",
    verify: str = "raise",
    verify_sizes: bool = True,
    isolate: str = "auto",
    compile: bool = False,
    padding: str = "skipped",
    warm: Sequence[Any] = (),
) -> QuantizedModel | Any:
    """Load a saved model.

    The class of the user's model is not needed, except for a model with low-bit weights that is not of
    transformers: give `model`.

    Every file is checked before anything is built from it. Nothing is unpickled, and no code from the
    artefact is executed: its graph may only call operators of a fixed list. Outputs have the
    structure that they had at capture; see `nc.storage.pytree_json` for classes that are not installed here.

    torch gets no more threads than the container's quota of CPUs allows, unless somebody chose a number. If
    the engine adds products in 16 bits on this CPU, layers whose sums could overflow are quantized again from
    their int8 codes, with an `NCWarning`. The files do not change.

    Args:
        model_name_or_path: the directory that `save` wrote.
        original_model: as `model`, for scripts written for Neural Compressor. Ignored for a graph, which
            contains the whole model.
        format: "default", the only one.
        device: "cpu", the only one.
        model: a float model of the class that was saved, e.g. a fresh one. Its layers are replaced in a copy;
            it stays as it is.
        backend: a name of `available_backends()`, or "auto": the first engine that can run here and computes
            this model correctly. The report says why earlier engines were not used.
        verify: "raise" or "warn" if the engine disagrees with the reference on the example inputs, or "off".
        verify_sizes: as in `convert`.
        isolate: run the first fused call in a child process: "auto" (only for unknown patterns), "always" or
            "never".
        compile: compile the fp32 operators between the int8 kernels of backend "native" with `torch.compile`;
            needs a C++ compiler.
        padding: as in `convert`.
        warm: sizes for which kernels are made now, not in the first calls: for each a shape of the first
            input, e.g. `[(1, 128), (8, 64)]`; shapes by name of the input, `{"x": (1, 3, 224, 224)}`; or
            inputs as in a call.

    Returns:
        A `QuantizedModel`; for a model with low-bit weights a module of the user's class, whose layers
        `backend` computes and for which `verify`, `verify_sizes`, `isolate`, `compile` and `padding` have
        no effect.

    Raises:
        StateError: torch's default device is not the CPU.
        ArtefactMissingError: the directory or one of its files does not exist.
        ArtefactCorruptError: a file is truncated or altered.
        ArtefactSchemaError: a newer version wrote it, or it is not an artefact.
        ArtefactOperatorError: it contains an operator that is not allowed.
        UnsupportedError: its integer ranges need CPU features that this CPU does not have.
        UnknownBackendError, BackendUnavailableError: as for `prepare`.
        VerificationError: the results of the engine differ from those of the reference.
        BackendError: the engine failed; for "auto", every engine failed, and the message has all reasons.
        ConfigError: another format or device, or the backend has no `compile`.
        ArtefactError: `model` is needed, or is not the model that was saved.
        InputError: `model` is not a torch.nn.Module, or an entry of `warm` does not fit the model.
    """
    if format != "default" or device != "cpu":
        msg = f'Expected format="default" and device="cpu", but got {format!r} and {device!r}.'
        raise ConfigError(msg)
    check_default_device("load")
    fit_threads()
    keep_threads_in_forks()
    asked = _Loading(
        model=original_model if model is None else model,
        backend=backend,
        verify=verify,
        verify_sizes=verify_sizes,
        isolate=isolate,
        compile=compile,
        padding=padding,
    )
    content = folder.read(checked_path("model_name_or_path", model_name_or_path), wait=False)
    with content.checked():  # another thread computes the checksum of the weights meanwhile
        loaded = _LOADERS[content.format](content, asked)
    warm_up(loaded, warm)
    return loaded


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Loading:
    """The arguments of `load` that say what is made of the files."""

    model: torch.nn.Module | None
    backend: str
    verify: str
    verify_sizes: bool
    isolate: str
    compile: bool
    padding: str


def _load_low_bit(content: folder.FolderContent, asked: _Loading) -> torch.nn.Module:
    """Return a module of the user's class with low-bit weights.

    Raises:
        InputError, ArtefactError, UnknownBackendError, BackendUnavailableError: see `load`.
    """
    low_bit_engine(asked.backend)  # refused before the work, not after it
    if asked.model is not None and not isinstance(asked.model, torch.nn.Module):
        msg = f"Expected model to be a torch.nn.Module, but got {type(asked.model).__name__}."
        raise InputError(msg)
    return set_backend(
        low_bit.read(content, asked.model, lambda built: str(weight_report(built))), asked.backend
    )


def _load_graph(content: folder.FolderContent, asked: _Loading) -> QuantizedModel:
    """Return a quantized graph on an engine.

    Raises:
        UnsupportedError, VerificationError, BackendError, ArtefactError: see `load`.
    """
    stored = store.checked(content)
    if choose_backend(asked.backend).name != REFERENCE:  # which computes in fp32, alike on every CPU
        _check_cpu(stored.plan.isa, stored.directory)
    graph, directory, weights = stored.graph(wait=False), stored.directory, content.weights
    kind = kind_of_graph(graph.module)

    def attempt(engine: Backend) -> tuple[QDQGraph, EngineModel]:
        fitted = narrowed(graph if engine.packs_weights else in_memory(graph), engine)
        sizes = {"verify_sizes": asked.verify_sizes, "verify_kernels": "in doubt"}
        given = {name: getattr(asked, name) for name in ("isolate", "compile", "padding")}
        options = engine_options(engine, **sizes, **given)
        return fitted, lower(engine, fitted, verify=asked.verify, **options)

    def check() -> None:
        with folder.malformed(directory / folder.MODEL):
            _run(graph, lambda inputs: graph.module(*inputs))

    if any(node.target in RECURRENT.values() for node in graph.module.graph.nodes):
        check()  # torch's kernels of these do not look at the sizes of what they read
    try:
        first = choose_backend(asked.backend, kind).name
        (lowered_graph, lowered), name, failed = first_that_can(asked.backend, first, attempt, model=kind)
        if not (lowered.verified and _fits(lowered_graph)):
            _run(lowered_graph, lowered.run)
    except Exception as error:
        check()  # a graph that can't run at all is the fault of the artefact
        if isinstance(error, NCError):
            raise
        msg = (
            f"{str(directory)!r}: the engine cannot run this graph ({type(error).__name__}: {error}). If its "
            "files were altered, copy "
            'or save the model again. backend="reference" runs it.'
        )
        raise ArtefactError(msg) from error
    weights.release()  # engines have packed them
    return QuantizedModel(lowered_graph, lowered, name, why_chosen(asked.backend, name, failed, kind))


#: What makes a model of the files, by their format.
_LOADERS: Mapping[str, Callable[[folder.FolderContent, _Loading], torch.nn.Module]] = {
    low_bit.FORMAT: _load_low_bit,
    store.FORMAT: _load_graph,
}


def _fits(graph: QDQGraph) -> bool:
    """Whether the outputs that the graph expects for its example are known, and have the captured structure.

    It raises what `_run` raises.
    """
    if graph.expected is None:
        return False
    graph.signature.unflatten(graph.expected)
    return True


def _run(graph: QDQGraph, run: Callable[[Sequence[torch.Tensor]], Sequence[Any]]) -> None:
    """Make one call with the example inputs, the structure of whose outputs must be the captured one."""
    with torch.no_grad(), without_autocast():
        graph.signature.unflatten(run([tensor.clone() for tensor in graph.example]))


def _check_cpu(isa: tuple[str, ...], directory: Path) -> None:
    """Raise UnsupportedError when this CPU lacks a feature that the artefact's integer ranges rely on."""
    missing = cpu.missing(isa)
    if missing:
        msg = (
            f"{str(directory)!r} was quantized for CPUs with {', '.join(isa)}; this one lacks "
            f"{', '.join(missing)} (it has {', '.join(cpu.machine_features()) or 'none that matter'}) and "
            "would compute other "
            'numbers. Convert the model again on this CPU, or load it with backend="reference" (slow).'
        )
        raise UnsupportedError(msg)

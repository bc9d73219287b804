"""Quantized models under `torch.compile`, and its backend "nc".

A model is one operator with a fake kernel, so that the graph around it does not break. Arguments of operators
are tensors and numbers: each model has a number, valid in its process.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch._guards import detect_fake_mode

from nc.errors import StateError
from nc.graph.qdq import QDQGraph
from nc.graph.tensor_meta import TENSORS
from nc.graph.views import returned
from nc.kernels.c_code.openmp import leave_threads_of_parent
from nc.process.cxx import check_compiler
from nc.process.warn import warn


class Computes(Protocol):
    """What the operator reads of a quantized model."""

    @property
    def graph(self) -> QDQGraph:
        """The graph that the engine computes."""

    def run(self, tensors: list[torch.Tensor]) -> Sequence[Any]:
        """Return the flat outputs of the engine for flat inputs."""


#: All models that exist: the operator finds them here by their number.
_MODELS: weakref.WeakValueDictionary[int, Computes] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number(model: Computes) -> int:
    """Return a number for a model, which no other model of this process ever gets."""
    found = next(_NUMBERS)
    _MODELS[found] = model
    return found


def is_operator(graph: QDQGraph) -> bool:
    """Return whether calls can be an operator.

    The model reads no values, writes into no arguments, and all its outputs are tensors.
    """
    outputs = (getattr(leaf, "meta", {}).get("val") for leaf in returned(graph.module))
    plain = not graph.signature.reads and not graph.signature.effects
    return plain and all(isinstance(val, TENSORS) for val in outputs)


def _found(model: int) -> Computes:
    found = _MODELS.get(model)
    if found is None:
        msg = "A compiled program calls a quantized model that does not exist any more. Compile it again."
        raise StateError(msg)
    return found


def _run(tensors: list[torch.Tensor], model: int) -> list[torch.Tensor]:
    leave_threads_of_parent()
    read = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    outputs = [output.contiguous() for output in _found(model).run(read)]
    # an operator returns neither its inputs nor one tensor twice
    memory = [v.untyped_storage().data_ptr() for v in (*tensors, *outputs)]
    return [
        v.clone() if p in memory[:n] else v
        for n, (v, p) in enumerate(zip(outputs, memory[len(tensors) :], strict=True), len(tensors))
    ]


def _like(tensors: list[torch.Tensor], model: int) -> list[torch.Tensor]:
    """Return fake outputs: those of the QDQ graph for fake inputs."""
    module = _found(model).graph.module
    mode = detect_fake_mode(tensors)
    state = {
        name: tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
    }
    outputs = torch.func.functional_call(module, state, tuple(tensors))
    return [torch.empty_like(v, memory_format=torch.contiguous_format) for v in outputs]


_LIBRARY = torch.library.Library("nc_models", "DEF")  # type: ignore[no-untyped-call] # torch annotates it in part only
_LIBRARY.define("call(Tensor[] tensors, int model) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
_LIBRARY.impl("call", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("call", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call] # no gradients
torch.library.register_fake("nc_models::call", _like, lib=_LIBRARY)


call_model: torch._ops.OpOverload = torch.ops.nc_models.call.default


#: Library of the operators of models, and of low-bit layers.
_OPERATORS = ("nc_models::", "nc_layers::", "nc::")
#: What multiplies by weights, in a graph of dynamo: names of functions of torch.
_MULTIPLIES = frozenset({"linear", "conv1d", "conv2d", "conv3d", "matmul", "bmm", "addmm"})


def backend(module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="nc")`.

    Quantized models and low-bit layers are operators of `nc`, which run on their engines. Inductor compiles
    what is between them.

    Args:
        module: the graph.
        example_inputs: its inputs, fake or real.
        options: `mode` and `options`, as `torch.compile` takes them.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
    """
    check_compiler('torch.compile(model, backend="nc")')
    names = [_name(node.target) for node in module.graph.nodes if node.op == "call_function"]
    if not any(name.startswith(_OPERATORS) for name in names) and not _MULTIPLIES.isdisjoint(names):
        warn(
            'torch.compile(model, backend="nc") compiles a graph without a layer that nc quantized: it '
            "quantizes none. Call nc.quantize(), or prepare() and convert(), first."
        )
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    mode = options.get("mode")
    patches = {**(list_mode_options(mode) if mode else {}), **(options.get("options") or {})}
    compiled: Any = compile_fx(module, example_inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def _name(target: Any) -> str:
    """Return the name of a function, with the library of an operator."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", "")

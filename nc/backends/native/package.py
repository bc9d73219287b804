"""The quantized graph as AOTInductor's `.pt2`: compiled ahead of time around oneDNN's int8 kernels; for C++."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nc.backends.native.compiled import check_compiler, functional
from nc.backends.native.lower import drop_unused, executed, kernels
from nc.backends.native.operators import in_place
from nc.backends.verify import check_option, verify_outputs
from nc.errors import BackendError, UnsupportedError
from nc.graph.fx_utils import inline
from nc.graph.qdq import QDQGraph
from nc.graph.signature import at_least_two

#: Constants stay constants, so that weights are packed at compile time.
_OPTIONS = {"freezing": True, "post_grad_custom_post_pass": in_place}
#: The operator of all convolutions that Inductor knows, under the name that it knows.
_CONVOLUTION = torch.ops.onednn.qconv_pointwise.default
_SYNONYMS = ("onednn::qconv1d_pointwise", "onednn::qconv2d_pointwise", "onednn::qconv3d_pointwise")


def package(graph: QDQGraph, *, free_sizes: bool, verify: str) -> bytes:
    """Content of the `.pt2`, for this CPU; run once and compared with the graph.

    Args:
        graph: the quantized model, with static quantization only.
        free_sizes: sizes that are free in the graph stay so.
        verify: see `nc.backends.verify`.

    Raises:
        UnsupportedError: an operator quantizes in each call, or has no int8 kernel.
        BackendUnavailableError: there is no C++ compiler.
        BackendError: AOTInductor failed.
        VerificationError: what it compiled computes something else than the graph.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    check_compiler("export_pt2()")
    _check_static(graph)
    module = kernels(graph, packed=False)
    _check_int8(graph, module)
    functional(module)
    _name_convolutions(module)
    drop_unused(module)
    inline(module)
    module.recompile()
    used = [leaf.dims for leaf in graph.signature.leaves if leaf.used]
    example, free = tuple(graph.example), None
    if free_sizes:
        example = tuple(at_least_two(graph.example, used))
        free = (tuple({i: torch.export.Dim.DYNAMIC for i, dim in enumerate(dims) if isinstance(dim, str)} for dims in used),)
    with tempfile.TemporaryDirectory(prefix="nc-") as directory, torch.no_grad():
        target = Path(directory) / "model.pt2"
        try:
            program = torch.export.export(_Tensors(module).eval(), example, dynamic_shapes=free)
            torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs=_OPTIONS)
            run = torch._inductor.aoti_load_package(str(target))
        except Exception as error:  # whatever a compiler may raise
            msg = f"AOTInductor failed on the quantized graph: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
            raise BackendError(msg) from error
        verify_outputs(graph, _as_before(graph, run(*graph.example)), verify, "AOTInductor's program")
        return target.read_bytes()


class _Tensors(torch.nn.Module):
    """Without what is no tensor among the outputs: a program returns nothing else."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value for value in self.module(*inputs) if isinstance(value, torch.Tensor))


def _as_before(graph: QDQGraph, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """A program's outputs where the graph has them."""
    left = iter(tensors)
    with torch.no_grad():
        return [next(left) if isinstance(value, torch.Tensor) else value for value in graph.module(*graph.example)]


def _check_static(graph: QDQGraph) -> None:
    names = [d.operator for d in graph.plan.quantized if d.spec.mode == "dynamic"]
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        msg = f"export_pt2() takes static quantization; AOTInductor has no int8 kernels for ranges found in each call, as of {some}."
        raise UnsupportedError(msg)


def _check_int8(graph: QDQGraph, module: fx.GraphModule) -> None:
    """Raise UnsupportedError when an operator that was asked to run in int8 has no kernel: the program would compute it in fp32."""
    found = executed(module)
    names = [d.operator for d in graph.plan.quantized if found.get(d.operator) != "int8"]
    if names:
        msg = (
            f"export_pt2() has no int8 kernel for {len(names)} of {len(graph.plan.quantized)} quantized operators: {', '.join(names)}. "
            "The program would compute them in fp32. Exclude them from quantization: config.exclude(name) for each."
        )
        raise UnsupportedError(msg)


def _name_convolutions(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "_overloadname", "") == "default" and node.target._schema.name in _SYNONYMS:
            node.target = _CONVOLUTION

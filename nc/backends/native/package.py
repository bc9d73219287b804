"""The quantized graph as AOTInductor's `.pt2`: compiled ahead of time, with the int8 kernels that Inductor finds; for C++."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nc.backends.native.attention import recompose
from nc.backends.native.bf16 import compute_in_bf16, drop_round_trips
from nc.backends.native.compiled import check_compiler
from nc.backends.native.fuse import constant, weight_of
from nc.backends.native.qdq_rewrites import unsigned
from nc.backends.verify import check_option, verify_outputs
from nc.errors import BackendError, NCWarning, UnsupportedError
from nc.graph.functions import dequantize_per_channel, dequantize_per_tensor, quantize_per_tensor
from nc.graph.fx_utils import copy_module
from nc.graph.qdq import QDQGraph
from nc.graph.signature import at_least_two

#: Kinds that Inductor has int8 kernels for, and its counter of how many it found.
_COUNTERS = {
    "linear": "qlinear_weight_prepack_matcher_count",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "qconv_weight_prepack_matcher_count"),
}


def package(graph: QDQGraph, *, free_sizes: bool, verify: str) -> bytes:
    """Content of the `.pt2`, for this CPU; run once and compared with the graph.

    Args:
        graph: the quantized model, with static quantization only.
        free_sizes: sizes that are free in the graph stay so.
        verify: see `nc.backends.verify`.

    Raises:
        UnsupportedError: an operator quantizes in each call.
        BackendUnavailableError: there is no C++ compiler.
        BackendError: AOTInductor failed.
        VerificationError: what it compiled computes something else than the graph.
    """
    check_option("verify", verify, ("raise", "warn", "off"))
    check_compiler("export_pt2()")
    _check_static(graph)
    module, _ = copy_module(graph.module)
    compute_in_bf16(module)
    recompose(module)
    unsigned(module)
    drop_round_trips(module)
    _speak_torch(module)
    used = [leaf.dims for leaf in graph.signature.leaves if leaf.used]
    example, free = tuple(graph.example), None
    if free_sizes:
        example = tuple(at_least_two(graph.example, used))
        free = (tuple({i: torch.export.Dim.DYNAMIC for i, dim in enumerate(dims) if isinstance(dim, str)} for dims in used),)
    with tempfile.TemporaryDirectory(prefix="nc-") as directory, torch.no_grad():
        target = Path(directory) / "model.pt2"
        before = _counts()
        try:
            program = torch.export.export(_Tensors(module).eval(), example, dynamic_shapes=free)
            torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs={"freezing": True})
            run = torch._inductor.aoti_load_package(str(target))
        except Exception as error:  # whatever a compiler may raise
            msg = f"AOTInductor failed on the quantized graph: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
            raise BackendError(msg) from error
        _check_int8(graph, before)
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
    names = [d.operator for d in graph.plan.quantized if d.spec.activation.dynamic]
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        msg = f"export_pt2() takes static quantization; AOTInductor has no int8 kernels for ranges found in each call, as of {some}."
        raise UnsupportedError(msg)


def _speak_torch(module: fx.GraphModule) -> None:
    """Let quantize and dequantize nodes call the operators by whose names Inductor knows them."""
    import torch.ao.quantization.fx._decomposed  # registers them

    ops = torch.ops.quantized_decomposed
    for node in list(module.graph.nodes):
        if node.target is quantize_per_tensor:
            node.target, node.args = ops.quantize_per_tensor.default, (*node.args, torch.uint8)
        elif node.target is dequantize_per_tensor and node.args[0].op != "get_attr":
            node.target, node.args = ops.dequantize_per_tensor.default, (*node.args, 0, 255, torch.uint8)
        elif node.target in (dequantize_per_tensor, dequantize_per_channel):  # a weight; there are kernels for a scale per channel only
            axis = node.args[2] if node.target is dequantize_per_channel else 0
            _, scales = weight_of(module, node)
            with module.graph.inserting_before(node):
                scales_node = constant(module, f"{node.name}_scales", scales)
                zeros_node = constant(module, f"{node.name}_zero_points", torch.zeros(len(scales), dtype=torch.int64))
            arguments = (node.args[0], scales_node, zeros_node, axis, -128, 127, torch.int8)
            node.target, node.args = ops.dequantize_per_channel.default, arguments
    module.recompile()


def _counts() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {name: counters["inductor"][name] for name in _COUNTERS.values()}


def _check_int8(graph: QDQGraph, before: dict[str, int]) -> None:
    """Warn when Inductor took fewer operators into int8 than were asked for, by its own count."""
    asked = sum(d.kind in _COUNTERS for d in graph.plan.quantized)
    found = sum(now - before[name] for name, now in _counts().items())
    if found < asked:
        text = f"AOTInductor compiled {found} of {asked} int8 linears and convolutions into int8 kernels; the others run in fp32 there."
        warnings.warn(text, NCWarning, stacklevel=4)

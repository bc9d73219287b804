"""Compile the quantized graph ahead of time with AOTInductor to a `.pt2` file for C++.

The program has oneDNN's int8 kernels.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nc.backends.base import EngineModel
from nc.backends.native.lower import executed
from nc.backends.native.passes import finish, kernels
from nc.backends.native.torch_library import in_place
from nc.backends.passes import run_passes
from nc.backends.verify import first_disagreement, verify_outputs
from nc.errors import BackendError, UnsupportedError
from nc.graph.fx_utils import copy_module
from nc.graph.plan import Decision
from nc.graph.qdq import QDQGraph
from nc.graph.signature import at_least_two
from nc.ops import quant_linear
from nc.process.cxx import check_compiler
from nc.process.warn import warn

#: Constants stay constants, so that weights are packed at compile time.
_OPTIONS = {"freezing": True, "post_grad_custom_post_pass": in_place}


def write(
    graph: QDQGraph,
    engine: EngineModel | None,
    file: Path,
    *,
    free_sizes: bool = False,
    verify: str = "raise",
) -> None:
    """Write the `.pt2`, for this CPU; it was run once and compared with the graph.

    Args:
        graph: the quantized model, with static quantization only.
        engine: not needed.
        file: where.
        free_sizes: sizes that are free in the graph stay so.
        verify: see `nc.backends.verify`.

    Raises:
        UnsupportedError: an operator quantizes in each call, or has no int8 kernel.
        BackendUnavailableError: there is no C++ compiler.
        BackendError: AOTInductor failed.
        VerificationError: what it compiled computes something else than the graph.
    """
    check_compiler("export_pt2()")
    _check_static(graph)
    used = [leaf.dims for leaf in graph.signature.leaves if leaf.used]
    example, free = tuple(graph.example), None
    if free_sizes:
        example = tuple(at_least_two(graph.example, used))
        free = (
            tuple(
                {i: torch.export.Dim.DYNAMIC for i, dim in enumerate(dims) if isinstance(dim, str)}
                for dims in used
            ),
        )
    module, _ = copy_module(graph.module)
    run_passes(module, kernels(graph.example, program=True))
    _check_int8(graph, module)
    _tell_low_bit(module)
    data, run = _compile(module, example, free)

    def run_part(part: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        module, _ = copy_module(part)
        run_passes(module, kernels(inputs, program=True))
        return _compile(module, inputs)[1](*inputs)

    first = functools.partial(first_disagreement, graph.module, graph.example, run_part)
    with torch.no_grad():
        verify_outputs(graph, _as_before(graph, run(*graph.example)), verify, "AOTInductor's program", first)
    file.write_bytes(data)


def _compile(
    module: fx.GraphModule, example: tuple[torch.Tensor, ...], free: Any = None
) -> tuple[bytes, Callable[..., Sequence[Any]]]:
    """Compile a graph of kernels with AOTInductor; the graph is changed.

    Returns:
        The bytes of the program's file, and a callable that runs the program.

    Raises:
        BackendError: AOTInductor failed.
    """
    run_passes(module, finish(program=True))
    with tempfile.TemporaryDirectory(prefix="nc-") as directory, torch.no_grad():
        target = Path(directory) / "model.pt2"
        try:
            program = torch.export.export(_Tensors(module).eval(), example, dynamic_shapes=free)
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(target), inductor_configs=_OPTIONS
            )
            run = torch._inductor.aoti_load_package(str(target))
        except Exception as error:  # whatever a compiler may raise
            msg = (
                "AOTInductor failed on the quantized graph: "
                f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}"
            )
            raise BackendError(msg) from error
        return target.read_bytes(), run


class _Tensors(torch.nn.Module):
    """Drop outputs that are not tensors, because a program returns tensors only."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value for value in self.module(*inputs) if isinstance(value, torch.Tensor))


def _as_before(graph: QDQGraph, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return a program's outputs where the graph has them."""
    left = iter(tensors)
    with torch.no_grad():
        return [
            next(left) if isinstance(value, torch.Tensor) else value for value in graph.module(*graph.example)
        ]


def _tell_low_bit(module: fx.GraphModule) -> None:
    """Warn of what has low-bit weights.

    The kernels for it need Python, and the compiler folds what is constant.
    """
    names = [
        node.meta.get("operator", node.name) for node in module.graph.nodes if node.target is quant_linear
    ]
    if names:
        msg = (
            f"The program holds {len(names)} linears with low-bit weights dequantized, in fp32, and computes "
            f"them so: {_some(names)}. With their kernels they run in Python: nc.save and nc.load."
        )
        warn(msg)


def _check_static(graph: QDQGraph) -> None:
    names = [d.operator for d in graph.plan.quantized if d.spec.mode == "dynamic"]
    if names:
        msg = (
            "export_pt2() takes static quantization; AOTInductor has no int8 kernels for ranges of each "
            f"call, as of {_some(names)}."
        )
        raise UnsupportedError(msg)


def _check_int8(graph: QDQGraph, module: fx.GraphModule) -> None:
    """Check that the program computes quantized operators in int8; it computes the others in fp32.

    Warn about operators for which only plans have int8 kernels.

    Raises:
        UnsupportedError: another quantized operator has no int8 kernel.
    """
    found = executed(module)
    without = [d for d in graph.plan.quantized if found.get(d.operator) != "int8"]
    planned = [d.operator for d in without if _only_planned(d)]
    if planned:
        msg = (
            f"The program computes {len(planned)} of {len(graph.plan.quantized)} quantized operators in "
            f"fp32, between codes: {_some(planned)}. AOTInductor has no int8 kernels for products of two "
            "activations and transposed convolutions. Without codes "
            'they are faster: set_local("matmul", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")).'
        )
        warn(msg)
    names = [d.operator for d in without if not _only_planned(d)]
    if names:
        msg = (
            f"export_pt2() has no int8 kernel for {len(names)} of {len(graph.plan.quantized)} quantized "
            f"operators: {', '.join(names)}. The program would compute them in fp32. Exclude them from "
            "quantization: config.exclude(name) for each."
        )
        raise UnsupportedError(msg)


def _only_planned(decision: Decision) -> bool:
    return decision.kind == "matmul" or decision.kind.startswith("conv_transpose")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

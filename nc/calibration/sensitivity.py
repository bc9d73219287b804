"""What each operator's rounding alone adds to the error of a model's outputs, estimated for all at once.

The outputs change by `J e`, to first order, where an operator's result changes by e and J is the Jacobian of
the outputs. For random v with independent signs, `E[(v^T J e)^2] = |J e|^2` (M. Hutchinson, 1990), and
`v^T J` is the gradient that one backward pass gives for all operators. Samples of a batch do not
interact, so each is an independent draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nc.graph.fx_utils import run_with
from nc.graph.placement import works_in_place
from nc.graph.plan import Applied, Plan

#: Backward passes for each batch.
PROBES = 4
#: Values of a batch that are held for them, in bytes; larger batches are left out.
_BYTES = 2 << 30
#: Outputs that are smaller have gradients that are smaller too.
_LEAST_SIZE = 1e-30
#: How many operators are named.
NAMED = 12
NAME = "sensitivity"


def ranking(noise: Mapping[str, float], times: Mapping[str, str] | None = None) -> Applied:
    """Return the operators that add most of the error, for the report.

    Args:
        noise: from `noise_of_operators`.
        times: operator → how long it takes, in words; where that was measured.
    """
    total = sum(noise.values())
    worst = list(noise.items())[:NAMED]

    rows = [
        (
            name,
            f"{share / total if total else 0.0:.0%}",
            f"{-10 * math.log10(max(share, 1e-30)):.1f} dB alone",
            (times or {}).get(name, ""),
        )
        for name, share in worst
    ]
    parts = [f"{name} {share} ({'; '.join(filter(None, known))})" for name, share, *known in rows]
    text = f"error of the outputs by operator: {', '.join(parts)}"
    header = ("operator", "share", "error alone", "time")
    return Applied(NAME, tuple(name for name, _ in worst), text, (header, *rows))


def noise_of_operators(
    fp32: fx.GraphModule,
    quantized: fx.GraphModule,
    plan: Plan,
    batches: Sequence[Sequence[torch.Tensor]],
    probes: int = PROBES,
) -> dict[str, float]:
    """Return the power of the error that each operator adds, as a part of that of the outputs.

    It is the worst output's. Operators are looked at one by one: each gets exact inputs, which it rounds.

    Args:
        fp32: the float graph from which `quantized` was made, with nodes of the same names.
        quantized: the QDQ graph.
        plan: says which operators are quantized.
        batches: flat inputs.
        probes: backward passes for each batch.

    Returns:
        Operator → share, the largest first; {} for graphs that work in place, and where no gradient flows.
    """
    names = {d.operator for d in plan.quantized}
    if works_in_place(fp32) or not names:
        return {}
    noise: dict[str, list[torch.Tensor]] = {}
    power: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        errors, size = _errors(fp32, quantized, names, batch)
        if size > _BYTES:
            continue
        found = _propagated(fp32, errors, batch, probes, generator)
        for operator, values in found[0].items():
            noise.setdefault(operator, []).append(values)
        power.append(found[1])
    total = torch.stack(power).sum(0) if power else torch.zeros(0, dtype=torch.float64)
    has_signal = total > 0
    shares = {
        operator: float((torch.stack(values).sum(0)[has_signal] / total[has_signal]).max())
        for operator, values in noise.items()
        if bool(has_signal.any())
    }
    finite = {operator: share for operator, share in shares.items() if math.isfinite(share)}
    return dict(sorted(finite.items(), key=lambda each: -each[1]))


@torch.no_grad()
def _errors(
    fp32: fx.GraphModule, quantized: fx.GraphModule, names: set[str], batch: Sequence[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int]:
    """Return by node name what rounding changes in each operator's result, on exact inputs.

    Returned too are the bytes of all values of the float graph.
    """
    exact: dict[str, Any] = {}
    size = 0

    def note(node: fx.Node, value: Any, _: Any) -> Any:
        nonlocal size
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            size += value.numel() * value.element_size()
        if node.meta.get("operator") in names and isinstance(value, torch.Tensor):
            exact[node.name] = value
        return value

    run_with(fp32, batch, note)
    errors: dict[str, torch.Tensor] = {}

    def compare(node: fx.Node, value: Any, _: Any) -> Any:
        if node.name not in exact:
            return value
        errors[node.name] = value.float() - exact[node.name].float()
        return exact[node.name]

    run_with(quantized, batch, compare)
    return errors, size


def _propagated(
    fp32: fx.GraphModule,
    errors: dict[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
    probes: int,
    generator: torch.Generator,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return by operator the power of what its error becomes in each output, and that of the outputs."""
    rows_of_batch = len(batch[0]) if batch and batch[0].dim() else 1
    leaves: dict[str, torch.Tensor] = {}
    operators: dict[str, str] = {}

    def open_(node: fx.Node, value: Any, _: Any) -> Any:
        if node.name not in errors:
            return value
        leaves[node.name] = torch.zeros_like(value, requires_grad=True)
        operators[node.name] = node.meta["operator"]
        return value + leaves[node.name]

    outputs = [
        o
        for o in run_with(fp32, batch, open_, gradients=True)
        if isinstance(o, torch.Tensor) and o.is_floating_point()
    ]
    power = torch.stack([o.detach().double().square().sum() for o in outputs])
    found = {operator: torch.zeros(len(outputs), dtype=torch.float64) for operator in operators.values()}
    for index, output in enumerate(outputs):
        # gradients of outputs whose mean square is 1 neither underflow nor overflow
        size = math.sqrt(float(power[index]) / max(1, output.numel()))
        if output.grad_fn is None or not 0.0 < size < math.inf:
            continue
        for _ in range(probes):
            signs = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8)
            grads = torch.autograd.grad(
                output,
                list(leaves.values()),
                (2 * signs - 1).to(output.dtype) * (1.0 / max(size, _LEAST_SIZE)),
                True,
                allow_unused=True,
            )
            for name, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    product = grad.double() * errors[name].double()
                    rows = product.reshape(rows_of_batch if len(product) == rows_of_batch else 1, -1)
                    each = rows.sum(1) * max(size, _LEAST_SIZE)
                    found[operators[name]][index] += each.square().sum() / probes
    return found, power

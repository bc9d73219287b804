"""How far low-bit weights of one layer move a model's outputs, by gradients of the float model.

For outputs that are logits, the loss is the log-likelihood of labels that are drawn from the model's own
distribution: half of the expected square of its derivative along an error is the KL divergence that the error
causes, to second order (the Fisher information; Amari, Natural Gradient Works Efficiently in Learning, 1998).
For others it is a random projection of the outputs, whose expected square is the power of the error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nc.errors import InputError
from nc.process.modes import evaluating
from nc.tuning.distance import floats_of, kept_positions, logits_of
from nc.tuning.identity import Call, copied


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """Name of a layer, what it was called with, and what it returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: torch.Tensor


def noise_of(
    model: torch.nn.Module,
    calls: Sequence[Call],
    options: Mapping[str, Mapping[str, torch.nn.Module]],
    *,
    draws: int = 1,
) -> dict[str, dict[str, float]]:
    """Return what each option of each layer costs: nats per row of logits, or the part of the power.

    Layers that no call reaches, or whose outputs nothing reads, are left out: nothing is known of them.

    Args:
        model: the float model, on whose inputs each layer is judged alone.
        calls: calibration data.
        options: layer → name of an option → the module that takes the layer's place.
        draws: number of random labels, or projections, for each call. All their gradients are held at once.

    Raises:
        InputError: the outputs have no gradient, or are NaN; or all positions are padding.
    """
    random = torch.Generator().manual_seed(0)
    totals = {name: dict.fromkeys(each, 0.0) for name, each in options.items()}
    divisor, reached = 0.0, set()
    for call in calls:
        args, kwargs = copied(call)
        with _recorded(model, options) as seen:
            outputs = model(*args, **kwargs)
            losses = [_loss(call, outputs, random) for _ in range(draws)]
        if losses[0][0].grad_fn is None:
            msg = (
                f"The outputs of {type(model).__name__} have no gradient with respect to its layers, so that "
                "what they cost can't be estimated: is there a no_grad or inference_mode inside of it?"
            )
            raise InputError(msg)
        sources = [each.output for each in seen]
        by_draw = [
            torch.autograd.grad(loss, sources, allow_unused=True, retain_graph=i + 1 < draws)
            for i, (loss, _) in enumerate(losses)
        ]
        for each, *gradients in zip(seen, *by_draw, strict=True):
            if gradients[0] is None:
                continue
            reached.add(name := each.name)
            with torch.no_grad():
                for option, module in options[name].items():
                    change = (module(*each.args, **each.kwargs) - each.output).float()
                    totals[name][option] += sum(
                        float((gradient * change).sum(-1).double().square().sum()) for gradient in gradients
                    )
        divisor += sum(part for _, part in losses)
    if not divisor:
        msg = "The calibration data has nothing but padding (attention_mask is 0 everywhere)."
        raise InputError(msg)
    return {
        name: {key: value / divisor for key, value in each.items()}
        for name, each in totals.items()
        if name in reached
    }


def _loss(call: Call, outputs: Any, random: torch.Generator) -> tuple[torch.Tensor, float]:
    """Return a loss, and by what the squares of its derivatives are divided."""
    logits = logits_of(outputs)
    if logits is not None:
        keep = kept_positions(call, logits)
        found = logits.float()[keep].log_softmax(-1)
        if bool(found.isnan().any()):
            msg = "The float model's logits hold NaN on calibration data."
            raise InputError(msg)
        drawn = torch.multinomial(found.detach().exp(), 1, generator=random)
        return found.gather(-1, drawn).sum(), 2.0 * len(found)
    floats = [each.float() for each in floats_of(outputs)]
    power = sum(float(each.detach().double().square().sum()) for each in floats)
    total = torch.zeros((), dtype=torch.float32)
    for each in floats:
        total = total + (torch.randn(each.shape, generator=random, dtype=torch.float32) * each).sum()
    return total / math.sqrt(max(power, 1e-60)), 1.0


@contextlib.contextmanager
def _recorded(model: torch.nn.Module, names: Mapping[str, Any]) -> Iterator[list[_Seen]]:
    """Give what layers are called with and return, in a graph that starts at the first of them."""
    seen: list[_Seen] = []

    def hook_of(name: str) -> Any:
        def hook(
            _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
        ) -> torch.Tensor:
            tracked = output if output.requires_grad else output.detach().requires_grad_()
            inputs, named = copied((args, kwargs))
            seen.append(_Seen(name, inputs, named, tracked))
            return tracked.clone()  # what comes may change it in place

        return hook

    hooks = [
        model.get_submodule(name).register_forward_hook(hook_of(name), with_kwargs=True) for name in names
    ]
    try:
        with evaluating(model), torch.enable_grad():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()

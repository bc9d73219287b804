"""How far low-bit weights of one layer move a model's outputs, by gradients of the float model.

For outputs that are logits, the loss is the log-likelihood of labels that are drawn from the model's own
distribution: half of the expected square of its derivative along an error is the KL divergence that the error
causes, to second order (the Fisher information; Amari, Natural Gradient Works Efficiently in Learning, 1998).
For others it is a random projection of the outputs, whose expected square is the power of the error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc.api.tune.identity import Call
from nc.errors import InputError
from nc.process.modes import evaluating


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Return the logits of what a model returns; None where it names none."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return found if isinstance(found, torch.Tensor) and found.dim() >= 2 else None


def kept_positions(call: Call, logits: torch.Tensor) -> torch.Tensor:
    """Return which rows of logits are no padding: True for all where the call has no mask for them."""
    mask = call[1].get("attention_mask")
    shape = logits.shape[:-1]
    if isinstance(mask, torch.Tensor) and mask.shape == shape:
        return mask.bool()
    return torch.ones(shape, dtype=torch.bool, device=logits.device)


def noise_of(
    model: torch.nn.Module,
    calls: Sequence[Call],
    options: Mapping[str, Mapping[str, torch.nn.Module]],
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Return what each option of each layer costs: nats per row of logits, or the part of the power.

    Args:
        model: the float model, on whose inputs each layer is judged alone.
        calls: calibration data.
        options: layer → name of an option → the module that takes the layer's place.
        seed: of the drawn labels and projections.

    Raises:
        InputError: the outputs have no gradient.
    """
    random = torch.Generator().manual_seed(seed)
    totals = {name: dict.fromkeys(each, 0.0) for name, each in options.items()}
    weight = 0.0
    for call in calls:
        with _recorded(model, options) as seen:
            outputs = model(*call[0], **call[1])
            loss, rows = _loss(call, outputs, random)
        names = [name for name, (_, out) in seen.items() if out.requires_grad]
        if loss.grad_fn is None or not names:
            msg = (
                f"The outputs of {type(model).__name__} have no gradient with respect to its layers (no_grad or "
                "inference_mode inside of it?), so that what they cost can't be estimated."
            )
            raise InputError(msg)
        gradients = torch.autograd.grad(loss, [seen[name][1] for name in names], allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                continue  # it has no influence on the outputs
            x, y = seen[name]
            with torch.no_grad():
                for option, module in options[name].items():
                    change = (module(*x) - y).float()
                    totals[name][option] += float((gradient * change).sum(-1).double().square().sum())
        weight += rows
    return {name: {key: value / weight for key, value in each.items()} for name, each in totals.items()}


def _loss(call: Call, outputs: Any, random: torch.Generator) -> tuple[torch.Tensor, float]:
    """Return a loss, and by what the squares of its derivatives are divided."""
    logits = logits_of(outputs)
    if logits is not None:
        keep = kept_positions(call, logits)
        found = logits.float()[keep].log_softmax(-1)
        drawn = torch.multinomial(found.detach().exp(), 1, generator=random)
        return found.gather(-1, drawn).sum(), 2.0 * len(found)
    floats = [
        leaf.float() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    power = sum(float(each.detach().double().square().sum()) for each in floats)
    total = torch.zeros((), dtype=torch.float32)
    for each in floats:
        total = total + (torch.randn(each.shape, generator=random, dtype=torch.float32) * each).sum()
    return total / math.sqrt(max(power, 1e-30)), 1.0


@contextlib.contextmanager
def _recorded(
    model: torch.nn.Module, names: Mapping[str, Any]
) -> Iterator[dict[str, tuple[tuple[Any, ...], torch.Tensor]]]:
    """Give what layers are called with and return, in a graph that starts at the first of them."""
    seen: dict[str, tuple[tuple[Any, ...], torch.Tensor]] = {}

    def hook_of(name: str) -> Any:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            tracked = output if output.requires_grad else output.detach().requires_grad_()
            seen[name] = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args), tracked
            return tracked.clone()  # what comes may change it in place

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(hook_of(name)) for name in names]
    try:
        with evaluating(model), torch.enable_grad():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()

"""Text generation: tokens after the first are computed by plans, without Python between the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from nc.errors import InputError, UnsupportedError
from nc.generation.decoder import Decoder
from nc.generation.example import first_step

_Model = TypeVar("_Model", bound=torch.nn.Module)


def accelerate_generation(model: _Model) -> _Model:
    """Let `model.generate` compute all tokens after the first by plans.

    Each token takes one list of calls in C, with no Python in between.

    One step of the model is captured (a few seconds), and compared with the model's own. The model computes
    prompts, and each call that plans are not for: other caches than `DynamicCache`, hooks inside the model,
    requests for hidden states. Changes of the model are followed with the next text. `nc.report` says what
    computes tokens.

    Args:
        model: a language model of transformers in eval mode on the CPU, with low-bit weights; its `forward`
            is replaced.

    Returns:
        The model.

    Raises:
        InputError: it is not such a model.
        UnsupportedError: it keeps other states than keys and values of all tokens, has hooks inside, or
            rotary positions that change with the length of a text.
        CaptureError: its step can't be captured.
        BackendError, BackendUnavailableError: there can be no plan for it here.
        VerificationError: the plan computes something else than the model.
    """
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "config"):
        msg = f"{type(model).__name__} is not a language model of transformers: it has no `generate`."
        raise InputError(msg)
    own_forward(model)
    if model.training:
        msg = "The model is in training mode: call model.eval() first."
        raise InputError(msg)
    decoder = Decoder(model)
    if not decoder.layers:
        msg = f"{type(model).__name__} has no low-bit linear: quantize it first, with nc.WeightOnlyConfig."
        raise InputError(msg)
    if decoder.hooked:
        msg = (
            f"{type(model).__name__} has forward hooks inside, which a plan would not call: remove them "
            "first."
        )
        raise UnsupportedError(msg)
    rope = _rope_of_length(model)
    if rope:
        msg = (
            f"{type(model).__name__} has rotary positions of type {rope!r}, whose angles change with the "
            "length of the text. A plan computes all tokens with the same angles; the model itself still "
            "generates."
        )
        raise UnsupportedError(msg)
    with torch.no_grad():
        try:
            step = first_step(model)
        except Exception as error:  # a model's own, of any type
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            msg = f"{type(model).__name__} can't be run on an example of its decoder's inputs: {line}"
            raise UnsupportedError(msg) from error
        decoder.prove(step)
    model.forward = decoder
    return model


def _rope_of_length(model: torch.nn.Module) -> str:
    """Return the type of rotary positions that change with the length of a text; "" where there are none."""
    for part in model.modules():
        found = getattr(part, "rope_type", "")
        for one in found.values() if isinstance(found, Mapping) else (found,):
            if isinstance(one, str) and ("dynamic" in one or one == "longrope"):
                return one
    return ""


def own_forward(model: torch.nn.Module) -> None:
    """Give a model its own `forward` back."""
    if isinstance(vars(model).get("forward"), Decoder):
        del model.forward


def status(model: torch.nn.Module) -> str:
    """Return what computes tokens after the first; "" where it is the model itself."""
    found = vars(model).get("forward")
    return found.status() if isinstance(found, Decoder) else ""

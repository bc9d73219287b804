"""Modes for a while: eval mode, and attention's plain path.

After eval mode, modules whose `train` does more than set a flag are as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class PlainPath(TorchFunctionMode):
    """Changes nothing.

    While a mode is active, attention and encoders of torch do not take their fast path, which hides products.

    Torch's own switch for that, `torch.backends.mha.set_fastpath_enabled`, is for all threads.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in eval mode; afterwards each module has its own flag again.

    Some modules do work when the mode changes: adapters add their product to the weight. Of those, the
    parameters and attributes are put back too. A model that is in eval mode already is left alone.
    """
    flags = {module: module.training for module in model.modules()}
    if not any(flags.values()):
        yield
        return
    working = [module for module in flags if _works_on_change(module)]
    attributes = [(module, dict(vars(module))) for module in working]
    values = [(p, p.detach().clone()) for module in working for p in module.parameters(recurse=False)]
    try:
        _set_eval(model)
        yield
    finally:
        for module, own in attributes:
            for name in set(vars(module)) - set(own):
                del vars(module)[name]
            vars(module).update(own)
        with torch.no_grad():
            for parameter, before in values:
                if not torch.equal(parameter, before):
                    parameter.copy_(before)
        for module, flag in flags.items():
            module.training = flag


def _works_on_change(module: torch.nn.Module) -> bool:
    """Return whether the class of the module overrides `train` or `eval`."""
    cls = type(module)
    return cls.train is not torch.nn.Module.train or cls.eval is not torch.nn.Module.eval


def _set_eval(model: torch.nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError:  # what modules of torch.export say to eval(): their flags are set one by one
        for module in model.modules():
            module.training = False

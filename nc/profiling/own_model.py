"""The user's own module and how the user calls it, to be timed. It is not kept alive."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nc.capture.export_guards import eval_mode
from nc.process.lock import LOCK
from nc.process.torch_settings import without_autocast

#: What a call can hold that calls do not change.
_VALUES = (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class OwnModel:
    """A weak reference to a module, and example arguments.

    Attributes:
        args: positional arguments.
        kwargs: those by keyword.
    """

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = weakref.ref(model)
        self.args, self.kwargs = args, kwargs

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the example arguments for calls that may write into them."""
        return _copied(self.args), _copied(self.kwargs)

    @property
    def model(self) -> torch.nn.Module | None:
        """The module; None where it does not exist any more."""
        return self._model()

    @contextlib.contextmanager
    def called(self) -> Iterator[tuple[Callable[[], object] | None, str]]:
        """Yield a call of the module in eval mode with copied inputs, and "".

        If the call can't be timed, yield None and the reason.
        """
        model = self._model()
        if model is None:
            yield None, "your model does not exist any more"
            return
        other = _other_value([self.args, self.kwargs])
        if other is not None:
            yield None, f"calls change its inputs, which hold a {other}"
            return
        args, kwargs = self.copies()
        with LOCK, eval_mode(model), torch.no_grad(), without_autocast():
            try:
                model(*args, **kwargs)
            except Exception as error:  # any model, perhaps changed since; the verdict says it
                failed = f"your model fails on the example inputs: {type(error).__name__}"
            else:
                failed = ""
            yield (None, failed) if failed else ((lambda: model(*args, **kwargs)), "")


def _other_value(value: Any) -> str | None:
    """Return the class of the first value that a call could change in another way than a tensor.

    It is searched for in nested tuples, lists and dicts.
    """
    if type(value) in (tuple, list, dict):
        parts = value.values() if isinstance(value, dict) else value
        return next((found for part in parts if (found := _other_value(part)) is not None), None)
    return None if isinstance(value, _VALUES) else type(value).__name__


def _copied(value: Any) -> Any:
    """Return the same structure with copies of its tensors: the model may write into them."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copied, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

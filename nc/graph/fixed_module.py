"""Modules with weights of a captured graph, an engine or the user's model.

What torch would do to weights is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from nc.errors import StateError, UnsupportedError
from nc.process.warn import warn

if TYPE_CHECKING:
    from typing_extensions import Self


class FixedModule(torch.nn.Module):
    """A module in eval mode whose weights have the dtypes that they have, on the CPU.

    Attributes:
        what: what it is, for messages.
        saved_by: how it is saved.
        cast_by: how it gets another dtype.
    """

    what: ClassVar[str]
    saved_by: ClassVar[str]
    cast_by: ClassVar[str] = (
        "prepare() decides what its operators compute in. For another precision give prepare() a "
        "configuration that asks for it"
    )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Check the function that `to`, `half`, `cuda` and the like apply to each tensor; return the module.

        A function that changes nothing is allowed.

        Raises:
            UnsupportedError: tensors would be on another device, or of another dtype.
        """
        for dtype in self._dtypes():
            probe = torch.zeros(1, dtype=dtype, device="cpu")
            try:
                moved = fn(probe)
            except Exception as error:  # of a device that this torch does not have
                msg = f"{self.what} computes on the CPU, and can't be moved: {error}"
                raise UnsupportedError(msg) from error
            if moved.device.type != "cpu":
                msg = (
                    f"{self.what} computes on the CPU, and can't be moved to {moved.device.type!r}. Call "
                    ".cpu() on its inputs."
                )
                raise UnsupportedError(msg)
            if moved.dtype != dtype:
                msg = f"{self.what} can't be cast to {moved.dtype}: {self.cast_by}."
                raise UnsupportedError(msg)
        return self

    def _dtypes(self) -> Iterable[torch.dtype]:
        """Return the dtypes of floating-point tensors that a cast would change."""
        return (torch.float32,)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode; warns for `train(True)`: there is nothing to train."""
        if mode:
            msg = (
                f"{self.what} stays in eval mode: it has nothing to train. Train the fp32 model, and call "
                "prepare() and convert() again."
            )
            warn(msg)
        self.training = False  # of this module alone: those in it may be the user's
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Stay without gradients.

        Raises:
            StateError: gradients are asked for.
        """
        if requires_grad:
            msg = (
                f"{self.what} has no gradients. Train the fp32 model, and call prepare() and convert() again."
            )
            raise StateError(msg)
        return self

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what checkpoints call.

        Raises:
            StateError: always: an empty dict would be saved without a word.
        """
        msg = f"{self.what} has no state_dict: {self.saved_by}."
        raise StateError(msg)

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the inverse.

        Raises:
            StateError: always.
        """
        msg = (
            f"{self.what} takes no state_dict. Load it into the fp32 model, and call prepare() and convert() "
            f"again; {self.saved_by}."
        )
        raise StateError(msg)

    def __getattr__(self, name: str) -> Any:
        """Return what torch calls for names that it does not find.

        It finds submodules, and attributes that only the user's model has.

        Raises:
            AttributeError: neither this module nor the user's model has it, or it would run the user's fp32
                model.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):
                raise
            return self._of_model(name, error)

    def _of_model(self, name: str, error: AttributeError) -> Any:
        """Return an attribute of the user's model, where this module knows one: values such as `config`.

        Raises:
            AttributeError: the model has none of that name; or it computes something, which calibration would
                not see.
        """
        model = self._users_model()
        if model is not None and hasattr(model, name):
            value = getattr(model, name)
            if not isinstance(value, (torch.nn.Module, torch.Tensor)) and not callable(value):
                return value
            msg = (
                f"{name!r} belongs to the fp32 model, and calibration would not see what it computes: call "
                "the prepared model itself with the inputs that your model gets there."
            )
            raise AttributeError(msg, name=name, obj=self) from error
        msg = (
            f"{self.what} has no attribute {name!r}. It has the signature and the outputs of your model, not "
            "its attributes: read them from the fp32 model."
        )
        if name == "generate":
            msg += " To generate text take WeightOnlyConfig: its result is a model of your own class."
        raise AttributeError(msg, name=name, obj=self) from error

    def _users_model(self) -> torch.nn.Module | None:
        """Return the user's model, where this module knows it."""
        return None

"""Statistics of the inputs of layers while a module runs; layers that read one tensor share them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import TorchDispatchMode

from nc.algorithms.solvers.base import InputNeeds
from nc.errors import CalibrationError
from nc.modules.statistics import InputStatistics
from nc.process.modes import PlainPath

_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


class Collector:
    """Collects the inputs of some layers.

    Attributes:
        of: statistics by the name of the layer; absent for layers that no call reached. Layers that read one
            tensor have the same object.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module], needs: InputNeeds) -> None:
        self._layers, self._needs = layers, needs
        self.of: dict[str, InputStatistics] = {}
        self._owner: dict[str, str] = {}
        self._keep: torch.Tensor | None = None
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._float: dict[str, torch.Tensor] | None = None

    @contextlib.contextmanager
    def watching(
        self, keep: torch.Tensor | None = None, float_inputs: dict[str, torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Collect during one call.

        Args:
            keep: positions of [batch, length] that count; None: all.
            float_inputs: the inputs of the same layers in the float model.

        Raises:
            CalibrationError: NaN or infinite values reached a layer; names it.
        """
        self._keep, self._float = keep, float_inputs
        handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in self._layers.items()
        ]
        try:
            with contextlib.ExitStack() as modes:
                others = _read_by_others(self._layers)
                if others:
                    modes.enter_context(PlainPath())
                    modes.enter_context(_Products(others, self._add))
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen, self._float = {}, None

    def _hook(self, name: str) -> Any:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._add(name, args[0] if args else next(iter(kwargs.values())))

        return hook

    def _add(self, name: str, x: torch.Tensor) -> None:
        owner, now = self._owner.get(name), (x, _version(x))
        if owner is None:
            owner = next(
                (
                    other
                    for other, seen in self._seen.items()
                    if _same(seen, now) and self._owner[other] == other
                ),
                name,
            )
            self._owner[name] = owner
            if owner != name:
                self.of[name] = self.of[owner]
        elif owner != name and not _same(
            self._seen.get(owner), now
        ):  # they read one tensor so far, and no longer
            self._owner[name], self.of[name] = name, copy.deepcopy(self.of[owner])
            owner = name
        self._seen[name] = now
        if owner != name:
            return
        float_x = None if self._float is None else self._float.get(name)
        if self._keep is not None and x.shape[:2] == self._keep.shape:
            x, float_x = x[self._keep], None if float_x is None else float_x[self._keep]
        if float_x is not None and float_x.shape != x.shape:
            float_x = None  # a router has sent other tokens here than in the float model
        if name not in self.of:
            self.of[name] = InputStatistics.empty(
                x.shape[-1], hessian=self._needs.hessian, cross=self._needs.float_inputs
            )
        try:
            self.of[name].add(x, float_x)
        except CalibrationError as error:
            msg = (
                f"Layer {name!r}: {error}. Check the calibration data, or leave the layer alone: "
                f"config.exclude({name!r})."
            )
            raise CalibrationError(msg) from None


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Sees products with a layer's weight that are made without calling the layer.

    Attention of torch makes such products with its `out_proj`.

    Args:
        layers: by name.
        add: gets the name of the layer and what is multiplied by its weight, [rows, inputs].
    """

    def __init__(
        self, layers: Mapping[str, torch.nn.Module], add: Callable[[str, torch.Tensor], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._names = {
            layer.weight.data_ptr(): name
            for name, layer in layers.items()
            if isinstance(layer.weight, torch.Tensor)
        }
        self._add = add

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            x, weight = args[-2:]
            name = self._names.get(weight.data_ptr())
            if name is not None:
                self._add(name, x)
        return func(*args, **(kwargs or {}))


def _read_by_others(root: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the layers whose weight is read by a function of torch, so that the layer is never called."""
    return {name: layer for name, layer in root.items() if isinstance(layer, NonDynamicallyQuantizableLinear)}


@contextlib.contextmanager
def inputs_of(layers: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the last input tensor of each layer while a module runs, as it was then.

    What follows may change it in place.
    """
    found: dict[str, torch.Tensor] = {}
    kept: dict[int, tuple[tuple[torch.Tensor, int], torch.Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            before = kept.get(id(x))
            if before is None or not _same(before[0], (x, _version(x))):
                before = kept[id(x)] = (x, _version(x)), x.clone()
            found[name] = before[1]

        return keep

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in layers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _version(tensor: torch.Tensor) -> int:
    """Torch's counter of changes in place; tensors of inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version  # torch's only one


def _same(one: tuple[torch.Tensor, int] | None, other: tuple[torch.Tensor, int]) -> bool:
    """Return whether two are one tensor that nothing changed in between."""
    return one is not None and one[0] is other[0] and one[1] == other[1]

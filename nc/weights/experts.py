"""Separate linears for experts that transformers keeps in one three-dimensional parameter.

Each can then have a low-bit weight.

Newer versions of transformers stack the experts of a layer, `gate_up_proj [E, N, K]`, and index the stack in
a loop over the experts that are needed. The loop is unchanged. What it finds at an index computes
`F.linear(x, weight)`, or `x @ weight`, with a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from nc.modules.copies import sharing

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
#: Of the implementations that transformers has, the one that indexes.
_LOOP = "eager"


class Experts(torch.nn.Module):
    """The linears of a stack, in the place of its parameter.

    Args:
        stack: shape [E, N, K], or [E, K, N] if it is transposed; the linears share its memory.
        transposed: it is multiplied as `x @ weight`.
    """

    def __init__(self, stack: torch.nn.Parameter, transposed: bool) -> None:
        super().__init__()
        self.transposed, self.shape = transposed, stack.shape
        for index, weight in enumerate(stack.detach()):
            rows = weight.t() if transposed else weight
            linear = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
            linear.weight = torch.nn.Parameter(rows, requires_grad=stack.requires_grad)
            self.add_module(str(index), linear)

    def __len__(self) -> int:
        """How many experts there are."""
        return len(self._modules)

    def __getitem__(self, index: int | torch.Tensor) -> _Weight:
        """Return what stands for the weight of an expert."""
        return _Weight(self.get_submodule(str(int(index))), self.transposed)


class _Weight:
    """Stands for a weight in a product."""

    def __init__(self, linear: torch.nn.Module, transposed: bool) -> None:
        self._linear, self._transposed = linear, transposed

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the product, by the linear; other functions have no weight to read."""
        x, weight, *bias = (*args, *(kwargs or {}).values())
        known = (
            function in _PRODUCTS
            if isinstance(weight, cls) and weight._transposed
            else function is torch.nn.functional.linear
        )
        if not isinstance(weight, cls) or not known or len(bias) > 1:
            return NotImplemented
        result = weight._linear(x)
        return result if not bias or bias[0] is None else result + bias[0]


def separated(
    model: torch.nn.Module, *, inplace: bool = False, names: Collection[str] | None = None
) -> torch.nn.Module:
    """Return the model with a linear for each expert.

    Args:
        model: any; without stacked experts it is returned as it is.
        inplace: change it. False: a copy that shares all weights.
        names: of parameters, those to take apart; None: all.
    """
    if not any(names is None or name in names for name, *_ in _stacks(model)):
        return model
    model = model if inplace else sharing(model)
    for name, module, leaf in list(_stacks(model)):
        if names is None or name in names:
            stack = module._parameters.pop(
                leaf
            )  # `delattr` is the same, but `setattr` needs the name to be free
            assert stack is not None
            module.add_module(leaf, Experts(stack, module.is_transposed).train(module.training))  # type: ignore[arg-type]
            module.config._experts_implementation = _LOOP  # type: ignore[union-attr]
    return model


def stacked_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the parameters that stack experts."""
    return tuple(name for name, *_ in _stacks(model))


def is_expert(model: torch.nn.Module, name: str) -> bool:
    """Return whether a module is a linear of a stack."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), Experts)


def _stacks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Name, module and name there of each parameter.

    Transformers marks the classes whose forward is a loop.
    """
    for prefix, module in model.named_modules():
        if not hasattr(getattr(module, "config", None), "_experts_implementation") or not isinstance(
            getattr(module, "is_transposed", None), bool
        ):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and parameter.is_floating_point():
                yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf

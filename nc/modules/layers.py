"""The layers of a model that can have low-bit weights: linears, transformers' `Conv1D`, embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nc.formats.reasons import Cause, Reason
from nc.modules.computed import is_computed, settle, weight_is_known
from nc.modules.copies import sharing
from nc.nn import QuantEmbedding, QuantLinear

#: Names of output heads in models that do not say which module theirs is.
_HEADS = ("lm_head", "output_layer", "embed_out")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        name: of the module.
        module: the module.
        kind: "linear" or "embedding".
        transposed: its weight has shape [K, N] (`Conv1D`).
        head: it is the model's output head.
        why: why it cannot be quantized; None if it can.
        others: further names of the same module.
    """

    name: str
    module: torch.nn.Module
    kind: str
    transposed: bool = False
    head: bool = False
    why: Reason | None = None
    others: tuple[str, ...] = ()

    @property
    def module_type(self) -> str:
        """Qualified name of its class."""
        return f"{type(self.module).__module__}.{type(self.module).__qualname__}"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        if not weight_is_known(self.module):  # what it shows may be of another size, or missing
            return _sizes(self.module)
        rows, columns = self.module.weight.shape  # type: ignore[misc]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, shape [N, K], a view."""
        weight: torch.Tensor = self.module.weight.detach()  # type: ignore[operator]
        return weight.t() if self.transposed else weight


def layers_of(model: torch.nn.Module) -> tuple[Layer, ...]:
    """All of them, each module once, in the order of `named_modules`."""
    head, adapters = _output_head(model), _adapters(model)
    found = [
        (names, replace(layer, why=Cause.ADAPTER()) if f"{names[0]}.".startswith(adapters) else layer)
        for module, names in names_of(model).items()
        if (layer := _layer(names[0], module, head)) is not None
    ]
    return tuple(replace(layer, others=tuple(names[1:])) if names[1:] else layer for names, layer in found)


def _adapters(model: torch.nn.Module) -> tuple[str, ...]:
    """Return how the names of modules in adapters begin: what peft puts beside a layer."""
    return tuple(
        f"{name}.{part}." if name else f"{part}."
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
        for part in getattr(module, "adapter_layer_names", ())
    ) or ("\0",)


def names_of(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """All names of each module, in the order of `named_modules`."""
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def readable(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, or a copy in which computed weights are parameters.

    The copy shares its tensors. Layers of the model compute these weights at each call.
    """
    if not any(is_computed(layer.module) for layer in layers_of(model)):
        return model
    copied = sharing(model)
    settle(layer.module for layer in layers_of(copied))
    return copied


def settle_layers(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Make parameters of the weights that some layers of a model compute at each call, in place."""
    wanted = set(names)
    settle(layer.module for layer in layers_of(model) if layer.name in wanted)


def _sizes(module: torch.nn.Module) -> tuple[int, int]:
    """Return (N, K) of a linear that shows no weight, or (rows, features) of an embedding."""
    names = (
        ("num_embeddings", "embedding_dim")
        if isinstance(module, torch.nn.Embedding)
        else ("out_features", "in_features")
    )
    first, second = (int(getattr(module, name, 0)) for name in names)
    return first, second


def has_low_bit(model: object) -> bool:
    """Return whether something is a model that holds a module with a low-bit weight."""
    return isinstance(model, torch.nn.Module) and any(map(is_low_bit, model.modules()))


def is_low_bit(module: torch.nn.Module) -> bool:
    """Return whether a module has a low-bit weight itself."""
    return isinstance(module, (QuantLinear, QuantEmbedding))


def _layer(name: str, module: torch.nn.Module, head: torch.nn.Module | None) -> Layer | None:
    if isinstance(module, (QuantLinear, QuantEmbedding)):
        return None
    is_head = module is head or (head is None and name.rpartition(".")[2] in _HEADS)
    if isinstance(module, torch.nn.Linear):
        return Layer(name, module, "linear", head=is_head, why=_why_not(module, torch.nn.Linear, "linear"))
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return Layer(
            name,
            module,
            "linear",
            transposed=True,
            head=is_head,
            why=_why_not(module, type(module), "linear"),
        )
    if isinstance(module, torch.nn.Embedding):
        return Layer(name, module, "embedding", why=_why_not(module, torch.nn.Embedding, "embedding"))
    return None


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same values in the same memory.

    Without values, it is equal for one and the same object.
    """
    return (
        (id(tensor),) if tensor.is_meta else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    )


def other_weights(model: torch.nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes of the float weights that are in no linear or embedding.

    Weights of two and more dimensions count, such as stacked experts.
    """
    inside = {
        name
        for name, module in model.named_modules()
        if is_low_bit(module) or _layer(name, module, None) is not None
    }
    return tuple(
        (name, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter.is_floating_point() and name.rpartition(".")[0] not in inside
    )


def _why_not(module: torch.nn.Module, base: type[torch.nn.Module], kind: str) -> Reason | None:
    if "forward" in vars(module):  # put on this object, as accelerate does; it would be lost with the object
        return Cause.OWN_FORWARD(cls=f"this {type(module).__name__}", kind=kind)
    if not weight_is_known(module):
        return Cause.COMPUTED_ELSEWHERE()
    if type(module).forward is not base.forward and not (kind == "linear" and _computes_a_linear(module)):
        return Cause.OWN_FORWARD(cls=type(module).__name__, kind=kind)
    if kind == "embedding" and module.max_norm is not None:
        return Cause.OPTION(option="max_norm")
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or weight.dtype not in _FLOATS:
        return Cause.NOT_FLOAT(dtype=getattr(weight, "dtype", type(weight).__name__))
    return None if weight.numel() else Cause.NO_ELEMENTS()


def _computes_a_linear(module: torch.nn.Module) -> bool:
    """Whether a forward of the user's own gives `x @ W.T + b` (transformers' FalconLinear), found by a call.

    Nothing else may be in it.
    """
    weight: Any = module.weight
    plain = {name for name, _ in (*module.named_parameters(), *module.named_buffers())} <= {
        "weight",
        "bias",
    } and not list(module.children())
    if not plain or weight.dim() != 2 or weight.dtype not in _FLOATS:
        return False
    if weight.is_meta:
        module = _small(module)
        weight = module.weight
    x = (
        torch.linspace(-20, 20, 3 * weight.shape[1], dtype=torch.float32)
        .sin()
        .reshape(3, -1)
        .to(weight.dtype)
    )
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, weight, module.bias)  # type: ignore[arg-type]
        try:
            found = type(module).forward(module, x)
        except Exception:  # it wants other arguments, so it is not a linear
            return False
    bound = torch.finfo(weight.dtype).eps * weight.shape[1]
    return (
        isinstance(found, torch.Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=bound, atol=bound)
    )


def _small(module: torch.nn.Module) -> torch.nn.Module:
    """Return a linear like another one, whose weight has no values yet, but of 8 x 16 and with values."""
    small = copy.copy(module)
    values = torch.linspace(-20, 20, 8 * 16 + 8, dtype=torch.float32).cos().to(module.weight.dtype)  # type: ignore[arg-type]
    parts = {"weight": values[8:].view(8, 16), "bias": None if module.bias is None else values[:8]}
    small._parameters = {
        key: None if part is None else torch.nn.Parameter(part) for key, part in parts.items()
    }  # of the copy
    small.in_features, small.out_features = 16, 8  # type: ignore[assignment]
    return small


def _output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return what a transformers model gives as its output head."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None

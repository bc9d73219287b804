"""Modules with low-bit weights.

They replace the linears and embeddings in the user's own model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from nc import ops
from nc.errors import StateError, UnsupportedError
from nc.formats import TensorFormat
from nc.nn import calls as layer_calls
from nc.nn.origin import Origin
from nc.nn.result import LayerResult
from nc.nn.tensor import QuantizedTensor
from nc.numerics.packed_weight import PARTS, PackedWeight
from nc.process.traced import in_trace

#: Key in the metadata of a state dict: the format of a layer's weight.
_FORM = "nc.form"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """How an engine computes a layer.

    Attributes:
        kernels: (name, the numbers of rows M that it is for as text, "" for all others), the first one first.
        refused: (name, reason) of the kernels that would come before.
    """

    kernels: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Names and rows, e.g. "bag (M <= 8), blocks"."""
        return ", ".join(name + (f" ({rows})" if rows else "") for name, rows in self.kernels) or "reference"


class LinearEngine(Protocol):
    """Computes linears with packed weights by kernels; `nc.backends.low_bit.engine` makes them."""

    @property
    def name(self) -> str:
        """Name of the backend."""

    def linear(self, layer: QuantLinear, x: torch.Tensor) -> torch.Tensor | None:
        """Return the layer's result for `x` of shape [..., K].

        None is returned where the operator has to compute it.
        """

    def kernels_of(self, layer: QuantLinear, dtype: torch.dtype) -> KernelChoice:
        """Return the kernels for a layer whose inputs have that dtype; nothing is packed for that."""


class _Packed(torch.nn.Module):
    """What both modules have: the stored tensors as buffers, under the names of `PackedWeight`.

    Attributes:
        form: the format of the weight.
        result: how the codes were found; None if that is not known.
        result_dtype: the dtype that `weight` shows: that of the weight before it was quantized, or of the
            last `.to(dtype)`.
        origin: the run that quantized it; None if that is not known.
    """

    form: TensorFormat
    result: LayerResult | None
    origin: Origin | None = None
    result_dtype: torch.dtype
    _shape: tuple[int, int]

    @property
    def packed(self) -> PackedWeight:
        """The stored weight."""
        return PackedWeight(form=self.form, shape=self._shape, **dict(zip(PARTS, self._parts(), strict=True)))  # type: ignore[arg-type]

    @property
    def weight(self) -> QuantizedTensor:
        """The stored weight as a tensor, for code that reads it; nothing is copied or dequantized."""
        return QuantizedTensor(self.packed, self.result_dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        """As for all modules; but the weight can't be set."""
        if name == "weight":
            msg = (
                f"The weight of a {type(self).__name__} holds packed codes and can't be set. Put a float "
                "module in its place (its weight: module.weight.dequantize()) and quantize again, or load "
                "stored tensors with load_state_dict()."
            )
            raise StateError(msg)
        super().__setattr__(name, value)

    def _hold(self, weight: PackedWeight, result: LayerResult | None) -> None:
        self.form, self.result, self._shape = weight.form, result, weight.shape
        for name in PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.requires_grad_(False)

    def _parts(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(getattr(self, name) for name in PARTS)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})  # torch's, which is an attribute and not a key
        metadata[prefix[:-1]] = {**metadata.get(prefix[:-1], {}), _FORM: str(self.form)}

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Codes of another format may have the same shapes, and would be other weights.

        Float weights need to be quantized.
        """
        found = local_metadata.get(_FORM, str(self.form))
        if found != str(self.form):
            errors.append(
                f"{prefix[:-1] or 'The layer'} holds a weight of format {self.form}, but got one of format "
                f"{found}."
            )
            return
        if f"{prefix}weight" in state_dict and f"{prefix}codes" not in state_dict:
            errors.append(
                f"{prefix[:-1] or 'The layer'} holds a weight of format {self.form}, but got a float one: "
                "load float weights into the float model, and call prepare() and convert() again."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to(dtype)` leaves what is stored alone: another dtype would be another weight. A bias follows."""
        stored = {id(part) for part in self._parts()}

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            is_other = id(tensor) in stored and moved.dtype != tensor.dtype
            return tensor.to(moved.device) if is_other else moved

        device = self._buffers["codes"].device  # type: ignore[union-attr]
        self.result_dtype = fn(torch.empty(0, dtype=self.result_dtype, device=device)).dtype
        return super()._apply(kept, recurse)  # type: ignore[no-untyped-call] # torch annotates it in part only


class QuantLinear(_Packed, torch.nn.Linear):  # type: ignore[misc] # `weight` is not a parameter
    """A linear whose weight of shape [N, K] is packed. It is made by `convert`, or from a `PackedWeight`.

    Its result has the dtype of its input. `packed` gives the stored weight, `weight` the same as a tensor.

    Attributes:
        in_features: K.
        out_features: N.
        bias: shape [N], or None.
        engine: computes it; None: the operator, which is the reference.
            `nc.backends.low_bit.engine.set_backend` sets it.
        act_dtype: what its input is rounded to first: "fp32" (nothing), "bf16", "int8" per token, or
            "int8_block32".
    """

    engine: LinearEngine | None = None
    #: What the engine keeps between calls. It is never stored or copied.
    packed_for_engine: Any = None

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        act_dtype: str = "fp32",
        result: LayerResult | None = None,
        result_dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.nn.Module.__init__(self)  # a Linear's own would make a weight
        self.out_features, self.in_features = weight.shape
        self.act_dtype, self.result_dtype = act_dtype, result_dtype
        self.register_parameter(
            "bias", None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        )
        self._hold(weight, result)
        self._number = layer_calls.number(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """`input` of shape [..., K] → [..., N].

        While a graph is captured, it is one operator: in `torch.compile` one that calls the layer.

        Torch 2.8 takes `is_exporting()` for true in `torch.compile` too, and so compiles the reference.

        Raises:
            UnsupportedError: it gets a tensor of forward-mode differentiation, whose derivative would be
                lost.
        """
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(input).tangent is not None:  # type: ignore[no-untyped-call]
            msg = "nc's low-bit layers have no forward-mode derivatives (jvp, dual tensors); backward() has."
            raise UnsupportedError(msg)
        if self.engine is not None:
            if not in_trace(input):
                found = self.engine.linear(self, input)
                if found is not None:
                    return found
            elif not torch.compiler.is_exporting() and not (
                torch.is_grad_enabled() and (input.requires_grad or self._bias_trains())
            ):
                called: torch.Tensor = layer_calls.call_layer(input, self._number, self.out_features)
                return called
        result: torch.Tensor = ops.quant_linear(
            input, *self._parts(), self.bias, self.form.dtype.name, self.in_features, self.act_dtype
        )
        return result

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.packed_for_engine = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.packed_for_engine = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what `pickle` and `copy.deepcopy` take."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("packed_for_engine", "_number")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy a separate layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch annotates it in part only
        self._number = layer_calls.number(self)

    def _bias_trains(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def extra_repr(self) -> str:
        """Sizes and format."""
        act = "" if self.act_dtype == "fp32" else f", activations {self.act_dtype}"
        return f"{self.in_features}, {self.out_features}, {self.form}{act}, bias={self.bias is not None}"


class QuantEmbedding(_Packed, torch.nn.Embedding):  # type: ignore[misc] # likewise
    """An embedding whose table of shape [rows, features] is packed.

    Only the rows that are read are dequantized.

    Attributes:
        num_embeddings: rows.
        embedding_dim: features.
        result_dtype: dtype of its results, that of the table before it was quantized.
    """

    def __init__(
        self,
        weight: PackedWeight,
        padding_idx: int | None = None,
        result_dtype: torch.dtype = torch.float32,
        result: LayerResult | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.result_dtype = padding_idx, result_dtype
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self._hold(weight, result)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """Integers of any shape → [*shape, features]."""
        result: torch.Tensor = ops.quant_embedding(
            input, *self._parts(), self.form.dtype.name, self.embedding_dim, self.result_dtype
        )
        return result

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.form}"

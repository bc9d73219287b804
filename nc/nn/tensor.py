"""A low-bit weight as a tensor: for code that wants a tensor where the model has a module.

Known operators work on the packed codes. All others get the dequantized values, so their results are right.
Operators that would change the tensor raise, because the change would be lost.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nc import ops
from nc.errors import ConfigError, UnsupportedError
from nc.formats import TensorFormat
from nc.numerics.packed_weight import PARTS, PackedWeight, check_parts
from nc.text.json_text import parsed

_aten = torch.ops.aten
_VIEWS = (_aten.detach.default, _aten.alias.default)
_TRANSPOSES = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
#: Key of the metadata that `flatten` writes.
_METADATA = "nc.quantized_tensors"


class QuantizedTensor(torch.Tensor):
    """A tensor of shape [N, K], or [K, N] where it was transposed, over a packed weight.

    It never needs gradients.

    Attributes:
        packed: the stored weight.
        transposed: whether this is the weight's transpose.
    """

    packed: PackedWeight
    transposed: bool
    #: Initializers of transformers leave such tensors alone: `from_pretrained` calls them for models whose
    #: weights it has read.
    _is_hf_initialized = True

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        packed: PackedWeight,
        dtype: torch.dtype = torch.float32,
        *,
        transposed: bool = False,
    ) -> QuantizedTensor:
        """Return a tensor that looks as if it had `dtype`, that of its dequantized values."""
        shape = packed.shape[::-1] if transposed else packed.shape
        result: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=packed.codes.device
        )
        return result

    def __init__(
        self, packed: PackedWeight, dtype: torch.dtype = torch.float32, *, transposed: bool = False
    ) -> None:  # of __new__
        self.packed, self.transposed = packed, transposed
        for name, tensor in packed.tensors().items():
            setattr(self, name, tensor)  # where compilers look for what a tensor consists of

    def dequantize(self) -> torch.Tensor:
        """Return the values, as a plain tensor of the same shape, dtype and device."""
        values = self.packed.dequantize().to(self.dtype)
        return values.t() if self.transposed else values

    def numpy(self, *, force: bool = False) -> Any:
        """Return the dequantized values as a new array."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """Return the dequantized values as lists."""
        return self.dequantize().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        """As `numpy`."""
        values = self.dequantize().numpy()
        return values if dtype is None else values.astype(dtype)

    def share_memory_(self) -> QuantizedTensor:
        """Move what is stored to shared memory; the tensor itself holds none."""
        for tensor in self.packed.tensors().values():
            tensor.share_memory_()  # type: ignore[no-untyped-call] # torch annotates it in part only
        return self

    def is_shared(self) -> bool:
        """Return whether what is stored is in shared memory."""
        return all(tensor.is_shared() for tensor in self.packed.tensors().values())  # type: ignore[no-untyped-call] # likewise

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and format."""
        return f"QuantizedTensor({tuple(self.shape)}, {self.packed.form}, dtype={self.dtype})"

    # ---- compilers, pickle ----

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the stored tensors, and all else."""
        return list(self.packed.tensors()), (self.packed.form, self.packed.shape, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        """Return the inverse of `__tensor_flatten__`."""
        form, shape, dtype, transposed = context
        return QuantizedTensor(PackedWeight(form=form, shape=shape, **inner), dtype, transposed=transposed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as its stored tensors and plain values.

        `SAFE_GLOBALS` has what torch.load needs with weights_only=True.
        """
        packed = self.packed
        return rebuild, (
            dict(packed.tensors()),
            packed.form.to_dict(),
            tuple(packed.shape),
            self.dtype,
            self.transposed,
        )

    def __deepcopy__(self, memo: Any) -> QuantizedTensor:
        """Return a copy of what is stored."""
        copied: QuantizedTensor = _map(self, torch.clone)
        memo[id(self)] = copied
        return copied

    # ---- operators ----

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Linears and look-ups use the packed codes also where torch would decompose them.

        Writes are refused.
        """
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        if func in _WRITES and isinstance(args[0], QuantizedTensor):
            _refuse(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch calls it so
        """See the module text."""
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        result = known(func, args, kwargs) if known is not None else NotImplemented
        if result is not NotImplemented:
            return result
        _check_writes(func, args, kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(
            QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs)
        )
        return func(*plain_args, **plain_kwargs)


_WRITES = (torch.Tensor.__setitem__, torch.Tensor.data.__set__, torch.Tensor.set_)  # type: ignore[attr-defined] # not in torch's stub


def rebuild(
    tensors: Mapping[str, torch.Tensor],
    form: dict[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    transposed: bool,
) -> QuantizedTensor:
    """Return a tensor from plain values.

    Raises:
        ConfigError: they are not those of a `QuantizedTensor`, e.g. because parts have other shapes or dtypes
            than the format says.
    """
    try:
        rows, columns = (operator.index(size) for size in shape)
        read = TensorFormat.from_dict(form)
        packed = PackedWeight(
            form=read, shape=(rows, columns), **{n: t for n, t in tensors.items() if n in PARTS}
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"These are not the parts of a QuantizedTensor ({type(error).__name__}: {error}); give those "
            "that were stored for it."
        )
        raise ConfigError(msg) from error
    check_parts(packed)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        msg = (
            "Expected the dtype of a QuantizedTensor to be a floating-point dtype of torch, but got "
            f"{dtype!r}."
        )
        raise ConfigError(msg)
    return QuantizedTensor(packed, dtype, transposed=transposed)


#: For `torch.serialization.add_safe_globals`: what `torch.load(…, weights_only=True)` calls for a
#: `QuantizedTensor`.
SAFE_GLOBALS = (rebuild,)


def flatten(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors and metadata of a state dict, as safetensors stores them.

    Args:
        state: tensors by name, quantized or not.

    Returns:
        Tensors, those of a quantized one as "name.codes", "name.scale", …; and metadata for `unflatten`.
    """
    tensors: dict[str, torch.Tensor] = {}
    quantized: dict[str, Any] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, QuantizedTensor):
            tensors[name] = tensor
            continue
        packed = tensor.packed
        tensors |= {f"{name}.{part}": value for part, value in packed.tensors().items()}
        dtype = str(tensor.dtype).removeprefix("torch.")
        quantized[name] = {
            "form": packed.form.to_dict(),
            "shape": list(packed.shape),
            "dtype": dtype,
            "transposed": tensor.transposed,
        }
    return tensors, {_METADATA: json.dumps(quantized)}


def unflatten(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    """Return the inverse of `flatten`.

    Raises:
        ConfigError: the metadata is not that of `flatten`, or tensors are missing.
    """
    try:
        quantized = parsed((metadata or {})[_METADATA])
        rest, result = dict(tensors), {}
        for name, entry in quantized.items():
            parts = {part: rest.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in rest}
            dtype = getattr(torch, entry["dtype"])
            result[name] = rebuild(parts, entry["form"], entry["shape"], dtype, entry["transposed"] is True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"This is not what flatten() gave ({type(error).__name__}: {error}); give unflatten() the "
            "tensors and metadata of one file."
        )
        raise ConfigError(msg) from error
    return {**rest, **result}


# ---- the known operators: (func, args, kwargs) → result, or NotImplemented to go on with dequantized values
# ----


def _map(
    tensor: QuantizedTensor, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> QuantizedTensor:
    packed = tensor.packed
    parts: dict[str, Any] = {name: change(part) for name, part in packed.tensors().items()}
    return QuantizedTensor(
        PackedWeight(form=packed.form, shape=packed.shape, **parts),
        dtype or tensor.dtype,
        transposed=tensor.transposed,
    )


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    return _map(args[0], lambda part: part)


def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *dims = args
    order = tuple(d % 2 for d in (dims[0] if func is _aten.permute.default else dims))
    if (
        func is _aten.permute.default
        and order == (0, 1)
        or func is _aten.transpose.int
        and order[0] == order[1]
    ):
        return _view(func, args, kwargs)
    return QuantizedTensor(tensor.packed, tensor.dtype, transposed=not tensor.transposed)


def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return _map(args[0], torch.clone)


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or args[0].dtype
    if not dtype.is_floating_point:
        return NotImplemented
    device = kwargs.get("device")
    return _map(args[0], lambda part: part.clone() if device is None else part.to(device, copy=True), dtype)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Into a quantized tensor: only from one of the same format, part by part."""
    target, source = args[:2]
    if not isinstance(target, QuantizedTensor):
        return NotImplemented
    same = isinstance(source, QuantizedTensor) and (source.packed.form, source.shape, source.transposed) == (
        target.packed.form,
        target.shape,
        target.transposed,
    )
    if not same:
        _refuse(f"copy_ from {source!r:.80}")
    for name, part in target.packed.tensors().items():
        part.copy_(getattr(source.packed, name))
    return target


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:  # torch's name
    """`F.linear`; also where the input or the bias is the quantized one."""
    plain = [x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (input, bias)]
    if not isinstance(weight, QuantizedTensor) or weight.transposed:
        weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        return torch.nn.functional.linear(plain[0], weight, plain[1])
    packed = weight.packed
    parts = [getattr(packed, name) for name in PARTS]
    return ops.quant_linear(plain[0], *parts, plain[1], packed.form.dtype.name, packed.shape[1], "fp32")


def _aten_linear(func: Any, args: Any, kwargs: Any) -> Any:
    return _linear(*args, **kwargs)


def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    left, right = args
    return _linear(left, right.t()) if _is_transpose(right) else NotImplemented


def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    bias, left, right = args
    if not _is_transpose(right) or kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return NotImplemented
    product = _linear(left, right.t())
    return product + (bias.dequantize() if isinstance(bias, QuantizedTensor) else bias)


def _is_transpose(tensor: object) -> bool:
    return isinstance(tensor, QuantizedTensor) and tensor.transposed


def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    table, ids = args[:2]
    if not isinstance(table, QuantizedTensor) or table.transposed or isinstance(ids, QuantizedTensor):
        return NotImplemented
    packed = table.packed
    return ops.quant_embedding(
        ids, *(getattr(packed, name) for name in PARTS), packed.form.dtype.name, packed.shape[1], table.dtype
    )


_KNOWN: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_TRANSPOSES, _transpose),
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.linear.default: _aten_linear,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.embedding.default: _embedding,
}


def _check_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise UnsupportedError if an operator would change a quantized tensor."""
    arguments = func._schema.arguments
    given = {**{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}
    for argument in arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(
            isinstance(leaf, QuantizedTensor) for leaf in pytree.tree_leaves(given.get(argument.name))
        ):
            _refuse(func._schema.name)


def _refuse(what: str) -> None:
    msg = (
        f"{what} would change a QuantizedTensor, which holds packed codes. Work on a copy, "
        "tensor.dequantize(), and quantize the result again."
    )
    raise UnsupportedError(msg)

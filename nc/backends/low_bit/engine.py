"""Which kernel computes which low-bit linear.

It is chosen from the rows of a backend by format, shape, activations and their number.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from nc.backends import AUTO, backend_names, get_backend, registered_backends
from nc.backends.base import check_available
from nc.backends.low_bit.choose import FLOATS, able, choice, compute, computed_as
from nc.errors import UnsupportedError
from nc.kernels.c_code.openmp import leave_threads_of_parent
from nc.kernels.low_bit.kernel import LowBitKernel, PackedLayout
from nc.nn import KernelChoice, QuantLinear
from nc.numerics.packed_weight import PackedWeight

#: One layer is packed by one thread; others wait for it.
_PACKING = threading.Lock()


@dataclass(slots=True)
class _Ready:
    """What an engine keeps of a layer between calls.

    Attributes:
        weight: the stored weight.
        stored: its tensors, each with its version.
        on_cpu: whether they are on the CPU.
        packed: layouts, by name of the kernel.
        chosen: kernels in the order of preference, by the dtype of activations.
    """

    weight: PackedWeight
    stored: tuple[tuple[torch.Tensor, int], ...]
    on_cpu: bool
    packed: dict[str, PackedLayout]
    chosen: dict[str, tuple[LowBitKernel, ...]]


@dataclass(frozen=True, slots=True)
class LowBitEngine:
    """Computes low-bit linears by the kernels of a backend.

    Attributes:
        name: of the backend, or "auto".
        kernels: its rows, the preferred ones first.
    """

    name: str
    kernels: tuple[LowBitKernel, ...]

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Another machine has other kernels: only the name is stored."""
        return engine, (self.name,)

    def linear(self, layer: QuantLinear, x: torch.Tensor) -> torch.Tensor | None:
        """See `nc.nn.LinearEngine`.

        The operator computes inputs that need gradients, are traced, are empty or are not on the CPU.

        It also rejects inputs of a wrong size: a kernel would read past their end.
        """
        if type(x) is not torch.Tensor or x.dtype not in FLOATS or x.device.type != "cpu" or not x.numel():
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return None
        if x.shape[-1:] != (layer.in_features,):
            return None
        if x.is_neg():  # `z.conj().imag`: kernels read the memory, which has the other sign
            x = x.resolve_neg()
        own = layer._parameters  # `layer.bias` takes longer: only where a parametrization gives it
        bias = own["bias"] if "bias" in own else layer.bias  # noqa: SIM401 - `get` would read both
        trained = x.requires_grad or (bias is not None and bias.requires_grad)
        if (trained and torch.is_grad_enabled()) or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return None
        ready = self._ready(layer)
        if not ready.on_cpu:
            return None
        activations = computed_as(layer.act_dtype, x.dtype)
        kernels = ready.chosen.get(activations)
        if kernels is None:
            kernels = ready.chosen[activations] = able(
                self.kernels, layer.form, (layer.out_features, layer.in_features), activations
            )
        rows = x.numel() // x.shape[-1]
        for kernel in kernels:  # `next` of a generator takes longer
            if rows <= kernel.max_rows:
                return compute(x, ready.weight, bias, layer.act_dtype, kernel, _layout(kernel, ready))
        return None

    def kernels_of(self, layer: QuantLinear, dtype: torch.dtype) -> KernelChoice:
        """See `nc.nn.LinearEngine`."""
        return choice(
            self.kernels,
            layer.form,
            (layer.out_features, layer.in_features),
            computed_as(layer.act_dtype, dtype),
        )

    def packed(self, layer: QuantLinear, kernel: LowBitKernel) -> PackedLayout:
        """Return what a kernel packed of a layer's weight, packed now if need be; the layer keeps it."""
        return _layout(kernel, self._ready(layer))

    def _ready(self, layer: QuantLinear) -> _Ready:
        ready = layer.packed_for_engine
        if isinstance(ready, _Ready) and _is_of(ready, layer):
            return ready
        with _PACKING:
            ready = layer.packed_for_engine  # another thread may have been faster
            if not isinstance(ready, _Ready) or not _is_of(ready, layer):
                stored = _stored(layer)
                on_cpu = all(tensor.device.type == "cpu" for tensor in stored)
                ready = _Ready(layer.packed, tuple((t, _version(t)) for t in stored), on_cpu, {}, {})
                layer.packed_for_engine = ready
        return ready


def engine(name: str = "auto") -> LowBitEngine | None:
    """Return the low-bit engine of a backend; None for the reference.

    Args:
        name: of a backend; "auto": for each layer the first kernel of all backends that can run here,
            registered ones first.

    Raises:
        UnknownBackendError: no backend has that name.
        BackendUnavailableError: it cannot run here.
        UnsupportedError: it has no kernel for low-bit weights.
    """
    if name == "reference":
        return None
    if name == "auto":
        names = (*registered_backends(), *AUTO)
        found = [
            kernel
            for each in names
            if not get_backend(each).why_unavailable()
            for kernel in get_backend(each).low_bit_kernels()
        ]
        return LowBitEngine(name, tuple(found)) if any(not kernel.refused for kernel in found) else None
    backend = get_backend(name)
    kernels = backend.low_bit_kernels()
    if all(kernel.refused for kernel in kernels):
        why = "".join(f" {kernel.what}: {kernel.refused}." for kernel in kernels)
        msg = f"Backend {name!r} has no kernel for low-bit weights.{why} Use {_named_for_users()}."
        raise UnsupportedError(msg)
    check_available(backend)
    return LowBitEngine(name, kernels)


def _named_for_users() -> str:
    """Return what users can ask for, as text.

    It is "auto", the backends with kernels for low-bit weights, and the reference.
    """
    computing = [
        name
        for name in backend_names()
        if any(not kernel.refused for kernel in get_backend(name).low_bit_kernels())
    ]
    *names, last = (f'"{name}"' for name in ("auto", *computing, "reference"))
    return f"{', '.join(names)} or {last}"


def set_backend(model: torch.nn.Module, name: str = "auto") -> torch.nn.Module:
    """Let a backend compute the low-bit linears of a model; layouts of another one are freed.

    Weights are packed in the first call.

    Args:
        model: changed in place, and returned.
        name: of a backend, or "auto", see `engine`.

    Raises:
        UnknownBackendError, BackendUnavailableError, UnsupportedError: see `engine`.
    """
    found = engine(name)
    leave_threads_of_parent()  # which notes that this process has computed
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.engine = found
            module.packed_for_engine = None
    return model


def _layout(kernel: LowBitKernel, ready: _Ready) -> PackedLayout:
    """Return what the kernel packed; it does so once per layer, whatever threads call."""
    layout = ready.packed.get(kernel.name)
    if layout is None:
        with _PACKING:
            layout = ready.packed.get(kernel.name)
            if layout is None:
                leave_threads_of_parent()
                layout = ready.packed[kernel.name] = kernel.pack(ready.weight)
    return layout


def _stored(layer: QuantLinear) -> list[torch.Tensor]:
    return [t for t in layer._buffers.values() if t is not None]  # `buffers()` takes longer than some kernels


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # torch's only counter of changes in place


def _is_of(ready: _Ready, layer: QuantLinear) -> bool:
    """Return whether the tensors of a layer are the ones that were packed, unchanged.

    This runs in each call: a loop takes half as long as `all` of a generator.
    """
    now = _stored(layer)
    if len(now) != len(ready.stored):
        return False
    for tensor, (before, version) in zip(now, ready.stored, strict=True):
        if tensor is not before or (version >= 0 and tensor._version != version):  # as above
            return False
    return True

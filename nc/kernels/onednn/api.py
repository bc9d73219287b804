"""oneDNN's C functions with their types, from any library that has them (oneDNN 3.x)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from nc.errors import BackendError

_P, _I, _U, _F, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_float, ctypes.c_size_t
_OUT = ctypes.POINTER(ctypes.c_void_p)

#: Argument types of the functions that return a status.
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "engine_create": (_OUT, _I, _Z),
    "stream_create": (_OUT, _P, _U),
    "memory_desc_create_with_strides": (_OUT, _I, _P, _I, _P),
    "memory_desc_create_with_tag": (_OUT, _I, _P, _I, _I),
    "memory_create": (_OUT, _P, _P, _P),
    "memory_set_data_handle": (_P, _P),
    "primitive_create": (_OUT, _P),
    "primitive_execute": (_P, _P, _I, _P),
    "primitive_desc_query": (_P, _I, _I, _P),
    "primitive_desc_next_impl": (_P,),
    "primitive_attr_create": (_OUT,),
    "primitive_attr_set_scratchpad_mode": (_P, _I),
    "primitive_attr_set_scales_mask": (_P, _I, _I),
    "primitive_attr_set_scales": (_P, _I, _I, _I, _P, _I),
    "primitive_attr_set_zero_points_mask": (_P, _I, _I),
    "primitive_attr_set_zero_points": (_P, _I, _I, _I, _P, _I),
    "primitive_attr_set_fpmath_mode_v2": (_P, _I, _I),
    "primitive_attr_set_post_ops": (_P, _P),
    "post_ops_create": (_OUT,),
    "post_ops_append_sum": (_P, _F, ctypes.c_int32, _I),
    "post_ops_append_eltwise": (_P, _I, _F, _F),
    "post_ops_append_binary": (_P, _I, _P),
    "post_ops_append_prelu": (_P, _I),
    "reorder_primitive_desc_create": (_OUT, _P, _P, _P, _P, _P),
    "matmul_primitive_desc_create": (_OUT, _P, _P, _P, _P, _P, _P),
    "convolution_forward_primitive_desc_create": (_OUT, _P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P, _P),
    "deconvolution_forward_primitive_desc_create": (_OUT, _P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P, _P),
    "layer_normalization_forward_primitive_desc_create": (_OUT, _P, _I, _P, _P, _P, _F, _U, _P),
    "softmax_forward_primitive_desc_create": (_OUT, _P, _I, _I, _P, _P, _I, _P),
    "pooling_forward_primitive_desc_create": (_OUT, _P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P),
    "binary_primitive_desc_create": (_OUT, _P, _I, _P, _P, _P, _P),
    "eltwise_forward_primitive_desc_create": (_OUT, _P, _I, _I, _P, _P, _F, _F, _P),
    "concat_primitive_desc_create": (_OUT, _P, _P, _I, _I, _P, _P),
    "memory_desc_destroy": (_P,),
    "memory_destroy": (_P,),
    "primitive_destroy": (_P,),
    "primitive_desc_destroy": (_P,),
    "primitive_attr_destroy": (_P,),
    "post_ops_destroy": (_P,),
    "stream_destroy": (_P,),
    "engine_destroy": (_P,),
}
#: Result and argument types of the others.
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "memory_desc_get_size": (_Z, _P),
    "memory_desc_equal": (_I, _P, _P),
    "primitive_desc_query_md": (_P, _P, _I, _I),
    "version": (_P,),
}
#: Newer than 3.0, or needed by some layers only: a library without them is of use all the same.
OPTIONAL = frozenset(
    {"primitive_attr_set_scales", "primitive_attr_set_zero_points", "primitive_attr_set_fpmath_mode_v2"}
)
NEEDED = (frozenset(SIGNATURES) | frozenset(OTHERS)) - OPTIONAL
#: dnnl_status_t
_STATUS = (
    "success",
    "out of memory",
    "invalid arguments",
    "unimplemented",
    "last implementation reached",
    "runtime error",
    "not required",
)
_UNIMPLEMENTED = 3


class Unimplemented(BackendError):
    """oneDNN has no kernel for what was asked."""


class Handle:
    """An object of oneDNN's, destroyed with the last reference to it."""

    __slots__ = ("_as_parameter_", "_destroy")

    def __init__(self, pointer: int, destroy: Callable[[int], object]) -> None:
        self._as_parameter_ = pointer
        self._destroy = destroy

    @property
    def pointer(self) -> int:
        """Its address."""
        return self._as_parameter_

    def __del__(self) -> None:
        self._destroy(self._as_parameter_)


class Library:
    """The functions of one oneDNN library.

    Args:
        addresses: address of every function, by its name in C.

    Raises:
        BackendError: it lacks functions that are needed, or is not version 3.
    """

    def __init__(self, addresses: Mapping[str, int]) -> None:
        missing = sorted(name for name in NEEDED if f"dnnl_{name}" not in addresses)
        if missing:
            msg = (
                f"it lacks dnnl_{missing[0]} and {len(missing) - 1} more functions"
                if len(missing) > 1
                else f"it lacks dnnl_{missing[0]}"
            )
            raise BackendError(msg)
        self.addresses = addresses
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, types in SIGNATURES.items():
            if f"dnnl_{name}" in addresses:
                self._functions[name] = ctypes.CFUNCTYPE(_I, *types)(addresses[f"dnnl_{name}"])
        for name, (result, *arguments) in OTHERS.items():
            self._functions[name] = ctypes.CFUNCTYPE(result, *arguments)(addresses[f"dnnl_{name}"])
        numbers = ctypes.cast(self._functions["version"](), ctypes.POINTER(_I * 3)).contents
        self.version: tuple[int, int, int] = (numbers[0], numbers[1], numbers[2])
        if self.version[0] != 3:
            msg = f"it is oneDNN {'.'.join(map(str, self.version))}, and only 3.x is known"
            raise BackendError(msg)

    def has(self, name: str) -> bool:
        """Return whether the library has an optional function."""
        return name in self._functions

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function itself."""
        return self._functions[name]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Raises:
            Unimplemented: there is no kernel for it.
            BackendError: it failed otherwise.
        """
        status = self._functions[name](*arguments)
        if status:
            kind = Unimplemented if status == _UNIMPLEMENTED else BackendError
            msg = f"oneDNN's dnnl_{name} says: {_STATUS[status] if 0 <= status < len(_STATUS) else status}"
            raise kind(msg)

    def advance(self, desc: Handle) -> bool:
        """Let a primitive descriptor be of the library's next choice of a kernel; False if there is none."""
        return not self._functions["primitive_desc_next_impl"](desc)

    def query(self, name: str, *arguments: Any) -> Any:
        """Return the result of a function that returns no status."""
        return self._functions[name](*arguments)

    def create(self, name: str, *arguments: Any, destroy: str) -> Handle:
        """Return a new object.

        Args:
            name: the function that makes it and writes its address to its first argument.
            arguments: the others.
            destroy: the function that ends its life.

        Raises:
            Unimplemented, BackendError: see `call`.
        """
        pointer = ctypes.c_void_p()
        self.call(name, ctypes.byref(pointer), *arguments)
        assert pointer.value is not None, name
        return Handle(pointer.value, self._functions[destroy])

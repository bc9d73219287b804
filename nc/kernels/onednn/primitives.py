"""oneDNN primitives as values: made once, with everything that a call needs but the addresses of its tensors.

The numbers are those of oneDNN's C headers (dnnl_types.h, version 3); names say which.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch

from nc.kernels.onednn.api import Handle, Library, Unimplemented
from nc.kernels.onednn.descriptions import (
    BIAS,
    BINARY,
    DST,
    DTYPES,
    ELTWISE,
    MULTIPLE_SRC,
    POOLING,
    POST_OP,
    SCALE,
    SCRATCHPAD,
    SHIFT,
    SRC,
    SRC_1,
    WEIGHTS,
    Attributes,
    BinaryOp,
    Desc,
    Eltwise,
    Geometry,
    Prelu,
    Sum,
)

_P = ParamSpec("_P")

_FORWARD_INFERENCE, _ANY, _USER_SCRATCHPAD, _CPU = 96, 1, 1, 1
_CONVOLUTION_DIRECT, _DECONVOLUTION_DIRECT, _SOFTMAX = 1, 10, 196608
_USE_SCALE_AND_SHIFT = 6
_IMPLEMENTATION, _WEIGHTS_MD, _SCRATCHPAD_MD = 8, 131, 136
_MAX_DIMS = 12
#: Mask of what has a number for each channel.
_CHANNELS = 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A memory descriptor of oneDNN's, also of layouts that strides can't describe.

    Attributes:
        handle: the descriptor.
        size: bytes.
        dtype: of its elements; None for a scratchpad.
        desc: how strides describe it; None where they can't.
    """

    handle: Handle
    size: int
    dtype: torch.dtype | None
    desc: Desc | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Primitive:
    """A kernel, ready to be called.

    Attributes:
        handle: the primitive.
        kind: what it computes: "matmul", "convolution", "reorder", ...
        kernel: oneDNN's name of the implementation, with its instruction set.
        layouts: the memory layout of each tensor argument.
        made_by: the method of `Maker` that made it, with its arguments by position and by name.
    """

    handle: Handle
    kind: str
    kernel: str
    layouts: Mapping[int, Layout]
    made_by: tuple[str, tuple[Any, ...], Mapping[str, Any]] = ("", (), {})

    @property
    def is_reference(self) -> bool:
        """Whether it is plain C++, which oneDNN has for completeness and not for speed."""
        return self.kernel.startswith("ref")


def _shared(make: Callable[_P, Primitive]) -> Callable[_P, Primitive]:
    """Let a method of `Maker` give the primitive that it made of equal arguments, if the maker keeps them."""

    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> Primitive:
        maker: Any = args[0]
        kept: dict[object, Primitive] | None = maker.kept
        key = make.__name__, args[1:], tuple(kwargs.items())
        found = None if kept is None else kept.get(key)
        if found is None:
            found = dataclasses.replace(make(*args, **kwargs), made_by=(make.__name__, args[1:], kwargs))
            if kept is not None:
                kept[key] = found
        return found

    return made


class Maker:
    """Makes descriptors and primitives with one library.

    Args:
        library: where the functions come from.

    Attributes:
        kept: primitives by what they were made of; None: each call makes a new one.
        verdicts: whether kernels give right sums, by what was tried; see `nc.kernels.onednn.trials`.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.engine = library.create("engine_create", _CPU, 0, destroy="engine_destroy")
        self._layouts: dict[Desc, Layout] = {}
        self.kept: dict[object, Primitive] | None = None
        self.verdicts: dict[object, bool] = {}

    def keeping(self) -> Maker:
        """Return a maker for one plan, made on one number of threads.

        It makes equal primitives once: layers of a model are often alike.
        """
        maker = copy.copy(self)
        maker.kept = {}
        return maker

    def stream(self) -> Handle:
        """Return a queue of calls; one per thread."""
        return self.library.create("stream_create", self.engine, 1, destroy="stream_destroy")

    def memory(self, layout: Layout, address: int) -> Handle:
        """Return a tensor argument: memory at an address."""
        return self.library.create(
            "memory_create", layout.handle, self.engine, address, destroy="memory_destroy"
        )

    def layout(self, desc: Desc, *, channels_last: bool = False) -> Layout:
        """Return the descriptor of a tensor: `desc.plain(channels_last=...)`."""
        desc = desc.plain(channels_last=channels_last)
        found = self._layouts.get(desc)
        if found is None:
            arguments = len(desc.sizes), _dims(desc.sizes), DTYPES[desc.dtype], _dims(desc.strides)
            handle = self.library.create(
                "memory_desc_create_with_strides", *arguments, destroy="memory_desc_destroy"
            )
            found = dataclasses.replace(self._sized(handle, desc.dtype), desc=desc)
            self._layouts[desc] = found
        return found

    @_shared
    def reorder(self, source: Layout, target: Layout, attributes: Attributes | None = None) -> Primitive:
        """Copy with another layout or dtype."""
        with_attributes = self._attributes(attributes or Attributes())
        arguments = source.handle, self.engine, target.handle, self.engine, with_attributes
        return self._primitive(
            "reorder_primitive_desc_create", arguments, {SRC: source, DST: target}, attributes
        )

    @_shared
    def matmul(
        self,
        source: Desc,
        weights: Desc | Layout,
        bias: Desc | None,
        target: Desc,
        attributes: Attributes,
        *,
        keep: bool = False,
    ) -> Primitive:
        """Return the primitive that computes `target = source @ weights + bias`.

        Args:
            source: [..., M, K].
            weights: [..., K, N]; a `Layout` is taken as it is.
            bias: [..., 1, N].
            target: [..., M, N].
            attributes: scales, zero points and what follows.
            keep: keep the layout of `weights`; else the kernel chooses it, see `layouts[WEIGHTS]`.
        """
        tensors = {SRC: self.layout(source), DST: self.layout(target)} | (
            {BIAS: self.layout(bias)} if bias is not None else {}
        )
        given = self._weights(weights, keep=keep)
        bias_handle = tensors[BIAS].handle if bias is not None else None
        arguments = (
            self.engine,
            tensors[SRC].handle,
            given.handle,
            bias_handle,
            tensors[DST].handle,
            self._attributes(attributes),
        )
        return self._primitive(
            "matmul_primitive_desc_create", arguments, tensors, attributes, weights=given.dtype
        )

    @_shared
    def convolution(
        self,
        source: Desc,
        weights: Desc | Layout,
        bias: Desc | None,
        target: Desc,
        geometry: Geometry,
        attributes: Attributes,
        *,
        avoid: frozenset[str] = frozenset(),
        amx: bool = True,
    ) -> Primitive:
        """Return a convolution, or a transposed one.

        Plans ask `nc.kernels.onednn.trials` for one, because some kernels give wrong sums.

        Args:
            source: [N, C, ...].
            weights: [out, in, ...] or, with groups, [groups, out / groups, in / groups, ...].
            bias: [out].
            target: [N, out, ...].
            geometry: strides, pads and dilations.
            attributes: scales, zero points and what follows.
            avoid: names of kernels that are not to be taken.
            amx: whether a kernel of AMX may be taken.

        Raises:
            Unimplemented: there is no other kernel.
        """
        images = {SRC: self.layout(source, channels_last=True), DST: self.layout(target, channels_last=True)}
        tensors = images | ({BIAS: self.layout(bias)} if bias is not None else {})
        given = self._weights(weights, keep=False)
        kind, algorithm = (
            ("deconvolution", _DECONVOLUTION_DIRECT)
            if geometry.transposed
            else ("convolution", _CONVOLUTION_DIRECT)
        )
        arguments = (
            self.engine,
            _FORWARD_INFERENCE,
            algorithm,
            tensors[SRC].handle,
            given.handle,
            tensors[BIAS].handle if bias is not None else None,
            tensors[DST].handle,
            _dims(geometry.strides),
            _dims([d - 1 for d in geometry.dilations]),
            _dims(geometry.before),
            _dims(geometry.after),
            self._attributes(attributes),
        )
        # AMX multiplies 64 values at once, a window of an image with three colours has 27: there VNNI is 1.2
        # to 2.3 times as fast
        few = source.sizes[1] <= 4 and max(geometry.window, default=4) <= 3
        create, without = f"{kind}_forward_primitive_desc_create", "amx" if few else ""
        return self._primitive(
            create, arguments, tensors, attributes, weights=given.dtype, without=without, avoid=avoid, amx=amx
        )

    @_shared
    def layer_norm(self, source: Desc, target: Desc, epsilon: float, attributes: Attributes) -> Primitive:
        """Over the last dimension, with `SCALE` and `SHIFT` of its size."""
        size = Desc.dense(source.sizes[-1:], torch.float32)
        tensors = {
            SRC: self.layout(source),
            DST: self.layout(target),
            SCALE: self.layout(size),
            SHIFT: self.layout(size),
        }
        handles = tensors[SRC].handle, tensors[DST].handle, None
        arguments = (
            self.engine,
            _FORWARD_INFERENCE,
            *handles,
            epsilon,
            _USE_SCALE_AND_SHIFT,
            self._attributes(attributes),
        )
        return self._primitive(
            "layer_normalization_forward_primitive_desc_create", arguments, tensors, attributes
        )

    @_shared
    def softmax(self, source: Desc, target: Desc, axis: int, attributes: Attributes) -> Primitive:
        """Along one dimension."""
        tensors = {SRC: self.layout(source), DST: self.layout(target)}
        handles = tensors[SRC].handle, tensors[DST].handle
        arguments = (self.engine, _FORWARD_INFERENCE, _SOFTMAX, *handles, axis, self._attributes(attributes))
        return self._primitive("softmax_forward_primitive_desc_create", arguments, tensors, attributes)

    @_shared
    def pooling(
        self, name: str, source: Desc, target: Desc, kernel: tuple[int, ...], geometry: Geometry
    ) -> Primitive:
        """Maximum or mean of windows; `name` is one of `POOLING`."""
        tensors = {SRC: self.layout(source, channels_last=True), DST: self.layout(target, channels_last=True)}
        dilations = _dims([d - 1 for d in geometry.dilations])
        sizes = (
            _dims(geometry.strides),
            _dims(kernel),
            dilations,
            _dims(geometry.before),
            _dims(geometry.after),
        )
        handles = tensors[SRC].handle, tensors[DST].handle
        arguments = (
            self.engine,
            _FORWARD_INFERENCE,
            POOLING[name],
            *handles,
            *sizes,
            self._attributes(Attributes()),
        )
        return self._primitive("pooling_forward_primitive_desc_create", arguments, tensors)

    @_shared
    def eltwise(self, operation: Eltwise, source: Desc, target: Desc, attributes: Attributes) -> Primitive:
        """Return a function of each element."""
        tensors = {SRC: self.layout(source), DST: self.layout(target)}
        handles = tensors[SRC].handle, tensors[DST].handle
        numbers = operation.alpha, operation.beta, self._attributes(attributes)
        arguments = (self.engine, _FORWARD_INFERENCE, ELTWISE[operation.name], *handles, *numbers)
        return self._primitive("eltwise_forward_primitive_desc_create", arguments, tensors, attributes)

    @_shared
    def binary(self, name: str, first: Desc, second: Desc, target: Desc, attributes: Attributes) -> Primitive:
        """Return an operation of two tensors, the second of which may have size 1 where the first has more.

        `name` is one of `BINARY`.
        """
        tensors = {SRC: self.layout(first), SRC_1: self.layout(second), DST: self.layout(target)}
        handles = tensors[SRC].handle, tensors[SRC_1].handle, tensors[DST].handle
        arguments = (self.engine, BINARY[name], *handles, self._attributes(attributes))
        return self._primitive("binary_primitive_desc_create", arguments, tensors, attributes)

    @_shared
    def concat(self, sources: tuple[Desc, ...], target: Desc, axis: int) -> Primitive:
        """Concatenate tensors along a dimension.

        Arguments are `MULTIPLE_SRC`, `MULTIPLE_SRC + 1`, ...
        """
        tensors = {MULTIPLE_SRC + i: self.layout(desc) for i, desc in enumerate(sources)} | {
            DST: self.layout(target)
        }
        pointers = (ctypes.c_void_p * len(sources))(
            *(tensors[MULTIPLE_SRC + i].handle.pointer for i in range(len(sources)))
        )
        arguments = (
            self.engine,
            tensors[DST].handle,
            len(sources),
            axis,
            pointers,
            self._attributes(Attributes()),
        )
        return self._primitive("concat_primitive_desc_create", arguments, tensors)

    def _weights(self, weights: Desc | Layout, *, keep: bool) -> Layout:
        if isinstance(weights, Layout):
            return weights
        if keep:
            return self.layout(weights)
        arguments = len(weights.sizes), _dims(weights.sizes), DTYPES[weights.dtype], _ANY
        handle = self.library.create("memory_desc_create_with_tag", *arguments, destroy="memory_desc_destroy")
        return Layout(handle, 0, weights.dtype)

    def _sized(self, handle: Handle, dtype: torch.dtype | None) -> Layout:
        return Layout(handle, self.library.query("memory_desc_get_size", handle), dtype)

    def _attributes(self, attributes: Attributes) -> Handle:
        library = self.library
        handle = library.create("primitive_attr_create", destroy="primitive_attr_destroy")
        library.call("primitive_attr_set_scratchpad_mode", handle, _USER_SCRATCHPAD)
        for argument, mask in attributes.scales.items():
            library.call("primitive_attr_set_scales_mask", handle, argument, mask)
        for argument, mask in attributes.zero_points.items():
            library.call("primitive_attr_set_zero_points_mask", handle, argument, mask)
        if attributes.post_ops:
            chain = library.create("post_ops_create", destroy="post_ops_destroy")
            for each in attributes.post_ops:
                if isinstance(each, Sum):
                    dtype = 0 if each.dtype is None else DTYPES[each.dtype]
                    library.call("post_ops_append_sum", chain, each.scale, each.zero_point, dtype)
                elif isinstance(each, Eltwise):
                    library.call("post_ops_append_eltwise", chain, ELTWISE[each.name], each.alpha, each.beta)
                elif isinstance(each, Prelu):
                    library.call("post_ops_append_prelu", chain, _CHANNELS)
                else:
                    library.call(
                        "post_ops_append_binary", chain, BINARY[each.name], self.layout(each.other).handle
                    )
            library.call("primitive_attr_set_post_ops", handle, chain)
        return handle

    def _primitive(
        self,
        create: str,
        arguments: tuple[object, ...],
        tensors: Mapping[int, Layout],
        attributes: Attributes | None = None,
        *,
        weights: torch.dtype | None = None,
        without: str = "",
        avoid: frozenset[str] = frozenset(),
        amx: bool = True,
    ) -> Primitive:
        """Return a primitive of the library's first choice of a kernel.

        Args:
            create: the function that makes its descriptor.
            arguments: of that function.
            tensors: layouts of its arguments.
            attributes: what modifies it.
            weights: dtype of its weights, if it has some.
            without: a part of names of kernels; another one is taken if it is not plain C++.
            avoid: names of kernels that are not taken at all.
            amx: whether one of AMX may be taken at all.
        """

        def first(fits: Callable[[str], bool]) -> tuple[Handle, str] | None:
            desc = self.library.create(create, *arguments, destroy="primitive_desc_destroy")
            while not fits(self._kernel(desc)):
                if not self.library.advance(desc):
                    return None
            return desc, self._kernel(desc)

        def is_allowed(kernel: str) -> bool:
            return kernel not in avoid and (amx or "amx" not in kernel)

        chosen = first(is_allowed)
        if chosen is None:
            refused = sorted(avoid) + ["those of AMX"] * (not amx)
            msg = f"oneDNN has no other kernel than {', '.join(refused)}, which are wrong here"
            raise Unimplemented(msg)
        if without and without in chosen[1]:
            other = first(lambda name: is_allowed(name) and without not in name)
            chosen = other if other is not None and not other[1].startswith("ref") else chosen
        desc, kernel = chosen
        layouts = dict(tensors)
        for index, each in enumerate(attributes.post_ops if attributes else ()):
            if isinstance(each, BinaryOp):
                layouts[POST_OP * (index + 1) | SRC_1] = self.layout(each.other)
            elif isinstance(each, Prelu):
                layouts[POST_OP * (index + 1) | WEIGHTS] = self.layout(each.slopes)
        if weights is not None:
            layouts[WEIGHTS] = self._queried(desc, _WEIGHTS_MD, weights)
        scratchpad = self._queried(desc, _SCRATCHPAD_MD, None)
        if scratchpad.size:
            layouts[SCRATCHPAD] = scratchpad
        kind = create.partition("_primitive_desc_")[0].removesuffix("_forward")
        return Primitive(
            self.library.create("primitive_create", desc, destroy="primitive_destroy"), kind, kernel, layouts
        )

    def _kernel(self, desc: Handle) -> str:
        name = ctypes.c_char_p()
        self.library.call("primitive_desc_query", desc, _IMPLEMENTATION, 0, ctypes.byref(name))
        return (name.value or b"").decode()

    def _queried(self, desc: Handle, query: int, dtype: torch.dtype | None) -> Layout:
        """Return a layout that belongs to a primitive descriptor, which is kept as long as it."""
        pointer = self.library.query("primitive_desc_query_md", desc, query, 0)
        return self._sized(Handle(pointer, lambda _, owner=desc: None), dtype)  # type: ignore[misc] # the default keeps the owner


def _dims(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * _MAX_DIMS)(*values)

"""Calls of primitives: argument lists with addresses in them, and what runs a list of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from nc.onednn.api import Handle
from nc.onednn.primitives import DST, SRC, Attributes, Desc, Layout, Maker, Primitive


class Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = [("argument", ctypes.c_int), ("memory", ctypes.c_void_p)]  # noqa: RUF012


def arguments(memories: Mapping[int, Handle]) -> ctypes.Array[Argument]:
    """The argument list of a call; it does not keep the memories alive."""
    return (Argument * len(memories))(*(Argument(key, value.pointer) for key, value in memories.items()))


def run_once(maker: Maker, primitive: Primitive, tensors: Mapping[int, torch.Tensor]) -> None:
    """Call a primitive once, with a stream and a scratchpad of its own; addresses are read from the tensors.

    Raises:
        BackendError: the call failed.
    """
    stream = maker.stream()
    given = dict(tensors)
    keep = []
    for key, layout in primitive.layouts.items():
        if key not in given:
            given[key] = torch.empty(layout.size, dtype=torch.uint8)
    memories = {}
    for key, tensor in given.items():
        layout_of = primitive.layouts.get(key) or maker.layout(Desc.of(tensor))
        keep.append(layout_of)
        memories[key] = maker.memory(layout_of, tensor.data_ptr())
    maker.library.call("primitive_execute", primitive.handle, stream, len(memories), arguments(memories))


def packed(maker: Maker, tensor: torch.Tensor, desc: Desc, layout: Layout) -> torch.Tensor:
    """Bytes of a tensor in another layout.

    Args:
        maker: of the library.
        tensor: the values.
        desc: how to read them, which need not be the tensor's own shape.
        layout: the layout wanted.
    """
    result = torch.empty(layout.size, dtype=torch.uint8)
    # of a transposed matrix oneDNN has no fast reorder: 10 ms for 3072 x 768 codes, where a copy and a reorder of that take 1.4 ms
    dense = tensor.as_strided(desc.sizes, desc.strides).contiguous()
    primitive = maker.reorder(maker.layout(Desc.of(dense)), layout, Attributes())
    run_once(maker, primitive, {SRC: dense, DST: result})
    return result

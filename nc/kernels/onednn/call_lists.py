"""Calls of primitives: argument lists with addresses in them, and what runs a list of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from nc.kernels.onednn.api import Handle
from nc.kernels.onednn.descriptions import DST, SRC, Desc
from nc.kernels.onednn.primitives import Layout, Maker, Primitive


class ExecArgument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = [("argument", ctypes.c_int), ("memory", ctypes.c_void_p)]


def arguments(memories: Mapping[int, Handle]) -> ctypes.Array[ExecArgument]:
    """Return the argument list of a call; it does not keep the memories alive."""
    return (ExecArgument * len(memories))(
        *(ExecArgument(key, value.pointer) for key, value in memories.items())
    )


def run_once(maker: Maker, primitive: Primitive, tensors: Mapping[int, torch.Tensor]) -> None:
    """Call a primitive once with its own stream and scratchpad; addresses are read from the tensors.

    Raises:
        BackendError: the call failed.
    """
    stream = maker.stream()
    given = dict(tensors)
    keep = []
    for key, layout in primitive.layouts.items():
        if key not in given:
            given[key] = torch.empty(layout.size, dtype=torch.uint8, device="cpu")
    memories = {}
    for key, tensor in given.items():
        layout_of = primitive.layouts.get(key) or maker.layout(Desc.of(tensor))
        keep.append(layout_of)
        memories[key] = maker.memory(layout_of, tensor.data_ptr())
    maker.library.call("primitive_execute", primitive.handle, stream, len(memories), arguments(memories))


class Scratch:
    """Memory that is used again and again: the system needs longer to give new memory than a copy takes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, size: int) -> torch.Tensor:
        """Return a uint8 tensor of `size` bytes; the next call returns the same memory."""
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size]


def packed(maker: Maker, tensor: torch.Tensor, desc: Desc, layout: Layout, scratch: Scratch) -> torch.Tensor:
    """Bytes of a tensor in another layout.

    Args:
        maker: of the library.
        tensor: the values.
        desc: how to read them, which need not be the tensor's own shape.
        layout: the layout wanted.
        scratch: memory to work in.
    """
    result = torch.empty(layout.size, dtype=torch.uint8, device="cpu")
    dense = Desc.dense(desc.sizes, desc.dtype)
    if desc != dense:
        # oneDNN packs a transposed matrix slowly: 10 ms for 3072 x 768 codes, and 0.8 ms by way of one that
        # is not
        turned = scratch.of(maker.layout(dense).size)
        run_once(maker, maker.reorder(maker.layout(desc), maker.layout(dense)), {SRC: tensor, DST: turned})
        tensor = turned
    run_once(maker, maker.reorder(maker.layout(dense), layout), {SRC: tensor, DST: result})
    return result

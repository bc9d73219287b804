"""Calibration on several machines: under `torch.distributed`, `convert` combines the statistics of all ranks.

Ranks send statistics as bytes in the file format. Nothing is pickled. Every rank merges them in the order of the ranks.
The statistics of a rank itself do not change: calibration can continue, and a second `convert` counts nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nc._version import __version__
from nc.calibration.statistics import Collected, Statistics, decode, encode
from nc.errors import StateError

_DIGEST = 32
_SIZE = 8


def gather(statistics: Statistics, identity: Callable[[], Mapping[str, bytes]]) -> Collected:
    """The statistics of all ranks of the default process group, merged in the order of the ranks. Without a group, those of this process.

    Every rank must call it. The group needs a backend for tensors on the CPU: gloo or mpi.

    Args:
        statistics: of this rank; they do not change.
        identity: name → bytes that must be the same on every rank, beside the model. It is called in a group only.

    Raises:
        StateError: a rank differs in something that must be the same (raised on every rank), or the group fails (a rank ended).
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return statistics.collected()
    same = {"version of nc or torch": f"{__version__} {torch.__version__}".encode(), **statistics.identity(), **identity()}
    data = encode(statistics.collected())
    sizes = _agree(same, len(data))
    return statistics.combined(_from_each(data, sizes))


def _agree(same: Mapping[str, bytes], size: int) -> list[int]:
    """The `size` of every rank; raises StateError if the ranks differ in `same`."""
    digests = b"".join(hashlib.sha256(value).digest() for value in same.values())
    mine = _tensor(digests + size.to_bytes(_SIZE, "little"))
    cards = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    _collective(dist.all_gather, cards, mine)
    read = [bytes(card.tolist()) for card in cards]
    for i, name in enumerate(same):
        part = slice(i * _DIGEST, (i + 1) * _DIGEST)
        others = [rank for rank, card in enumerate(read) if card[part] != read[0][part]]
        if others:
            ranks = f"Rank {others[0]} has" if len(others) == 1 else f"Ranks {', '.join(map(str, others))} have"
            msg = (
                f"{ranks} another {name} than rank 0, so that there is no common model. Give prepare() the same model, with the same "
                "weights, configuration and example_inputs, on every rank; only the calibration data differs."
            )
            raise StateError(msg)
    return [int.from_bytes(card[-_SIZE:], "little") for card in cards]


def _from_each(data: bytes, sizes: list[int]) -> Iterator[tuple[str, Collected]]:
    """The statistics of each rank; only those of one rank are in memory at a time."""
    for rank, size in enumerate(sizes):
        sent = _tensor(data) if rank == dist.get_rank() else torch.empty(size, dtype=torch.uint8)
        _collective(dist.broadcast, sent, rank)
        yield f"rank {rank}", decode(sent.numpy().tobytes(), f"rank {rank}")


def _collective(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except RuntimeError as error:
        msg = (
            f"The ranks could not exchange their statistics ({error}). Every rank of the process group must call convert(), equally often, "
            "and the group needs a backend for tensors on the CPU, such as gloo."
        )
        raise StateError(msg) from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

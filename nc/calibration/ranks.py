"""The processes ("ranks") of a `torch.distributed` group.

It has what they must agree on, and what they send each other. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from nc._version import __version__
from nc.errors import StateError
from nc.text.json_text import parsed


def _import_without_group() -> None:
    """Import the functions whose default argument is the default process group of the moment of the import.

    torch.export imports them. A group that exists by then would outlive destroy_process_group(), and gloo's
    threads can abort the process while Python shuts down. None is the same argument, as without a group.
    """
    import torch.distributed.nn.functional as functions

    for function in vars(functions).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__
            )


if dist.is_available():
    _import_without_group()

_DIGEST = 32


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others; one that is alone exchanges nothing.

    Every method must be called by all ranks, in the same order. The group needs a backend for tensors on the
    CPU: gloo or mpi. Every method raises StateError where the group fails, e.g. because a rank ended.

    Attributes:
        rank: of this process.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the default process group; without a group, this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def alone(self) -> bool:
        """There is no other one."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def agree(self, same: Callable[[], Mapping[str, bytes]]) -> None:
        """Compare what must be the same on every rank, beside the versions of nc and torch.

        Args:
            same: name → bytes; called only where there are other ranks.

        Raises:
            StateError: on every rank, if one differs; names what.
        """
        if self.alone:
            return
        values = {"version of nc or torch": f"{__version__} {torch.__version__}".encode(), **same()}
        cards = self._cards(b"".join(hashlib.sha256(value).digest() for value in values.values()))
        for i, name in enumerate(values):
            part = slice(i * _DIGEST, (i + 1) * _DIGEST)
            others = [rank for rank, card in enumerate(cards) if card[part] != cards[0][part]]
            if others:
                ranks = (
                    f"Rank {others[0]} has"
                    if len(others) == 1
                    else f"Ranks {', '.join(map(str, others))} have"
                )
                msg = (
                    f"{ranks} another {name} than rank 0, so that there is no common model. Give prepare() "
                    "the same model, with the same weights, configuration and example_inputs, on every rank; "
                    "only the calibration data differs."
                )
                raise StateError(msg)

    def all(self, flag: bool) -> bool:
        """Return whether a flag is set on every rank."""
        return flag if self.alone else all(card[0] for card in self._cards(bytes([flag])))

    def each(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes of each rank, in the order of the ranks.

        Only those of one are in memory at a time.
        """
        if self.alone:
            yield data
            return
        for rank, size in enumerate(self._numbers(len(data))):
            sent = _tensor(data) if rank == self.rank else torch.empty(size, dtype=torch.uint8)
            _collective(dist.broadcast, sent, rank)
            yield sent.numpy().tobytes()

    def from_first(
        self, document: Any, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return what rank 0 gives, bit for bit; the arguments of the other ranks are not used.

        Args:
            document: JSON.
            tensors: of any dtype, by name.
        """
        if self.alone:
            return document, dict(tensors)
        rows = [list(tensors), _described(list(tensors.values()))]
        header = json.dumps([document, rows]).encode() if self.is_first else b""
        size = self._numbers(len(header))[0]
        sent = _tensor(header) if self.is_first else torch.empty(size, dtype=torch.uint8)
        _collective(dist.broadcast, sent, 0)
        document, rows = parsed(sent.numpy().tobytes(), finite=False)
        found: dict[str, torch.Tensor] = {}
        for name, empty in zip(rows[0], _empty(rows[1]), strict=True):
            mine = tensors[name].detach().contiguous() if self.is_first else empty
            if mine.numel():
                _collective(dist.broadcast, mine.view(-1).view(torch.uint8), 0)
            found[name] = mine
        return document, found

    def on_first(
        self, document: Any, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Any, Sequence[torch.Tensor]]]:
        """On rank 0 what every other rank gives, in the order of the ranks; nothing on the others.

        One rank is in memory at a time.

        Args:
            document: JSON.
            tensors: likewise of this rank.
        """
        documents = [
            parsed(data, finite=False)
            for data in self.each(json.dumps([document, _described(tensors)]).encode())
        ]
        for rank in range(1, self.count):
            if self.is_first:
                received = _empty(documents[rank][1])
                for tensor in received:
                    _collective(dist.recv, tensor, rank)
                yield documents[rank][0], received
            elif rank == self.rank:
                for tensor in tensors:
                    _collective(dist.send, tensor.contiguous(), 0)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """If the body fails on one rank, it fails on all of them: none waits for one that gave up.

        The body must not call other methods of this class.

        Raises:
            StateError: on ranks whose own body did not fail; it has the message of the first one that did.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # raised below
            failed = error
        if not self.alone:
            text = "" if failed is None else f"{type(failed).__name__}: {failed}"
            sizes = self._numbers(len(text.encode()))
            first = next((rank for rank, size in enumerate(sizes) if size), None)
            if first is not None:
                sent = (
                    _tensor(text.encode())
                    if first == self.rank
                    else torch.empty(sizes[first], dtype=torch.uint8)
                )
                _collective(dist.broadcast, sent, first)
                if failed is None:
                    msg = f"Rank {first} stopped: {sent.numpy().tobytes().decode()}"
                    raise StateError(msg)
        if failed is not None:
            raise failed

    def _cards(self, mine: bytes) -> list[bytes]:
        """As many bytes of each rank as of this one."""
        sent = _tensor(mine)
        cards = [torch.empty_like(sent) for _ in range(self.count)]
        _collective(dist.all_gather, cards, sent)
        return [bytes(card.tolist()) for card in cards]

    def _numbers(self, mine: int) -> list[int]:
        return [int.from_bytes(card, "little") for card in self._cards(mine.to_bytes(8, "little"))]


def _described(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]


def _empty(described: list[Any]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in described]


def _collective(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except RuntimeError as error:
        msg = (
            f"The ranks could not exchange their statistics ({error}). Every rank of the process group must "
            "call convert(), equally often, and the group needs a backend for tensors on the CPU, such as "
            "gloo."
        )
        raise StateError(msg) from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

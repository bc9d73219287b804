"""Hidden states of all samples between two blocks: in memory up to a limit, the rest in files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: Bytes that stay in memory.
LIMIT = 2**30


class Activations(Sequence[Any]):
    """One tensor per sample, which `put` replaces.

    Args:
        count: number of samples.
        limit: bytes that stay in memory.
    """

    def __init__(self, count: int, limit: int = LIMIT) -> None:
        self._held: list[torch.Tensor | Path | None] = [None] * count
        self._left = limit
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._held)

    def __getitem__(self, index: Any) -> Any:
        """Return the tensor of a sample, None before the first `put`; or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._held[index]
        return torch.load(found, weights_only=True) if isinstance(found, Path) else found

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Replace the tensor of a sample."""
        before = self._held[index]
        if isinstance(before, torch.Tensor):
            self._left += before.numel() * before.element_size()
        size = tensor.numel() * tensor.element_size()
        if size <= self._left:
            self._held[index] = tensor
            self._left -= size
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="nc-")
        path = Path(self._folder.name) / f"{index}.pt"
        torch.save(tensor, path)
        self._held[index] = path

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()

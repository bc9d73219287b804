"""A folder with a quantized model as a server sees it: requests are checked alone, and computed together.

Three kinds of folders are known: what `nc.save` wrote (requests are tensors), what `nc.hf.quantize` wrote
(likewise), and what `nc.hf.quantize_sentence_transformer` wrote (requests are texts).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nc

Arrays = dict[str, np.ndarray]
#: Name of the input of models over texts, and of their output.
TEXT, EMBEDDING = "text", "sentence_embedding"
#: Outputs of transformers models with a value for each token.
_OF_TOKENS = ("last_hidden_state", "start_logits", "end_logits")
_IDS, _MASK = "input_ids", "attention_mask"


class BadRequest(ValueError):
    """What a client sent can't be computed; says why."""


def warm_sizes(most: int, lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Return (rows, length) for all lengths: rows are powers of two, and the most of a call."""
    rows = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    return [(count, length) for count in rows for length in lengths]


def _next_size(sizes: Sequence[int], size: int) -> int:
    """Return the next size that is warm; the size itself where all are smaller."""
    return next((known for known in sizes if known >= size), size)


class Tensors:
    """A model whose requests are named tensors with one row for each item."""

    def __init__(self, folder: Path, warm: Sequence[tuple[int, int]]) -> None:
        self.rows_warm, self.lengths = _sides(warm)
        self.is_transformer = (folder / "config.json").exists()
        if self.is_transformer:
            from nc import hf

            self.model: Any = hf.load(folder, warm=warm, lengths=self.lengths)
            graph = self.model.quantized.graph
        else:
            self.model = nc.load(folder, warm=warm)
            graph = self.model.graph
        self.leaves = {leaf.path: leaf for leaf in graph.signature.leaves if leaf.dtype is not None}

    def checked(self, given: Arrays) -> Arrays:
        """Return a request with the types that the model takes.

        Raises:
            BadRequest: names, types, dimensions or numbers of rows are others.
        """
        if set(given) != set(self.leaves):
            msg = f"expected the inputs {', '.join(self.leaves)}, but got {', '.join(given) or 'none'}"
            raise BadRequest(msg)
        found = {name: self._checked(name, given[name]) for name in self.leaves}
        rows = {name: len(value) for name, value in found.items()}
        if len(set(rows.values())) > 1 or not min(rows.values()):
            msg = f"inputs have different numbers of rows, or none: {rows}"
            raise BadRequest(msg)
        return found

    def _checked(self, name: str, value: np.ndarray) -> np.ndarray:
        leaf = self.leaves[name]
        wanted = torch.empty(0, dtype=leaf.dtype).numpy().dtype
        if not np.can_cast(value.dtype, wanted, "same_kind") or value.dtype == object:
            msg = f"input {name!r}: expected {wanted}, but got {value.dtype}"
            raise BadRequest(msg)
        fixed = [size if isinstance(size, int) else None for size in leaf.dims]
        fits = value.ndim == len(fixed) and all(
            size in (None, given) for size, given in zip(fixed, value.shape, strict=True)
        )
        if not fits:
            wanted_shape = [size or -1 for size in fixed]
            msg = f"input {name!r}: expected shape {wanted_shape}, but got {list(value.shape)}"
            raise BadRequest(msg)
        return value.astype(wanted)

    def key(self, request: Arrays) -> object:
        """Return what requests have in common that can be computed together."""
        if self._fills(request):
            return _next_size(self.lengths, request[_IDS].shape[1])
        return tuple((name, value.shape[1:], str(value.dtype)) for name, value in request.items())

    def rows(self, request: Arrays) -> int:
        """Return how many items a request has."""
        return len(next(iter(request.values())))

    def run(self, requests: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of requests with one key, computed by one call."""
        length = max((r[_IDS].shape[1] for r in requests if self._fills(r)), default=0)
        length = _next_size(self.lengths, length) if length else 0
        rows = sum(map(self.rows, requests))
        more = _next_size(self.rows_warm, rows) - rows
        together = {}
        for name in self.leaves:
            parts = [_longer(request[name], length) for request in requests]
            together[name] = np.concatenate([*parts, parts[-1][-1:].repeat(more, 0)])
        with torch.no_grad():
            outputs = self.model(**{name: torch.from_numpy(value) for name, value in together.items()})
        named = _named(outputs)
        found, start = [], 0
        for request in requests:
            end = start + self.rows(request)
            own = {name: value[start:end] for name, value in named.items()}
            if length:
                own = _cut(own, request[_IDS].shape[1])
            found.append(own)
            start = end
        return found

    def _fills(self, request: Arrays) -> bool:
        """Whether texts may be filled up to a common length."""
        return self.is_transformer and {_IDS, _MASK} <= set(request) and request[_IDS].ndim == 2


class Texts:
    """A model of sentence-transformers, whose requests are texts."""

    def __init__(self, folder: Path, warm: Sequence[tuple[int, int]]) -> None:
        from nc import hf

        self.rows_warm, self.lengths = _sides(warm)
        self.model = hf.load_sentence_transformer(folder, warm=warm, lengths=self.lengths)
        if not hasattr(self.model, "encode"):
            msg = f"{folder} holds a {type(self.model).__name__}; this example serves models with encode()."
            raise SystemExit(msg)

    def checked(self, given: Arrays) -> Arrays:
        """Return a request; raises BadRequest as `Tensors.checked`."""
        if set(given) != {TEXT} or given[TEXT].ndim != 1 or not len(given[TEXT]):
            msg = f"expected one input {TEXT!r}, a list of one or more texts"
            raise BadRequest(msg)
        texts = [text.decode() if isinstance(text, bytes) else text for text in given[TEXT].tolist()]
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            msg = f"expected texts, but got {wrong!r}"
            raise BadRequest(msg)
        return {TEXT: np.array(texts, dtype=object)}

    def key(self, request: Arrays) -> object:
        """Return what requests have in common that can be computed together: all have it."""
        return TEXT

    def rows(self, request: Arrays) -> int:
        """Return how many texts a request has."""
        return len(request[TEXT])

    def run(self, requests: Sequence[Arrays]) -> list[Arrays]:
        """Return the embeddings of requests; texts of one length, rounded up, are computed together."""
        texts = [text for request in requests for text in request[TEXT]]
        groups: dict[int, list[int]] = {}
        for index, tokens in enumerate(self._tokens(texts)):
            groups.setdefault(_next_size(self.lengths, tokens), []).append(index)
        found: list[Any] = [None] * len(texts)
        for places in groups.values():
            most = max(self.rows_warm, default=len(places))
            for start in range(0, len(places), most):
                part = places[start : start + most]
                count = _next_size(self.rows_warm, len(part))
                given = [texts[i] for i in part] + [texts[part[-1]]] * (count - len(part))
                vectors = self.model.encode(given, batch_size=count, show_progress_bar=False)
                for place, vector in zip(part, vectors, strict=False):  # the last ones only fill up
                    found[place] = vector
        ends = np.cumsum([self.rows(request) for request in requests])
        return [{EMBEDDING: part} for part in np.split(np.stack(found), ends[:-1])]

    def _tokens(self, texts: list[str]) -> list[int]:
        """Return how many tokens each text has for the model."""
        most = self.model.max_seq_length
        prompt = (self.model.prompts or {}).get(self.model.default_prompt_name or "", "")
        ids = self.model.tokenizer([prompt + text for text in texts], verbose=False)["input_ids"]
        return [min(len(each), most) if most else len(each) for each in ids]


def _sides(warm: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the numbers of rows, and the lengths, in order."""
    return sorted({rows for rows, _ in warm}), sorted({length for _, length in warm})


def opened(folder: str | Path, warm: Sequence[tuple[int, int]] = ()) -> Tensors | Texts:
    """Return the model of a folder, with kernels for some (rows, length)."""
    place = Path(folder)
    return Texts(place, warm) if (place / "modules.json").exists() else Tensors(place, warm)


class Batcher:
    """Computes requests that arrive within a window together.

    One thread computes: torch uses all cores for one call.

    Attributes:
        batches: rows of each call so far, and its seconds.
    """

    def __init__(self, served: Tensors | Texts, window_ms: float = 3.0, most: int = 16) -> None:
        self.served, self.window, self.most = served, window_ms / 1000, most
        self.waiting: list[tuple[Arrays, asyncio.Future[Arrays]]] = []
        self.task: asyncio.Task[None] | None = None
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.batches: list[tuple[int, float]] = []

    async def ask(self, given: Arrays) -> Arrays:
        """Return the outputs for a request; raises BadRequest."""
        request = self.served.checked(given)
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, answer))
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._work())
        return await answer

    async def drained(self) -> None:
        """Wait until all that was asked is answered."""
        while self.task is not None and not self.task.done():
            await asyncio.wait([self.task])

    async def _work(self) -> None:
        while self.waiting:
            if sum(self.served.rows(request) for request, _ in self.waiting) < self.most:
                await asyncio.sleep(self.window)
            taken = self._next()
            requests = [request for request, _ in taken]
            for (_, answer), outputs in zip(taken, await self._run(requests), strict=True):
                if not answer.done():  # its client may have gone
                    (answer.set_exception if isinstance(outputs, Exception) else answer.set_result)(outputs)

    def _next(self) -> list[tuple[Arrays, asyncio.Future[Arrays]]]:
        """Take the first request, and others that fit to it."""
        key, rows, taken, left = self.served.key(self.waiting[0][0]), 0, [], []
        for each in self.waiting:
            count = self.served.rows(each[0])
            if self.served.key(each[0]) == key and (not taken or rows + count <= self.most):
                taken.append(each)
                rows += count
            else:
                left.append(each)
        self.waiting = left
        return taken

    async def _run(self, requests: list[Arrays]) -> Sequence[Arrays | Exception]:
        loop, begin = asyncio.get_running_loop(), time.perf_counter()
        found = await loop.run_in_executor(self.pool, answers, self.served, requests)
        self.batches.append((sum(map(self.served.rows, requests)), time.perf_counter() - begin))
        return found


def answers(served: Tensors | Texts, requests: Sequence[Arrays]) -> list[Arrays | Exception]:
    """Return the outputs of requests, those with one key computed by one call; or what went wrong.

    Where a call fails, each request is tried alone, so that none spoils the others.
    """
    found: list[Any] = [None] * len(requests)
    keys = [served.key(request) for request in requests]
    for key in dict.fromkeys(keys):
        places = [i for i, each in enumerate(keys) if each == key]
        try:
            outputs: Sequence[Any] = served.run([requests[i] for i in places])
        except Exception as error:  # whatever a model may raise
            if len(places) == 1:
                outputs = [BadRequest(str(error)) if isinstance(error, nc.InputError) else error]
            else:
                outputs = [answers(served, [requests[i]])[0] for i in places]
        for place, one in zip(places, outputs, strict=True):
            found[place] = one
    return found


def _longer(value: np.ndarray, length: int) -> np.ndarray:
    """Fill the rows of tokens up with zeros, which the mask leaves out."""
    more = length - value.shape[1] if value.ndim == 2 and length else 0
    return np.pad(value, ((0, 0), (0, more))) if more > 0 else value


def _named(outputs: Any) -> Arrays:
    if isinstance(outputs, torch.Tensor):
        outputs = {"output_0": outputs}
    elif not hasattr(outputs, "items"):
        outputs = {f"output_{i}": value for i, value in enumerate(outputs)}
    return {name: value.numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def _cut(outputs: Arrays, length: int) -> Arrays:
    """Leave out values of tokens that were filled up."""
    return {
        name: value[:, :length] if name in _OF_TOKENS or (name == "logits" and value.ndim == 3) else value
        for name, value in outputs.items()
    }

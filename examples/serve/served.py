"""A folder with a quantized model as a server sees it: requests are checked alone, and computed together.

Three kinds of folders are known: what `nc.save` wrote (requests are tensors), what `nc.hf.quantize` wrote
(likewise), and what `nc.hf.quantize_sentence_transformer` wrote (requests are texts).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import gc
import importlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batching import Batches

import nc

Arrays = dict[str, np.ndarray]
#: Name of the input of models over texts, and of their output.
TEXT, EMBEDDING = "text", "sentence_embedding"
#: Outputs of transformers models with a value for each token.
_OF_TOKENS = ("last_hidden_state", "start_logits", "end_logits")
_IDS, _MASK = "input_ids", "attention_mask"


class BadRequestError(ValueError):
    """What a client sent can't be computed; says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One item of a request.

    Attributes:
        value: a text, or arrays with one row.
        tokens: that a model computes for it; 1 where it has none.
    """

    value: Any
    tokens: int


class Tensors:
    """A model whose requests are named tensors with one row for each item."""

    def __init__(self, folder: Path) -> None:
        self.is_transformer = (folder / "config.json").exists()
        if self.is_transformer:
            from nc import hf

            self.model: Any = hf.load(folder)
            graph = self.model.quantized.graph
        else:
            self.model = nc.load(folder)
            graph = self.model.graph
        self.leaves = {leaf.path: leaf for leaf in graph.signature.leaves if leaf.dtype is not None}

    def rows(self, given: Arrays) -> list[Row]:
        """Return the rows of a request, with the types that the model takes.

        Raises:
            BadRequestError: names, types, dimensions or numbers of rows are others.
        """
        if set(given) != set(self.leaves):
            msg = f"expected the inputs {', '.join(self.leaves)}, but got {', '.join(given) or 'none'}"
            raise BadRequestError(msg)
        found = {name: self._checked(name, given[name]) for name in self.leaves}
        counts = {name: len(value) for name, value in found.items()}
        if len(set(counts.values())) > 1 or not min(counts.values()):
            msg = f"inputs have different numbers of rows, or none: {counts}"
            raise BadRequestError(msg)
        rows = [
            {name: value[i : i + 1] for name, value in found.items()} for i in range(min(counts.values()))
        ]
        return [Row(row, max(1, int(row[_MASK].sum())) if self._fills(row) else 1) for row in rows]

    def _checked(self, name: str, value: np.ndarray) -> np.ndarray:
        leaf = self.leaves[name]
        wanted = torch.empty(0, dtype=leaf.dtype).numpy().dtype
        if not np.can_cast(value.dtype, wanted, "same_kind") or value.dtype == object:
            msg = f"input {name!r}: expected {wanted}, but got {value.dtype}"
            raise BadRequestError(msg)
        fixed = [size if isinstance(size, int) else None for size in leaf.dims]
        fits = value.ndim == len(fixed) and all(
            size in (None, given) for size, given in zip(fixed, value.shape, strict=True)
        )
        if not fits:
            wanted_shape = [size or -1 for size in fixed]
            msg = f"input {name!r}: expected shape {wanted_shape}, but got {list(value.shape)}"
            raise BadRequestError(msg)
        return value.astype(wanted)

    def run(self, rows: Sequence[Row]) -> list[Arrays]:
        """Return the outputs of each row; rows that fit together are computed by one call.

        Raises:
            BadRequestError: the model refuses an input.
        """
        found: list[Any] = [None] * len(rows)
        places: dict[object, list[int]] = {}
        for i, row in enumerate(rows):
            places.setdefault(self._key(row.value), []).append(i)
        for chosen in places.values():
            for place, outputs in zip(chosen, self._call([rows[i].value for i in chosen]), strict=True):
                found[place] = outputs
        return found

    def _call(self, rows: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of each row, computed by one call."""
        length = max((row[_IDS].shape[1] for row in rows if self._fills(row)), default=0)
        together = {
            name: torch.from_numpy(np.concatenate([_longer(row[name], length) for row in rows]))
            for name in self.leaves
        }
        try:
            with torch.no_grad():
                outputs = _named(self.model(**together))
        except nc.InputError as error:
            raise BadRequestError(str(error)) from error
        found = [{name: value[i : i + 1] for name, value in outputs.items()} for i in range(len(rows))]
        if not length:
            return found
        return [_cut(own, row[_IDS].shape[1]) for own, row in zip(found, rows, strict=True)]

    def _key(self, row: Arrays) -> object:
        """Return what rows have in common that one call can compute."""
        if self._fills(row):
            return _MASK
        return tuple((name, value.shape, str(value.dtype)) for name, value in row.items())

    def _fills(self, row: Arrays) -> bool:
        """Whether texts may be filled up to a common length: the mask leaves out what is added."""
        return self.is_transformer and {_IDS, _MASK} <= set(row) and row[_IDS].ndim == 2


class Texts:
    """A model of sentence-transformers, whose requests are texts."""

    def __init__(self, folder: Path) -> None:
        from nc import hf

        self.model = hf.load_sentence_transformer(folder)
        if not hasattr(self.model, "encode"):
            msg = f"{folder} holds a {type(self.model).__name__}; this example serves models with encode()."
            raise ValueError(msg)
        # A tokenizer keeps its last settings for truncation, so two threads need two of them.
        self._counter = copy.deepcopy(self.model.tokenizer)
        self.run(self.rows({TEXT: np.array(["a first call"], dtype=object)}))

    def rows(self, given: Arrays) -> list[Row]:
        """Return the texts of a request.

        Raises:
            BadRequestError: it has anything but texts, or none.
        """
        if set(given) != {TEXT} or given[TEXT].ndim != 1 or not len(given[TEXT]):
            msg = f"expected one input {TEXT!r}, a list of one or more texts"
            raise BadRequestError(msg)
        texts = [text.decode() if isinstance(text, bytes) else text for text in given[TEXT].tolist()]
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            msg = f"expected texts, but got {wrong!r}"
            raise BadRequestError(msg)
        return [Row(text, tokens) for text, tokens in zip(texts, self._tokens(texts), strict=True)]

    def run(self, rows: Sequence[Row]) -> list[Arrays]:
        """Return the embedding of each text."""
        texts = [row.value for row in rows]
        vectors = self.model.encode(texts, batch_size=len(texts), show_progress_bar=False)
        return [{EMBEDDING: vector[None]} for vector in vectors]

    def _tokens(self, texts: list[str]) -> list[int]:
        """Return how many tokens each text has for the model."""
        most = self.model.max_seq_length
        prompt = (self.model.prompts or {}).get(self.model.default_prompt_name or "", "")
        ids = self._counter([prompt + text for text in texts], verbose=False)["input_ids"]
        return [min(len(each), most) if most else len(each) for each in ids]


def opened(folder: str | Path) -> Tensors | Texts:
    """Return the model of a folder.

    Raises:
        ValueError: it holds a model that this example does not serve.
    """
    place = Path(folder)
    return Texts(place) if (place / "modules.json").exists() else Tensors(place)


def tokens_of(row: Row) -> int:
    """Return what a row costs."""
    return row.tokens


def joined(rows: Sequence[Arrays]) -> Arrays:
    """Return the outputs of all rows of a request."""
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _set_libraries_aside(folder: Path) -> None:
    """Import what the model of a folder needs, and let the garbage collector pass over all of it.

    Libraries are half a million objects. Each full collection would look at them: every few seconds it would
    stop all requests for most of a second. Models that are loaded later are collected as ever.
    """
    if (folder / "modules.json").exists():
        importlib.import_module("sentence_transformers")
    if (folder / "config.json").exists() or (folder / "modules.json").exists():
        importlib.import_module("nc.hf")
    gc.collect()
    gc.freeze()


class Service:
    """The model of a folder, whose requests are computed in batches.

    Args:
        folder: with the model.
        opener: returns the model of the folder.
        limits: of `batching.Batches`.

    Attributes:
        served: the model.
        batches: what waits.
    """

    def __init__(
        self,
        folder: str | Path,
        opener: Callable[[str | Path], Tensors | Texts] = opened,
        **limits: Any,
    ) -> None:
        self.folder, self.opener = folder, opener
        _set_libraries_aside(Path(folder))
        self.served = opener(folder)
        self.batches: Batches[Row, Arrays] = Batches(self.served.run, tokens_of, **limits)
        self._loading = threading.Lock()

    async def rows(self, given: Arrays) -> list[Row]:
        """Return the rows of a request; raises BadRequestError. A thread counts the tokens."""
        return await asyncio.to_thread(self.served.rows, given)

    async def ask(self, given: Arrays) -> Arrays:
        """Return the outputs for a request; raises BadRequestError and what `Batches.ask` raises."""
        return joined(await self.batches.ask(await self.rows(given)))

    def reload(self) -> None:
        """Load the folder again, and compute all later batches by that model.

        Raises:
            Exception: the folder can't be loaded; the model of before goes on.
        """
        with self._loading:
            served = self.opener(self.folder)
            self.batches.replace(served.run)
            self.served = served

    def reload_on_hangup(self) -> None:
        """Reload at each SIGHUP, in a thread, so that requests go on. Call this in the main thread."""

        def load() -> None:
            try:
                self.reload()
            except Exception:  # whatever is wrong with the folder, the server goes on
                logging.getLogger(__name__).exception("%s was not loaded again", self.folder)

        signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=load).start())


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Give a parser the limits of batches."""
    parser.add_argument("--most_tokens", type=int, default=4096, help="of one call")
    parser.add_argument("--most_items", type=int, default=64, help="of one call")
    parser.add_argument("--most_waiting", type=int, default=1024, help="items; a request beyond gets 429")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds of a request")


def limits_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the limits that `add_limits` has read."""
    return {key: getattr(options, key) for key in ("most_tokens", "most_items", "most_waiting", "timeout")}


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

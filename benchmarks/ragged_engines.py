"""Engines of ragged.py, and the process of one: each computes lists of texts or of token ids.

`ragged_engines.py FILE`; the file is what ragged.py wrote for this process.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from worker import replies

#: Token ids of each text.
Ids = list[list[int]]
#: Computes one batch: hidden states, padded at the end, or vectors, one for each text.
Run = Callable[[Any], Any]
#: What calibration computes at once.
_BATCH = 16
#: Token ids of random texts: words of the vocabulary, between the marks of beginning and end.
_WORDS, _BEGIN, _END = (1000, 30000), 101, 102


def padded(ids: Ids) -> dict[str, torch.Tensor]:
    """Return texts as one batch, filled up to the longest one."""
    longest = max(map(len, ids))
    rows = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros(len(ids), longest, dtype=torch.long)
    for i, own in enumerate(ids):
        rows[i, : len(own)] = torch.tensor(own)
        mask[i, : len(own)] = 1
    return {"input_ids": rows, "attention_mask": mask}


def hidden_of(output: Any) -> Any:
    """Return the last hidden states of what an engine returns."""
    return output if isinstance(output, torch.Tensor) else output["last_hidden_state"]


def vectors_of(hidden: Any, ids: Ids) -> np.ndarray:
    """Return the mean over the tokens of each text, of length 1."""
    given = hidden.numpy() if isinstance(hidden, torch.Tensor) else np.asarray(hidden)
    means = np.stack(
        [row[: len(own)].mean(0) if given.ndim == 3 else row for row, own in zip(given, ids, strict=True)]
    )
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def loaded(folder: str, **options: Any) -> torch.nn.Module:
    """Return the fp32 model."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, local_files_only=True, **options).eval()


def fp32(folder: str, _: list[Ids]) -> Run:
    """Return `transformers` with its default attention, padded."""
    model = loaded(folder)
    return lambda ids: hidden_of(model(**padded(ids)))


def fp32_flash(folder: str, _: list[Ids]) -> Run:
    """Return `transformers` with attention of this project, and no padding: texts are one row."""
    from nc import hf

    model = loaded(folder, attn_implementation=hf.register_attention())

    def run(ids: Ids) -> torch.Tensor:
        lengths = torch.tensor([len(own) for own in ids])
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        longest = int(lengths.max())
        flat = hidden_of(
            model(
                input_ids=torch.tensor([token for own in ids for token in own])[None],
                position_ids=torch.cat([torch.arange(len(own)) for own in ids])[None],
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                max_length_q=longest,
                max_length_k=longest,
            )
        )
        parts = flat[0].split(lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    return run


def sentence_transformers(folder: str, _: list[Ids], most: int = 512) -> Run:
    """`SentenceTransformer.encode` in fp32. It tokenizes, too."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    model.max_seq_length = most
    return lambda texts: model.encode(texts, batch_size=len(texts), show_progress_bar=False)


def nc_int8(folder: str, calibration: list[Ids], dynamic: bool = False) -> Run:
    """Return a model of this project, or of the checkout that comes first on the path."""
    import nc

    batches = [padded(ids) for ids in calibration]
    options: dict[str, Any] = {"example_inputs": batches[0], "backend": "native"}
    if dynamic:
        config = nc.DynamicQuantConfig(act_granularity="per_token")
        quantized = nc.convert(nc.prepare(loaded(folder), config, **options), measure=False)
    else:
        prepared = nc.prepare(loaded(folder), nc.StaticQuantConfig(), **options)
        for batch in batches:
            prepared(**batch)
        quantized = nc.convert(prepared, measure=False)
    return lambda ids: hidden_of(quantized(**padded(ids)))


def peer(folder: str, calibration: list[Ids], name: str) -> Run:
    """Return an engine of peers.py, padded."""
    import peers

    task: Any = SimpleNamespace(
        model=loaded(folder), calibration=[padded(ids) for ids in calibration], free=(0, 1)
    )
    run = peers.PEERS[name](task)[0]
    return lambda ids: run(**padded(ids))


def ctranslate2_int8(folder: str, _: list[Ids]) -> Run:
    """CTranslate2, which takes texts as they are."""
    import peers

    encoder = peers.ctranslate2_encoder(folder)[0]
    return lambda ids: np.asarray(encoder.forward_batch(ids).last_hidden_state)


#: Names that end in "-before" compute with another checkout of this project.
BEFORE = "-before"
BASE = "fp32"
ENGINES: dict[str, Callable[[str, list[Ids]], Run]] = {
    BASE: fp32,
    "sentence-transformers": sentence_transformers,
    "fp32-nc-flash": fp32_flash,
    "nc-static": nc_int8,
    "nc-dynamic": functools.partial(nc_int8, dynamic=True),
    "nc-static-before": nc_int8,
    "nc-dynamic-before": functools.partial(nc_int8, dynamic=True),
    # Static ranges take in the -3.4e38 of masks, and then all scores are one code.
    "onnxruntime-int8": functools.partial(peer, name="ONNX Runtime dynamic"),
    "openvino-int8": functools.partial(peer, name="NNCF transformer"),
    "ctranslate2-int8": ctranslate2_int8,
}
#: Engines that take texts.
OF_TEXTS = ("sentence-transformers",)


def random_ids(number: int, most_texts: int = 32, most_tokens: int = 512) -> Ids:
    """Return the batch of a number: 1 to 32 texts of 3 to 512 tokens."""
    chance = random.Random(number)
    lengths = [chance.randint(3, most_tokens) for _ in range(chance.randint(1, most_texts))]
    return [[_BEGIN, *(chance.randrange(*_WORDS) for _ in range(n - 2)), _END] for n in lengths]


def resident() -> float:
    """Return the MB of memory that this process holds."""
    import os

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Work:
    """Answers to the commands of ragged.py.

    Args:
        run: computes one batch.
        given: name → batches as the engine takes them.
        ids: name → batches as token ids.
    """

    def __init__(self, run: Run, given: dict[str, list[Any]], ids: dict[str, list[Ids]]) -> None:
        self.run, self.given, self.ids = run, given, ids

    def __call__(self, line: str) -> str:
        """Return the answer to one command as JSON."""
        name, *arguments = json.loads(line)
        return json.dumps(getattr(self, name)(*arguments))

    def vectors(self, name: str, file: str) -> int:
        """Write one vector for each text of some batches; return how many."""
        pairs = zip(self.given[name], self.ids[name], strict=True)
        found = np.concatenate([vectors_of(self.run(batch), ids) for batch, ids in pairs])
        np.save(file, found)
        return len(found)

    def time(self, name: str) -> tuple[float, float]:
        """Return the seconds of some batches, and the seconds of all CPUs."""
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in self.given[name]:
            self.run(batch)
        return time.perf_counter() - wall, time.process_time() - cpu

    def calls(self, start: int, stop: int, most: int) -> tuple[list[float], float]:
        """Return the µs of each real token in random batches, and the memory in MB after them."""
        found = []
        for number in range(start, stop):
            ids = random_ids(number, most_tokens=most)
            begin = time.perf_counter()
            self.run(ids)
            found.append(1e6 * (time.perf_counter() - begin) / sum(map(len, ids)))
        return found, resident()


def chunks(rows: Sequence[Any], size: int) -> list[Any]:
    """Return rows in batches."""
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def main(file: str) -> None:
    """Be the process of one engine."""
    told = json.loads(Path(file).read_text(encoding="utf-8"))

    def begin() -> Work:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(told["threads"])
        options = {"most": told["most"]} if told["engine"] in OF_TEXTS else {}
        with torch.no_grad():
            run = ENGINES[told["engine"]](told["folder"], chunks(told["calibration"], _BATCH), **options)
        given = told["texts" if told["engine"] in OF_TEXTS else "ids"]
        return Work(run, given, told["ids"])

    replies(begin)


if __name__ == "__main__":
    main(*sys.argv[1:])

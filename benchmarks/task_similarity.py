"""How alike news are, judged by people: MiniLM on the documents of Lee, Pincombe and Welsh (2005).

50 documents, and 0 to 1 for each of their 1,225 pairs, are in the package `gensim` (28 MB); 96 of the 300
other documents that come with them calibrate.
"""

from __future__ import annotations

from typing import ClassVar

import packages
import torch
from ranks import spearman
from task_minilm import MiniLM, minilm


class Similarity(MiniLM):
    """The correlation of cosines with what people said.

    A bootstrap draws pairs as if they did not share documents.
    """

    name = "similarity"
    figures: ClassVar = {"Spearman": ("x 100", 2), "mean cosine to fp32": ("cosine", 5)}
    packages = (*MiniLM.packages, "gensim")

    def make(self) -> None:
        """Tokenize."""
        folder = packages.folder("gensim", "gensim==4.4.0") / "test" / "test_data"
        judged, others = (
            (folder / name).read_text(encoding="latin-1").splitlines()
            for name in ("lee.cor", "lee_background.cor")
        )
        tokenizer = minilm.load_tokenizer()
        self.calibration, self.evaluation = (
            list(minilm.batches(texts, tokenizer, 10)) for texts in (others[: minilm.CALIBRATION], judged)
        )
        said = (folder / "similarities0-1.txt").read_text(encoding="utf-8").splitlines()
        table = torch.tensor([[float(number) for number in line.split()] for line in said])
        self.labels = table[self._pairs()]

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return for each pair the cosine and what people said."""
        return torch.stack(((got @ got.T)[self._pairs()], self.labels), 1)

    def score(self, samples: torch.Tensor) -> float:
        """Return 100 times the correlation."""
        return 100 * spearman(*samples.T)

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """Return the correlation, and how near the embeddings are."""
        return self.score(self.samples(fp32, got)), (fp32 * got).sum(-1).mean().item()

    @staticmethod
    def _pairs() -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.triu_indices(50, 50, 1)
        return first, second

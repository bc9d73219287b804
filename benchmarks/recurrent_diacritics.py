"""Task of recurrent.py: arabic-diacritizer, which gives the vowel marks of Arabic letters.

Only files of the package are read: weights of three LSTM layers in both directions with attention, and its
list of sentences with marks. The list was made of the text that the model was trained on, so the rate is not
that of unknown text. An error is a letter with another mark than in the list.
"""

from __future__ import annotations

import gzip
import json
import unicodedata

import numpy as np
import torch
from recurrent_task import Calls, Part, Task, folder, ratio
from torch import nn

LETTERS = "ءآأؤإئابةتثجحخدذرزسشصضطظعغـفقكلمنهوي"
#: The model's numbers of characters: 0 to 3 have other uses, and 1 stands for unknown ones.
NUMBERS = {character: 4 + i for i, character in enumerate(LETTERS + " .,،؛:؟!()-\"'\n")}
UNKNOWN, VOCABULARY = 1, 4 + len(NUMBERS)
SHADDA, VOWELS, NUNATION = "\u0651", "\u064e\u064f\u0650", "\u064b\u064c\u064d"
#: Marks in the order of the model's classes.
MARKS = ["", *VOWELS, "\u0652", SHADDA, *NUNATION, *(SHADDA + mark for mark in VOWELS + NUNATION)]
SENTENCES, CALIBRATION, SHORTEST, LONGEST, TOGETHER = 300, 16, 60, 200, 4


class Attention(nn.Module):
    """Additive attention of each state to all states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, 1, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return a mean of all states for each one."""
        scores = self.v(torch.tanh(self.W(states)[:, :, None] + self.U(states)[:, None]))
        return torch.bmm(torch.softmax(scores.squeeze(-1), -1), states)


class Tagger(nn.Module):
    """Characters [sentences, characters] → logits of their marks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.lstm = nn.LSTM(128, 256, 3, batch_first=True, bidirectional=True)
        self.attention, self.classifier = Attention(512), nn.Linear(512, len(MARKS))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        states: torch.Tensor = self.lstm(self.embedding(characters))[0]
        logits: torch.Tensor = self.classifier(self.attention(states))
        return logits


def tagger() -> Tagger:
    """Return the model with its weights."""
    model = Tagger().eval()
    path = folder("diacritize") / "assets" / "bilstm_best.pt"
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model


def parsed(text: str) -> tuple[list[str], list[str]]:
    """Return the characters of a text without marks, and the marks of each one."""
    characters: list[str] = []
    marks: list[str] = []
    for character in unicodedata.normalize("NFKC", text):
        if character not in "".join(MARKS):
            characters.append(character)
            marks.append("")
        elif marks:
            marks[-1] = "".join(sorted(marks[-1] + character, key=lambda mark: mark != SHADDA))
    return characters, marks


def sentences() -> list[tuple[torch.Tensor, np.ndarray]]:
    """Return numbers of characters, and those of their marks: -1 for what is no letter."""
    with gzip.open(folder("diacritize") / "assets" / "word_cache.json.gz", "rt", encoding="utf-8") as file:
        stored = json.load(file)["sentences"]
    texts = [next(iter(forms.values())) if isinstance(forms, dict) else forms for forms in stored.values()]
    wanted, found = SENTENCES + CALIBRATION, []
    for i in np.random.default_rng(0).permutation(len(texts)):
        characters, marks = parsed(texts[i])
        known = all(c in NUMBERS for c in characters) and all(m in MARKS for m in marks)
        marked = sum(mark != "" for mark in marks)
        if not known or not SHORTEST <= len(characters) <= LONGEST or 2 * marked < len(characters):
            continue
        labels = [MARKS.index(m) if c in LETTERS else -1 for c, m in zip(characters, marks, strict=True)]
        found.append((torch.tensor([[NUMBERS[c] for c in characters]]), np.array(labels)))
        if len(found) == wanted:
            return found
    msg = f"the list has {len(found)} sentences of the wanted kind, and {wanted} are needed"
    raise ValueError(msg)


def task() -> Task:
    """Return the task."""
    everything = sentences()
    held = everything[CALIBRATION:]

    def evaluate(calls: Calls) -> tuple[torch.Tensor, np.ndarray]:
        found, counts = [], []
        for characters, labels in held:
            (logits,) = calls["tagger"](characters)
            found.append(logits[0])
            letters = labels >= 0
            counts.append(((logits[0].argmax(1).numpy() != labels)[letters].sum(), letters.sum()))
        return torch.cat(found), np.array(counts)

    one = held[0][0]
    many = one.expand(TOGETHER, -1).contiguous()
    return Task(
        metric="diacritic error rate",
        of="arabic-diacritizer: 3 LSTM layers in both directions, attention",
        packages=("arabic-diacritizer",),
        parts={
            "tagger": Part(
                tagger(), [(c,) for c, _ in everything[:CALIBRATION]], [{0: "sentences", 1: "characters"}]
            )
        },
        evaluate=evaluate,
        rate=ratio,
        timed={"one": lambda calls: calls["tagger"](one), "many": lambda calls: calls["tagger"](many)},
    )

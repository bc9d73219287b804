"""Task of recurrent.py: silero-vad, which tells speech from other sound, on pyannote's sample.

Only files of the packages are read: weights of convolutions and of an LSTM cell, 30 seconds of two speakers,
and who speaks when. The sound is given once as it is, and with white noise of three levels; the model reads
a stream in chunks of 32 ms, and its state goes from call to call. An error is a chunk on whose middle it is
wrong at a limit of one half.
"""

from __future__ import annotations

import wave

import numpy as np
import torch
from recurrent_task import Calls, Part, Task, Tensors, folder, ratio
from torch import nn

RATE, CHUNK, BEFORE, WIDTH = 16000, 512, 64, 128
#: Noise in dB below the sound; for calibration another one.
LEVELS, CALIBRATION_LEVEL = (None, 20.0, 10.0, 0.0), 15.0
BLOCK = 31  # chunks of a second: neighbours are alike, so the bootstrap draws seconds
STREAMS = 16  # that are timed as one batch


class Detector(nn.Module):
    """A chunk [streams, samples] and both states → probability of speech, and the states behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell, self.final_conv = nn.LSTMCell(128, WIDTH), nn.Conv1d(WIDTH, 1, 1)

    def forward(self, chunk: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
        """Return the probability [streams, 1], and the states."""
        padded = nn.functional.pad(chunk[:, None], (0, BEFORE), mode="reflect")
        real, imaginary = self.stft_conv(padded).chunk(2, 1)
        x = (real**2 + imaginary**2).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        h, c = self.lstm_cell(x.squeeze(-1), (h, c))
        return self.final_conv(h[:, :, None].relu()).sigmoid().squeeze(-1), h, c


def detector() -> Detector:
    """Return the model with its weights."""
    from safetensors.torch import load_file

    model = Detector().eval()
    model.load_state_dict(load_file(folder("silero_vad") / "data" / "silero_vad_16k.safetensors"))
    return model


def recording() -> tuple[torch.Tensor, np.ndarray]:
    """Return the samples, and for each chunk whether somebody speaks."""
    sample = folder("pyannote.audio") / "sample"
    with wave.open(str(sample / "sample.wav")) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    middles = (np.arange(len(sound) // CHUNK) + 0.5) * CHUNK / RATE
    speaks = np.zeros(len(middles), bool)
    for line in (sample / "sample.rttm").read_text().splitlines():
        start, length = map(float, line.split()[3:5])
        speaks |= (middles >= start) & (middles < start + length)
    return torch.from_numpy(sound), speaks


def chunks(sound: torch.Tensor, level: float | None, seed: int) -> torch.Tensor:
    """Return chunks [chunks, samples], each with the last samples of the one before; with noise."""
    noise = torch.randn(len(sound), generator=torch.Generator().manual_seed(seed))
    noisy = sound if level is None else sound + noise * sound.std() * 10 ** (-level / 20)
    return nn.functional.pad(noisy, (BEFORE, 0)).unfold(0, BEFORE + CHUNK, CHUNK).contiguous()


def states(streams: int) -> Tensors:
    """Return both states of new streams."""
    return torch.zeros(streams, WIDTH), torch.zeros(streams, WIDTH)


def task() -> Task:
    """Return the task."""
    sound, speaks = recording()
    model = detector()
    streams = [chunks(sound, level, seed) for seed, level in enumerate(LEVELS)]

    def evaluate(calls: Calls) -> tuple[torch.Tensor, np.ndarray]:
        found, counts = [], []
        for stream in streams:
            state, said = states(1), []
            for chunk in stream:
                probability, *state = calls["detector"](chunk[None], *state)
                said.append(probability[0, 0])
            found.append(torch.stack(said))
            wrong = (found[-1].numpy() > 0.5) != speaks
            counts.append(np.stack([wrong, np.ones_like(wrong)], 1))
        return torch.cat(found), np.concatenate(counts).astype(int)

    examples: list[Tensors] = []
    state = states(1)
    for i, chunk in enumerate(chunks(sound, CALIBRATION_LEVEL, len(LEVELS))):
        if i % 8 == 0 and speaks[i]:
            examples.append((chunk[None], *state))
        state = model(chunk[None], *state)[1:]
    chunk = streams[0][500:501]
    many = (chunk.expand(STREAMS, -1).contiguous(), *states(STREAMS))
    return Task(
        metric="wrong chunks",
        of="silero-vad: 5 convolutions, an LSTM cell",
        packages=("silero-vad", "pyannote-audio"),
        parts={"detector": Part(model, examples, [{0: "streams"}] * 3)},
        evaluate=evaluate,
        rate=ratio,
        block=BLOCK,
        timed={
            "one": lambda calls: calls["detector"](chunk, *state),
            "many": lambda calls: calls["detector"](*many),
        },
    )

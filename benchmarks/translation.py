"""Encoder-decoders: tokens of nc, transformers and CTranslate2, with weights of their real shapes.

    .venv-ragged/bin/python benchmarks/translation.py [--shape t5-small marian whisper-base] [--batch 1 8]
        [--engines fp32 nc nc-plan ctranslate2] [--threads 1] [--results results/low-bit-speed.jsonl]

Weights are random, since nothing can be downloaded; the price of a token does not depend on them. All
engines generate the same number of tokens greedily, none ends early. `nc` has the encoder in static int8 and
a decoder of int8 weights, as `nc.hf.quantize` makes them; `nc-plan` is the same after
`nc.accelerate_generation`; CTranslate2 computes in int8. Each engine has a process of its own; they take
turns in random order. A row has the median over the rounds, and the median of its ratios to the first engine
in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_rows
from lowbit_tokens import Worker

HERE = Path(__file__).resolve()
ENGINES = ("fp32", "nc", "nc-plan", "ctranslate2")
SOURCE = 64
_OF_MARIAN = {
    **{"vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6},
    **{"encoder_attention_heads": 8, "decoder_attention_heads": 8, "activation_function": "swish"},
    **{"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "max_position_embeddings": 512},
    **{"pad_token_id": 58100, "eos_token_id": 0, "decoder_start_token_id": 58100, "bos_token_id": 1},
    **{"scale_embedding": True, "static_position_embeddings": True, "add_final_layer_norm": False},
}
_OF_WHISPER = {
    **{"vocab_size": 51865, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6},
    **{"encoder_attention_heads": 8, "decoder_attention_heads": 8, "num_mel_bins": 80},
    **{
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    **{"pad_token_id": 50257, "eos_token_id": 50257, "decoder_start_token_id": 50258, "bos_token_id": 50257},
}
#: Name → class and configuration.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-small": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0, "vocab_size": 32128}),
    "marian": ("MarianMTModel", _OF_MARIAN),
    "whisper-base": ("WhisperForConditionalGeneration", _OF_WHISPER),
}


def main() -> None:
    """Print a Markdown table; or be an engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["t5-small", "marian"], choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate after the first")
    parser.add_argument("--rounds", type=int, default=7)
    results_rows.add_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    print("| model | batch | engine | first token, ms | each step, ms | x " + options.engines[0] + " |")
    print("|---|---|---|---|---|---|")
    for shape in options.shape:
        for batch in options.batch:
            compare(shape, batch, options)


def compare(shape: str, batch: int, options: argparse.Namespace) -> None:
    """Run all engines in turns."""
    conditions = {"threads": options.threads, "tokens": options.tokens, "batch": batch}
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:
        for engine in options.engines:
            given = {"engine": engine, "shape": shape, **conditions}
            workers[engine] = Worker(sys.executable, given, HERE)
            stack.callback(workers[engine].stop)
        found: dict[str, list[dict[str, float]]] = {engine: [] for engine in workers}
        order = random.Random(0)
        for _ in range(options.rounds):
            for engine in order.sample(list(workers), len(workers)):
                found[engine].append(workers[engine].ask("run"))
    base = found[options.engines[0]]
    for engine, rounds in found.items():
        ratios = [b["step"] / r["step"] for b, r in zip(base, rounds, strict=True)]
        row = {
            "first": results_rows.median([1e3 * r["first"] for r in rounds], "ms"),
            "step": results_rows.median([1e3 * r["step"] for r in rounds], "ms"),
            "speed": results_rows.median(ratios, f"x {options.engines[0]}"),
        }
        first, step, speed = (figure.value for figure in row.values())
        print(f"| {shape} | {batch} | {engine} | {first:.1f} | {step:.2f} | {speed:.2f} |", flush=True)
        what = {"measured": "translation", "model": shape, "engine": engine, **conditions}
        results_rows.append(options.results, what, row, ("transformers", "ctranslate2"))


def work(given: dict[str, Any]) -> None:
    """Answer the lines of standard input: seconds to the first token, and of each step after it."""
    import os

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not mix with the answers
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        generate = (_ctranslate2 if given["engine"] == "ctranslate2" else _transformers)(given, Path(folder))
    _seconds(generate, given["tokens"])
    print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(_seconds(generate, given["tokens"])), file=answers, flush=True)


def _seconds(generate: Callable[[int], None], tokens: int) -> dict[str, float]:
    """Seconds of a text of one token, and of each one more."""
    found = []
    for count in (1, 1 + tokens):
        start = time.perf_counter()
        generate(count)
        found.append(time.perf_counter() - start)
    return {"first": found[0], "step": (found[1] - found[0]) / tokens}


def _model(shape: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    name, sizes = SHAPES[shape]
    made = getattr(transformers, name)
    model = made(made.config_class(**sizes)).eval()
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = None
    return model


def _inputs(shape: str, batch: int) -> dict[str, Any]:
    import torch

    if shape.startswith("whisper"):
        return {"input_features": torch.randn(batch, 80, 3000)}
    ids = torch.randint(100, 30_000, (batch, SOURCE), generator=torch.Generator().manual_seed(batch))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _transformers(given: dict[str, Any], folder: Path) -> Callable[[int], None]:
    """Return `generate` of a model of transformers, which nc may have quantized."""
    import torch
    from transformers import GenerationMixin

    torch.set_num_threads(given["threads"])
    model, inputs = _model(given["shape"]), _inputs(given["shape"], given["batch"])
    if given["engine"] != "fp32":
        import nc
        import nc.hf

        config = nc.StaticQuantConfig(post=())
        nc.hf.quantize(model, [_inputs(given["shape"], 4)] * 2, folder / "q", config, measure=False)
        model = nc.hf.load(folder / "q")
        if given["engine"] == "nc-plan":
            nc.accelerate_generation(model)

    def generate(count: int) -> None:
        with torch.no_grad():
            GenerationMixin.generate(
                model, **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1
            )

    return generate


def _ctranslate2(given: dict[str, Any], folder: Path) -> Callable[[int], None]:
    """Return CTranslate2's own loop over the same weights."""
    import ctranslate2
    import numpy
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    shape, batch = given["shape"], given["batch"]
    model, inputs = _model(shape), _inputs(shape, batch)
    model.save_pretrained(folder / "hf")
    config = model.config
    # CTranslate2 knows Marian's token for padding by its text
    words = [
        "<pad>" if number == config.pad_token_id else f"w{number}" for number in range(config.vocab_size)
    ]
    if shape.startswith("whisper"):
        of_whisper = {
            50257: "endoftext",
            50258: "startoftranscript",
            50359: "transcribe",
            50363: "notimestamps",
        }
        for number, name in of_whisper.items():
            words[number] = f"<|{name}|>"
    special = {
        f"{name}_token": words[getattr(config, f"{name}_token_id", None) or 0]
        for name in ("unk", "pad", "bos", "eos")
    }
    model_of_words = WordLevel({word: number for number, word in enumerate(words)}, special["unk_token"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model_of_words), **special)
    tokenizer.save_pretrained(folder / "hf")
    TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"), quantization="int8")
    options: dict[str, Any] = {"device": "cpu", "compute_type": "int8", "intra_threads": given["threads"]}
    if shape.startswith("whisper"):
        engine = ctranslate2.models.Whisper(str(folder / "ct2"), **options)
        features = ctranslate2.StorageView.from_array(inputs["input_features"].numpy().astype(numpy.float32))

        def transcribe(count: int) -> None:
            # half of its greatest length may be a prompt
            given = {"beam_size": 1, "max_length": 2 * count, "suppress_tokens": [config.eos_token_id]}
            engine.generate(features, [[config.decoder_start_token_id, 50363]] * batch, **given)

        return transcribe
    translator = ctranslate2.Translator(str(folder / "ct2"), inter_threads=1, **options)
    texts = [[f"w{i}" for i in row] for row in inputs["input_ids"].tolist()]

    def translate(count: int) -> None:
        translator.translate_batch(
            texts, beam_size=1, max_decoding_length=count, min_decoding_length=count, max_batch_size=batch
        )

    return translate


if __name__ == "__main__":
    main()

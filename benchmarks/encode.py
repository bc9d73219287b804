"""What SentenceTransformer.encode gives beside other engines in one run: sentences per second and quality.

    .venv-readers/bin/python benchmarks/encode.py [--ways fp32 bf16 openvino nc auto] [--rounds 5]

MiniLM on paragraphs of Python's documentation, batches of 32, lengths as they are. Each way has a process;
the processes take turns. The number is that of the fastest round, and its ratio to the first way is the
median of the rounds'. Quality: 100 x Spearman's correlation of cosines with what people said of the 1,225
pairs of news of Lee, Pincombe and Welsh (2005; package gensim), and the mean cosine to fp32. The first 96 of
the 300 other news calibrate all integers.

    fp32      sentence-transformers as it is
    bf16      model_kwargs={"dtype": torch.bfloat16}
    openvino  backend="openvino"; NNCF quantizes the encoder as sentence-transformers' own export does, but
              with the calibration texts at their own lengths
    nc        nc.hf.quantize_sentence_transformer(model, texts, out, nc.StaticQuantConfig())
    auto      nc.hf.quantize_sentence_transformer(model, texts, out)
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import packages
import torch
from ranks import spearman

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import minilm

WAYS = ("fp32", "bf16", "openvino", "nc", "auto")
BATCH = 32


def news() -> tuple[list[str], list[str], torch.Tensor]:
    """Return texts that calibrate, those that people judged, and what they said of each pair."""
    folder = packages.folder("gensim", "gensim==4.4.0") / "test" / "test_data"
    others, judged = (
        (folder / name).read_text(encoding="latin-1").splitlines()
        for name in ("lee_background.cor", "lee.cor")
    )
    said = (folder / "similarities0-1.txt").read_text(encoding="utf-8").splitlines()
    return others[:96], judged, torch.tensor([[float(number) for number in line.split()] for line in said])


def made(way: str, place: str) -> Any:
    """Return the model of one way."""
    from sentence_transformers import SentenceTransformer

    source, calibration = str(minilm.model_folder()), news()[0]
    if way == "bf16":
        return SentenceTransformer(source, device="cpu", model_kwargs={"dtype": torch.bfloat16})
    if way == "openvino":
        return _openvino(source, calibration, place)
    model = SentenceTransformer(source, device="cpu")
    if way == "fp32":
        return model
    import nc
    from nc import hf

    config = nc.StaticQuantConfig() if way == "nc" else "auto"
    return hf.quantize_sentence_transformer(model, calibration, f"{place}/{way}", config)


def _openvino(source: str, calibration: list[str], place: str) -> Any:
    """Export, quantize by NNCF for transformers, and load as users do."""
    import nncf
    import openvino
    from sentence_transformers import SentenceTransformer

    exported = SentenceTransformer(
        source, backend="openvino", device="cpu", model_kwargs={"export": True, "compile": False}
    )
    folder = f"{place}/openvino"
    exported.save_pretrained(folder)
    file = next(Path(folder).rglob("openvino_model.xml"))
    model = openvino.Core().read_model(file)
    names = {port.get_any_name() for port in model.inputs}
    features = [exported.tokenizer(text, truncation=True, return_tensors="np") for text in calibration]
    given = [{name: value for name, value in each.items() if name in names} for each in features]
    quantized = nncf.quantize(model, nncf.Dataset(given), model_type=nncf.ModelType.TRANSFORMER)
    del model
    openvino.save_model(quantized, file.with_name("openvino_model_qint8_quantized.xml"))
    options = {"file_name": "openvino/openvino_model_qint8_quantized.xml"}
    return SentenceTransformer(folder, backend="openvino", device="cpu", model_kwargs=options)


def work(way: str, texts: int) -> None:
    """Be the process of one way: print its quality, then sentences per second for each line that comes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        model = made(way, place)
        plain = made("fp32", place) if way != "fp32" else model
        _, judged, said = news()
        got, expected = (torch.from_numpy(np.asarray(m.encode(judged), np.float32)) for m in (model, plain))
        pairs = tuple(torch.triu_indices(len(judged), len(judged), 1))
        quality = 100 * spearman((got @ got.T)[pairs], said[pairs]), (got * expected).sum(1).mean().item()
        given = minilm.split()[1][:texts]
        del plain
        for _ in range(2):
            model.encode(given, batch_size=BATCH)
        print("told", json.dumps(quality), flush=True)
        for _ in sys.stdin:
            begin = time.perf_counter()
            model.encode(given, batch_size=BATCH)
            print("told", json.dumps(len(given) / (time.perf_counter() - begin)), flush=True)


def told(process: subprocess.Popen[str]) -> Any:
    """Return the next thing that a process says; libraries may print, too."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("told "):
            return json.loads(line.removeprefix("told "))
    msg = f"a process ended with code {process.wait()}"
    raise SystemExit(msg)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.texts)
        return
    started = {}
    for way in options.ways:  # one after the other, so that none is disturbed while it is made
        words = [sys.executable, __file__, "--work", way, "--texts", str(options.texts)]
        started[way] = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(f"{way:9} Spearman, cosine to fp32: {told(started[way])}", flush=True)
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for way, process in started.items():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rounds[-1][way] = told(process)
    for process in started.values():
        process.communicate()
    for way in started:
        best = max(each[way] for each in rounds)
        ratio = statistics.median(each[way] / each[options.ways[0]] for each in rounds)
        print(f"{way:9} {best:7.1f} sentences/s   {ratio:.2f} x {options.ways[0]}")


if __name__ == "__main__":
    main()

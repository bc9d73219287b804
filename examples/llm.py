"""Quantize a real language model to 4 bits.

Text, accuracy, size, time per token, and loading in a new process.

    python examples/llm.py [--out DIR] [--bits 4] [--group-size 64] [--tokens 24]

The model is SmolLM2-135M-Instruct from a PyPI package, the text comes from installed packages (see
smollm2.py). Nothing is downloaded, and nothing is written to the working directory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import show
import smollm2
import torch

import nc
from nc import GPTQ, WeightOnlyConfig

PROMPT = "What is the capital of France, and what is it known for?"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="new or empty folder for what is saved (default: a temporary one)"
    )
    parser.add_argument(
        "--bits", type=int, default=4, choices=range(2, 9), help="bits of a weight (default: %(default)s)"
    )
    parser.add_argument(
        "--group-size", type=int, default=64, help="weights that share a scale (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=16, help="pieces of text to calibrate with (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--check", type=Path, metavar="DIR", help="only load what an earlier run saved, and generate"
    )
    options = parser.parse_args()
    if options.check:
        check(options.check, options.tokens)
    else:
        tour(options, options.out or Path(tempfile.mkdtemp(prefix="nc-llm-")))


def tour(options: argparse.Namespace, out: Path) -> None:
    """Quantize, judge, save and load."""
    model, tokenizer = smollm2.load_model(), smollm2.load_tokenizer()
    calibration, held_out = (
        smollm2.texts(tokenizer, options.samples, 256),
        smollm2.texts(tokenizer, 8, 256, held_out=True),
    )

    # ── 4 bits in four lines ────────────────────────────────────────────
    config = WeightOnlyConfig(
        f"int{options.bits}", group_size=options.group_size, scale_dtype="fp16", lm_head="int8", solver=GPTQ()
    )
    prepared = nc.prepare(model, config)
    for ids in show.progress(calibration, "calibrate"):
        prepared(ids)
    q_model = nc.accelerate_generation(nc.convert(prepared, progress=tell))
    # ────────────────────────────────────────────────────────────────────

    show.heading("What is stored")
    show.console.print(str(nc.report(q_model)), soft_wrap=True)
    show.heading("Accuracy on held-out text, against the fp32 model")
    kl, same, perplexities = smollm2.compare(model, q_model, held_out)
    show.console.print(
        f"mean KL divergence {kl:.4f} nats; the same most likely token at {same:.1%} of the positions"
    )
    show.console.print(f"perplexity: fp32 {perplexities[0]:.2f}, quantized {perplexities[1]:.2f}")
    show.heading("Text and time")
    for name, each in (("fp32", model), ("quantized", q_model)):
        text, times = generate(each, tokenizer, options.tokens)
        show.console.print(f"{name}, {statistics.median(times) * 1e3:.0f} ms per token:\n  {text}")
    nc.save(q_model, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    show.heading("Loaded in a new process")
    show.console.print(f"{size / 1e6:.1f} MB in {out}")
    subprocess.run(
        [sys.executable, __file__, "--check", str(out), "--tokens", str(options.tokens)], check=True
    )


def check(out: Path, tokens: int) -> None:
    """Load and generate."""
    q_model = nc.accelerate_generation(nc.load(out))
    text, _ = generate(q_model, smollm2.load_tokenizer(), tokens)
    show.console.print(f"  {text}")


def generate(model: Any, tokenizer: Any, tokens: int) -> tuple[str, list[float]]:
    """Return the answer to `PROMPT`, and the seconds that each token but the first took."""
    chat = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    stamps: list[float] = []
    handle = model.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    handle.remove()
    answer: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(answer.split()), [
        later - earlier for earlier, later in zip(stamps[1:], stamps[2:], strict=False)
    ]


def tell(done: int, total: int, name: str) -> None:
    """Print which block comes next."""
    print(
        f"\rblock {done} of {total} {name:40}", end="" if done < total else "\n", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    main()

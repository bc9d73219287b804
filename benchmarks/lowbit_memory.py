"""Time and peak memory of quantizing a language model of 1.1 B random weights from files, block by block.

    python benchmarks/lowbit_memory.py --solver rtn
    python benchmarks/lowbit_memory.py --solver gptq --samples 128 --length 512
    python benchmarks/lowbit_memory.py --solver gptq --blocks 3                     # all sizes but the depth;
    times are per block

The sizes are those of TinyLlama-1.1B. Weights are made shard by shard into a temporary folder (4.4 GB in
float32), calibration data are random token ids, so no tokenizer is needed. A process of its own quantizes a
tiny model first: everything is imported and warm. Then Linux's high-water mark of resident memory (VmHWM) is
reset, and the growth above the memory at that moment (VmRSS) is what quantizing needs. Files are read, not
mapped, so all of the growth is memory of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import results_rows
import torch
from results_rows import Figure
from safetensors.torch import save_file

TINYLLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}
#: Bytes of hidden states that stay in memory; see nc.modules.activations.
_HIDDEN_LIMIT = 2**30


def shapes(sizes: dict[str, int], blocks: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each shard: one per block, and one for the rest."""
    width, inner, rows = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    narrow = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    for block in range(blocks):
        yield {f"model.layers.{block}.{name}.weight": shape for name, shape in linears.items()}
    yield {
        "model.embed_tokens.weight": (rows, width),
        "lm_head.weight": (rows, width),
        "model.norm.weight": (width,),
    }


def make(folder: Path, sizes: dict[str, int], blocks: int, dtype: torch.dtype) -> None:
    """Return a model of random weights, as transformers' `save_pretrained` lays it out."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": blocks,
        "tie_word_embeddings": False,
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    for index, shard in enumerate(shapes(sizes, blocks)):
        tensors = {
            name: (
                torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape)
            ).to(dtype)
            for name, shape in shard.items()
        }
        save_file(tensors, folder / f"model-{index:05d}-of-{blocks + 1:05d}.safetensors")


def status(name: str) -> float:
    """Return a line of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def child(source: str, tiny: str, out: str, solver: str, samples: int, length: int, threads: int) -> None:
    """Quantize; prints one line of JSON."""
    from nc import GPTQ, RTN, WeightOnlyConfig
    from nc.api.pretrained import quantize_folder

    torch.set_num_threads(threads)
    config = WeightOnlyConfig(
        "int4", group_size=64, scale_dtype="fp16", solver=GPTQ() if solver == "gptq" else RTN()
    )
    generator = torch.Generator().manual_seed(1)

    def run(folder: str, count: int) -> None:
        data = [torch.randint(0, 32000, (1, length), generator=generator) for _ in range(count)]
        quantize_folder(Path(folder), config, Path(out), data if solver == "gptq" else [], progress=progress)

    times: list[float] = []

    def progress(done: int, total: int, name: str) -> None:
        times.append(time.perf_counter())
        print(f"{done} of {total} {name}, peak {status('VmHWM'):.0f} MB", file=sys.stderr, flush=True)

    run(tiny, 2)
    shutil.rmtree(out)
    gc.collect()
    times.clear()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = status("VmRSS"), time.perf_counter()
    run(source, samples)
    row = {"mb_before": before, "mb_peak": status("VmHWM"), "seconds": time.perf_counter() - begun}
    row |= {"seconds_per_block": (times[-2] - times[0]) / max(len(times) - 2, 1), "load": os.getloadavg()[0]}
    print(json.dumps(row), flush=True)


def main() -> None:
    """Make the models, quantize them in a child process, print figures and the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solver", choices=("rtn", "gptq"), default="rtn")
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    results_rows.add_option(parser)
    asked = parser.parse_args()
    block = next(iter(shapes(TINYLLAMA, 1)))
    dtype = getattr(torch, asked.dtype)
    with tempfile.TemporaryDirectory(prefix="nc-memory-") as name:
        folder = Path(name)
        make(folder / "source", TINYLLAMA, asked.blocks, dtype)
        make(folder / "tiny", TINY, 2, dtype)
        arguments = [
            folder / "source",
            folder / "tiny",
            folder / "out",
            asked.solver,
            asked.samples,
            asked.length,
            asked.threads,
        ]
        done = subprocess.run(
            [sys.executable, __file__, "child", *map(str, arguments)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        row = json.loads(done.stdout.splitlines()[-1])
        stored = sum(path.stat().st_size for path in (folder / "out").iterdir())
        weights = sum(
            torch.Size(shape).numel() for shard in shapes(TINYLLAMA, asked.blocks) for shape in shard.values()
        )
    mb = 1e-6
    largest = 4 * sum(torch.Size(shape).numel() for shape in block.values()) * mb
    # one matrix per tensor that linears read: in front of q, k and v, of o, of gate and up, of down
    sums = (
        (3 * TINYLLAMA["hidden_size"] ** 2 + TINYLLAMA["intermediate_size"] ** 2) * 8 * mb
        if asked.solver == "gptq"
        else 0.0
    )
    hidden = (
        asked.samples * asked.length * TINYLLAMA["hidden_size"] * dtype.itemsize
        if asked.solver == "gptq"
        else 0
    )
    held = min(hidden, _HIDDEN_LIMIT) * mb
    need = row["mb_peak"] - row["mb_before"]
    bound = 2 * largest + sums + held
    what = {
        "measured": "low-bit from files",
        "model": "TinyLlama's sizes, 1.1 B weights",
        "format": "int4, groups of 64",
    }
    what |= {
        "solver": asked.solver.upper(),
        "threads": asked.threads,
        "blocks": asked.blocks,
        "dtype": asked.dtype,
    }
    what |= {"tokens": f"{asked.samples} x {asked.length}"} if asked.solver == "gptq" else {}
    measured = {
        "peak": (need, "MB"),
        "bound": (bound, "MB"),
        "time": (row["seconds"], "s"),
        "time per block": (row["seconds_per_block"], "s"),
    }
    figures = {name: Figure(results_rows.rounded(number), unit) for name, (number, unit) in measured.items()}
    results_rows.append(
        asked.results, what, figures, ("transformers",), f"load of the machine {row['load']:.1f}"
    )
    print(
        f"{asked.solver}, {weights / 1e9:.2f} B weights in {asked.dtype} ({asked.blocks} blocks), "
        f"{asked.threads} threads"
    )
    print(
        f"time {row['seconds']:.0f} s, {row['seconds_per_block']:.1f} s per block; load of the machine "
        f"{row['load']:.1f}"
    )
    print(
        f"memory: before {row['mb_before']:.0f}, peak {row['mb_peak']:.0f}, so quantizing {need:.0f}; result "
        f"{stored * mb:.0f} MB"
    )
    print(
        f"bound: 2 x largest block {2 * largest:.0f} (float32) + statistics {sums:.0f} + hidden states "
        f"{held:.0f} = {bound:.0f} MB"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:6], *map(int, sys.argv[6:]))  # type: ignore[arg-type]
    else:
        main()

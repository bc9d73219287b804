"""AutoScheme of AutoRound 0.16: bits per layer for an average, of 2 to 6 bits in groups of 64, symmetric.

python benchmarks/peers_lowbit/with_autoscheme.py --data DIR --target 3.25 --method "opt RTN" --out FILE

The file holds what those of the other scripts hold; its metadata has the average of the stored bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import outside
from lowbit_subjects import load

GROUP, SCALE_BITS = 64, 16
#: Name → options of `AutoRound`.
METHODS: dict[str, dict[str, Any]] = {
    "opt RTN": {"iters": 0},
    "light": {"iters": 50, "lr": 5e-3},
}


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser()
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--method", choices=list(METHODS), required=True)
    options = parser.parse_args()
    from auto_round import AutoRound, AutoScheme
    from transformers import AutoTokenizer

    subject = load(options.data, "smollm2")
    assert subject.folder is not None
    tokenizer = AutoTokenizer.from_pretrained(subject.folder)
    rows = [row for batch in subject.calibration for row in batch["input_ids"]]
    tick = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        texts.write_text(json.dumps([{"text": tokenizer.decode(row)} for row in rows]), encoding="utf-8")
        length = min(len(tokenizer(tokenizer.decode(row))["input_ids"]) for row in rows)
        schemes = [f"W{bits}A16G{GROUP}" for bits in (2, 3, 4, 5, 6)]
        scheme = AutoScheme(
            avg_bits=options.target,
            options=schemes,
            nsamples=len(rows),
            seqlen=length,
            dataset=str(texts),
            enable_torch_compile=False,
        )
        tuner = AutoRound(
            subject.model,
            tokenizer,
            scheme=scheme,
            dataset=str(texts),
            nsamples=len(rows),
            seqlen=length,
            batch_size=8,
            device_map="cpu",
            amp=False,
            enable_torch_compile=False,
            layer_config={n: {"bits": 16, "data_type": "float"} for n in outside(subject)},
            **METHODS[options.method],
        )
        model, _ = tuner.quantize()
    weights, stored, count = {}, 0.0, 0
    widths: Counter[int] = Counter()
    for name in subject.layers:
        module = model.get_submodule(name)
        weight = getattr(module, "orig_layer", module).weight
        weights[f"{name}.weight"] = weight.detach().float().contiguous().clone()
        bits = int(getattr(module, "bits", 16))
        widths[bits] += 1
        stored += weight.numel() * (bits + SCALE_BITS / GROUP)
        count += weight.numel()
    told = {
        "method": f"AutoScheme, {options.method}",
        "bits": str(stored / count),
        "widths": str(dict(widths)),
        "seconds": str(time.perf_counter() - tick),
    }
    save_file(weights, options.out, metadata=told)
    print(told)


if __name__ == "__main__":
    main()

"""Bits per layer for an average, of SmolLM2-135M: `nc.tune` with `target_bits`, beside others at equal size.

    python benchmarks/lowbit_prepare.py --data DIR --subject smollm2
    python benchmarks/lowbit_bits.py --data DIR --target 3.25
    .venv-lowbit-autoround/bin/python benchmarks/peers_lowbit/with_autoscheme.py --data DIR --target 3.25 \
        --method "opt RTN" --out FILE
    python benchmarks/lowbit_bits.py --data DIR --weights FILE

All linears of the blocks have 2 to 6 bits in groups of 64, symmetric, with fp16 scales. Both are judged on
data that they have not seen, by what judges the tables of lowbit.py.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

from lowbit import Row, judge
from lowbit_subjects import Subject, load, settings
from safetensors import safe_open

WIDTHS = (2, 3, 4, 5, 6)


def candidates(subject: Subject, widths: tuple[int, ...] = WIDTHS) -> dict[str, Any]:
    """Return two-sided GPTQ with each width, the best of one width for all in the tables of lowbit.py."""
    import nc

    options = {"group_size": 64, "scale_dtype": "fp16", "solver": nc.GPTQ(two_sided="gptaq")}
    return {
        f"int{bits}": nc.WeightOnlyConfig(f"int{bits}", **options, white_list=subject.layers)
        for bits in widths
    }


def ours(subject: Subject, target: float, setting: str, trials: Path | None) -> Row:
    """Return what `nc.tune` gives for a target, after its front."""
    import nc

    def run_fn(prepared: Any) -> None:
        for batch in subject.calibration:
            prepared(**batch)

    tick = time.perf_counter()
    front = nc.tune(
        subject.model,
        subject.calibration[0],
        run_fn,
        candidates=candidates(subject),
        target_bits=target,
        points=1,
        budget="2h",
        trials=trials,
        progress=lambda p: print(p, flush=True),
    )
    print(front)
    point = front.most_accurate(max_bits=target)
    row = Row("smollm2", f"int-{target:g} bits", "nc", "tune", setting, data=True)
    quantized = nc.quantize(subject.model, point.config, run_fn, measure=False)
    row.seconds, row.bits = time.perf_counter() - tick, point.result.bits or 0.0
    judge(subject, quantized, row)
    return row


def theirs(subject: Subject, file: Path, target: float, setting: str) -> Row:
    """Return what weights give that AutoScheme made."""
    with safe_open(file, "pt") as opened:
        told = opened.metadata()
        weights = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
    row = Row("smollm2", f"int-{target:g} bits", "autoround", told["method"], setting, data=True)
    row.bits, row.seconds = float(told["bits"]), float(told["seconds"])
    print(told["widths"])
    model = copy.deepcopy(subject.model)
    model.load_state_dict({**model.state_dict(), **weights})
    judge(subject, model, row)
    return row


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--weights", type=Path, help="of AutoScheme; without it nc.tune is measured")
    parser.add_argument("--trials", type=Path, help="of nc.tune, for another target with the same estimates")
    options = parser.parse_args()
    setting = settings(options.data)["setting"]
    subject = load(options.data, "smollm2")
    row = (
        ours(subject, options.target, setting, options.trials)
        if options.weights is None
        else theirs(subject, options.weights, options.target, setting)
    )
    figures = f"{row.bits:.3f} bits, KL {row.kl:.4f}, top-1 {row.top1:.1f} %, {row.seconds:.0f} s"
    print(f"{row.tool} {row.method}: {figures}")


if __name__ == "__main__":
    main()

"""What holds accuracy back: MiniLM with one operator in int8 at a time, and all others in fp32.

python benchmarks/sensitivity.py [--evaluate 32] [--results results/accuracy.jsonl]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import minilm
import results_rows
from results_rows import Figure, rounded
from rich.progress import track

import nc
from nc.formats import FLOAT


def losses(evaluate: int) -> dict[str, float]:
    """Operator → 1 - mean cosine to the fp32 embeddings when only it is quantized, on the reference backend.

    And of all together.
    """
    model, tokenizer = minilm.load_model(), minilm.load_tokenizer()
    calibration_text, evaluation_text = minilm.split()
    data = list(minilm.batches(evaluation_text[:evaluate], tokenizer))
    fp32 = minilm.embed(model, data)
    calibration = list(minilm.batches(calibration_text, tokenizer))
    config = nc.StaticQuantConfig(post=())  # what each operator costs before anything mends it
    prepared = nc.prepare(model, config, example_inputs=calibration[0], backend="reference")
    for batch in calibration:
        prepared(**batch)
    plan = prepared.plan
    found = {}
    for name in track(["", *(d.operator for d in plan.quantized)], "quantize", transient=True):
        kept = tuple(
            d if name in ("", d.operator) else dataclasses.replace(d, spec=FLOAT) for d in plan.decisions
        )
        prepared.plan = dataclasses.replace(plan, decisions=kept)
        found[name or "all"] = (
            1.0 - minilm.agreement(fp32, minilm.embed(nc.convert(prepared), data))["mean_cosine"]
        )
    return found


def main() -> None:
    """Print the operators that cost most, and the sums over all layers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--evaluate", type=int, default=32, help="paragraphs to judge on (default: %(default)s)"
    )
    results_rows.add_option(parser)
    options = parser.parse_args()
    found = losses(options.evaluate)
    whole = found.pop("all")
    roles: dict[str, float] = collections.defaultdict(float)
    for name, loss in found.items():
        roles[re.sub(r"\.\d+\.", ".*.", name)] += loss
    lines = [f"1 - mean cosine in 1e-4, {options.evaluate} paragraphs; all together: {whole * 1e4:.1f}", ""]
    for title, table, most in (("summed over layers", roles, len(roles)), ("worst operators", found, 10)):
        lines += [f"| {title} | 1 - cosine, 1e-4 |", "|---|---|"]
        lines += [
            f"| `{name}` | {loss * 1e4:.2f} |"
            for name, loss in sorted(table.items(), key=lambda item: -item[1])[:most]
        ] + [""]
    print("\n".join(lines))
    groups = {"whole model": {"all operators": whole}, "all layers": roles, "one operator": found}
    for of, table in groups.items():
        for name, loss in table.items():
            what = {"measured": "sensitivity", "operators": name, "of": of, "paragraphs": options.evaluate}
            results_rows.append(options.results, what, {"loss": Figure(rounded(loss * 1e4), "1e-4")})


if __name__ == "__main__":
    main()

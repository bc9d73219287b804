"""Draw the pictures of the documents.

docs/images/ranges.svg, the ranges that algorithms choose for one activation of MiniLM.

python benchmarks/figures.py [--operator encoder.layer.5.output.dense]

Needs matplotlib. The same versions of Python, torch and matplotlib write the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
import minilm
import torch

import nc
from nc.graph.catalogue import input_node
from nc.graph.plan import Decision
from nc.numerics.histogram import edges
from nc.observers import ALGORITHMS
from nc.observers.base import State
from nc.observers.histogram import HISTOGRAM

ALGOS = ("minmax", "percentile", "mse", "kl")
BARS = 90
COLOURS = ("#767676", "#0068b5", "#d9730d", "#2e8540")


def histogram_of(operator: str) -> tuple[State, Decision]:
    """Return what calibration sees of the input of an operator, and the decision about it."""
    model, tokenizer = minilm.load_model(), minilm.load_tokenizer()
    data = list(minilm.batches(minilm.split()[0], tokenizer))
    config = nc.StaticQuantConfig(act_algo="mse", post=())
    prepared = nc.prepare(model, config, example_inputs=data[0], backend="reference")
    for batch in data:
        prepared(**batch)
    source = input_node(
        next(n for n in prepared.graph.module.graph.nodes if n.meta.get("operator") == operator)
    )
    return prepared.observers[source.name, HISTOGRAM.name].state, prepared.plan[operator]


def bars(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the histogram in fewer bins: BARS + 1 borders, and BARS counts."""
    borders, low, high = edges(int(state["exponent"])), float(state["low"]), float(state["high"])
    wider = torch.linspace(low, high, BARS + 1, dtype=torch.float64)
    middle = ((borders[:-1] + borders[1:]) / 2).clamp(low, high)
    index = ((middle - low) / (high - low) * BARS).long().clamp(0, BARS - 1)
    return wider, torch.zeros(BARS, dtype=torch.int64).index_add_(0, index, state["counts"])


def draw(state: State, decision: Decision, path: Path) -> None:
    """Return the histogram, and one line below it for each algorithm's range."""
    options = {"svg.hashsalt": "nc", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context(options):
        figure, (top, below) = plt.subplots(
            2, 1, figsize=(6.4, 3.2), sharex=True, height_ratios=(3, 1.1), layout="constrained"
        )
        borders, counts = bars(state)
        top.stairs(counts.tolist(), borders.tolist(), fill=True, color="#9db8cc", baseline=0.5)
        top.set(yscale="log", ylim=(0.5, None), ylabel="values per bar")
        spec = dataclasses.replace(decision.spec.activation, percentile=nc.StaticQuantConfig().percentile)
        for row, (name, colour) in enumerate(zip(ALGOS, COLOURS, strict=True)):
            low, high = (float(end) for end in ALGORITHMS[name].find_range(state, spec))
            below.plot([low, high], [row, row], color=colour, linewidth=4, solid_capstyle="butt")
            below.annotate(
                f"{low:.2f} … {high:.2f}",
                (high, row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            print(f"{name:11}{low:8.3f}{high:8.3f}")
        below.set(ylim=(len(ALGOS) - 0.4, -0.6), xlabel=f"input of {decision.operator}")
        below.set_yticks(range(len(ALGOS)), ALGOS)
        reach = float(state["high"] - state["low"])
        below.set_xlim(float(state["low"]) - 0.02 * reach, float(state["high"]) + 0.16 * reach)
        for axes in (top, below):
            axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--operator",
        default="encoder.layer.5.output.dense",
        help="whose input is drawn (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "docs" / "images" / "ranges.svg"
    )
    options = parser.parse_args()
    draw(*histogram_of(options.operator), options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

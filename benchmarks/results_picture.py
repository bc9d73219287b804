"""Draw docs/images/speed.svg, the picture of README.md, from results/speed.jsonl and results/accuracy.jsonl.

python benchmarks/results_picture.py

Needs matplotlib. The same versions of Python and matplotlib write the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from results_markdown import geometric_mean, matches
from results_overview import KINDS
from results_rows import FOLDER, ROOT, Row, read

PICTURE = ROOT / "docs" / "images" / "speed.svg"
OPENVINO = "openvino-int8"
#: Engine in rows → its name in the picture.
ENGINES = {
    "nc-native": "nc, int8",
    OPENVINO: "OpenVINO, int8 (NNCF)",
    "onnxruntime-int8": "ONNX Runtime, int8",
    "inductor-int8": "Inductor, int8",
    "eager": "PyTorch fp32",
}
COLOURS = ("#0068b5", "#8a8a8a", "#a9a9a9", "#c4c4c4", "#dcdcdc")
#: Flow of accuracy.py → its name in the picture.
FLOWS = {
    "nc auto": 'nc, "auto"',
    "NNCF transformer": "OpenVINO (NNCF, its best preset)",
    "ONNX Runtime dynamic": "ONNX Runtime, dynamic",
}
WHERE = {"batch": 1, "threads": 2, "further": None, "graph": None}


@dataclasses.dataclass(frozen=True)
class Bar:
    """Speed of an engine on a CPU, relative to OpenVINO in the same run.

    Attributes:
        engine: its name in the picture.
        speed: geometric mean over models; OpenVINO has 1.
        models: how many.
    """

    engine: str
    speed: float
    models: int

    @property
    def label(self) -> str:
        """What the picture says at its end."""
        return (
            f"{self.speed:.2f} × ({self.models} models)"
            if self.models > 1
            else f"{self.speed:.2f} × (1 model)"
        )


def speeds(rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """Return for each kind of CPU the bars of the engines: of several machines of a kind, the last one."""
    found = {}
    for flag, kind in KINDS.items():
        beside = [row for row in rows if _kind(row) == flag and matches(row, {**WHERE, "base": OPENVINO})]
        if beside:
            machine = beside[-1].machine
            same = [row for row in rows if row.machine == machine and matches(row, WHERE)]
            found[f"{kind}: {machine.split(',')[0]}"] = _bars(same)
    return found


def _bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for engine, name in ENGINES.items():
        ratios = []
        for model in dict.fromkeys(row.what["model"] for row in rows):
            for base in (OPENVINO, "eager"):  # a run that has both: the first is the longer one
                own = _latency(rows, base, model, engine)
                other = _latency(rows, base, model, OPENVINO)
                if own and other:
                    ratios.append(other / own)
                    break
        if ratios:
            bars.append(Bar(name, geometric_mean(ratios), len(ratios)))
    return bars


def _latency(rows: Sequence[Row], base: str, model: str, engine: str) -> float | None:
    same = {"base": base, "model": model, "engine": engine}
    found = [
        row.value("latency")
        for row in rows
        if matches(row, same) and row.versions["torch"].startswith("2.13")
    ]
    return float(found[-1]) if found and found[-1] is not None else None


def errors(rows: Sequence[Row]) -> dict[str, float]:
    """Return flow → 1 - mean cosine to fp32 of MiniLM's embeddings, all of the last machine that has them."""
    where = {"measured": "accuracy", "task": "minilm"}
    machine = next(r.machine for r in reversed(rows) if matches(r, {**where, "flow": "nc auto"}))
    found = {}
    for flow, name in FLOWS.items():
        same = [r for r in rows if r.machine == machine and matches(r, {**where, "flow": flow})]
        found[name] = 1 - float(same[-1].figures["mean cosine"].value)
    return found


def _kind(row: Row) -> str:
    return next((flag for flag in KINDS if flag in row.isa.split()), "")


def draw(bars: Mapping[str, Sequence[Bar]], noise: Mapping[str, float], path: Path) -> None:
    """Write the picture: a row of bars for each CPU, and one for the error."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    options = {"svg.hashsalt": "nc", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 8}
    heights = [len(found) + 1 for found in (*bars.values(), noise)]
    with mpl.rc_context(options):
        figure, axes = plt.subplots(
            len(heights), 1, figsize=(7.2, 0.26 * sum(heights)), height_ratios=heights, layout="constrained"
        )
        colours = dict(zip(ENGINES.values(), COLOURS, strict=True))
        for axis, (cpu, found) in zip(axes, bars.items(), strict=False):
            names = [bar.engine for bar in found]
            axis.barh(names, [bar.speed for bar in found], color=[colours[name] for name in names])
            for row, bar in enumerate(found):
                axis.annotate(bar.label, (bar.speed, row), (4, 0), textcoords="offset points", va="center")
            axis.set_title(f"Speed, × OpenVINO int8. {cpu}", loc="left", fontsize=9, fontweight="bold")
            axis.set_xlim(0, 2)
        last = axes[-1]
        last.barh(list(noise), list(noise.values()), color=[COLOURS[0], COLOURS[1], COLOURS[2]])
        for row, value in enumerate(noise.values()):
            last.annotate(f"{value:.4f}", (value, row), (4, 0), textcoords="offset points", va="center")
        last.set_title(
            "Error: 1 - cosine of MiniLM's embeddings to fp32", loc="left", fontsize=9, fontweight="bold"
        )
        last.set_xlim(0, 1.25 * max(noise.values()))
        for axis in axes:
            axis.invert_yaxis()
            axis.set_xticks([])
            axis.spines[["top", "right", "bottom"]].set_visible(False)
            axis.tick_params(length=0)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def main() -> None:
    """Write the picture."""
    draw(speeds(read(FOLDER / "speed.jsonl")), errors(read(FOLDER / "accuracy.jsonl")), PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

"""Kinds of models that users found slower, or worse, in int8: what each tool makes of them.

python benchmarks/worse.py [--case voice detector ...] [--only "nc auto" "ONNX Runtime static"]
    [--results results/worse.jsonl]

Needs the environment of `make setup-peers`. Tools get the same model and the same data, with their defaults,
and calls take turns. What a tool cannot do is a row with its reason.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings

import torch
import turns
from accuracy import quantized
from peers import PACKAGES, PEERS
from results_markdown import markdown
from results_rows import Figure, add_option, append
from task import Run
from tasks import Candidate
from worse_cases import Case, all_cases, cases, decibels

import nc

ROUNDS = 9


def torch_dynamic(case: Case) -> tuple[Run, str, str]:
    """PyTorch's own `quantize_dynamic`: linears."""
    from torch.ao.quantization import quantize_dynamic

    model = quantize_dynamic(copy.deepcopy(case.model), {torch.nn.Linear}, dtype=torch.qint8)
    return model, "-", "-"


TOOLS: dict[str, Candidate] = {
    "nc auto": quantized(lambda: "auto"),
    "nc static": quantized(nc.StaticQuantConfig),
    "NNCF": PEERS["NNCF"],
    "NNCF transformer": PEERS["NNCF transformer"],
    "ONNX Runtime static": PEERS["ONNX Runtime static"],
    "ONNX Runtime dynamic": PEERS["ONNX Runtime dynamic"],
    "torch dynamic": torch_dynamic,
}


@torch.no_grad()
def main() -> None:
    """Print a table for each case, and append rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=list(cases()), default=list(cases()))
    parser.add_argument("--only", nargs="+", choices=list(TOOLS), default=list(TOOLS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for case in all_cases(options.case):
        print(f"\n### {case.name}\n", flush=True)
        found, failed = judged(case, options.only)
        names = list(dict.fromkeys(name for row in found.values() for name in row))
        body = [
            [tool, *(str(row[n].value) if n in row else "" for n in names)] for tool, row in found.items()
        ]
        print(markdown(["", *(case.asked if n == "judged" else n for n in names)], body, numbers=len(names)))
        print("".join(f"* {name}: {why}\n" for name, why in failed.items()), flush=True)
        for name, figures in found.items():
            what = {"measured": "worse", "case": case.name, "tool": name, "threads": options.threads}
            append(options.results, what, figures, PACKAGES)
        for name, why in failed.items():
            what = {"measured": "worse", "case": case.name, "tool": name, "threads": options.threads}
            append(options.results, what, {}, PACKAGES, note=f"{name}: {why}")


def judged(case: Case, names: list[str]) -> tuple[dict[str, dict[str, Figure]], dict[str, str]]:
    """Return the figures of fp32 and of each tool, and why others have none."""
    base = copy.deepcopy(case.model).float()
    runs: dict[str, Run] = {turns.BASE: base}
    figures: dict[str, dict[str, Figure]] = {}
    failed: dict[str, str] = {}
    for name in names:
        made = _made(case, name, base)
        if isinstance(made, str):
            failed[name] = made
        else:
            runs[name], figures[name] = made
    times = turns.timings(
        {name: lambda run=run: run(**case.evaluation[0]) for name, run in runs.items()}, ROUNDS
    )
    rows = {}
    for name in runs:
        rows[name] = {
            "time": turns.duration(times[name]),
            "speed": turns.speed(times[turns.BASE], times[name]),
            **figures.get(name, {}),
        }
    return rows, failed


def _made(case: Case, name: str, base: Run) -> tuple[Run, dict[str, Figure]] | str:
    """Return a tool's model and its errors, or why there is none: the other tools still count."""
    try:
        run, _, int8 = TOOLS[name](case)
        found = {"error": Figure(decibels(base, run, case.evaluation), "dB")}
        if case.judge is not None:
            found["judged"] = case.judge(base, run)
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"
    return run, found | {"int8 products": Figure(int8, "products")}


def _line(error: Exception, most: int = 200) -> str:
    """Return the beginning of what an error says."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]} …"


if __name__ == "__main__":
    main()

"""Quantize torchvision's ResNet-50 with two fallback rules, and see which rule decided for which operator.

    python examples/resnet50.py [--out DIR]     the whole tour
    python examples/resnet50.py --check DIR     only load what an earlier tour saved, and compare its numbers

The weights are RANDOM, and so are the images: torchvision ships no weights and nothing is downloaded. Speed,
size and what runs int8 are those of the real model; the agreement only shows that int8 follows the fp32
network.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import show
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from torchvision.models import resnet50

import nc
from nc import StaticQuantConfig, convert, prepare

SIZE, BATCH = 224, 8
CALIBRATION_BATCHES, EVALUATION_BATCHES = 4, 4
LATENCY_ROUNDS = 20


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="new or empty folder for what is saved (default: a temporary one)"
    )
    parser.add_argument("--check", type=Path, metavar="DIR", help="the --out folder of an earlier run")
    options = parser.parse_args()
    if options.check:
        check(options.check)
    else:
        tour(options.out or Path(tempfile.mkdtemp(prefix="nc-resnet50-")))


def tour(out: Path) -> None:
    """Everything but loading."""
    show.console.print("torchvision resnet50 with RANDOM weights on random images")
    torch.manual_seed(0)
    model = resnet50(weights=None).eval()
    calibration = [images(seed) for seed in range(CALIBRATION_BATCHES)]
    evaluation = [images(100 + seed) for seed in range(EVALUATION_BATCHES)]

    # ── int8 but for the first convolution (by name) and all Linears (by type) ──
    fp32 = StaticQuantConfig(w_dtype="fp32", act_dtype="fp32")
    config = StaticQuantConfig().set_local("conv1", fp32).set_local(torch.nn.Linear, fp32)
    prepared = prepare(model, config, example_inputs=calibration[0][:1])
    for batch in show.progress(calibration, "calibrate"):
        prepared(batch)
    q_model = convert(prepared)
    # ────────────────────────────────────────────────────────────────────────────

    report = q_model.report()
    rules(report)
    show.operators(report)
    accuracy(model, q_model, evaluation)
    one = evaluation[0][:1]
    show.latency(lambda: model(one), lambda: q_model(one), f"batch 1, {SIZE} × {SIZE}", LATENCY_ROUNDS)

    nc.save(q_model, out / "int8")
    save_file({"images": one, "logits": q_model(one)}, out / "expected.safetensors")
    save_file(model.state_dict(), out / "fp32.safetensors")
    show.sizes((out / "fp32.safetensors").stat().st_size, show.folder_bytes(out / "int8"))
    show.heading(f"Saved in {out}")
    show.in_new_process("--check", out)


def images(seed: int) -> torch.Tensor:
    """Random images [8, 3, 224, 224], smooth like photographs: neighbouring pixels are similar."""
    coarse = torch.randn(BATCH, 3, SIZE // 16, SIZE // 16, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear")


def rules(report: nc.reports.report.Report) -> None:
    """Which rule decided for the operators at both ends of the network."""
    show.heading("Which rule decided")
    table = Table("operator", "type", "rule", "asked", box=None, pad_edge=False)
    for op in report.ops:
        if op.rule.startswith(("name", "pattern", "type")) or op.operator.startswith("layer1.0"):
            table.add_row(op.operator, op.kind, op.rule, op.asked)
    show.console.print(table)


@torch.no_grad()
def accuracy(model: torch.nn.Module, q_model: torch.nn.Module, evaluation: list[torch.Tensor]) -> None:
    """Compare the logits with those of the fp32 network."""
    fp32 = torch.cat([model(batch) for batch in show.progress(evaluation, "evaluate fp32")])
    int8 = torch.cat([q_model(batch) for batch in show.progress(evaluation, "evaluate int8")])
    cosine = torch.nn.functional.cosine_similarity(fp32, int8)
    same = (fp32.argmax(-1) == int8.argmax(-1)).float().mean()
    show.heading(
        f"Agreement with fp32 on {len(fp32)} random images (random weights: this says nothing about accuracy)"
    )
    show.console.print(
        f"cosine of the logits: mean {cosine.mean():.4f}, worst {cosine.min():.4f}; same class {same:.1%}"
    )


def check(out: Path) -> None:
    """Load the artefact, without torchvision's class or the fp32 weights, and classify one image again."""
    expected = load_file(out / "expected.safetensors")
    loaded = nc.load(out / "int8")
    show.same_numbers([expected["logits"]], [loaded(expected["images"])], "Loaded in a new process")


if __name__ == "__main__":
    main()

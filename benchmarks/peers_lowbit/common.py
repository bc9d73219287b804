"""What the scripts of this folder share: the command line, and the file that they hand over.

python benchmarks/peers_lowbit/TOOL.py --data DIR --subject NAME --format NAME --method NAME --out FILE

The file holds `{layer}.weight`, dequantized fp32 [N, K], of all linears of the blocks; other parameters if
the tool changed them; and `{layer}.input_scale` [K] where the tool multiplies a layer's input.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowbit_formats import FORMATS, Format
from lowbit_subjects import Subject, load


@dataclass
class Made:
    """What a tool made.

    Attributes:
        weights: tensors of the file.
        data: whether it used calibration data.
        scale_bits: of a stored scale.
        zero_bits: of a stored zero point, 0 where there is none.
    """

    weights: dict[str, torch.Tensor]
    data: bool
    scale_bits: int
    zero_bits: int = 0


@dataclass
class Task:
    """What is asked."""

    subject: Subject
    form: Format
    group: int
    method: str


def serve(make: Callable[[Task], Made]) -> None:
    """Run a tool as the command line asks."""
    parser = argparse.ArgumentParser()
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("subject", "format", "method"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    form = FORMATS[options.format]
    subject = load(options.data, options.subject)
    tick = time.perf_counter()
    made = make(Task(subject, form, form.of(options.subject), options.method))
    told = {
        "data": str(int(made.data)),
        "seconds": str(time.perf_counter() - tick),
        "scale_bits": str(made.scale_bits),
        "zero_bits": str(made.zero_bits),
    }
    save_file(
        {k: v.detach().float().contiguous().clone() for k, v in made.weights.items()},
        options.out,
        metadata=told,
    )


def changed(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters that a tool changed besides the layers."""
    return {
        k: v
        for k, v in model.state_dict().items()
        if k in before and v.shape == before[k].shape and not torch.equal(v.float(), before[k])
    }


def outside(subject: Subject) -> list[str]:
    """Linears that are not quantized."""
    inside = set(subject.layers)
    return [n for n, m in subject.model.named_modules() if isinstance(m, torch.nn.Linear) and n not in inside]


def refuse(why: str) -> None:
    """End, because the tool has no such thing."""
    msg = f"not offered: {why}"
    raise SystemExit(msg)

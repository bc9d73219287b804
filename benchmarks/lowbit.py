"""Our low-bit weights and those of other tools, in one format at a time, judged by one program.

    python benchmarks/lowbit_prepare.py --data DIR             # once
    python benchmarks/lowbit.py ours --data DIR                # this project's methods
    python benchmarks/lowbit.py peer nncf --data DIR           # another tool's, in an environment of its own
    python benchmarks/results_page.py                          # the page: docs/results/low-bit-accuracy.md

Rows go to results/low-bit-accuracy.jsonl, or to the file of `--results`. What is in the file already is not
computed again. Another tool hands over dequantized fp32 weights (peers_lowbit), which are put into the fp32
model here: what is judged is what its numbers are worth, and not the precision of its kernels.
Bits per weight count the code, the scale and the zero point as the tool stores them.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results_rows
import torch
from lowbit_formats import BLOCKS, FORMATS, Format
from lowbit_subjects import IGNORED, Subject, load, logits, settings
from results_rows import Figure
from safetensors import safe_open

#: Tools in peers_lowbit → their methods there.
PEERS = {
    "torchao": ("RTN", "HQQ scale"),
    "nncf": ("RTN", "scale estimation", "GPTQ", "scale estimation + GPTQ", "AWQ + scale estimation"),
    "inc": ("RTN", "RTN full range", "RTN mse", "HQQ", "GPTQ", "GPTQ mse", "GPTQ hybrid order", "AWQ"),
    "autoround": ("RTN", "opt RTN", "light"),
    "llmcompressor": ("RTN", "GPTQ", "AWQ"),
}

#: What a stored row says a row is about; all else is a figure.
WHAT = ("subject", "format", "tool", "method", "setting", "data", "levels")
#: Figure of a stored row → its unit, and the attribute of `Row`.
FIGURES = {
    "bits": ("bits per weight", "bits"),
    "kl": ("nats per token", "kl"),
    "top1": ("%", "top1"),
    "perplexity": ("perplexity", "perplexity"),
    "fp32 perplexity": ("perplexity", "fp32_perplexity"),
    "seconds": ("s", "seconds"),
}
MEASURED = "beside other tools"
#: Their programs.
FOLDER = Path(__file__).resolve().parent / "peers_lowbit"


@dataclass
class Row:
    """What was found of one method.

    Attributes:
        subject: a name of `BLOCKS`.
        format: a name of `FORMATS`.
        tool: "nc" or a name of `PEERS`.
        method: of the tool.
        data: whether it used calibration data.
        bits: per weight, scales and zero points included.
        levels: the most different values in a group of the layers that were looked at.
        kl: mean KL(fp32 || low bit) per judged token, nats.
        top1: percent of judged tokens with fp32's first choice.
        perplexity: on what is judged.
        fp32_perplexity: likewise, of the fp32 model.
        seconds: what quantizing took, on a machine that did other things as well.
        setting: of lowbit_prepare.py.
        error: why there are no figures.
    """

    subject: str
    format: str
    tool: str
    method: str
    setting: str
    data: bool = False
    bits: float = 0.0
    levels: int = 0
    kl: float = 0.0
    top1: float = 0.0
    perplexity: float = 0.0
    fp32_perplexity: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies it."""
        return self.subject, self.format, self.tool, self.method, self.setting


def methods(form: Format, group: int) -> dict[str, Any]:
    """Our configurations by name; what this version does not have is left out."""
    import nc

    def config(**more: Any) -> Any:
        kind = "nf4" if form.kind == "nf" else f"{'int' if form.symmetric else 'uint'}{form.bits}"
        return nc.WeightOnlyConfig(kind, group_size=group, w_sym=form.symmetric, scale_dtype="fp16", **more)

    def has(*names: str) -> bool:
        return all(hasattr(nc, name) for name in names)

    found: dict[str, Any] = {f"RTN {rule}": config(w_algo=rule) for rule in ("minmax", "mse", "wls")}
    found["GPTQ"] = config(solver=nc.GPTQ())
    found["GPTQ minmax"] = config(solver=nc.GPTQ(), w_algo="minmax")
    found |= {f"GPTQ order {order}": config(solver=nc.GPTQ(order=order)) for order in ("none", "groups")}
    found |= {f"GPTQ {kind}": config(solver=nc.GPTQ(two_sided=kind)) for kind in ("gptaq", "qronos")}
    for names in (("AWQ",), ("Rotation",), ("Rotation", "AWQ")):
        transforms = [getattr(nc, name)() for name in names]
        found[" + ".join([*names, "RTN wls"])] = config(transforms=transforms)
        found[" + ".join([*names, "GPTQ"])] = config(transforms=transforms, solver=nc.GPTQ())
    if has("HQQ"):
        found["HQQ"] = config(solver=nc.HQQ())
    if has("AutoRound"):
        found["AutoRound light"] = config(solver=nc.AutoRound())
    return found


def ours(subject: Subject, name: str, method: str, setting: str) -> Row:
    """Return a row of this project."""
    import nc

    form = FORMATS[name]
    group = form.of(subject.name)
    config = methods(form, group)[method]
    config.white_list = subject.layers
    row = Row(subject.name, name, "nc", method, setting)
    tick = time.perf_counter()
    prepared = nc.prepare(subject.model, config)
    row.data = bool(prepared.plan.needs_data)
    if row.data:
        for batch in subject.calibration:
            prepared(**batch)
    quantized = nc.convert(prepared)
    row.seconds = time.perf_counter() - tick
    report = nc.report(quantized)
    done = {layer.operator for layer in report.quantized}
    if done != set(subject.layers):
        msg = f"not the layers that were asked: {sorted(done ^ set(subject.layers))[:4]}"
        raise RuntimeError(msg)
    count = sum(math.prod(layer.shape) for layer in report.quantized)
    row.bits = 8 * sum(layer.size for layer in report.quantized) / count
    row.levels = max(
        levels(quantized.get_submodule(n).packed.dequantize(), group) for n in looked_at(subject)
    )
    judge(subject, quantized, row)
    return row


def peer(subject: Subject, name: str, tool: str, method: str, data: Path, python: Path) -> Row:
    """Return a row of another tool: a process in its environment makes the weights."""
    form = FORMATS[name]
    row = Row(subject.name, name, tool, method, settings(data)["setting"])
    script = FOLDER / f"with_{tool}.py"
    with tempfile.TemporaryDirectory(dir=data) as folder:
        made = Path(folder) / "weights.safetensors"
        asked = [
            "--data",
            data,
            "--subject",
            subject.name,
            "--format",
            name,
            "--method",
            method,
            "--out",
            made,
        ]
        done = subprocess.run([python, script, *asked], check=False, capture_output=True, text=True)
        if done.returncode:
            told = [
                line
                for line in done.stderr.splitlines()
                if re.match(r"([\w.]+\.)?[A-Z]\w+: |not offered", line)
            ]
            last = [line for line in done.stderr.splitlines() if line.strip()]
            row.error = (told or last or [f"ended with {done.returncode} and no message"])[-1].strip()[:300]
            print(done.stderr[-3000:], file=sys.stderr)
            return row
        with safe_open(made, "pt") as file:
            told, weights = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    row.data, row.seconds = told["data"] == "1", float(told["seconds"])
    row.bits = bits(subject, form, float(told["scale_bits"]), float(told["zero_bits"]))
    judge_weights(subject, form, weights, row)
    return row


def judge_weights(subject: Subject, form: Format, weights: dict[str, torch.Tensor], row: Row) -> None:
    """Judge the fp32 model with these weights in it.

    The row gets an error instead if layers are missing, are as they were, or hold more values than the format
    has.
    """
    names = {layer: f"{layer}.weight" for layer in subject.layers}
    if missing := sorted(set(names.values()) - weights.keys()):
        row.error = f"weights are missing: {missing[:3]}"
        return
    row.levels = max(levels(weights[names[n]], form.of(subject.name)) for n in looked_at(subject))
    if row.levels > 2**form.bits:
        row.error = f"{row.levels} values in a group, and {form.bits} bits have {2**form.bits}"
        return
    # what a transform multiplies the input by belongs to the weight
    factors = {n: weights.get(f"{n}.input_scale", 1.0) for n in names}
    put = {k: w for k, w in weights.items() if not k.endswith(".input_scale")} | {
        k: weights[k] * factors[n] for n, k in names.items()
    }
    model = copy.deepcopy(subject.model)
    model.load_state_dict({**model.state_dict(), **put})
    same = [
        n for n in names if torch.equal(model.get_submodule(n).weight, subject.model.get_submodule(n).weight)
    ]
    if same:
        row.error = f"left as they were: {same[:3]}"
        return
    judge(subject, model, row)


def bits(subject: Subject, form: Format, scale: float, zero: float) -> float:
    """Return the stored bits per weight: the code, and a group's share of scale and zero point."""
    shapes = [subject.model.get_submodule(n).weight.shape for n in subject.layers]
    groups = [n * (1 if form.group == -1 else k // form.of(subject.name)) for n, k in shapes]
    return form.bits + (scale + zero) * sum(groups) / sum(n * k for n, k in shapes)


def looked_at(subject: Subject) -> list[str]:
    """Return the layers of one block in the middle."""
    inside = sorted({int(n.removeprefix(f"{subject.blocks}.").split(".")[0]) for n in subject.layers})
    return [n for n in subject.layers if n.startswith(f"{subject.blocks}.{inside[len(inside) // 2]}.")]


def levels(weight: torch.Tensor, group: int) -> int:
    """Return the most different values that a group has."""
    rows = weight.reshape(-1, weight.shape[1] if group == -1 else group).sort(1).values
    step = rows.abs().amax(1, keepdim=True) * 1e-4  # products in other orders differ in the last bits
    return int(((rows.diff(dim=1)) > step).sum(1).max()) + 1


@torch.no_grad()
def judge(subject: Subject, model: Any, row: Row) -> None:
    """Put the figures into a row."""
    kl = same = before = after = 0.0
    count = 0
    for batch, a in zip(subject.evaluation, reference(subject), strict=True):
        chosen = batch["labels"] != IGNORED
        right = batch["labels"][chosen][:, None]
        b = logits(model, batch)[chosen].log_softmax(-1)
        count += len(right)
        kl += (a.exp() * (a - b)).sum(dtype=torch.float64).item()
        same += (a.argmax(-1) == b.argmax(-1)).sum().item()
        before, after = (
            total - x.gather(1, right).sum(dtype=torch.float64).item()
            for total, x in ((before, a), (after, b))
        )
    row.kl, row.top1 = kl / count, 100 * same / count
    row.fp32_perplexity, row.perplexity = math.exp(before / count), math.exp(after / count)


@torch.no_grad()
def reference(subject: Subject) -> Iterator[torch.Tensor]:
    """Return the fp32 model's log-probabilities, batch by batch: kept where they are small."""
    for i, batch in enumerate(subject.evaluation):
        if len(subject.kept) == i:
            found = logits(subject.model, batch)[batch["labels"] != IGNORED].log_softmax(-1)
            if len(subject.evaluation) > 32:  # 3 GB of SmolLM2
                yield found
                continue
            subject.kept.append(found)
        yield subject.kept[i]


def read(path: Path) -> list[Row]:
    """Return the rows so far; of equal ones the last."""
    stored = results_rows.read(path) if path.exists() else []
    found = [restored(row) for row in stored if row.what["measured"] == MEASURED]
    return list({row.key: row for row in found}.values())


def restored(stored: results_rows.Row) -> Row:
    """Return the row of a line of results/low-bit-accuracy.jsonl."""
    figures = {attribute: stored.value(name) for name, (_, attribute) in FIGURES.items() if stored.figures}
    return Row(
        **{name: stored.what[name] for name in WHAT}, **figures, error="" if stored.figures else stored.note
    )


def store(path: Path, row: Row) -> None:
    """Append a row to results/low-bit-accuracy.jsonl."""
    what = {"measured": MEASURED, **{name: getattr(row, name) for name in WHAT}}
    figures = {name: Figure(getattr(row, attribute), unit) for name, (unit, attribute) in FIGURES.items()}
    results_rows.append(
        path, what, {} if row.error else figures, ("transformers",), row.error, pinned(row.tool)
    )


def pinned(tool: str) -> dict[str, str]:
    """Return the versions of another tool: its environment is made from pins."""
    file = results_rows.ROOT / "requirements" / f"peers-lowbit-{tool}.txt"
    pins = (
        dict(re.findall(r"^([\w.-]+)==([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE))
        if tool != "nc"
        else {}
    )
    return {
        name: found for name, found in pins.items() if name not in ("accelerate", "datasets", "transformers")
    }


def compare(row: Row, others: Iterable[Row]) -> None:
    """Stop if a row is about other data than those that it would stand beside.

    What fp32 says of the same tokens is the same.
    """
    for other in others:
        near = math.isclose(row.fp32_perplexity, other.fp32_perplexity, rel_tol=1e-4)
        if (row.subject, row.setting) == (other.subject, other.setting) and not (
            near or row.error or other.error
        ):
            msg = (
                f"{row.subject}: other data than in the rows so far: fp32 perplexity {row.fp32_perplexity}, "
                f"not {other.fp32_perplexity}"
            )
            raise SystemExit(msg)


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ours", "peer"))
    parser.add_argument("tool", nargs="?", choices=list(PEERS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--results",
        type=Path,
        default=results_rows.FOLDER / "low-bit-accuracy.jsonl",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--python", type=Path, help="of the tool's environment; default .venv-lowbit-TOOL/bin/python"
    )
    parser.add_argument("--subject", nargs="+", choices=list(BLOCKS), default=["antiberty", "smollm2"])
    parser.add_argument("--format", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--method", nargs="+", help="default: all")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    options = parser.parse_args()
    setting = settings(options.data)["setting"]
    old = read(options.results)
    done = set() if options.again else {row.key for row in old if not row.error}
    tool = options.tool or "nc"
    python = (options.python or Path(f".venv-lowbit-{tool}/bin/python")).absolute()
    for name in options.subject:
        subject = load(options.data, name)
        for form in options.format:
            known = list(methods(FORMATS[form], 64)) if tool == "nc" else list(PEERS[tool])
            for method in options.method or known:
                if (name, form, tool, method, setting) in done or method not in known:
                    continue
                try:
                    row = (
                        ours(subject, form, method, setting)
                        if tool == "nc"
                        else peer(subject, form, tool, method, options.data, python)
                    )
                except Exception as error:
                    traceback.print_exc()
                    row = Row(
                        name, form, tool, method, setting, error=f"{type(error).__name__}: {error}"[:300]
                    )
                compare(row, old)
                store(options.results, row)
                print(
                    f"{name} {form} {tool} {method}: "
                    + (
                        row.error
                        or f"KL {row.kl:.5f} top-1 {row.top1:.1f} bits {row.bits:.2f} levels {row.levels} "
                        f"{row.seconds:.0f} s"
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()

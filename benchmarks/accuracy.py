"""Accuracy of every algorithm on real data: fp32, plain IPEX and this project's configurations; see tasks.py, docs/accuracy.md.

python benchmarks/accuracy.py [--task minilm digits lm] [--only "static kl" fp32] [--data DIR]

Other projects' quantizers on the same data: peers.py, which needs the folder given as --data and an environment of its own.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tasks import TASKS, Run, Task, table

import nc
from nc.observers import ALGORITHMS

#: Kinds of operators that multiply and add: nearly all of a model's work.
PRODUCTS = ("linear", "conv", "matmul")
Result = tuple[Run, str, str]


def fp32(task: Task) -> Result:
    """The model itself."""
    size = sum(t.numel() * t.element_size() for t in task.model.state_dict().values())
    return task.model, f"{size / 1e6:.1f}", "-"


def plain_ipex(task: Task) -> Result:
    """`ipex.quantization` with min-max observers, as Neural Compressor drives it."""
    import intel_extension_for_pytorch as ipex
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping

    qconfig = QConfig(
        activation=MinMaxObserver.with_args(qscheme=torch.per_tensor_affine, dtype=torch.quint8),
        weight=PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
    )
    example = task.calibration[0]
    prepared = ipex.quantization.prepare(task.model, QConfigMapping().set_global(qconfig), example_kwarg_inputs=example, inplace=False)
    for batch in task.calibration:
        prepared(**batch)
    traced = torch.jit.trace(ipex.quantization.convert(prepared), example_kwarg_inputs=example, strict=False, check_trace=False)
    return torch.jit.freeze(traced.eval()), "-", "-"


def quantized(config: Callable[[], object]) -> Callable[[Task], Result]:
    """This project with a configuration."""

    def run(task: Task) -> Result:
        prepared = nc.prepare(task.model, config(), example_inputs=task.calibration[0])
        for batch in task.calibration:
            prepared(**batch)
        model = nc.convert(prepared)
        report = model.report()
        products = [op for op in report.ops if op.kind.startswith(PRODUCTS)]
        int8 = sum(op.ran == "int8" for op in products)
        return model, f"{report.weight_bytes / 1e6:.1f}", f"{int8} of {len(products)}"

    return run


def candidates() -> dict[str, Callable[[Task], Result]]:
    """Everything that can be compared, by name."""
    configs: dict[str, Callable[[], object]] = {f"static {algo}": lambda a=algo: nc.StaticQuantConfig(act_algo=a) for algo in ALGORITHMS}
    configs["static minmax, weights mse"] = lambda: nc.StaticQuantConfig(w_algo="mse")
    configs["static minmax, biases not corrected"] = lambda: nc.StaticQuantConfig(post=())
    configs |= {f"smooth alpha={alpha}": lambda a=alpha: nc.SmoothQuantConfig(alpha=a) for alpha in (0.3, 0.5, 0.7, 0.95, "auto")}
    configs["smooth alpha=0.5 folded"] = lambda: nc.SmoothQuantConfig(alpha=0.5, folding=True)
    configs |= {f"dynamic {g}": lambda g=g: nc.DynamicQuantConfig(act_granularity=g) for g in ("per_token", "per_tensor")}
    return {"fp32": fp32, "plain IPEX": plain_ipex, **{name: quantized(config) for name, config in configs.items()}}


def rows(task: Task, names: list[str]) -> Iterator[list[str]]:
    """One row for each candidate; one that fails says why."""
    expected = task.outputs(task.model)
    for name in names:
        try:
            run, size, int8 = candidates()[name](task)
            for _ in range(2):  # engines compile during the first calls
                run(**task.calibration[0])
            yield [name, *task.row(expected, task.outputs(run)), size, int8]
        except Exception as error:  # whatever it is, the other candidates still count
            yield [name, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"]


@torch.no_grad()
def main() -> None:
    """Print a Markdown table for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=list(candidates()), default=list(candidates()), metavar="NAME")
    parser.add_argument("--data", type=Path, help="folder for trained models and data: written when empty, else read")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for name in options.task:
        try:
            with torch.enable_grad():
                task = TASKS[name](options.data)
        except LookupError as error:
            print(f"\n### {name}\n\nskipped: {error}", flush=True)
            continue
        table(task, rows(task, options.only))


if __name__ == "__main__":
    main()

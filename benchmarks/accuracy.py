"""Accuracy and speed on real data: fp32, plain IPEX, this project's configurations, others; see tasks.py.

python benchmarks/accuracy.py [--task minilm digits] [--only "nc static kl" fp32 NNCF] [--peers] [--data DIR]
    [--rounds 9] [--results results/accuracy.jsonl]

Candidates whose packages are missing are skipped. Those of other projects (--peers, or --only with a name of
peers.py) need the environment of `make setup-peers`, and run in the same process: the times of all are of the
same minutes. Where this project has to run with another torch than they, peers.py runs them alone, on a
folder that --data has filled.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import peers
import results_rows
import torch
from task import Task
from tasks import ROUNDS, TASKS, Candidate, Result, compare, fp32, loaded

import nc
from nc.observers import ALGORITHMS

#: Kinds of operators that multiply and add: nearly all of a model's work.
PRODUCTS = ("linear", "conv", "matmul")
PACKAGES = ("transformers", "intel-extension-for-pytorch", "nncf", "openvino", "onnxruntime")
#: What --peers runs. NNCF's default fails for transformers with padding, for which it has a preset.
PEERS = ("NNCF", "NNCF transformer", "ONNX Runtime static", "ONNX Runtime dynamic")


def plain_ipex(task: Task) -> Result:
    """`ipex.quantization` with min-max observers, as Neural Compressor drives it."""
    import intel_extension_for_pytorch as ipex
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping

    qconfig = QConfig(
        activation=MinMaxObserver.with_args(qscheme=torch.per_tensor_affine, dtype=torch.quint8),
        weight=PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
    )
    example = task.calibration[0]
    prepared = ipex.quantization.prepare(
        task.model, QConfigMapping().set_global(qconfig), example_kwarg_inputs=example, inplace=False
    )
    for batch in task.calibration:
        prepared(**batch)
    traced = torch.jit.trace(
        ipex.quantization.convert(prepared), example_kwarg_inputs=example, strict=False, check_trace=False
    )
    return torch.jit.freeze(traced.eval()), "-", "-"


def quantized(config: Callable[[], object]) -> Candidate:
    """Quantize with this project and a configuration."""

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


def candidates() -> dict[str, Candidate]:
    """Everything that can be compared, by name."""
    configs: dict[str, Callable[[], object]] = {
        f"static {algo}": lambda a=algo: nc.StaticQuantConfig(act_algo=a) for algo in ALGORITHMS
    }
    configs["static minmax, weights mse"] = lambda: nc.StaticQuantConfig(w_algo="mse")
    configs["static minmax, biases not corrected"] = lambda: nc.StaticQuantConfig(post=())
    configs |= {
        f"smooth alpha={alpha}": lambda a=alpha: nc.SmoothQuantConfig(alpha=a)
        for alpha in (0.3, 0.5, 0.7, 0.8, 0.95, "auto")
    }
    configs["smooth alpha=0.5 folded"] = lambda: nc.SmoothQuantConfig(alpha=0.5, folding=True)
    configs["smooth alpha=0.8, shared, percentile"] = lambda: nc.SmoothQuantConfig(
        alpha=0.8, scale_sharing=True, act_algo="percentile"
    )
    configs |= {
        f"static {a} + dynamic": lambda a=a: nc.StaticQuantConfig(act_algo=a) + nc.DynamicQuantConfig()
        for a in ("minmax", "percentile")
    }
    configs |= {
        f"dynamic {g}": lambda g=g: nc.DynamicQuantConfig(act_granularity=g)
        for g in ("per_token", "per_tensor")
    }
    configs["dynamic per_token, matmuls too"] = lambda: nc.DynamicQuantConfig().set_local(
        "matmul", nc.DynamicQuantConfig()
    )
    configs["auto"] = lambda: "auto"
    configs["static minmax, weights rounded"] = lambda: nc.StaticQuantConfig(
        post=(nc.WeightRounding(), nc.BiasCorrection())
    )
    configs["static minmax, channels scaled"] = lambda: nc.StaticQuantConfig(pre=(nc.ChannelScaling(),))
    return {
        "fp32": fp32,
        "plain IPEX": plain_ipex,
        **{f"nc {name}": quantized(config) for name, config in configs.items()},
        **{name: candidate for name, candidate in peers.PEERS.items() if candidate is not fp32},
    }


@torch.no_grad()
def main() -> None:
    """Print a Markdown table for each task, and append rows."""
    everything = candidates()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    own = [name for name in everything if name not in peers.PEERS]
    parser.add_argument("--only", nargs="+", choices=list(everything), default=own, metavar="NAME")
    parser.add_argument("--peers", action="store_true", help=f"also {', '.join(PEERS)}")
    parser.add_argument(
        "--data", type=Path, help="folder for trained models and data: written when empty, else read"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in which a call of each is timed")
    results_rows.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = dict.fromkeys([*options.only, *(PEERS if options.peers else ())])
    for name in options.task:
        task = loaded(name, options.data)
        if task is not None:
            compare(task, {n: everything[n] for n in names}, options.results, PACKAGES, options.rounds)


if __name__ == "__main__":
    main()

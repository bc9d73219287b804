"""Models found by `nc.tune`, by other projects' tuning and by hand: metric, latency, time to find them.

    make setup-peers
    .venv-peers/bin/python benchmarks/tuned.py --task spam digits --max-drop 0.5
    .venv/bin/python benchmarks/tuned.py --task spam --only fp32 "nc tune" "INC autotune"

The metric is the task's first figure; all tools search with the evaluation data, and are judged on it. NNCF's
accuracy control runs in OpenVINO; Neural Compressor's autotune needs IPEX, the packages that migrations.py
names, and peft. The times of all are of the same minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from accuracy import PRODUCTS, quantized
from task import Task
from tasks import ROUNDS, TASKS, Candidate, Result, compare, fp32, loaded

import nc

PACKAGES = ("transformers", "nncf", "openvino")


Score = Callable[[Callable[..., Any]], float]


def score_of(task: Task) -> Score:
    """Return what gives the first figure of a task for a model."""
    expected = task.outputs(task.model)
    return lambda run: task.score(task.samples(expected, task.outputs(run)))


def calibrated(task: Task) -> Callable[[Any], None]:
    """Return what calls a prepared model with the calibration data."""

    def run_fn(prepared: Any) -> None:
        for batch in task.calibration:
            prepared(**batch)

    return run_fn


def tuned(max_drop: float, budget: str) -> Candidate:
    """`nc.tune`, and the fastest of its points that loses at most so much."""

    def run(task: Task) -> Result:
        example = task.calibration[0]
        front = nc.tune(
            task.model,
            example,
            calibrated(task),
            score_of(task),
            budget=budget,
            mix=[task.evaluation[0]],
        )
        print(front, file=sys.stderr)
        point = front.fastest(max_drop=max_drop)
        model = nc.quantize(task.model, point.config, calibrated(task), example_inputs=example, measure=False)
        report = model.report()
        int8 = sum(op.ran == "int8" for op in report.ops)
        return model, f"{report.weight_bytes / 1e6:.1f}", f"{int8} operators"

    return run


def accuracy_control(max_drop: float) -> Candidate:
    """`nncf.quantize_with_accuracy_control`, executed by OpenVINO."""

    def run(task: Task) -> Result:
        import nncf

        score = score_of(task)

        def validate(compiled: Any, _: Any) -> tuple[float, None]:
            run = lambda **batch: torch.from_numpy(compiled(peers.arrays(batch))[0].copy())  # noqa: E731
            return score(run), None

        transformer = any(isinstance(m, torch.nn.LayerNorm) for m in task.model.modules())
        data = nncf.Dataset([peers.arrays(batch) for batch in task.calibration])
        judged = nncf.Dataset([peers.arrays(batch) for batch in task.evaluation])
        with contextlib.redirect_stdout(sys.stderr):  # its progress bars
            found = nncf.quantize_with_accuracy_control(
                peers.openvino_of(task),
                data,
                judged,
                validate,
                max_drop=max_drop,
                drop_type=nncf.DropType.ABSOLUTE,
                model_type=nncf.ModelType.TRANSFORMER if transformer else None,
            )
        return peers.compiled(found)

    return run


def autotune(max_drop: float) -> Candidate:
    """Neural Compressor's `autotune` over static, SmoothQuant and dynamic configurations, on IPEX."""

    def run(task: Task) -> Result:
        import intel_extension_for_pytorch  # noqa: F401
        from neural_compressor.common.base_tuning import TuningConfig
        from neural_compressor.torch.quantization import SmoothQuantConfig, StaticQuantConfig
        from neural_compressor.torch.quantization import autotune as search

        score = score_of(task)
        before = score(task.model)
        config = TuningConfig(
            config_set=[
                StaticQuantConfig(),
                StaticQuantConfig(act_algo="minmax"),
                *(SmoothQuantConfig(alpha=alpha) for alpha in (0.3, 0.5, 0.7)),
            ],
            tolerable_loss=max_drop / before,
        )
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it writes nc_workspace
            found: Any = search(
                task.model,
                config,
                score,
                run_fn=calibrated(task),
                example_inputs=task.calibration[0],
            )
        if found is None:
            msg = "none of its models is within the loss"
            raise RuntimeError(msg)
        return found, "-", "-"

    return run


def by_hand(task: Task) -> Result:
    """Quantize statically without the first and the last product, which people leave in fp32 first."""
    plan = nc.prepare(task.model, nc.StaticQuantConfig(), example_inputs=task.calibration[0]).plan
    products = [d.operator for d in plan.quantized if d.kind.startswith(PRODUCTS)]
    return quantized(lambda: nc.StaticQuantConfig().exclude(products[0], products[-1]))(task)


def timed(name: str, candidate: Candidate) -> Candidate:
    """Say how long a candidate took to be found."""

    def run(task: Task) -> Result:
        start = time.perf_counter()
        model, size, int8 = candidate(task)
        seconds = time.perf_counter() - start
        print(f"{task.name}, {name}: found in {seconds:.0f} s", flush=True)
        return model, size, int8

    return run


def main() -> None:
    """Print a Markdown table for each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=["digits", "spam"])
    parser.add_argument("--max-drop", type=float, default=0.5, help="of the first figure, in its unit")
    parser.add_argument("--budget", default="10min")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    everything: dict[str, Candidate] = {
        "fp32": fp32,
        "nc tune": tuned(options.max_drop, options.budget),
        "nc auto": quantized(lambda: "auto"),
        "nc static": quantized(nc.StaticQuantConfig),
        "nc static, first and last fp32": by_hand,
        "nc SmoothQuant": quantized(nc.SmoothQuantConfig),
        "nc dynamic": quantized(nc.DynamicQuantConfig),
        "NNCF": peers.PEERS["NNCF"],
        "NNCF transformer": peers.PEERS["NNCF transformer"],
        "NNCF accuracy control": accuracy_control(options.max_drop),
        "INC autotune": autotune(options.max_drop),
    }
    names = options.only or list(everything)
    for name in options.task:
        task = loaded(name, options.data)
        if task is not None:
            chosen = {n: timed(n, everything[n]) for n in names}
            compare(task, chosen, None, PACKAGES, options.rounds)


if __name__ == "__main__":
    main()

"""One architecture of the sweep, from building it to the numbers of its quantized model."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import torch
from sweep_building import Inputs, NotBuilt
from sweep_models import Entry, build
from torch.utils import _pytree as pytree

import nc
from nc.errors import NCError
from nc.numerics.metrics import sqnr_db

BATCH, OTHER_BATCH, CALIBRATION = 2, 3, 3


def run(entry: Entry, backend: str) -> dict[str, Any]:
    """Return a row without its surroundings: see `sweep.py` for the fields."""
    row: dict[str, Any] = {"stage": "build"}
    began = time.perf_counter()
    try:
        _steps(entry, backend, row)
        row.update(status="ok", stage="done")
    except NotBuilt as error:
        row.update(status="not built", reason=str(error))
    except Exception as error:  # every failure is a row
        status = "not built" if row["stage"] == "build" else "failed"
        row.update(
            status=status,
            error=type(error).__name__,
            typed=isinstance(error, NCError),
            reason=str(error)[:2000],
        )
        row["cause"] = _origin(error)
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def _origin(error: BaseException) -> str:
    """Return the innermost cause: its type, its first line, and where it was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_name}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}{where}"


@torch.no_grad()
def _steps(entry: Entry, backend: str, row: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    model, make, row["size"] = build(entry)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    example = _made(make, 0, BATCH)
    row["inputs"] = pytree.tree_map(lambda t: list(t.shape) if isinstance(t, torch.Tensor) else t, example)
    row["stage"] = "prepare"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=example, backend=backend)
        except nc.errors.CaptureError as error:
            if "use_cache=False" not in str(error):
                raise
            make, row["size"] = (
                _without_cache(make),
                f"{row['size']}, use_cache=False",
            )  # what the error advises
            example = _made(make, 0, BATCH)
            prepared = nc.prepare(model, nc.StaticQuantConfig(), example_inputs=example, backend=backend)
    row["captured"] = True
    row["warnings"] = [str(w.message)[:200] for w in caught if issubclass(w.category, nc.errors.NCWarning)]
    row["stage"] = "calibrate"
    for seed in range(CALIBRATION):
        call(prepared, _made(make, seed, BATCH))
    row["stage"] = "convert"
    quantized = nc.convert(prepared)
    report = quantized.report()
    row.update(engine=quantized.backend, asked=report.asked_int8, int8=report.ran_int8)
    if (padding := quantized.engine.report().details.get("padding")) is not None:
        row["padding"] = padding
    if report.verdict is not None:
        row["speed"] = round(report.verdict.ratio, 3)
    row["stage"] = "run"
    expected = _floats(call(model, example))
    row.update(_compared(expected, quantized, example, ""))
    row["stage"] = "other batch"
    _other_batch(model, quantized, _made(make, 7, OTHER_BATCH), row)


def _other_batch(
    model: torch.nn.Module, quantized: nc.api.quantized.QuantizedModel, inputs: Any, row: dict[str, Any]
) -> None:
    try:
        expected = _floats(call(model, inputs))
    except Exception:  # nothing to compare with
        row["other"] = "the fp32 model does not take it"
        return
    try:
        row.update(_compared(expected, quantized, inputs, "_other"))
        row["other"] = "free"
    except nc.InputError as error:
        row["other"] = f"fixed: {str(error)[:200]}"


def _compared(
    expected: list[torch.Tensor], quantized: nc.api.quantized.QuantizedModel, inputs: Any, suffix: str
) -> dict[str, Any]:
    """SQNR of the engine against fp32, and against the reference; in dB, of the worst output."""
    got, reference = _floats(call(quantized, inputs)), _floats(call(quantized.reference, inputs))
    if [t.shape for t in got] != [t.shape for t in expected]:
        shapes = f"{[list(t.shape) for t in expected]} became {[list(t.shape) for t in got]}"
        return {
            f"sqnr_db{suffix}": None,
            f"reference_db{suffix}": _worst(reference, got),
            f"shapes{suffix}": shapes[:300],
        }
    return {f"sqnr_db{suffix}": _worst(expected, got), f"reference_db{suffix}": _worst(reference, got)}


def _worst(expected: list[torch.Tensor], got: list[torch.Tensor]) -> float | None:
    """None where nothing can be compared: no signal, or other shapes."""
    if [t.shape for t in got] != [t.shape for t in expected]:
        return None
    values = [sqnr_db(e, g) for e, g in zip(expected, got, strict=True) if bool(e.any())]
    finite = [min(v, 200.0) for v in values if not math.isinf(v) or v > 0]
    return round(min(finite), 1) if finite and len(finite) == len(values) else None


def _without_cache(make: Inputs) -> Inputs:
    return lambda batch: {**make(batch), "use_cache": False}


def _made(make: Any, seed: int, batch: int) -> Any:
    torch.manual_seed(seed)
    return make(batch)


def call(model: Any, inputs: Any) -> Any:
    """Call with inputs as `example_inputs` has them."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _floats(outputs: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]

"""Measure whether layers with low-bit weights are faster than the float layers that they replace.

The figures are for this machine. A weight-only model need not have example inputs, and a whole language model
takes seconds. So some layers of each shape and format are called alone, in turns with
`torch.nn.functional.linear` in the model's dtype, with one row of inputs (a token) and with some tens (a
prompt). Layers of all shapes are called in each round, so that one layer's weights do not stay in the cache
where the model's would not.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from nc.backends import verdict as int8_verdict
from nc.nn import QuantLinear
from nc.process.torch_settings import without_autocast
from nc.process.warn import warn
from nc.profiling.latency import LEAST_ROUNDS, Round, compared, milliseconds, timed_rounds
from nc.profiling.load import Load, LoadWatch

#: Rows of inputs that layers are called with.
ROWS = (1, 32)
#: Layers of one shape and format, and bytes of the float weights of all, that are timed at most.
_MOST_LAYERS, _MOST_BYTES = 2, 2**28
#: A layer that takes longer by less than this is not worth a warning.
_MARGIN = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerVerdict:
    """Layers of one shape and format.

    Attributes:
        form: the format, as text.
        shape: (N, K).
        count: how many such layers the model has; 0 for all timed layers together.
        rows: of the inputs.
        float_ms: milliseconds of one float layer, the median.
        low_bit_ms: those of the layer with low-bit weights.
        ratio: how many times as fast as in float it is: the median of the rounds' own ratios.
        quartiles: of the rounds' ratios; None with fewer than three rounds.
        doubt: why the measurement does not tell which one is faster; "" if it tells.
    """

    form: str
    shape: tuple[int, int]
    count: int
    rows: int
    float_ms: float
    low_bit_ms: float
    ratio: float
    quartiles: tuple[float, float] | None
    doubt: str

    @property
    def is_slower(self) -> bool:
        """Whether it certainly takes longer than in float."""
        return not self.doubt and self.ratio < 1 / _MARGIN

    def brief(self, dtype: str) -> str:
        """Return both times of all layers and their ratio; `dtype` is that of float layers."""
        mine, other = (
            milliseconds(self.low_bit_ms, self.float_ms),
            milliseconds(self.float_ms, self.low_bit_ms),
        )
        times = f"low-bit layers {mine}, {dtype} {other}"
        if self.doubt:
            return f"{times}: cannot tell which ones are faster: {self.doubt}"
        between = f" ({self.quartiles[0]:.2f} to {self.quartiles[1]:.2f})" if self.quartiles else ""
        slower = f"SLOWER than {dtype}: " if self.is_slower else ""
        return f"{slower}{times}: {self.ratio:.2f} times as fast{between}"

    def __str__(self) -> str:
        """Return what was found, without the name."""
        spread = (
            f"; in half of the rounds {self.quartiles[0]:.2f} to {self.quartiles[1]:.2f}"
            if self.quartiles
            else ""
        )
        times = f"{milliseconds(self.low_bit_ms)} against {milliseconds(self.float_ms)}{spread}"
        if self.doubt:
            return f"cannot tell whether they are faster: {self.doubt} ({times})"
        if self.ratio < 1:
            return f"SLOWER, they take {1 / self.ratio:.2f} times as long ({times})"
        return f"{self.ratio:.2f} times as fast ({times})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LowBitVerdict:
    """Low-bit layers against float ones, on this machine.

    Attributes:
        totals: all layers together, weighted by how many of each the model has, for each number of rows.
        layers: the same by shape and format.
        untimed: how many layers are of shapes whose float weights would take too much memory.
        dtype: of the float layers.
        threads: of torch.
    """

    totals: tuple[LayerVerdict, ...]
    layers: tuple[LayerVerdict, ...]
    untimed: int
    dtype: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def brief(self) -> list[str]:
        """Return a line for each number of rows."""
        return [f"speed of {_rows(total.rows)}: {total.brief(self.dtype)}" for total in self.totals]

    def __str__(self) -> str:
        """Return a line for each number of rows, and one for each format and shape that is slower."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        lines = [f"low-bit layers against {self.dtype} ones, called alone, {threads}:"]
        lines += [f"  {_rows(total.rows)}: {total}" for total in self.totals]
        lines += [f"  {_named(layer)}: {layer}" for layer in self.slower]
        lines += [f"  {self.untimed} large layers were not timed"] if self.untimed else []
        return "\n".join(lines)

    @property
    def slower(self) -> tuple[LayerVerdict, ...]:
        """Shapes and formats that are certainly slower than in float."""
        return tuple(layer for layer in self.layers if layer.is_slower)


@torch.no_grad()
def measure(
    model: torch.nn.Module,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    watch: LoadWatch | None = None,
) -> LowBitVerdict | None:
    """Time some layers of each shape and format; None where a model has no low-bit linear.

    Args:
        model: with low-bit layers.
        seconds: for all; None: as for int8 models. Each layer that is timed is called once in any case.
        clock: gives the time in seconds.
        watch: looks at the machine.
    """
    seconds = int8_verdict.SECONDS if seconds is None else seconds
    groups, counts, untimed = _groups(model)
    if not counts:
        return None
    dtype = _dtype(model)
    weights = {
        layer: torch.full((layer.out_features, layer.in_features), 0.01, dtype=dtype)
        for layers in groups.values()
        for layer in layers
    }
    found = (
        [_timed(groups, counts, weights, rows, seconds / len(ROWS), clock, watch) for rows in ROWS]
        if groups
        else []
    )
    return LowBitVerdict(
        totals=tuple(total for total, _ in found),
        layers=tuple(layer for _, layers in found for layer in layers),
        untimed=untimed,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def warn_if_slower(found: LowBitVerdict) -> None:
    """Warn of low-bit layers that all together take longer than float ones."""
    slow = [total for total in found.totals if total.is_slower]
    if not slow:
        return
    times = " and ".join(f"{1 / total.ratio:.1f} times as long for {_rows(total.rows)}" for total in slow)
    forms = ", ".join(dict.fromkeys(layer.form for layer in found.slower)) or "these"
    faster = ", ".join(
        dict.fromkeys(layer.form for layer in found.layers if not layer.doubt and layer.ratio > 1)
    )
    advice = (
        f"On this machine {faster} is faster than float here."
        if faster
        else "int4 and int8 with group_size=32 or more have fast kernels."
    )
    msg = (
        f"The low-bit layers are SLOWER than the {found.dtype} ones on this machine: they take {times} "
        f"(format {forms}). {advice} nc.report(model) has the times and the kernel of each layer; "
        "measure=False skips this measurement."
    )
    warn(msg)


_Key = tuple[str, int, int]


def _groups(model: torch.nn.Module) -> tuple[dict[_Key, list[QuantLinear]], dict[_Key, int], int]:
    """Return layers to time by format and shape, and how many there are of each.

    How many have shapes that are not timed is returned too.
    """
    found: dict[_Key, list[QuantLinear]] = {}
    for module in model.modules():
        if isinstance(module, QuantLinear):
            activations = "" if module.act_dtype == "fp32" else f", activations {module.act_dtype}"
            found.setdefault(
                (f"{module.form}{activations}", module.out_features, module.in_features), []
            ).append(module)
    counts = {key: len(layers) for key, layers in found.items()}
    size = _dtype(model).itemsize
    room, chosen = _MOST_BYTES, {}
    for key, layers in sorted(found.items(), key=lambda item: item[0][1] * item[0][2]):
        number = min(len(layers), _MOST_LAYERS, room // max(1, size * key[1] * key[2]))
        if number:
            chosen[key] = layers[:number]
            room -= number * size * key[1] * key[2]
    return chosen, counts, sum(count for key, count in counts.items() if key not in chosen)


def _timed(
    groups: Mapping[_Key, Sequence[QuantLinear]],
    counts: Mapping[_Key, int],
    weights: Mapping[QuantLinear, torch.Tensor],
    rows: int,
    seconds: float,
    clock: Callable[[], float],
    watch: LoadWatch | None,
) -> tuple[LayerVerdict, list[LayerVerdict]]:
    """All layers together, and by format and shape, with some rows of inputs."""
    candidates: dict[str, Callable[[], object]] = {}
    for i, layers in enumerate(groups.values()):
        x = torch.linspace(-1, 1, rows * layers[0].in_features, dtype=weights[layers[0]].dtype).reshape(
            rows, -1
        )
        candidates[f"float {i}"] = functools.partial(
            _call_float, [(weights[layer], layer.bias) for layer in layers], x
        )
        candidates[f"low-bit {i}"] = functools.partial(_call_low_bit, layers, x)
    with without_autocast():
        timed, repeats, load = timed_rounds(candidates, seconds, clock, watch, least=LEAST_ROUNDS)
    made = [
        _verdict(timed, repeats, load, f"float {i}", f"low-bit {i}", key, counts[key], rows, len(layers))
        for i, (key, layers) in enumerate(groups.items())
    ]
    shares = {i: counts[key] / len(layers) for i, (key, layers) in enumerate(groups.items())}
    sums = [
        {
            side: sum(times[f"{side} {i}"] * share for i, share in shares.items())
            for side in ("float", "low-bit")
        }
        for times in timed
    ]
    return _verdict(sums, repeats, load, "float", "low-bit", ("", 0, 0), 0, rows, 1), made


def _verdict(
    rounds: Sequence[Round],
    repeats: int,
    load: Load,
    slow: str,
    fast: str,
    key: _Key,
    count: int,
    rows: int,
    layers: int,
) -> LayerVerdict:
    found = compared(rounds, repeats, load, slow, fast)
    return LayerVerdict(
        form=key[0],
        shape=key[1:],
        count=count,
        rows=rows,
        float_ms=found.times["slow"] / layers,
        low_bit_ms=found.times["fast"] / layers,
        ratio=found.ratio,
        quartiles=found.quartiles,
        doubt=found.doubt,
    )


def _call_float(layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]], x: torch.Tensor) -> None:
    for weight, bias in layers:
        F.linear(x, weight, bias)


def _call_low_bit(layers: Sequence[QuantLinear], x: torch.Tensor) -> None:
    for layer in layers:
        layer.forward(x)  # not the hooks that the user may have put on it


def _dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the one of the weights before they were quantized."""
    return next(
        (module.result_dtype for module in model.modules() if isinstance(module, QuantLinear)), torch.float32
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _named(layer: LayerVerdict) -> str:
    return f"{layer.count} x {layer.form}, {layer.shape[0]} x {layer.shape[1]}, {_rows(layer.rows)}"

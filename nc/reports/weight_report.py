"""The report of a model with low-bit weights.

It has for each layer its format, which solver won, its loss, bits per weight and size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nc import generation
from nc.formats.reasons import Cause
from nc.graph.plan import Applied
from nc.graph.shares import Part, Shares, fractions, shares_of
from nc.modules.block_calls import BlockCall
from nc.modules.layers import memory_of, other_weights
from nc.nn import KernelChoice, QuantEmbedding, QuantLinear
from nc.planning.layer_plan import other_parts, others_text
from nc.profiling.bandwidth import read_bandwidth
from nc.reports.advice import some_names, source
from nc.reports.brief import FOOT, costly, decibels_text, megabytes_text
from nc.reports.report import refused_lines
from nc.reports.weight_verdict import LowBitVerdict
from nc.text.fitted import REST, Section, fitted
from nc.text.html_page import preformatted
from nc.text.plain import plain
from nc.text.table import WIDTH, flowing, folded, format_table, largest
from nc.weights.accuracy import hopeless_layers, hopeless_text
from nc.weights.history import history_of
from nc.weights.speed import LayerSpeed, layer_speeds

#: Columns with what differs between equal layers.
_MEASURED = ("loss", "rtn loss", "us", "GB/s", "% of reading")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer.

    Attributes:
        operator: its name.
        kind: "linear" or "embedding".
        shape: (N, K).
        form: the format as text; "float" if it was not quantized.
        solver: whose codes were kept, "" where nothing is known.
        loss: squared error of the layer's output over its square, see `LayerResult`; None where it is not
            known.
        rtn_loss: the same for round to nearest.
        bits: stored bits per weight.
        size: stored bytes of the weight.
        note: what a reader must know, or why it stays float.
        kernel: what computes it, with the numbers of rows M of activations that each kernel is for; "" if it
            stays float.
        refused: (kernel, why it does not compute this layer) of the kernels that would be preferred.
        speed: its time, None where it was not measured.
        dtype: of the codes; "float" if it was not quantized.
    """

    operator: str
    kind: str
    shape: tuple[int, int]
    form: str
    solver: str
    loss: float | None
    rtn_loss: float | None
    bits: float
    size: int
    note: str
    kernel: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    speed: LayerSpeed | None = None
    dtype: str = "float"

    @property
    def part(self) -> Part:
        """What it contributes to the shares of the model."""
        size = math.prod(self.shape)
        steps = 0 if self.speed is None else self.speed.rows * self.speed.calls * size
        return Part(
            operator=self.operator, form=self.dtype, weights=((self.operator, size),), multiply_adds=steps
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What is stored in how many bits, and what it cost; `print` shows a table.

    Attributes:
        layers: one per linear and embedding.
        applied: what each transform did.
        weight_bytes: bytes of all parameters and buffers, tied ones once.
        float_bytes: the same with every low-bit weight in fp32.
        others: names and shapes of weights that are in no linear or embedding; they stay float.
        bandwidth: GB/s that this machine reads with the same threads, measured; None where no layer was
            timed.
        verdict: the speed of layers relative to float ones, measured by `convert`; None if it was not
            measured. It is not saved.
        tokens: what computes tokens after the first, and how it was proved; "" where
            `nc.accelerate_generation` was not called.
        weight_shares: by dtype ("int4", "float", …) the share of the weights' values.
        sqnr_db: of the outputs against the float model's in the first call of the prepared model; None if it
            was not measured. It is not saved.
        hopeless: (name, dB) of the layers whose own output is far from the float one, the worst first.
        multiply_add_shares: the same of the multiply-adds of linears in a call of the model; empty where no
            layer was timed, because only then the numbers of rows are known.
        model: name of its class.
        detailed: whether `print` shows everything; see `text`.
    """

    layers: tuple[LayerReport, ...]
    applied: tuple[Applied, ...]
    weight_bytes: int
    float_bytes: int
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    bandwidth: float | None = None
    tokens: str = ""
    verdict: LowBitVerdict | None = None
    weight_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    multiply_add_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sqnr_db: float | None = None
    hopeless: tuple[tuple[str, float], ...] = ()
    model: str = "the model"
    detailed: bool = False

    @property
    def shares(self) -> Shares:
        """Which share of the weights, and of the multiply-adds of timed linears, has which dtype."""
        return shares_of([*(layer.part for layer in self.layers), *other_parts(self.others)])

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        """The layers with low-bit weights."""
        return tuple(layer for layer in self.layers if layer.form != "float")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """Return the figures, without the table of layers."""
        quantized = self.quantized
        count = sum(layer.shape[0] * layer.shape[1] for layer in quantized)
        stored = sum(layer.size for layer in quantized)
        bits = f", {stored * 8 / count:.2f} bits each" if count else ""
        sizes = f"{count / 1e6:.1f} M weights in {stored / 1e6:.1f} MB{bits}"
        lines = [
            *self._accuracy(),
            f"{len(quantized)} of {len(self.layers)} layers have low-bit weights: {sizes}",
            f"parameters and buffers {self.weight_bytes / 1e6:.1f} MB, in fp32 {self.float_bytes / 1e6:.1f} "
            "MB",
            *self.shares.lines(),
        ]
        lines += [others_text(self.others)] if self.others else []
        lines += [str(applied) for applied in self.applied]
        lines += [f"tokens after the first: {self.tokens}"] if self.tokens else []
        lines += [f"note: {layer.operator}: {layer.note}" for layer in quantized if layer.note]
        lines += refused_lines(reason for layer in self.layers for reason in layer.refused)
        return "\n".join([*lines, *self._times()])

    def _accuracy(self) -> Iterator[str]:
        """Yield lines about what the outputs are worth, and the speed."""
        hopeless = hopeless_text(self.sqnr_db, self.hopeless)
        if hopeless:
            yield hopeless
        if self.verdict is not None:
            yield str(self.verdict)
        if self.sqnr_db is not None:
            agreement = f"{self.sqnr_db:.1f} dB against the float model"
            yield f"outputs in the first call of the prepared model: {agreement}"
        elif self.verdict is not None:  # of `convert`, and not of `load`
            why = "the prepared model was not called, or keeps a state"
            yield f"outputs were not compared with the float model's: {why}"

    def _times(self) -> Iterator[str]:
        """Yield a line about the times of layers, if they were measured."""
        if self.bandwidth is None:
            return
        speeds = [layer.speed for layer in self.layers if layer.speed is not None]
        total = sum(speed.us * speed.calls for speed in speeds) / 1e3
        limit = f"this machine reads {self.bandwidth:.1f} GB/s (measured)"
        yield f"{len(speeds)} low-bit layers take {total:.2f} ms of a call; {limit}"

    def __repr__(self) -> str:
        """Return the same as `print` shows: fields alone are thousands of characters."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return preformatted(str(self))

    def __str__(self) -> str:
        """Return what `print` shows: `text`, with details where they were asked for."""
        return self.text(details=self.detailed)

    def text(self, *, details: bool = False) -> str:
        """Return at most 25 lines: what is stored in how many bits, how fast, exact and large it is.

        Args:
            details: return a table of all layers, in which equal blocks are one, and all figures.
        """
        if not details:
            return plain(self._brief())
        figures = "\n".join(flowing(self.summary(), WIDTH))
        return plain(f"{self.table(WIDTH, fold=True)}\n\n{figures}")

    def _brief(self) -> str:
        low_bit = self.quantized
        count = sum(layer.shape[0] * layer.shape[1] for layer in low_bit)
        bits = f", {sum(layer.size for layer in low_bit) * 8 / count:.2f} bits each" if count else ""
        hopeless = hopeless_text(self.sqnr_db, self.hopeless).splitlines()
        head = [
            *hopeless[:1],
            f"{self.model}: {len(low_bit)} of {len(self.layers)} layers have low-bit weights{bits}",
            *(["speed: not measured against float"] if self.verdict is None else self.verdict.brief()),
        ]
        if self.sqnr_db is not None and not hopeless:  # which has it
            head.append(f"error: {decibels_text(self.sqnr_db)} against the float model in the first call")
        head.append(f"size: {megabytes_text(self.weight_bytes)}, fp32 {megabytes_text(self.float_bytes)}")
        losses = sorted((x for x in low_bit if x.loss is not None), key=lambda x: -(x.loss or 0.0))
        worst = [f"{source(layer.operator)} {layer.loss:.1e}" for layer in losses]
        return fitted(
            head,
            [
                Section("weights:", self._forms(), 6),
                Section("float, and why:", self._floats(), REST),
                Section("", costly("largest loss", worst[:3]), 3),
                Section("", [f"tokens after the first: {self.tokens}"] if self.tokens else [], 3),
                Section("what to do next:", [f"- {line}" for line in hopeless[1:]], 5),
            ],
            FOOT,
        )

    def _forms(self) -> list[str]:
        """Return a line for each format of weights, the one with most bytes first."""
        groups: dict[tuple[str, str], list[LayerReport]] = {}
        for layer in self.quantized:
            groups.setdefault((layer.form, layer.kernel), []).append(layer)
        sizes = {key: sum(layer.size for layer in layers) for key, layers in groups.items()}
        return [
            f"- {len(groups[form, kernel])} x {form}: {megabytes_text(sizes[form, kernel])}, kernel {kernel}"
            for form, kernel in sorted(sizes, key=lambda key: -sizes[key])
        ]

    def _floats(self) -> list[str]:
        """Return a line for each reason why weights stay float."""
        groups: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.form == "float":
                groups.setdefault(layer.note, []).append(layer.operator)
        lines = [f"- {len(names)} x {why}: {some_names(names)}" for why, names in groups.items()]
        return [*lines, *([f"- {others_text(self.others)}"] if self.others else [])]

    def table(self, width: int | None = None, *, fold: bool = False) -> str:
        """One row per layer and other weight.

        It has name, sizes, format, solver, losses, bits per weight, MB, kernel, times and note.

        Args:
            width: of the table, see `nc.text.table.format_table`; None: as wide as its texts are.
            fold: write equal blocks ("layer.0", "layer.1", …) once, as `print(report)` does, with the largest
                loss and time.
        """
        rows: list[tuple[str, ...]] = [
            (
                "layer",
                "N x K",
                "weight",
                "solver",
                "loss",
                "rtn loss",
                "bits",
                "MB",
                "kernel",
                *self._speed_head(),
                "note",
            )
        ]
        for x in self.layers:
            losses = ("-" if loss is None else f"{loss:.2e}" for loss in (x.loss, x.rtn_loss))
            rows.append(
                (
                    x.operator,
                    f"{x.shape[0]} x {x.shape[1]}",
                    x.form,
                    x.solver or "-",
                    *losses,
                    f"{x.bits:.2f}",
                    f"{x.size / 1e6:.2f}",
                    x.kernel or "-",
                    *self._speed_row(x),
                    x.note,
                )
            )
        rows += [self._other_row(name, shape) for name, shape in self.others]
        measured = [i for i, name in enumerate(rows[0]) if name in _MEASURED]
        return format_table(folded(rows, dict.fromkeys(measured, largest)) if fold else rows, width)

    def _other_row(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return a row about a weight that is in no layer."""
        return (
            name,
            " x ".join(map(str, shape)),
            "float",
            *("-",) * (6 + len(self._speed_head())),
            str(Cause.NO_LAYER()),
        )

    def _speed_head(self) -> tuple[str, ...]:
        return () if self.bandwidth is None else ("M", "us", "GB/s", "% of reading")

    def _speed_row(self, layer: LayerReport) -> tuple[str, ...]:
        if self.bandwidth is None:
            return ()
        if layer.speed is None:
            return ("-",) * 4
        rate = layer.size / layer.speed.us / 1e3
        return (
            str(layer.speed.rows),
            f"{layer.speed.us:.0f}",
            f"{rate:.2f}",
            f"{100 * rate / self.bandwidth:.0f}",
        )


def weight_report(
    model: torch.nn.Module, call: BlockCall | None = None, *, detailed: bool = False
) -> WeightReport:
    """Return the report of a model; see `WeightReport`.

    Args:
        model: with low-bit layers.
        call: arguments of the model, on which each low-bit linear is timed; None: nothing is timed.
        detailed: whether `print` shows everything.
    """
    speeds = {} if call is None else layer_speeds(model, call)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    record = history_of(model)
    reasons = (
        {}
        if record.plan is None
        else {d["operator"]: d["reason"] for d in record.plan["decisions"] if d["reason"]}
    )
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, (QuantLinear, QuantEmbedding)):
            layers.append(_low_bit_layer(name, module, dtype, speeds.get(name)))
        elif name in reasons:
            layers.append(_float_layer(name, module, reasons[name]))
    others = other_weights(model)
    shares = shares_of([*(layer.part for layer in layers), *other_parts(others)])
    return WeightReport(
        layers=tuple(layers),
        applied=record.applied,
        weight_bytes=_bytes(model),
        float_bytes=_bytes(model) + _saved(model),
        others=others,
        weight_shares=fractions(shares.weights),
        multiply_add_shares=fractions(shares.multiply_adds),
        bandwidth=read_bandwidth(torch.get_num_threads()) if speeds else None,
        tokens=generation.status(model),
        verdict=record.verdict,
        sqnr_db=record.sqnr_db,
        hopeless=tuple(hopeless_layers(model)),
        model=type(model).__name__,
        detailed=detailed,
    )


def _low_bit_layer(
    name: str, module: QuantLinear | QuantEmbedding, dtype: torch.dtype, speed: LayerSpeed | None
) -> LayerReport:
    """Return what is known of a layer with a low-bit weight; `dtype` is that of its inputs."""
    packed, found = module.packed, module.result
    engine = module.engine if isinstance(module, QuantLinear) else None
    choice = KernelChoice(()) if engine is None else engine.kernels_of(module, dtype)  # type: ignore[arg-type] # it is a linear
    return LayerReport(
        operator=name,
        kind="linear" if isinstance(module, QuantLinear) else "embedding",
        shape=packed.shape,
        form=str(module.form),
        dtype=str(module.form.dtype),
        solver="" if found is None else found.solver,
        loss=None if found is None else found.loss,
        rtn_loss=None if found is None else found.rtn_loss,
        bits=packed.bytes * 8 / (packed.shape[0] * packed.shape[1]),
        size=packed.bytes,
        note="" if found is None else found.note,
        kernel=str(choice),
        refused=choice.refused,
        speed=speed,
    )


def _float_layer(name: str, module: torch.nn.Module, reason: str) -> LayerReport:
    """Return what is known of a layer that stays float."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return LayerReport(
        operator=name,
        kind="embedding" if isinstance(module, torch.nn.Embedding) else "linear",
        shape=(rows, columns),
        form="float",
        solver="",
        loss=None,
        rtn_loss=None,
        bits=8.0 * weight.element_size(),
        size=weight.numel() * weight.element_size(),
        note=reason,
    )


def _bytes(model: torch.nn.Module) -> int:
    tensors = {memory_of(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _saved(model: torch.nn.Module) -> int:
    layers = [m for m in model.modules() if isinstance(m, (QuantLinear, QuantEmbedding))]
    packed = {memory_of(layer.codes): layer.packed for layer in layers}  # type: ignore[arg-type]
    return sum(4 * p.shape[0] * p.shape[1] - p.bytes for p in packed.values())

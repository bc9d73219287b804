"""The report of a model with low-bit weights: per layer its format, which solver won, its loss, bits per weight and size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nc.nn import QuantEmbedding, QuantLinear
from nc.plan import Applied, format_table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What was done to a model; it is the model's attribute `nc_record`.

    Attributes:
        plan: the decisions, as plain values (`WeightPlan.to_dict`); None for a model that was loaded from another tool's files.
        applied: what each transform did.
        config: the configuration, as plain values.
    """

    plan: dict[str, Any] | None = None
    applied: tuple[Applied, ...] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer.

    Attributes:
        operator: its name.
        kind: "linear" or "embedding".
        shape: (N, K).
        form: the format as text; "float" if it was not quantized.
        solver: whose codes were kept, "" where nothing is known.
        loss: squared error of the layer's output over its square, see `LayerResult`; None where it is not known.
        rtn_loss: the same for round to nearest.
        bits: stored bits per weight.
        size: stored bytes of the weight.
        note: what a reader must know, or why it stays float.
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What is stored in how many bits, and what it cost; `print` shows a table.

    Attributes:
        layers: one per linear and embedding.
        applied: what each transform did.
        weight_bytes: bytes of all parameters and buffers, tied ones once.
        float_bytes: the same with every low-bit weight in fp32.
    """

    layers: tuple[LayerReport, ...]
    applied: tuple[Applied, ...]
    weight_bytes: int
    float_bytes: int

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        """The layers with low-bit weights."""
        return tuple(layer for layer in self.layers if layer.form != "float")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """The figures, without the table of layers."""
        count = sum(layer.shape[0] * layer.shape[1] for layer in self.quantized)
        stored = sum(layer.size for layer in self.quantized)
        lines = [
            f"{len(self.quantized)} of {len(self.layers)} layers have low-bit weights: {count / 1e6:.1f} M weights in {stored / 1e6:.1f} MB"
            + (f", {stored * 8 / count:.2f} bits each" if count else ""),
            f"parameters and buffers {self.weight_bytes / 1e6:.1f} MB, in fp32 {self.float_bytes / 1e6:.1f} MB",
        ]
        lines += [str(applied) for applied in self.applied]
        lines += [f"note: {layer.operator}: {layer.note}" for layer in self.quantized if layer.note]
        return "\n".join(lines)

    def __str__(self) -> str:
        """All layers as a table, then the figures."""
        rows: list[tuple[str, ...]] = [("layer", "N x K", "weight", "solver", "loss", "loss of rtn", "bits", "MB", "note")]
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
                    x.note,
                )
            )
        return f"{format_table(rows)}\n\n{self.summary()}"


def weight_report(model: torch.nn.Module) -> WeightReport:
    """The report of a model; see `WeightReport`."""
    record = model.__dict__.get("nc_record", Record())
    reasons = {} if record.plan is None else {d["operator"]: d["reason"] for d in record.plan["decisions"] if d["reason"]}
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, (QuantLinear, QuantEmbedding)):
            packed, found = module.packed, module.result
            layers.append(
                LayerReport(
                    operator=name,
                    kind="linear" if isinstance(module, QuantLinear) else "embedding",
                    shape=packed.shape,
                    form=str(module.form),
                    solver="" if found is None else found.solver,
                    loss=None if found is None else found.loss,
                    rtn_loss=None if found is None else found.rtn_loss,
                    bits=packed.bytes * 8 / (packed.shape[0] * packed.shape[1]),
                    size=packed.bytes,
                    note="" if found is None else found.note,
                )
            )
        elif name in reasons:
            weight: Any = module.weight
            rows, columns = weight.shape
            bits = 8.0 * weight.element_size()
            layers.append(
                LayerReport(
                    operator=name,
                    kind="embedding" if isinstance(module, torch.nn.Embedding) else "linear",
                    shape=(rows, columns),
                    form="float",
                    solver="",
                    loss=None,
                    rtn_loss=None,
                    bits=bits,
                    size=weight.numel() * weight.element_size(),
                    note=reasons[name],
                )
            )
    return WeightReport(layers=tuple(layers), applied=record.applied, weight_bytes=_bytes(model), float_bytes=_bytes(model) + _saved(model))


def _bytes(model: torch.nn.Module) -> int:
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _saved(model: torch.nn.Module) -> int:
    packed = {m.codes.data_ptr(): m.packed for m in model.modules() if isinstance(m, (QuantLinear, QuantEmbedding))}  # type: ignore[operator]
    return sum(4 * p.shape[0] * p.shape[1] - p.bytes for p in packed.values())

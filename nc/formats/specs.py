"""How a tensor is quantized, how an operator is quantized, and what a backend supports."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from nc.errors import ConfigError
from nc.formats.dtypes import dtype
from nc.formats.fake_spec import FakeSpec
from nc.formats.granularities import granularity
from nc.formats.tensor_format import TensorFormat

#: How ranges that are found in each call are shared.
DYNAMIC_GRANULARITIES = ("per_tensor", "per_token")
#: How an operator is quantized: with ranges from calibration, with ranges found in each call, its weight
#: only, as a simulation of any formats, or not at all.
Mode = Literal["static", "dynamic", "weight_only", "fake_quant", "float"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SmoothSpec:
    """How SmoothQuant treats one linear; see `SmoothQuantConfig` for the fields.

    Attributes:
        alpha: a number, or None for the search ("auto").
    """

    alpha: float | None
    folding: bool = False
    scale_sharing: bool = False
    shared_criterion: str = "max"
    init_alpha: float = 0.5
    alpha_min: float = 0.0
    alpha_max: float = 1.0
    alpha_step: float = 0.1
    do_blockwise: bool = False

    def __str__(self) -> str:
        """Short form for tables."""
        return f"smooth {'auto' if self.alpha is None else f'{self.alpha:g}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """What one operator asks for; `None` means that role stays fp32.

    Attributes:
        activation: its inputs.
        weight: its constant weight.
        right: the second input of a matmul, where it uses another range than the first.
        smooth: how outliers of its input move into its weight first.
        bf16: not quantized, but computed in bf16: inputs, weight, bias and result are rounded to it, sums are
            not.
        fake: what is simulated, of an operator whose other roles are None.
    """

    activation: TensorFormat | None = None
    weight: TensorFormat | None = None
    right: TensorFormat | None = None
    smooth: SmoothSpec | None = None
    bf16: bool = False
    fake: FakeSpec | None = None

    @property
    def mode(self) -> Mode:
        """How it is quantized."""
        if self.fake is not None:
            return "fake_quant"
        if self.activation is not None:
            return "dynamic" if self.activation.dynamic else "static"
        return "float" if self.weight is None else "weight_only"

    @property
    def quantized(self) -> bool:
        """Whether anything is quantized at all."""
        return self.mode != "float"

    @property
    def activations(self) -> str:
        """Short form of the inputs, for tables; of a simulated operator also of its output."""
        if self.fake is not None:
            return " → ".join(
                str(spec or "fp32")
                for spec in (self.fake.input, self.fake.output)[: 1 + (self.fake.output is not None)]
            )
        if self.right is not None:
            return f"{self.activation}, {self.right}"
        if self.smooth is not None:
            return f"{self.activation} {self.smooth}"
        return str(self.activation or ("bf16" if self.bf16 else "fp32"))

    @property
    def weights(self) -> str:
        """Short form of the weight, for tables; of a simulated operator also of its bias."""
        if self.fake is None:
            return str(self.weight or "-")
        bias = "" if self.fake.bias is None else f", bias {self.fake.bias}"
        return f"{self.fake.weight or '-'}{bias}"

    @property
    def precision(self) -> str:
        """What was asked.

        It is "int8", "bf16", "fp32", "int4 per_group 32, weight only", or the formats of all roles of a
        simulated operator.
        """
        if self.fake is not None:
            return f"simulated: {self.fake}"
        if self.mode == "weight_only" and self.weight is not None:
            return f"{self.weight.dtype} {self.weight.granularity}, weight only"
        return "int8" if self.quantized else "bf16" if self.bf16 else "fp32"

    def input(self, index: int) -> TensorFormat:
        """How the activation at one argument position is quantized, of an operator whose activations are."""
        spec = self.right if index == 1 and self.right is not None else self.activation
        assert spec is not None, "no activation of this operator is quantized"
        return spec

    def narrow(self) -> OpSpec:
        """Return the same for a kernel that adds pairs of products in 16 bits without saturation.

        See `Capabilities.narrow_sums`.
        """
        if self.weight is not None:
            return replace(self, weight=replace(self.weight, paired=True))
        return replace(self, right=replace(self.input(1), reduce_range=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        parts = {role: spec.to_dict() if spec else None for role, spec in self._tensors().items()}
        smooth = {f.name: getattr(self.smooth, f.name) for f in fields(self.smooth)} if self.smooth else None
        fake = {} if self.fake is None else {"fake": self.fake.to_dict()}
        return {**parts, "smooth": smooth, "bf16": self.bf16, **fake}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> OpSpec:
        """Return the inverse of `to_dict`."""
        tensors = {
            role: TensorFormat.from_dict(v)
            for role, v in data.items()
            if role in ("activation", "weight", "right") and v is not None
        }
        smooth = data["smooth"]
        fake = FakeSpec.from_dict(data["fake"]) if data.get("fake") is not None else None
        return cls(
            **tensors,
            smooth=None if smooth is None else SmoothSpec(**smooth),
            bf16=data["bf16"] is True,
            fake=fake,
        )

    def _tensors(self) -> dict[str, TensorFormat | None]:
        return {"activation": self.activation, "weight": self.weight, "right": self.right}


FLOAT = OpSpec()
BF16 = OpSpec(bf16=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class QParams:
    """Scale and zero point of one tensor.

    Attributes:
        scale: fp32 tensor: one number per block of `spec.granularity`, [] per tensor.
        zero_point: integer tensor of the same shape.
        spec: the dtype and range that the codes use.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    spec: TensorFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSupport:
    """What a backend can do with one kind of operator: a row of its capability table.

    Attributes:
        kind: catalogue name, e.g. "linear".
        activations: dtypes that its integer kernel reads with ranges from calibration (empty: it has none).
        dynamic: granularities of activations whose ranges it finds itself, in each call (empty: it can't).
        projections: granularities with which it takes projections too (`proj_size` of an LSTM).
        weights: dtypes that it takes as weight (empty: the operator has none).
        fake: formats that it simulates at any role (empty: none).
        symmetric: as static operator it takes symmetric activations only.
        affine_only: as dynamic operator it takes affine activations only.
        grouped_weights: granularities of weights without an axis of output channels (transposed convolutions
            in groups), the preferred one first.
        note: limits in words, for readers of the table.

    Raises:
        ConfigError: a dtype or granularity that does not exist; names the nearest dtypes.
    """

    kind: str
    activations: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    projections: tuple[str, ...] = ()
    fake: tuple[str, ...] = ()
    symmetric: bool = False
    affine_only: bool = False
    grouped_weights: tuple[str, ...] = ("per_tensor",)
    note: str = ""

    def __post_init__(self) -> None:
        """Check all names."""
        try:
            for name in (*self.activations, *self.weights, *self.fake):
                dtype(name)
            for text in (*self.dynamic, *self.projections, *self.grouped_weights):
                granularity(text)
        except ConfigError as error:
            msg = f"Row for {self.kind!r} of a capability table: {error}"
            raise ConfigError(msg) from error

    def supports(self, mode: Mode) -> bool:
        """Return whether there is a kernel for one way to quantize."""
        kernels = {"static": self.activations, "dynamic": self.dynamic, "fake_quant": self.fake}
        return bool(kernels.get(mode))


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can run here, as data.

    Attributes:
        backend: its name.
        ops: one row per operator kind with an integer kernel.
        narrow_sums: (kind, activation dtype, or granularity of ranges found in each call) of operators whose
            kernels add pairs of products in 16 bits, with saturation, on this CPU (without VNNI): 2 x 255 x
            64 fits, 2 x 255 x 127 does not. Weights are `paired` there, a matmul's second input takes 7 bits.
        isa: CPU features that the resulting numbers rely on.
        why_no_bf16: why what is not int8 can't compute in bf16, on this CPU or at all; "" where it can.
        bf16_isa: CPU features that bf16 relies on.
        fused_add: kinds of operators whose kernels also do an addition after them.
        tolerance: how far its values may be from exact ones, in quanta: so near to a tie either code is
            right.
    """

    backend: str
    ops: tuple[OpSupport, ...]
    narrow_sums: frozenset[tuple[str, str]] = frozenset()
    isa: tuple[str, ...] = ()
    fused_add: frozenset[str] = field(default_factory=frozenset)
    why_no_bf16: str = "it has no bf16 kernels"
    bf16_isa: tuple[str, ...] = ()
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        """Check all names; raises ConfigError for dtypes that do not exist."""
        for _, name in self.narrow_sums:
            if name not in DYNAMIC_GRANULARITIES:
                dtype(name)

    def row(self, kind: str) -> OpSupport | None:
        """Return the row of one kind, or None when the backend has no integer kernel for it."""
        return next((row for row in self.ops if row.kind == kind), None)

    def sums_narrow(self, kind: str, spec: OpSpec) -> bool:
        """Return whether the kernel that runs an operator is one of `narrow_sums`."""
        if spec.activation is None:
            return False
        given = spec.activation.granularity if spec.mode == "dynamic" else spec.activation.dtype.name
        return (kind, str(given)) in self.narrow_sums

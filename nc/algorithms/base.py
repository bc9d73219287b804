"""What an algorithm is.

It says at which stage it works and what it needs, and `apply` changes the model and says what it did.

A model goes through the stages in the order of `Stage`. At each stage the algorithms are applied one after
the other; `nc.algorithms` has their order. An algorithm knows graphs, the plan and statistics, never a
configuration or a backend.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import fx

from nc.calibration.observe import Watch
from nc.calibration.statistics import Collected
from nc.formats import QParams, TensorFormat
from nc.graph.catalogue import WEIGHTED, groups_of, kind_of_node, weight_axis
from nc.graph.fx_utils import constant_of
from nc.graph.placement import Edge
from nc.graph.plan import Applied, Plan
from nc.graph.qdq import Finding
from nc.graph.views import Dequantize, Weighted
from nc.numerics.weights import pairs_fit
from nc.ops import DEQUANTIZE

Batch = Sequence[torch.Tensor]
State = dict[str, torch.Tensor]


class Stage(enum.Enum):
    """When an algorithm is applied, in this order.

    * FLOAT: the captured fp32 graph, in `prepare`; there is no data yet.
    * STATISTICS: the fp32 graph and what calibration collected; the graph can still change.
    * QPARAMS: the scale and zero point of every activation; they can be replaced.
    * CODES: the QDQ graph: codes of weights and biases can be replaced.
    """

    FLOAT = "float graph"
    STATISTICS = "statistics"
    QPARAMS = "qparams"
    CODES = "codes"


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """How much calibration data an algorithm wants to see again.

    Attributes:
        rows: samples; a whole batch is kept as long as there are fewer.
        size: bytes.
        macs: multiply-adds of int8 operators, in fp32, after which no further batch is run.
    """

    rows: int = 96  # NNCF's default is 300; a mean per channel over all positions needs fewer
    size: int = 64 * 2**20
    macs: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Tap:
    """What is collected of one tensor.

    It is collected while kept samples run through the fp32 graph once, for all algorithms of a stage.

    Attributes:
        operator: name of the operator.
        role: "input" or "output".
        update: `(state, x) -> state`; state is empty at first, x is the tensor of one batch.
    """

    operator: str
    role: str
    update: Callable[[State, torch.Tensor], State]


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What is to be collected for an algorithm.

    Attributes:
        statistics: of tensors, by observers, over all calibration batches.
        samples: calibration batches that are kept; None: none.
        taps: of inputs and outputs of operators, over the kept batches.
    """

    statistics: tuple[Watch, ...] = ()
    samples: Bound | None = None
    taps: tuple[Tap, ...] = ()


@dataclasses.dataclass(slots=True)
class Context:
    """A model on its way to a QDQ graph; algorithms change it.

    Attributes:
        module: the fp32 graph.
        plan: what is quantized to what.
        found: the statistics; None at stage FLOAT.
        edges: activations that get codes; from stage QPARAMS on.
        qparams: their ranges, by `placement.edge_key`; from stage QPARAMS on.
        quantized: the QDQ graph, at stage CODES.
        batches: flat kept batches within the bound of the algorithm that is being applied.
        observed: (operator, role) → state of its taps.
        findings: problems that calibration found, for the report.
    """

    module: fx.GraphModule
    plan: Plan
    found: Collected | None = None
    edges: Sequence[Edge] = ()
    qparams: dict[tuple[str, TensorFormat], QParams] = dataclasses.field(default_factory=dict)
    quantized: fx.GraphModule | None = None
    batches: Sequence[Batch] = ()
    observed: Mapping[tuple[str, str], State] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def weight(self, operator: str) -> WeightCodes | None:
        """Return the codes of an operator's weight at stage CODES.

        None is returned where it has none (a matmul, an addition, a recurrent layer).
        """
        assert self.quantized is not None
        for node in self.quantized.graph.nodes:
            if node.meta.get("operator") == operator and kind_of_node(node) in WEIGHTED:
                weight, spec = Weighted.of(node).weight, self.plan[operator].spec.weight
                codes = codes_of(weight)
                if codes is not None and spec is not None:
                    scale = Dequantize.of(weight).scale
                    value = (
                        constant_of(self.quantized, scale)
                        if isinstance(scale, fx.Node)
                        else torch.tensor(scale, dtype=torch.float32)
                    )
                    return WeightCodes(
                        self.quantized, str(codes.target), value, weight_axis(node), groups_of(node), spec
                    )
        return None


def codes_of(weight: fx.Node) -> fx.Node | None:
    """Return the constant codes that a weight of a QDQ graph dequantizes; None where it is not quantized."""
    codes = Dequantize.of(weight).codes if weight.target in DEQUANTIZE else None
    return codes if codes is not None and codes.op == "get_attr" else None


@dataclasses.dataclass(frozen=True, slots=True)
class WeightCodes:
    """The int8 codes of one weight of a QDQ graph; operators that share a weight share them.

    Attributes:
        module: the QDQ graph.
        name: of the constant there.
        scale: fp32, shape [channels] per channel, [] per tensor, else one per block of the granularity.
        axis: of the output channels; None for a transposed convolution in groups.
        groups: of a convolution.
        spec: how the weight is quantized.
    """

    module: fx.GraphModule
    name: str
    scale: torch.Tensor
    axis: int | None
    groups: int
    spec: TensorFormat

    @property
    def codes(self) -> torch.Tensor:
        """int8, of the weight's shape."""
        value: torch.Tensor = getattr(self.module, self.name)
        return value

    def replace(self, codes: torch.Tensor) -> None:
        """Replace the codes in the graph.

        Args:
            codes: integers, in the shape of the weight.

        Raises:
            ValueError: the shape differs, a code is out of range, or `spec.paired` is set and the products of
                a pair of codes do not fit in 16 bits.
        """
        if codes.shape != self.codes.shape:
            msg = (
                f"Codes of {self.name!r} have shape {tuple(self.codes.shape)}, but got {tuple(codes.shape)}."
            )
            raise ValueError(msg)
        if (
            codes.numel()
            and not self.spec.quant_min <= int(codes.min()) <= int(codes.max()) <= self.spec.quant_max
        ):
            msg = (
                f"Codes of {self.name!r} range from {self.spec.quant_min} to {self.spec.quant_max}; some are "
                "outside."
            )
            raise ValueError(msg)
        codes = codes.to(self.codes.dtype)
        if self.spec.paired and not pairs_fit(codes, self.axis, self.groups):
            msg = (
                f"Pairs of codes of {self.name!r} can overflow 16-bit sums on this CPU; leave weights with "
                "spec.paired as they are."
            )
            raise ValueError(msg)
        setattr(self.module, self.name, codes)


@runtime_checkable
class Algorithm(Protocol):
    """A frozen dataclass of options with these members."""

    @property
    def name(self) -> str:
        """As it is called in plans and reports."""

    @property
    def stage(self) -> Stage:
        """When it is applied."""

    def needs(self, module: fx.GraphModule, plan: Plan) -> Needs:
        """Return what is to be collected for it, of a captured graph and its plan."""

    def apply(self, context: Context) -> Applied:
        """Change the model; what was done, or why nothing was."""


#: For algorithms that look at nothing.
NOTHING = Needs()

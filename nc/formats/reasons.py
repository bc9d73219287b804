"""Why an operator stays fp32, and which rule decided, as values.

The text that people read is derived from them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class Cause(enum.Enum):
    """Every reason; the value is its text, with the names of its arguments in braces."""

    OTHER = "{text}"
    # what the captured operator is
    LOOK_UP = "a table look-up: no arithmetic to quantize"
    NORMALISATION = "normalisation stays fp32"
    LONE_BATCH_NORM = "batch norm without a convolution before it stays fp32"
    SOFTMAX = "softmax stays fp32"
    WHOLE_ATTENTION = "attention that could not be decomposed stays fp32"
    REWRITABLE = "{kind} stays fp32; write it as {form} to quantize it"
    FOLLOWS = "follows its neighbours"
    ELEMENTWISE = "it works element by element: no products to quantize"
    MOVED = "it moves values: no arithmetic to quantize"
    NO_INTEGER_FORM = "nc has no int8 form of {kind}"
    CUSTOM_OPERATOR = "nc does not know what {kind} computes"
    NOT_FP32 = "it computes in {dtype}; quantization starts from fp32"
    COMPUTED_WEIGHT = "its weight is computed from the inputs"
    COMPUTED_OPTIONS = "{names}: computed from sizes, and kernels need numbers"
    VECTOR_WEIGHT = "its weight is a vector: kernels need output channels"
    CONSTANT_INPUT = "its input is a constant: computed once, not at each call"
    CONSTANT_SIDE = "one side is a constant, a mask or a position"
    NO_ACTIVATION = "one side is not a float activation"
    ALPHA = "add with alpha"
    SHAPES_DIFFER = "the sides have different shapes"
    PACKED_SEQUENCE = "packed sequences stay fp32"
    COMPUTED_WEIGHTS = "its weights are computed from the inputs"
    WEIGHTS_NOT_FP32 = "quantization starts from fp32"
    PROJECTIONS = "backend {backend!r} has no {granularity} kernel with projections (proj_size)"
    # what the configuration says
    ASKED = "{dtype} was asked for"
    NOT_LISTED = "not on the white list"
    NO_BF16_FORM = "{reason}; {kind} stays fp32"
    # what the backend can
    NO_KERNEL = "backend {backend!r} has no {how} kernel for {kind}"
    OTHER_RANGES = "backend {backend!r} has no {how} kernel for {kind}, but one with {ranges}: add {config}"
    OTHER_CODES = "backend {backend!r} has int8 kernels for {kind} with symmetric {dtypes} only"
    ONLY_NAMED = "ranges found at each call are for a {kind} only where a rule names it or its type"
    ONE_OUTPUT = "dynamic int8 gains nothing with one output; a rule that names it makes it int8"
    # what weight-only quantization leaves alone
    OUTPUT_HEAD = "the output head stays float; quantize it with lm_head=… or a rule that names it"
    EMBEDDING = "embeddings stay float; quantize them with embedding=… or a rule that names them"
    OWN_FORWARD = "{cls} has its own forward, which may do more than a {kind}"
    OPTION = "an embedding with {option} changes or scales its rows at run time"
    NOT_FLOAT = "its weight is {dtype}; quantization starts from fp32, bf16 or fp16"
    COMPUTED_ELSEWHERE = "its weight is not a parameter, and what computes it is outside of the layer"
    NO_ELEMENTS = "its weight has no elements"
    ADAPTER = "it is part of an adapter, which is trained, merged or exchanged in float"
    LOW_BIT = "weight-only {dtype}: one operator, float in and out"
    OTHER_STRATEGY = "a rule gives it to {strategy}"
    NO_LAYER = "weight-only quantization is for linears and embeddings that are modules"
    # what surrounds an addition
    NO_PRODUCER = "no int8 operator produces either side"
    NO_READER = "no int8 operator reads the sum; it is fused in fp32"
    NOT_FUSABLE = "it does not directly follow an int8 operator that the engine could fuse it with"
    # what calibration saw
    INACCURATE = (
        "its int8 result has {db} dB against fp32 on the example inputs; keep_inaccurate=True keeps it int8"
    )
    NEVER_RAN = "never executed during calibration"
    # what was measured
    SLOWER = "int8 takes {int8}, fp32 {fp32}: undone by measurement"
    NOTHING_GAINED = "in int8 the model is {ratio} times as fast: undone by measurement"
    COSTLY = "it adds {share} of the error of int8: left out by measurement"
    BELOW_FLOOR = "int8 left {db} dB, less than {floor} dB: left out by measurement"
    FAILED = "every form of the model in int8 failed: {why}"

    def __call__(self, **arguments: object) -> Reason:
        """Return the reason with its arguments."""
        return Reason(self, tuple((name, str(value)) for name, value in arguments.items()))


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why an operator stays fp32.

    Attributes:
        cause: which reason it is.
        arguments: (name, value) of each argument of its text.
    """

    cause: Cause
    arguments: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Return the text."""
        return self.cause.value.format(**dict(self.arguments))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"cause": self.cause.name, "arguments": dict(self.arguments)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reason:
        """Return the inverse of `to_dict`."""
        return Cause[data["cause"]](**data["arguments"])


class Level(enum.IntEnum):
    """How specific a rule is; a higher level wins."""

    GLOBAL = 0
    TYPE = 1
    PATTERN = 2
    NAME = 3


@dataclasses.dataclass(frozen=True, slots=True)
class DecidingRule:
    """Which rule decided.

    Attributes:
        level: how specific it is; None where no rule applies.
        key: the name, pattern or type that it is for; where no rule applies, the name of what decided
            instead, if anything did.
    """

    level: Level | None = None
    key: str = ""

    def __str__(self) -> str:
        """For tables: "name 'fc'", "global", "-"."""
        if self.level is None:
            return self.key or "-"
        return "global" if self.level is Level.GLOBAL else f"{self.level.name.lower()} {self.key!r}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"level": None if self.level is None else self.level.name, "key": self.key}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecidingRule:
        """Return the inverse of `to_dict`."""
        return cls(None if data["level"] is None else Level[data["level"]], data["key"])


NO_RULE = DecidingRule()
WHITE_LIST = DecidingRule(key="white_list")

"""What a conversion saw and a graph alone does not show; reports draw it, nothing computes with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DepthPoint:
    """The error at one quantized operator, on the example inputs.

    Attributes:
        operator: its name.
        local_db: SQNR of its result for the inputs that it has in fp32, in dB.
        cumulative_db: SQNR of its result in the quantized graph, in dB.
    """

    operator: str
    local_db: float
    cumulative_db: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RangeView:
    """The values of one tensor with a static range.

    Attributes:
        operator: name of the first operator that reads it.
        data: "calibration" or "example inputs": where the values come from.
        low: the smallest value.
        high: the largest one.
        counts: numbers of values in bins of equal width from `low` to `high`.
        chosen: the range that the codes cover.
        others: range algorithm → the range that it finds for the same values.
        db: SQNR of the values after rounding, in dB, estimated.
    """

    operator: str
    data: str
    low: float
    high: float
    counts: tuple[int, ...]
    chosen: tuple[float, float]
    others: Mapping[str, tuple[float, float]]
    db: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelView:
    """Magnitudes of the channels that a smoothed operator reads, on the example inputs.

    Attributes:
        operator: its name.
        channels: how many there are.
        before: largest magnitudes without smoothing, of groups of channels, the largest first.
        after: those of the same groups with smoothing.
    """

    operator: str
    channels: int
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All of it.

    Attributes:
        config: the configuration as plain values; None if it has parts that can't be written.
        depth: the operators in execution order.
        ranges: the worst ones, the worst first.
        channels: the worst operators that were smoothed, the worst first.
        missing: why the other parts are empty; "" if they are not.
    """

    config: Mapping[str, Any] | None = None
    depth: tuple[DepthPoint, ...] = ()
    ranges: tuple[RangeView, ...] = ()
    channels: tuple[ChannelView, ...] = ()
    missing: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """Return the inverse of `to_dict`, through JSON too.

        Raises:
            TypeError, ValueError, KeyError: it is not what `to_dict` gives.
        """
        config = data["config"]
        if not (config is None or isinstance(config, dict)) or not isinstance(data["missing"], str):
            msg = f"expected a configuration and a text, but got {config!r} and {data['missing']!r}"
            raise TypeError(msg)
        return cls(
            config=config,
            depth=tuple(
                DepthPoint(
                    operator=_text(d["operator"]),
                    local_db=_number(d["local_db"]),
                    cumulative_db=_number(d["cumulative_db"]),
                )
                for d in data["depth"]
            ),
            ranges=tuple(_range(r) for r in data["ranges"]),
            channels=tuple(
                ChannelView(
                    operator=_text(c["operator"]),
                    channels=int(_number(c["channels"])),
                    before=tuple(map(_number, c["before"])),
                    after=tuple(map(_number, c["after"])),
                )
                for c in data["channels"]
            ),
            missing=data["missing"],
        )


def _range(data: Mapping[str, Any]) -> RangeView:
    return RangeView(
        operator=_text(data["operator"]),
        data=_text(data["data"]),
        low=_number(data["low"]),
        high=_number(data["high"]),
        counts=tuple(int(_number(count)) for count in data["counts"]),
        chosen=_pair(data["chosen"]),
        others={_text(name): _pair(pair) for name, pair in data["others"].items()},
        db=_number(data["db"]),
    )


def _pair(values: Any) -> tuple[float, float]:
    low, high = values
    return _number(low), _number(high)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        msg = f"expected a text, but got {value!r}"
        raise TypeError(msg)
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        msg = f"expected a finite number, but got {value!r}"
        raise TypeError(msg)
    return float(value)

"""What `config="auto"` tries, by what a model consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from nc.algorithms.base import Algorithm
from nc.algorithms.bias_correction import BiasCorrection
from nc.algorithms.channel_scaling import ChannelScaling
from nc.config import AnyConfig, DynamicQuantConfig, SmoothQuantConfig, StaticQuantConfig
from nc.graph.catalogue import CONVOLUTIONS, RECURRENT

#: Kinds of model.
CONVOLUTIONAL, TRANSFORMER, RECURRENT_MODEL, LINEAR = "convolutions", "transformer", "recurrent", "linears"


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that is tried.

    Attributes:
        name: name in reports.
        config: the configuration.
        late: whether it is tried only if the others are slow.
    """

    name: str
    config: AnyConfig
    late: bool = False


def kind_of(kinds: Collection[str]) -> str:
    """Return the kind of a model with quantizable operators of these kinds."""
    if not RECURRENT.isdisjoint(kinds):
        return RECURRENT_MODEL
    if "matmul" in kinds and "linear" in kinds:
        return TRANSFORMER
    return CONVOLUTIONAL if not CONVOLUTIONS.isdisjoint(kinds) else LINEAR


def candidates(kinds: Collection[str], post: Sequence[Algorithm] = ()) -> tuple[Candidate, ...]:
    """Return what is tried for a model with quantizable operators of these kinds.

    The first is what is taken where nothing can be measured.

    Args:
        kinds: as in `Decision.kind`.
        post: algorithms for the quantized model; those that can help this kind of model are taken.
    """
    kind = kind_of(kinds)
    convolves = not CONVOLUTIONS.isdisjoint(kinds)
    pre = (ChannelScaling(),) if convolves else ()
    # products of inputs that the weights are rounded for have their means in them; a window of nine weights
    # that each reads one channel can't make up for these
    post = [algorithm for algorithm in post if convolves or not isinstance(algorithm, BiasCorrection)]
    around: dict[str, Any] = {"pre": pre, "post": tuple(post)}
    static = Candidate("static", StaticQuantConfig(**around))
    percentile = StaticQuantConfig(act_algo="percentile", **around)
    of_rows = Candidate("ranges per row", percentile + DynamicQuantConfig())
    if kind == RECURRENT_MODEL:
        return of_rows, static
    if kind == CONVOLUTIONAL:
        return (
            static,
            Candidate("static, mse", StaticQuantConfig(act_algo="mse", **around)),
            Candidate("static, channels as they are", StaticQuantConfig(post=tuple(post))),
        )
    smooth = SmoothQuantConfig(alpha=0.8, scale_sharing=True, act_algo="percentile", **around)
    if kind == LINEAR:
        return of_rows, static, Candidate("SmoothQuant", smooth, late=True)
    float_attention = StaticQuantConfig(act_algo="percentile", **around) + DynamicQuantConfig()
    float_attention.set_local("matmul", StaticQuantConfig(w_dtype="fp32", act_dtype="fp32"))
    return (
        Candidate("ranges per row, attention in float", float_attention),
        of_rows,
        static,
        Candidate("SmoothQuant", smooth, late=True),
    )

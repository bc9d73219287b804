"""Statistics → scale and zero point of the activations of simulated operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nc.calibration.observe import Watch
from nc.calibration.statistics import Collected
from nc.errors import ConfigError
from nc.formats import FakeTensorSpec, TensorSpec, per_group
from nc.graph.fake_quant import Site
from nc.numerics import affine, fake_quant
from nc.observers import ALGORITHMS, Statistic
from nc.observers.base import Key
from nc.observers.channels import extremes_along


def statistic_for(spec: FakeTensorSpec) -> Statistic:
    """Return what is to be collected of an activation."""
    if spec.granularity == "per_tensor":
        return ALGORITHMS[str(spec.observer)].statistic
    assert spec.axis is not None
    return extremes_along(spec.axis)


def watches_for_sites(sites: Sequence[Site]) -> list[Watch]:
    """Return the statistics from which the ranges of simulated activations are found."""
    return [Watch(s.node, s.reader, statistic_for(s.spec), s.operator) for s in sites]


def key_of(site: Site) -> Key:
    """Key of the observer that collects the statistic of a site."""
    return site.node.name, statistic_for(site.spec).name


def find_fake_ranges(
    sites: Sequence[Site], found: Collected
) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]:
    """Scale and zero point by (operator, role).

    Their shape is [] per tensor, else of the rank of the activation with 1 in all other dimensions.

    Raises:
        ConfigError: groups do not cover the channels.
    """
    return {(s.operator, s.role): _qparams(s, found) for s in sites}


def _qparams(site: Site, found: Collected) -> tuple[torch.Tensor, torch.Tensor | None]:
    spec, state = site.spec, found.states[key_of(site)]
    options = {
        "symmetric": bool(spec.symmetric),
        "scale_type": str(spec.scale_type),
        "tensor_scale": bool(spec.tensor_scale),
    }
    if spec.granularity == "per_tensor":
        codes = TensorSpec(
            dtype=spec.format,
            symmetric=bool(spec.symmetric),
            algo=str(spec.observer),
            percentile=spec.percentile,
        )
        low, high = ALGORITHMS[str(spec.observer)].find_range(state, codes)
    else:
        low, high = state["low"], state["high"]
        if spec.granularity == "per_group":
            block = (_checked_group(site, low.numel()),)
            low, high = affine.block_range(low, block)[0], affine.block_range(high, block)[1]
    scale, zero_point = fake_quant.choose(low, high, spec.format, **options)  # type: ignore[arg-type]
    if not scale.dim():
        return scale, zero_point
    assert spec.axis is not None
    rank = site.node.meta["val"].dim()
    shape = [1] * rank
    shape[spec.axis] = scale.numel()
    return scale.reshape(shape), None if zero_point is None else zero_point.reshape(shape)


def _checked_group(site: Site, channels: int) -> int:
    assert site.spec.group_size is not None
    try:
        return per_group(-1, site.spec.group_size).block_size((channels,))[0]
    except ConfigError as error:
        msg = f"Operator {site.operator!r}: {site.role} as {site.spec}: {error}"
        raise ConfigError(msg) from error

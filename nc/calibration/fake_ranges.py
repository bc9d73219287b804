"""Statistics → scale and zero point of the activations of simulated operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nc.calibration.observe import Watch
from nc.calibration.statistics import Collected
from nc.errors import ConfigError
from nc.formats import TensorFormat, per_group
from nc.graph.fake_quant import Site
from nc.numerics import affine, fake_quant
from nc.observers import ALGORITHMS, Statistic
from nc.observers.base import Key
from nc.observers.channels import extremes_along


def statistic_for(form: TensorFormat) -> Statistic:
    """Return what is to be collected of an activation."""
    if form.granularity.name == "per_tensor":
        return ALGORITHMS[form.algo].statistic
    assert form.granularity.axis is not None
    return extremes_along(form.granularity.axis)


def watches_for_sites(sites: Sequence[Site]) -> list[Watch]:
    """Return the statistics from which the ranges of simulated activations are found."""
    return [Watch(s.node, s.reader, statistic_for(s.form), s.operator) for s in sites]


def key_of(site: Site) -> Key:
    """Key of the observer that collects the statistic of a site."""
    return site.node.name, statistic_for(site.form).name


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
    form, state = site.form, found.states[key_of(site)]
    if form.granularity.name == "per_tensor":
        low, high = ALGORITHMS[form.algo].find_range(state, form)
    else:
        low, high = state["low"], state["high"]
        if form.granularity.name == "per_group":
            block = (_checked_group(site, low.numel()),)
            low, high = affine.block_range(low, block)[0], affine.block_range(high, block)[1]
    scale, zero_point = fake_quant.choose(low, high, form)
    if not scale.dim():
        return scale, zero_point
    axis = form.granularity.axis
    assert axis is not None
    rank = site.node.meta["val"].dim()
    shape = [1] * rank
    shape[axis] = scale.numel()
    return scale.reshape(shape), None if zero_point is None else zero_point.reshape(shape)


def _checked_group(site: Site, channels: int) -> int:
    try:
        return per_group(-1, site.form.group_size).block_size((channels,))[0]
    except ConfigError as error:
        msg = f"Operator {site.operator!r}: {site.role} as {site.form}: {error}"
        raise ConfigError(msg) from error

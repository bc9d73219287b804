"""What plans compute, one file for each operator: how it is found in a graph, its ordered ways, its shapes.

A file has `OPERATORS`; nothing else has to name it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from nc.backends.native.plans.ways import PlannedOperator


@functools.cache
def table(*, one_token: bool = False) -> Mapping[Any, PlannedOperator]:
    """Return what plans know of each operator of torch, for graphs of one token or for all others."""
    rows = [row for row in _rows() if not row.only_c]
    general = _by_target(row for row in rows if not row.of_one_token)
    if not one_token:
        return general
    return general | {
        target: _instead(general.get(target), row)
        for target, row in _by_target(r for r in rows if r.of_one_token).items()
    }


@functools.cache
def of_c() -> Mapping[Any, PlannedOperator]:
    """Return the same for plans that call C only: of operators of all graphs, the ways of one token too."""
    general, small = table(), table(one_token=True)
    found = _by_target(row for row in _rows() if row.only_c)
    for target, row in small.items():
        ways = dict(general[target].ways) if target in general else {}
        ways |= {f"{name} of few": way for name, way in row.ways.items() if way not in ways.values()}
        found[target] = dataclasses.replace(row, ways=ways)
    return found


def _rows() -> list[PlannedOperator]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [row for module in modules for row in getattr(module, "OPERATORS", ())]


def _by_target(rows: Iterable[PlannedOperator]) -> dict[Any, PlannedOperator]:
    """Return rows by target; two files that claim one are a mistake."""
    found: dict[Any, PlannedOperator] = {}
    for row in rows:
        for target in row.targets:
            assert target not in found, f"two files have ways for {target}"
            found[target] = row
    return found


def _instead(general: PlannedOperator | None, row: PlannedOperator) -> PlannedOperator:
    """Return the ways of a row, with what another one has besides."""
    return (
        row
        if general is None
        else dataclasses.replace(general, ways=row.ways, waits=row.waits or general.waits)
    )

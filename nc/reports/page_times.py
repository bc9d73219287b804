"""Where the time goes: the kernels of a profile, and the part of the hardware's limit that each reaches."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from nc.profiling.hardware import Limits
from nc.profiling.latency import milliseconds
from nc.profiling.profile import EngineCall, Profile
from nc.reports.op_report import OpReport
from nc.text.html_page import escaped, table

#: Kernels that the table has at most.
_MOST_KERNELS = 12


def times(profile: Profile | None, ops: Sequence[OpReport]) -> str:
    """Return the kernels that take most of the time; "" without a profile.

    Args:
        profile: of the engine.
        ops: the operators that its steps name.
    """
    if profile is None:
        return ""
    by_kernel: dict[str, list[EngineCall]] = collections.defaultdict(list)
    for step in profile.steps:
        by_kernel[f"{step.role}: {step.kernel}"].append(step)
    total = sum(step.ms for step in profile.steps) or 1.0
    largest = sorted(by_kernel.items(), key=lambda each: -_ms(each[1]))[:_MOST_KERNELS]
    doubt = (
        f"The steps take {milliseconds(total)} when they are called one by one, a call takes "
        f"{milliseconds(profile.call_ms)}: this machine was busy meanwhile."
        if profile.call_ms > 2 * total
        else ""
    )
    rows = [
        (name, f"{_ms(steps):.3f}", f"{_ms(steps) / total:.1%}", _part(steps, profile.limits, ops))
        for name, steps in largest
    ]
    return (
        "<h2>Where the time goes</h2>"
        + (f"<p class=doubt>{escaped(doubt)}</p>" if doubt else "")
        + table(("kernel", "ms", "share", "of the limit"), rows, bars=2)
        + f"<p>{escaped(limit_text(profile, ops))}</p>"
    )


def limit_text(profile: Profile, ops: Sequence[OpReport]) -> str:
    """Return in words what this CPU could do at best."""
    limits = profile.limits
    if limits is None:
        return "The limit is not known for these inputs: they have other sizes than the example's."
    if limits.missing:
        return f"The limit of this CPU was not measured: {limits.missing}"
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits.multiply_adds.items())
    from_memory = limits.exceeds_cache(ops)
    weights = (
        f", and the weights, which do not fit into its cache, are read with {limits.read_gb_s:.1f} GB/s"
        if from_memory
        else ""
    )
    least = limits.least_ms(ops, from_memory=from_memory)
    at_best = (
        ""
        if least is None
        else (
            f" At this limit the call takes {milliseconds(least)}, {least / profile.call_ms:.1%} of its time;"
            " conversions and operators without products are not in it."
        )
    )
    threads = f"{profile.threads} thread{'s' if profile.threads > 1 else ''}"
    return f"The limit: {threads} of this CPU do {rates} billion multiply-adds in a second{weights}.{at_best}"


def _part(steps: Sequence[EngineCall], limits: Limits | None, ops: Sequence[OpReport]) -> str:
    """Return the part of the limit that some steps reach; "" where that is not known."""
    if limits is None:
        return ""
    names = {name for step in steps if not step.converts for name in step.operators}
    least = limits.least_ms([op for op in ops if op.operator in names], from_memory=limits.exceeds_cache(ops))
    return "" if least is None else f"{least / (_ms(steps) or 1.0):.1%}"


def _ms(steps: Sequence[EngineCall]) -> float:
    return sum(step.ms for step in steps)

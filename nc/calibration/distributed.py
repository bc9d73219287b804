"""Calibration on several machines: under `torch.distributed`, `convert` combines the statistics of all ranks.

Ranks send statistics as bytes in the file format. Nothing is pickled. Every rank merges them in the order of
the ranks. The statistics of a rank itself do not change: calibration can continue, and a second `convert`
counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nc.calibration.ranks import Ranks
from nc.calibration.statistics import Collected, Statistics, decode, encode


def gather(statistics: Statistics, identity: Callable[[], Mapping[str, bytes]]) -> Collected:
    """Return the statistics of all ranks of the default process group, merged in their order.

    Without a group, those of this process.

    Every rank must call it. The group needs a backend for tensors on the CPU: gloo or mpi.

    Args:
        statistics: of this rank; they do not change.
        identity: name → bytes that must be the same on every rank, beside the model. It is called in a group
            only.

    Raises:
        StateError: a rank differs in something that must be the same (raised on every rank), or the group
            fails (a rank ended).
    """
    ranks = Ranks.current()
    if ranks.alone:
        return statistics.collected()
    ranks.agree(lambda: {**statistics.identity(), **identity()})
    parts = enumerate(ranks.each(encode(statistics.collected())))
    return statistics.combined((f"rank {rank}", decode(data, f"rank {rank}")) for rank, data in parts)

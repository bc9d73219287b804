"""Whether a measurement was disturbed: what else this machine computed meanwhile."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

#: Least CPU time of this process in a second that it computes on one thread or more.
LEAST_SHARE = 0.85
#: How often in a second other threads may take a core away from this process.
MOST_SWITCHES = 50.0


@dataclass(frozen=True, slots=True)
class Load:
    """What was seen during a measurement.

    Attributes:
        seconds: how long it took.
        share: seconds of CPU time of this process, per second.
        switches: how often the system took a core away from this process, per second; 0 where it does not
            say.
        runnable: threads that could run on this machine, the median over the rounds; 0 where the system does
            not say.
        cores: of this machine.
    """

    seconds: float
    share: float
    switches: float = 0.0
    runnable: float = 0.0
    cores: int = 1

    def disturbed(self) -> str:
        """Return what says that other work took time from the measurement; "" if nothing does."""
        if self.runnable > self.cores:
            return f"this machine is busy: {self.runnable:.0f} threads want its {self.cores} cores"
        if self.share < LEAST_SHARE:
            return f"this machine is busy: the measurement got {100 * self.share:.0f} % of a core"
        if self.switches > MOST_SWITCHES:
            return f"this machine is busy: other work took a core away {self.switches:.0f} times per second"
        return ""


@dataclass(slots=True)
class LoadWatch:
    """Looks at the machine from its creation on. It needs Linux for all but the CPU time."""

    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)
    _switches: int = field(default_factory=lambda: _involuntary_switches())
    _runnable: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Count the threads that can run; call it once in each round."""
        with contextlib.suppress(OSError, IndexError, ValueError):  # another system: nothing is counted
            self._runnable.append(
                int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
            )

    def load(self) -> Load:
        """Return what was seen so far."""
        seconds = max(time.perf_counter() - self._wall, 1e-9)
        return Load(
            seconds=seconds,
            share=(time.process_time() - self._cpu) / seconds,
            switches=(_involuntary_switches() - self._switches) / seconds,
            runnable=statistics.median(self._runnable) if self._runnable else 0.0,
            cores=os.cpu_count() or 1,
        )


def _involuntary_switches() -> int:
    if sys.platform == "win32":
        return 0
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

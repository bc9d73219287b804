"""Which of the trials is taken: a pure function of what was measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

#: Operators that are left in float together: at most so many, or this part of those that are int8; they add
#: at least so much of the error.
_FEW, _PART, _MOST_OF_IT = 4, 0.05, 0.5
#: Mending them has to lower the power of the error by so much.
LEAST_MENDED = 1.5
#: How many times as long a call may take for it at `ENOUGH_DB`, and how much more for each dB below.
MOST_LOST, LOST_FOR_EACH_DB = 1.05, 0.05
#: A least error of this power (40 dB) is so small that the chosen one may be larger by this factor.
GOOD, WHERE_GOOD = 1e-4, 2.0
#: Times that differ by less are the same, and the error decides.
SAME_TIME = 1.05
#: Times of the fastest from which on the late candidates are tried too.
SLOW = 1.3
#: From this SQNR on nothing is left in float, in dB: the error has a thousandth of the power of the outputs.
ENOUGH_DB = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A configuration that was tried.

    Attributes:
        name: of the candidate.
        sqnr_db: of its outputs against fp32 on data that was held out, in dB, the worst output; -inf where it
            failed.
        ms: milliseconds of a call on the example inputs; None where that was not measured.
        failed: why there is no model; "" if there is one.
        int8: whether it is; else it is what int8 has to beat.
        fitted: how many of its operators have ranges that calibration found.
    """

    name: str
    sqnr_db: float
    ms: float | None = None
    failed: str = ""
    int8: bool = True
    fitted: int = 0

    @property
    def error(self) -> float:
        """Power of the error, as a part of that of the signal."""
        return 10 ** min(-self.sqnr_db / 10, 300.0)  # -inf dB is a power that numbers can hold

    @property
    def cells(self) -> tuple[str, str, str]:
        """The name and what was measured, as a row of a table."""
        if self.failed:
            return self.name, "failed", ""
        error = f"{self.sqnr_db:.1f} dB" if self.int8 else "near fp32"
        return self.name, error, "" if self.ms is None else f"{self.ms:.2f} ms"

    def __str__(self) -> str:
        """Return the name and what was measured."""
        name, error, time = self.cells
        return f"{name}: {self.failed or error}{', ' * bool(time)}{time}"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What is taken.

    Attributes:
        index: of the trial.
        why: one sentence.
    """

    index: int
    why: str


def choose(
    trials: Sequence[Trial],
    error_factor: float,
    least_gain: float,
    doubt: str = "",
    *,
    floor: float | None = None,
    held_out: bool = True,
) -> Choice | None:
    """Return the fastest int8 trial whose error is within a factor of the least, if that gains anything.

    Of those that are as fast it is the one with the least error.

    Args:
        trials: in order of preference where times are not known.
        error_factor: at least 1.
        least_gain: how many times as fast as a float trial it has to be; else that one is taken.
        doubt: why their times say nothing; "" if they do.
        floor: trials with a lower SQNR, in dB, are taken only where all have one; None: any is taken.
        held_out: whether their errors are on data that no range was found for. If not, they say little, and
            those trials with the fewest such ranges are chosen from.

    Returns:
        None where all int8 trials failed.
    """
    possible = _possible(trials, floor, held_out=held_out)
    if not possible:
        return None
    near, error_factor = _near(trials, possible, error_factor)
    within = f"within {10 * math.log10(error_factor):.1f} dB of the least error"
    times = {index: ms for index in near if (ms := trials[index].ms) is not None}
    if doubt or len(times) < len(near):
        why = doubt or "times were not measured"
        return Choice(near[0], f"it is what suits this kind of model, and {within}; {why}")
    as_fast = [index for index, ms in times.items() if ms <= SAME_TIME * min(times.values())]
    fastest = min(as_fast, key=lambda index: trials[index].error)
    ms = times[fastest]
    for index, trial in enumerate(trials):
        is_float = not trial.int8 and not trial.failed
        if is_float and trial.ms is not None and trial.ms < ms * least_gain:
            gain = f"{trial.ms / ms:.2f} times as fast" if ms else "no faster"
            return Choice(index, f"{trials[fastest].name} is {gain}")
    return Choice(fastest, f"it is the fastest {within}")


def _possible(trials: Sequence[Trial], floor: float | None, *, held_out: bool) -> list[int]:
    """Return the int8 trials that can be chosen; arguments as for `choose`."""
    found = [index for index, trial in enumerate(trials) if trial.int8 and not trial.failed]
    if not held_out:
        fewest = min((trials[index].fitted for index in found), default=0)
        found = [index for index in found if trials[index].fitted == fewest]
    if floor is not None:
        found = [index for index in found if trials[index].sqnr_db >= floor] or found
    return found


def _near(trials: Sequence[Trial], possible: Sequence[int], factor: float) -> tuple[list[int], float]:
    """Return the indices of trials whose error is at most a factor times the least one, and this factor."""
    least = min(trials[index].error for index in possible)
    if least <= GOOD:
        factor = max(factor, WHERE_GOOD)
    return [index for index in possible if trials[index].error <= factor * least], factor


def is_slow(trials: Sequence[Trial], choice: Choice) -> bool:
    """Return whether the chosen trial takes far longer than the fastest int8 one."""
    ms = trials[choice.index].ms
    known = [trial.ms for trial in trials if trial.int8 and trial.ms is not None]
    return ms is not None and trials[choice.index].int8 and ms > SLOW * min(known)


def most_lost(sqnr_db: float, floor: float | None) -> float:
    """Return how many times as long a call may take where operators are mended; it rises with the error.

    Args:
        sqnr_db: without mending, in dB.
        floor: the least that is delivered, for which any time is lost; None: there is none.
    """
    if floor is not None and sqnr_db < floor:
        return math.inf
    return MOST_LOST + LOST_FOR_EACH_DB * max(0.0, ENOUGH_DB - sqnr_db)


def next_in_float(noise: Mapping[str, float], lossy: Sequence[str], floor: float, least: int) -> list[str]:
    """Return the operators that go to float so that the others are expected to leave a given SQNR.

    Args:
        noise: of operators, as parts of the power of the outputs, the largest first; empty where that is not
            known, and then all go.
        lossy: names of all operators that are not in fp32.
        floor: the SQNR, in dB.
        least: so many at least, if there are so many.
    """
    known = [name for name in noise if name in lossy]
    if not known:
        return list(lossy)
    rest, found = sum(noise[name] for name in known), list[str]()
    for name in known:
        if found and len(found) >= least and rest <= 10 ** (-floor / 10):
            break
        found.append(name)
        rest -= noise[name]
    return found


def costly_few(noise: Mapping[str, float]) -> dict[str, float]:
    """Return the few operators that add most of the error, and the part of it that each adds.

    Args:
        noise: of each int8 operator, the largest first.

    Returns:
        {} where many operators share the error.
    """
    total, found = sum(noise.values()), dict[str, float]()
    for name, share in list(noise.items())[: max(_FEW, int(_PART * len(noise)))]:
        if total > 0:
            found[name] = share / total
        if sum(found.values()) >= _MOST_OF_IT:
            return found if len(found) < len(noise) else {}
    return {}

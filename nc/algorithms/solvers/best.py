"""A solver's codes or those of round to nearest, whichever lose less.

No layer is ever worse than round to nearest.
"""

from __future__ import annotations

from nc.algorithms.solvers.base import Problem, Solver
from nc.algorithms.solvers.rtn import RTN
from nc.errors import CalibrationError, InputError
from nc.modules.statistics import weighted_loss
from nc.nn.result import LayerResult
from nc.numerics.packed_weight import PackedWeight

UNREACHED = "calibration never reached it"


def solve_best(problem: Problem, solver: Solver) -> tuple[PackedWeight, LayerResult]:
    """Solve a layer, and keep round to nearest where the solver does worse.

    `nc.modules.statistics.weighted_loss` decides. A solver that needs data is not asked where no
    token reached the layer; the note says so.

    Raises:
        CalibrationError: sums over its inputs overflowed.
        InputError: the weight holds NaN or infinite values.
        UnsupportedError: the solver cannot produce this format.
    """
    refuse_not_finite(problem)
    if solver.needs.data and not problem.tokens:
        problem.notes.append(UNREACHED)
        return keep_best(problem, None, solver)
    return keep_best(problem, solver.solve(problem), solver)


def keep_best(
    problem: Problem, solved: PackedWeight | None, solver: Solver
) -> tuple[PackedWeight, LayerResult]:
    """Return what a solver found, or round to nearest if that loses less.

    A solver that corrects what earlier layers did to the inputs is judged by that: the error of its output
    for the changed inputs alone is larger than without a correction, and round to nearest would replace just
    those layers that were corrected most.

    Args:
        problem: the layer.
        solved: the solver's codes; None: round to nearest is all there is.
        solver: the one that was asked.
    """

    def loss_of(packed: PackedWeight) -> float:
        return weighted_loss(
            problem.weight, packed.dequantize(), problem.inputs, two_sided=solver.needs.float_inputs
        )

    nearest = RTN().solve(problem)
    rtn_loss = loss = loss_of(nearest)
    kept, name = nearest, RTN.name
    if solved is not None:
        solved_loss = loss_of(solved)
        if solved_loss <= rtn_loss:  # False for NaN
            kept, name, loss = solved, solver.name, solved_loss
    result = LayerResult(
        solver=name,
        asked=solver.name,
        loss=loss,
        rtn_loss=rtn_loss,
        tokens=problem.tokens,
        note="; ".join(dict.fromkeys(problem.notes)),
    )
    return kept, result


def refuse_not_finite(problem: Problem) -> None:
    """Raise InputError if the weight holds NaN or infinite values, CalibrationError if the statistics do."""
    bad = ~problem.weight.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        msg = (
            f"The weight of {problem.name!r} holds {int(bad.sum())} NaN or infinite values, the first at "
            f"[{row}, {column}]. Repair the model, or exclude this layer."
        )
        raise InputError(msg)
    inputs = problem.inputs
    sums = [] if inputs is None else [inputs.squares, inputs.outer, inputs.cross]
    if not all(
        part is None or all(bool(end.isfinite()) for end in part.aminmax()) for part in sums
    ):  # isfinite of all would copy it
        msg = (
            f"The inputs of {problem.name!r} are so large that their sums overflow. Check the calibration "
            "data, or exclude this layer."
        )
        raise CalibrationError(msg)

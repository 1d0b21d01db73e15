"""BF-IO to optimality: the integer program (IO) as a MILP, solved by HiGHS."""

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rescheduler.routing.bfio.fast import bfio_fast, evened_out, foresight, loads_ahead, must_admit
from rescheduler.routing.inputs import FloatArray, IntArray, RoutingInputs, empty_target

TOLERANCE = 0.1
"""Tokens of J within which an assignment counts as optimal: far less than one request's."""


@dataclass(frozen=True, slots=True, eq=False)
class ExactSolution:
    """What HiGHS found, and how far from the optimum it can be.

    Attributes:
        instance: [n] instance of each waiting request, or -1.
        objective: J of it, in tokens.
        bound: no assignment that admits as many has a smaller J.
        gap: (objective - bound) / objective; 0 if both are within `TOLERANCE`.
        status: of HiGHS, in its words, such as "Optimal" or "Time limit reached".
        source: "highs", or "fast" if HiGHS had found nothing by then.
    """

    instance: IntArray
    objective: float
    bound: float
    gap: float
    status: str
    source: str


def solve_exactly(
    inputs: RoutingInputs, starvation: int | None = None, time_limit: float = np.inf
) -> ExactSolution:
    r"""Return the assignment of the least J; the inputs are left as they are.

    .. math::
        \min_{x, M} \; & \sum_h \Big[ G M_h - \sum_g L_g(h) \Big], \quad
            L_g(h) = \Lambda_g(h) + \sum_i x_{ig} \hat w_i(h) \\
        & M_h \ge L_g(h), \quad \sum_g x_{ig} \le 1, \quad \sum_i x_{ig} \le c_g, \quad
            \sum_i c_i x_{ig} \le K_g, \quad \sum_{ig} x_{ig} = U

    with Λ and ŵ weighted and refilled as `loads_ahead` returns them, K_g the KV room, and
    U = min(n, Σ c_g), or, where that room is short, the most that can be admitted, for which a
    first MILP is solved. Requests that starve have Σ_g x_ig = 1. HiGHS begins at the assignment
    of `bfio_fast`. Of optima, `evened_out` takes one that Lemma 1 speaks of.

    The time that a MILP takes grows steeply: 16 requests and 6 instances take some 0.1 s, twice
    as many often do not end. At the time limit its best assignment so far counts.

    Source: A Universal Load Balancing Principle (Chen et al. 2026), section 4, problem (IO).

    Args:
        inputs: the decision.
        starvation: W, see `BFIO`; None for no bound.
        time_limit: seconds for HiGHS, at which what it returns depends on the machine.

    Raises:
        RuntimeError: HiGHS refuses the program.
    """
    parameters = np.array([-1.0 if starvation is None else starvation])
    start = empty_target(inputs)
    bfio_fast(RoutingInputs._make(array.copy() for array in inputs), parameters, start)
    must = must_admit(inputs, parameters[0]) >= 0
    admitted = int((start >= 0).sum())
    most = min(len(start), int(np.clip(inputs.slots, 0, len(start)).sum()))
    if admitted < most:
        begun = time.monotonic()
        start = _solve(inputs, must, start, None, time_limit).instance
        admitted = int((start >= 0).sum())
        time_limit -= time.monotonic() - begun
    if admitted == 0:
        value = imbalance_of(inputs, start)
        return ExactSolution(start, value, value, 0.0, "Optimal", "highs")
    solution = _solve(inputs, must, start, admitted, max(time_limit, 0.0))
    instance = evened_out(inputs, solution.instance)
    objective = imbalance_of(inputs, instance)
    bound = min(solution.bound, objective)
    gap = (objective - bound) / objective if objective - bound > TOLERANCE else 0.0
    return replace(solution, instance=instance, objective=objective, bound=bound, gap=gap)


def imbalance_of(inputs: RoutingInputs, instance: IntArray) -> float:
    """Return J, in tokens, with these requests placed; the inputs are left as they are.

    Args:
        inputs: before the decision.
        instance: [n] where each waiting request goes, or -1.
    """
    load, brought = loads_ahead(inputs, np.arange(len(instance)), *foresight(inputs))
    np.add.at(load, instance[instance >= 0], brought[instance >= 0])
    return float((len(load) * load.max(axis=0) - load.sum(axis=0)).sum())


def _solve(
    inputs: RoutingInputs,
    must: npt.NDArray[np.bool_],
    start: IntArray,
    admitted: int | None,
    time_limit: float,
) -> ExactSolution:
    """Admit so many at the least J, or, if that is None, as many as possible.

    Columns are x, instance by instance, and then M_h. ``gap`` is left to the caller.
    """
    import highspy

    n, n_instances = len(inputs.size), len(inputs.load)
    row, weight = loads_ahead(inputs, np.arange(n), *foresight(inputs))
    n_points, n_x = row.shape[1], n * n_instances
    x = np.arange(n_x).reshape(n_instances, n)

    highs = highspy.Highs()
    for option, setting in (
        ("output_flag", False),
        ("threads", 1),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", TOLERANCE),
        ("time_limit", time_limit),
    ):
        highs.setOptionValue(option, setting)
    infinity = highspy.kHighsInf
    highs.addVars(n_x, np.zeros(n_x), np.ones(n_x))
    highs.addVars(n_points, row.max(axis=0), np.full(n_points, infinity))
    integer = np.full(n_x, highspy.HighsVarType.kInteger.value, dtype=np.uint8)
    highs.changeColsIntegrality(n_x, np.arange(n_x, dtype=np.int32), integer)
    counted = admitted is None
    cost = np.concatenate(
        [
            np.full(n_x, -1.0) if counted else np.tile(-weight.sum(axis=1), n_instances),
            np.full(n_points, 0.0 if counted else n_instances),
        ]
    )
    highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def add_row(low: float, high: float, columns: IntArray, values: npt.ArrayLike) -> None:
        filled = np.broadcast_to(values, columns.shape).astype(np.float64)
        highs.addRow(low, high, len(columns), columns.astype(np.int32), filled)

    for i in range(n):
        add_row(float(must[i]), 1.0, x[:, i], 1.0)
    for g in range(n_instances):
        add_row(-infinity, float(np.clip(inputs.slots[g], 0, n)), x[g], 1.0)
        if np.sort(inputs.size)[::-1][: inputs.slots[g]].sum() > inputs.room[g]:
            add_row(-infinity, max(float(inputs.room[g]), 0.0), x[g], inputs.size)
        for h in range(n_points):
            columns = np.append(x[g], n_x + h)
            add_row(row[g, h], infinity, columns, np.append(-weight[:, h], 1.0))
    if admitted is not None:
        add_row(admitted, admitted, x.ravel(), 1.0)

    begin = highspy.HighsSolution()
    begin.col_value = list(_columns(start, x, row, weight))
    highs.setSolution(begin)
    highs.run()
    status = highs.modelStatusToString(highs.getModelStatus())
    info = highs.getInfo()
    found = info.primal_solution_status == highspy.kSolutionStatusFeasible
    if not found and highs.getModelStatus() != highspy.HighsModelStatus.kTimeLimit:
        raise RuntimeError(f"HiGHS ends a program of {n} x {n_instances} variables with {status!r}")
    instance = start
    if found:
        chosen = np.array(highs.getSolution().col_value[:n_x]).reshape(x.shape) > 0.5
        instance = np.where(chosen.any(axis=0), chosen.argmax(axis=0), -1)
    bound = max(float(info.mip_dual_bound - row.sum()), 0.0)
    return ExactSolution(instance, np.nan, bound, np.nan, status, "highs" if found else "fast")


def _columns(start: IntArray, x: IntArray, row: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the values of x and M in an assignment."""
    chosen, load = np.zeros(x.shape), row.copy()
    for i in np.flatnonzero(start >= 0):
        chosen[start[i], i] = 1.0
        load[start[i]] += weight[i]
    return np.concatenate([chosen.ravel(), load.max(axis=0)])

"""What the time of a step depends on: the own load, or the greatest and the mean of both."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from benchmarks.barrier.grid import Measured
from rescheduler.step_time.step_time import StepTime, step_seconds

FloatArray = npt.NDArray[np.float64]

_UNEQUAL = 1.5
_MOST_TURNS = 20


class Observations(NamedTuple):
    """The steps of engines that had requests, one row an engine and a point."""

    seconds: FloatArray  # of a step, in the median, [n]
    new: FloatArray  # tokens computed in a step, by this engine and by the other, [n, 2]
    context: FloatArray  # their tokens of context, [n, 2]


class Fit(NamedTuple):
    """A model of the time of a step, and how well it says it."""

    coefficients: dict[str, float]  # seconds of every step, and per token of what each names
    r2: float
    error: float  # median of |estimate − measured| / measured


def observed(points: Sequence[Measured]) -> Observations:
    """Return the engines that had requests; what one without does is in the other's time."""
    rows = [
        (one.seconds[g], *(values[k] for values in (one.requests, one.context) for k in (g, 1 - g)))
        for one in points
        for g in range(2)
        if one.requests[g] and one.steps[g]
    ]
    table = np.array(rows)
    return Observations(table[:, 0], table[:, 1:3], table[:, 3:5])


def disagreement(points: Sequence[Measured]) -> float:
    """Return how much longer the slower engine's steps are, in the median over unequal loads.

    As a part of the other's; of points at which both have requests, and one far more tokens.
    """
    slower = [
        max(one.seconds) / min(one.seconds) - 1
        for one in points
        if all(one.steps) and all(one.requests) and max(one.context) > _UNEQUAL * min(one.context)
    ]
    return float(np.median(slower))


def fits(seen: Observations) -> dict[str, Fit]:
    r"""Return models by name, all with times that are not below 0.

    .. math:: \text{own:}\ a + b L_g \qquad
              \text{own and other:}\ a + b L_g + c L_{g'} \qquad
              \text{max and mean:}\ a + b \max L + c \bar L

    and the simulator's behind a barrier, :math:`\max_g(a + b\,n_g + c L_g) + d \bar L`.
    """
    own, other = seen.context.T
    columns = {
        "own": {"own": own},
        "own and other": {"own": own, "other": other},
        "max and mean": {"max": seen.context.max(axis=1), "mean": seen.context.mean(axis=1)},
    }
    found = {}
    for name, used in columns.items():
        times = _relative_nnls(np.column_stack(list(used.values())), seen.seconds)
        estimate = times[0] + np.column_stack(list(used.values())) @ times[1:]
        named = dict(zip(["constant", *used], times.tolist(), strict=True))
        found[name] = Fit(named, *_quality(estimate, seen.seconds))
    found["simulator"] = _simulated(seen)
    return found


def _simulated(seen: Observations) -> Fit:
    """Fit the simulator's model; which engine is slowest depends on it, so it is found in turns."""
    rows, slowest = np.arange(len(seen.seconds)), seen.context.argmax(axis=1)
    for _ in range(_MOST_TURNS):
        columns = (seen.new[rows, slowest], seen.context[rows, slowest], seen.context.mean(axis=1))
        a, b, c, d = _relative_nnls(np.column_stack(columns), seen.seconds)
        again = (b * seen.new + c * seen.context).argmax(axis=1)
        if (again == slowest).all():
            break
        slowest = again
    empty = np.empty(0)
    step_time = StepTime(a, b, c, d, empty, empty, np.empty((0, 0)))
    estimate = np.array(
        [
            max(step_seconds(step_time, n, load) for n, load in zip(new, context, strict=True))
            + d * context.mean()
            for new, context in zip(seen.new, seen.context, strict=True)
        ]
    )
    named = {"constant": a, "new": b, "max": c, "mean": d}
    return Fit({k: float(v) for k, v in named.items()}, *_quality(estimate, seen.seconds))


def _relative_nnls(columns: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return an offset and a slope of each column, none below 0, by the least relative error."""
    scale = np.maximum(columns.max(axis=0), 1.0)
    design = np.column_stack([np.ones(len(columns)), columns / scale]) / seconds[:, None]
    return np.asarray(nnls(design, np.ones(len(seconds)))[0] / np.concatenate([[1.0], scale]))


def _quality(estimate: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    left = ((estimate - seconds) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    return float(1 - left), float(np.median(np.abs(estimate - seconds) / seconds))

"""How long one step of an instance takes, by its new tokens and its load."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from predictor.compilation import compiled_core
from rescheduler.step_time.profile import load_profile, read_steps

FloatArray = npt.NDArray[np.float64]

_KNOTS = 16
_NO_KNOTS, _NO_CELLS = np.empty(0), np.empty((0, 0))


class StepTime(NamedTuple):
    r"""Seconds of a step, :math:`t = a + b\,n_{new} + c\,L`, or a table of them.

    Behind a barrier a step takes :math:`\max_g t(n_{new,g}, L_g) + d\,\frac1G\sum_g L_g`.

    Attributes:
        constant: a.
        per_new: b, seconds per token computed in the step.
        per_context: c, seconds per context token on the instance.
        per_mean_context: d, seconds per context token of the mean instance.
        table_new: [N] ascending new tokens of a table, or [0] without one.
        table_context: [C] ascending context tokens of the table.
        table_seconds: [N, C] seconds, nowhere falling. Beside a table b and c count only what is
            beyond its last knots.
    """

    constant: float
    per_new: float
    per_context: float
    per_mean_context: float
    table_new: FloatArray = _NO_KNOTS
    table_context: FloatArray = _NO_KNOTS
    table_seconds: FloatArray = _NO_CELLS


@compiled_core
def step_seconds(step_time: StepTime, new: float, load: float) -> float:
    """Return the seconds that one instance computes, without the part of the mean load.

    Args:
        step_time: the model.
        new: tokens computed in the step: one a decoding request, and those of prompts.
        load: context tokens on the instance.
    """
    if len(step_time.table_new) == 0:
        return step_time.constant + step_time.per_new * new + step_time.per_context * load
    i, x = _place(step_time.table_new, new)
    j, y = _place(step_time.table_context, load)
    t = step_time.table_seconds
    low = t[i, j] + (t[i, j + 1] - t[i, j]) * y
    high = t[i + 1, j] + (t[i + 1, j + 1] - t[i + 1, j]) * y
    beyond_new = max(new - step_time.table_new[-1], 0.0)
    beyond_context = max(load - step_time.table_context[-1], 0.0)
    return (  # type: ignore[no-any-return]
        low
        + (high - low) * x
        + step_time.per_new * beyond_new
        + step_time.per_context * beyond_context
    )


@compiled_core
def _place(knots: FloatArray, value: float) -> tuple[int, float]:
    """Return the cell that a value is in, or is nearest to, and its place there in [0, 1]."""
    i = min(max(int(np.searchsorted(knots, value, "right")) - 1, 0), len(knots) - 2)
    return i, min(max((value - knots[i]) / (knots[i + 1] - knots[i]), 0.0), 1.0)


def bfio_step_time(
    slots: int, constant: float | None = None, per_token: float | None = None
) -> StepTime:
    r"""Return paper 000's model of decoding behind a barrier, :math:`C + t_\ell \max_g L_g`.

    Args:
        slots: B of an instance.
        constant: C in seconds; :math:`(0.6\cdot10^{-3} B + 35\cdot10^{-3}) / 16` when None.
        per_token: :math:`t_\ell` in seconds per context token; reading the KV cache of a model
            with 61 layers of width 576, :math:`1.5 \cdot 2 \cdot 576 \cdot 61\cdot10^{-6} /
            2^{20}`, when None.

    Source: Chen et al. 2026, §6.2, equation (6), with the public setting of its authors.
    """
    a = (0.6e-3 * slots + 35e-3) / 16 if constant is None else constant
    c = 1.5 * 2 * 576 * 61e-6 / 2**20 if per_token is None else per_token
    return _linear(constant=a, per_context=c)


def moe_step_time(a: float, b: float | None = None, constant: float = 0.0) -> StepTime:
    r"""Return the model of a mixture of experts, :math:`\max_g(a L_g) + b \bar L`.

    Args:
        a: seconds per context token of the fullest instance (its attention).
        b: seconds per context token of the mean instance (experts and collectives, which no
            balance shortens); half of a when None, as measured in the paper.
        constant: seconds of every step.

    Source: Li 2026, 'MoE Step-Time Model'.
    """
    mean = a / 2 if b is None else b
    return _linear(constant=constant, per_context=a, per_mean_context=mean)


def batch_step_time(a: float, b: float, c: float) -> StepTime:
    """Return FairBatching's model of a batch, a + b · new tokens + c · context tokens.

    Source: Lyu et al. 2025, 'Batch execution time estimation'.
    """
    return _linear(constant=a, per_new=b, per_context=c)


def profile_step_time(path: str | Path) -> StepTime:
    """Return the a, b and c of an engine that `headway profile` has measured."""
    return batch_step_time(*load_profile(path).batch)


def table_step_time(path: str | Path, knots: int = _KNOTS) -> StepTime:
    """Return a table of medians, fitted to a log of measured steps, interpolated bilinearly.

    Steps are sorted into cells by their new and their context tokens. Cells without a step take
    what a linear model of all steps says, but no less than the shortest step; its slopes also go
    on beyond the log. The medians are then made monotone: more work never takes less time.

    Args:
        path: CSV file, plain or gzipped, with columns new_tokens, context_tokens, seconds.
        knots: most points of the grid along each axis.

    Raises:
        ValueError: the file cannot be read, or a line of it; both are named.
    """
    if knots < 2:
        raise ValueError(f"knots must be at least 2, not {knots}")
    steps = read_steps(Path(path))
    if len(steps) == 0:
        raise ValueError(f"{path}: no steps in it")
    new, new_cell = _grid(steps[:, 0], knots)
    context, context_cell = _grid(steps[:, 1], knots)
    # What never changes in the log has no slope. In like units, for the fit's sake.
    varies = np.ptp(steps[:, :2], axis=0) > 0
    scale = np.where(varies, np.maximum(steps[:, :2].max(axis=0), 1.0), np.inf)
    design = np.column_stack([np.ones(len(steps)), steps[:, :2] / scale])
    a, *slopes = nnls(design, steps[:, 2])[0]
    b, c = slopes / scale
    seconds = np.maximum(a + b * new[:, None] + c * context[None, :], steps[:, 2].min())
    for i, j in set(zip(new_cell.tolist(), context_cell.tolist(), strict=True)):
        seconds[i, j] = np.median(steps[(new_cell == i) & (context_cell == j), 2])
    return StepTime(
        constant=0.0,
        per_new=float(b),
        per_context=float(c),
        per_mean_context=0.0,
        table_new=new,
        table_context=context,
        table_seconds=_monotone(seconds),
    )


_MODELS: dict[str, Callable[..., StepTime]] = {
    "bfio": bfio_step_time,
    "moe": moe_step_time,
    "batch": batch_step_time,
    "profile": profile_step_time,
    "table": table_step_time,
}


def create_step_time(name: str, slots: int, **options: Any) -> StepTime:
    """Return the model of that name.

    Args:
        name: bfio, moe, batch, profile or table.
        slots: B of an instance, on which bfio's constant depends.
        **options: of the model.

    Raises:
        ValueError: no such model, or an option that it does not take or refuses.
    """
    if name not in _MODELS:
        raise ValueError(f"no model {name!r}; known: {', '.join(_MODELS)}")
    if name == "bfio":
        options = {"slots": slots} | options
    try:
        return _MODELS[name](**options)
    except TypeError as error:  # an option too many or too few, or of another type
        raise ValueError(str(error)) from error


def _linear(
    constant: float = 0.0,
    per_new: float = 0.0,
    per_context: float = 0.0,
    per_mean_context: float = 0.0,
) -> StepTime:
    times = (constant, per_new, per_context, per_mean_context)
    if not all(0 <= value < math.inf for value in times) or not any(times):
        raise ValueError(f"times must not be below 0, and not all 0: {times}")
    a, b, c, d = map(float, times)
    return StepTime(a, b, c, d)


def _grid(values: FloatArray, most: int) -> tuple[FloatArray, npt.NDArray[np.intp]]:
    """Return ascending knots, at least two, and the knot that each value belongs to."""
    distinct = np.unique(values)
    if len(distinct) > most:
        edges = np.unique(np.quantile(values, np.arange(1, most) / most))
        cell = np.searchsorted(edges, values, "right")
        distinct = np.array([np.median(values[cell == i]) for i in np.unique(cell)])
        distinct = np.unique(distinct)
    if len(distinct) == 1:  # the other end of its only cell
        distinct = np.array([distinct[0], distinct[0] + 1.0])
    middles = (distinct[1:] + distinct[:-1]) / 2
    return distinct, np.searchsorted(middles, values, "left")


def _monotone(seconds: FloatArray) -> FloatArray:
    """Return the mean of the least monotone table above and the greatest below."""
    above = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
    turned = seconds[::-1, ::-1]
    below = np.minimum.accumulate(np.minimum.accumulate(turned, axis=0), axis=1)[::-1, ::-1]
    return np.ascontiguousarray((above + below) / 2)

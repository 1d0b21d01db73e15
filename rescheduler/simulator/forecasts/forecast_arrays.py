"""Forecasts as the compiled simulator evaluates them: pure functions of a request's age."""

from math import cos, exp, log, pi, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.compilation import compiled_core, compiled_inline
from predictor.forecasts.curve import aged_mean, aged_survival

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NONE, POINT, CURVE, MARGINAL = 0, 1, 2, 3

ONCE = 1 << 40
"""Tokens between two predictions of a request that is predicted once."""


_NONE, _NO_ROWS = np.empty(0), np.empty(0, dtype=np.int64)


class ForecastArrays(NamedTuple):
    r"""A source of forecasts, as arrays.

    A request that has generated n tokens was last predicted at n' = n − n mod ``interval``;
    since then the prediction has aged.

    Attributes:
        kind: `NONE`, `POINT`, `CURVE` or `MARGINAL`.
        interval: tokens between two predictions of a request.
        sigma: of a point forecast, the standard deviation of the logarithm of a factor on the
            true remaining length, drawn anew at each prediction.
        seed: of those draws.
        bins: [n_bins + 1] edges; of a point forecast only its bin is known. Or [0].
        stand_in: [n_bins] the length that stands for those of a bin.
        accuracy: share of the forecasts that name the right bin.
        common: [n_bins] how common each bin is, by which wrong ones are drawn.
        table: [T + 1] S(t) = P(output > t) at t = 0 .. T of all requests alike; 0 past T. Of curves
            for each request, what is known of one that has no token yet; empty if its curve is.
        tail: [T + 2] sums of ``table`` from t on.
        edges: [E] ascending tokens from 0, of the curves.
        curves: [rows, E] P(remaining > edge) when predicted.
        first_row: [n_templates] the row predicted at n = 0.
        n_rows: [n_templates] rows of each template, ``interval`` tokens apart.
        cap: [n_templates] output tokens at which a request is cut.
        prompt_row: [n_templates] the row of a request that has no token yet, which is not yet the
            one predicted at n = 0; or empty.
    """

    kind: int
    interval: int = 1
    sigma: float = 0.0
    seed: int = 0
    bins: FloatArray = _NONE
    stand_in: FloatArray = _NONE
    accuracy: float = 1.0
    common: FloatArray = _NONE
    table: FloatArray = _NONE
    tail: FloatArray = _NONE
    edges: FloatArray = _NONE
    curves: npt.NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)
    first_row: IntArray = _NO_ROWS
    n_rows: IntArray = _NO_ROWS
    cap: IntArray = _NO_ROWS
    prompt_row: IntArray = _NO_ROWS


@compiled_core
def knows_ends(f: ForecastArrays) -> bool:
    """Return whether every forecast is the request's true length."""
    return f.kind == POINT and f.sigma == 0.0 and len(f.bins) == 0


@compiled_inline
def splitmix64(number: np.uint64) -> np.uint64:
    """Return the output of SplitMix64 that follows the state ``number`` (Steele et al. 2014)."""
    mixed = number + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@compiled_core
def _uniform(seed: int, number: int, draw: int, part: int) -> float:
    """Return a number in (0, 1) that depends on nothing but the arguments."""
    key = splitmix64(splitmix64(np.uint64(seed)) + np.uint64(number))
    x = splitmix64(splitmix64(key + np.uint64(draw)) + np.uint64(part))
    return (float(x >> np.uint64(11)) + 0.5) / 9007199254740992.0


@compiled_core
def _point(f: ForecastArrays, number: int, generated: int, output: int) -> float:
    """Return R, the predicted remaining tokens now, at least 1."""
    since = generated % f.interval
    predicted = float(output - generated + since)
    if f.sigma > 0.0:
        draw = generated // f.interval
        radius = sqrt(-2.0 * log(_uniform(f.seed, number, draw, 0)))
        predicted *= exp(f.sigma * radius * cos(2.0 * pi * _uniform(f.seed, number, draw, 1)))
    if len(f.bins) > 0:
        low = min(max(int(np.searchsorted(f.bins, predicted, "right")) - 1, 0), len(f.bins) - 2)
        if f.accuracy < 1.0:
            low = _named_bin(f, low, _uniform(f.seed, number, generated // f.interval, 2))
        predicted = f.stand_in[low]
    return max(predicted - since, 1.0)


@compiled_core
def _named_bin(f: ForecastArrays, right: int, u: float) -> int:
    """Return the right bin with the source's accuracy, else another, common ones more often."""
    if u < f.accuracy:
        return right
    left = f.common.sum() - f.common[right]
    if not left > 0.0:
        return right
    left *= (u - f.accuracy) / (1.0 - f.accuracy)
    named = right
    for k in range(len(f.common)):
        if k == right or f.common[k] == 0.0:
            continue
        named = k
        if left < f.common[k]:
            break
        left -= f.common[k]
    return named


@compiled_core
def survival_row(
    f: ForecastArrays,
    number: int,
    template: int,
    generated: int,
    output: int,
    points: IntArray,
    out: FloatArray,
) -> None:
    """Write S(h) of one request at the horizon points into ``out``, [n_points]."""
    if f.kind == POINT:
        remaining = _point(f, number, generated, output)
        for p in range(len(points)):
            out[p] = 1.0 if points[p] < remaining else 0.0
    elif f.kind == MARGINAL or (generated == 0 and len(f.table) > 0):
        last = len(f.table) - 1
        alive = f.table[generated] if generated <= last else 0.0
        for p in range(len(points)):
            t = generated + points[p]
            out[p] = f.table[t] / alive if t <= last and alive > 0.0 else 0.0
    elif f.kind == CURVE:
        row, age, limit = _last_curve(f, template, generated)
        aged_survival(f.edges, f.curves[row], age, limit, points, out)
    else:
        for p in range(len(points)):
            out[p] = 1.0
    for p in range(len(points)):
        if points[p] == 0:
            out[p] = 1.0


@compiled_inline
def _last_curve(f: ForecastArrays, template: int, generated: int) -> tuple[int, float, float]:
    """Return the row of the curve predicted last, its age, and the most tokens left then."""
    renewed = min(generated // f.interval, f.n_rows[template] - 1)
    predicted = renewed * f.interval
    row = f.first_row[template] + renewed
    if generated == 0 and len(f.prompt_row) > 0:
        row = f.prompt_row[template]
    return row, float(generated - predicted), float(f.cap[template] - predicted)


@compiled_core
def expected_remaining(
    f: ForecastArrays, number: int, template: int, generated: int, output: int
) -> float:
    """Return E[R], the tokens a request is expected to generate yet; 0 without a forecast."""
    if f.kind == POINT:
        return _point(f, number, generated, output)
    if f.kind == MARGINAL or (generated == 0 and len(f.table) > 0):
        if generated >= len(f.table) or f.table[generated] <= 0.0:
            return 1.0
        return max(f.tail[generated] / f.table[generated], 1.0)  # type: ignore[no-any-return]
    if f.kind == CURVE:
        row, age, limit = _last_curve(f, template, generated)
        return aged_mean(f.edges, f.curves[row], age, limit)
    return 0.0

"""What is known of the lengths of answers: by age alone, by forecasts of some quality, exactly."""

from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from predictor.compilation import compiled_core
from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.simulator.workloads.forecast_recording import MEASURED_SIGMA

__all__ = ["LengthForecast", "LengthKnowledge", "length_forecast", "still_running"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LengthKnowledge = Literal["age", "recorded", "exact"]
"""Kaplan-Meier by age; forecasts with the error that was recorded of real ones; the truth."""

_POINTS = 2048
_LEVELS = 48


class LengthForecast(NamedTuple):
    """Survival curves of the answers' lengths, of which each request has one.

    Attributes:
        survival: [n_levels, n_points] P(length > tokens); [0, 0]: lengths are known.
        stride: tokens between two points, of which the first is 0.
        level: [n_requests] the curve of each request.
    """

    survival: FloatArray
    stride: float
    level: IntArray


@compiled_core
def still_running(
    forecast: LengthForecast, i: int, generated: float, steps: float, output: float
) -> float:
    r"""Return :math:`P(o > n + h \mid o > n)` of request i, n tokens ``generated``, h ``steps``."""
    if len(forecast.survival) == 0:
        return 1.0 if output > generated + steps else 0.0
    now = _at(forecast, i, generated)
    return _at(forecast, i, generated + steps) / now if now > 1e-9 else 0.0


@compiled_core
def _at(forecast: LengthForecast, i: int, tokens: float) -> float:
    place = tokens / forecast.stride
    k = int(place)
    curve = forecast.survival[forecast.level[i]]
    if k >= len(curve) - 1:
        return 0.0
    return curve[k] + (curve[k + 1] - curve[k]) * (place - k)  # type: ignore[no-any-return]


def length_forecast(
    knowledge: LengthKnowledge, past: IntArray, output: npt.ArrayLike, seed: int
) -> LengthForecast:
    r"""Return what is known of requests.

    ``age`` knows what past requests were like: a Kaplan-Meier curve, which ages. ``recorded`` has
    seen :math:`y = \log o + \sigma z` of each request besides, z normal and drawn once a request,
    with the :math:`\sigma` of recorded forecasts, and follows Bayes' rule:

    .. math:: P(o > x \mid y) \propto \sum_{o > x} e^{-(y - \log o)^2 / 2\sigma^2}

    over past lengths o: as `rescheduler.emulation.length_posterior` has it, for lengths of any law.
    ``exact`` knows the lengths.

    Args:
        knowledge: of the three.
        past: [n_past] output tokens of other requests.
        output: [n_requests] output tokens of these.
        seed: of z.

    Raises:
        ValueError: no such knowledge.
    """
    lengths = np.asarray(output, dtype=np.float64)
    level = np.zeros(len(lengths), dtype=np.int64)
    if knowledge == "exact":
        return LengthForecast(np.empty((0, 0)), 1.0, level)
    if knowledge not in get_args(LengthKnowledge):
        raise ValueError(f"lengths are known by {get_args(LengthKnowledge)}, not {knowledge!r}")
    stride = max(1.0, np.ceil((past.max() + 1) / (_POINTS - 2)))
    points = stride * np.arange(_POINTS)
    if knowledge == "age":
        curve = KaplanMeierCurve.estimate(past, np.zeros(len(past), dtype=np.bool_)).at(points)
        return LengthForecast(curve[None, :], stride, level)
    sigma = MEASURED_SIGMA
    logs = np.log(past)
    levels = np.linspace(logs.min() - 3 * sigma, logs.max() + 3 * sigma, _LEVELS)
    counts = np.bincount(np.minimum((past - 1) // int(stride), _POINTS - 2), minlength=_POINTS)
    middles = np.log(points + (stride + 1) / 2)
    half = (levels[1] - levels[0]) / 2  # a level stands for what is nearest to it
    away = levels[:, None] - middles[None, :]
    weight = counts * (ndtr((away + half) / sigma) - ndtr((away - half) / sigma) + 1e-12)
    above = np.cumsum(weight[:, ::-1], axis=1)[:, ::-1] / weight.sum(axis=1, keepdims=True)
    seen = np.log(lengths) + sigma * np.random.default_rng(seed).standard_normal(len(lengths))
    level = np.clip(np.rint((seen - levels[0]) / (2 * half)), 0, _LEVELS - 1).astype(np.int64)
    return LengthForecast(np.ascontiguousarray(above), stride, level)

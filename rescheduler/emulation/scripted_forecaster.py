"""Forecasts of scripted answers, as good as is asked for."""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from data_collection.capture.capture_hook import Cadence, CapturedRows
from data_collection.capture.requests import FinishedRequest
from predictor.live.engine_forecasts import FORECASTS_ATTRIBUTE, GAUGES_ATTRIBUTE, EngineForecasts
from predictor.live.telemetry_publisher import TelemetryPublisher
from rescheduler.emulation.emulate_options import AnswerLengths, ForecastQuality
from rescheduler.emulation.scripted_answers import ScriptedAnswers, standard_normal

__all__ = ["ScriptedForecaster", "forecast_edges", "posterior_survival"]

FloatArray = npt.NDArray[np.float64]

_EDGES, _POINTS = 24, 160
_LEAST_SIGMA = 1e-6
_UNKNOWN = 1 << 31


def forecast_edges(law: AnswerLengths) -> FloatArray:
    """Return the grid of curves for lengths of a law: [n_edges] tokens, from 0."""
    first = min(20.0, law.longest / 2)
    return np.unique(np.r_[0.0, np.round(np.geomspace(first, law.longest, _EDGES))])


def posterior_survival(
    law: AnswerLengths,
    sigma: float,
    generated: npt.ArrayLike,
    observed: npt.ArrayLike,
    edges: FloatArray,
) -> FloatArray:
    r"""Return P(remaining > edge) of whoever knows the law, and has seen the remaining length.

    .. math:: p(r \mid y) \propto f(n + r)\, e^{-(y - \log r)^2 / 2\sigma^2}

    with f the law's density, n the tokens generated, and y what was seen of :math:`\log r`. It is
    calibrated: the curve of a request is right as often as it says.

    Args:
        law: of whole answers.
        sigma: of the error in the observation; above 0.
        generated: [n_requests] tokens.
        observed: [n_requests] :math:`\log r + \sigma z`.
        edges: [n_edges] tokens.

    Returns:
        [n_requests, n_edges].
    """
    n = np.asarray(generated, dtype=np.float64)[:, None]
    y = np.asarray(observed, dtype=np.float64)[:, None]
    # Cells of the remaining length, [n_points + 1], each with the law's probability.
    ends = np.r_[0.5, np.geomspace(1.5, law.longest + 1.5, _POINTS)]
    widths = np.diff(np.log(ends))
    below = ndtr((np.log(n + ends[None, :]) - np.log(law.median)) / law.sigma)
    # What the law thinks impossible is only very unlikely: clients may state other lengths.
    prior = np.diff(below, axis=1) + 1e-12 * widths
    # The mean likelihood of a cell, which may be wider than the error.
    up_to = ndtr((np.log(ends)[None, :] - y) / max(sigma, _LEAST_SIGMA))
    weight = prior * (np.diff(up_to, axis=1) / widths + 1e-12)
    weight /= weight.sum(axis=1, keepdims=True)
    reached = np.c_[np.zeros(len(n)), np.cumsum(weight, axis=1)]
    return np.array([1.0 - np.interp(edges, ends, row, left=0.0, right=1.0) for row in reached])


class ScriptedForecaster:
    """A `StepForecaster` that knows the lengths, and shows them through an error.

    Args:
        law: of the lengths.
        quality: of the forecasts.
        answers: of the engine's requests.
        publisher: publishes forecasts and ends; None publishes nothing.
    """

    cadence: Cadence = "step"

    def __init__(
        self,
        law: AnswerLengths,
        quality: ForecastQuality,
        answers: ScriptedAnswers,
        publisher: TelemetryPublisher | None,
    ) -> None:
        self._law, self._quality, self._answers = law, quality, answers
        self._publisher = publisher
        self._edges = forecast_edges(law)
        self._arrived: list[EngineForecasts] = []

    def before_step(self, step: int, scheduled: Any) -> None:
        """Learn what the scheduler says of the engine."""
        if self._publisher is not None:
            self._publisher.at_step(step, getattr(scheduled, GAUGES_ATTRIBUTE, None))

    def on_rows(self, rows: CapturedRows) -> None:
        """Forecast for the requests of a step."""
        generated = np.array(rows.generated_tokens)
        whole = np.array([self._answers.lengths.get(name, 1) for name in rows.request_ids])
        remaining = np.maximum(whole - generated, 1)
        limits = zip(rows.max_tokens, rows.generated_tokens, strict=True)
        self._arrived.append(
            EngineForecasts(
                step=rows.step,
                request_ids=rows.request_ids,
                prompt_tokens=rows.prompt_tokens,
                generated_tokens=rows.generated_tokens,
                tokens_left=[max(1, cap - n) if cap else _UNKNOWN for cap, n in limits],
                edges=self._edges,
                survival=self._curves(rows.request_ids, generated, remaining),
            )
        )

    def _curves(
        self, names: list[str], generated: npt.NDArray[Any], remaining: npt.NDArray[Any]
    ) -> FloatArray:
        quality = self._quality
        if quality.sigma == 0:
            return (self._edges[None, :] < remaining[:, None]).astype(np.float64)
        pairs = zip(names, generated.tolist(), strict=True)
        z = np.array([self._error(self._answers.keys.get(name, name), n) for name, n in pairs])
        observed = np.log(remaining) + quality.sigma * z
        return posterior_survival(self._law, quality.sigma, generated, observed, self._edges)

    def _error(self, key: str, n: int) -> float:
        rho, seed = self._quality.correlation, self._quality.seed
        lasting, new = (standard_normal(f"{seed} {key} {part}") for part in ("", str(n)))
        return float(np.sqrt(rho) * lasting + np.sqrt(1 - rho) * new)

    def on_finished(self, finished: list[FinishedRequest]) -> None:
        """Report requests that ended."""
        if self._publisher is not None:
            self._publisher.finished(finished)

    def attach_arrived(self, output: Any) -> None:
        """Add the forecasts of the step to its output, for the scheduler, and publish them."""
        arrived, self._arrived = self._arrived, []
        if self._publisher is not None:
            for forecasts in arrived:
                self._publisher.forecasts(forecasts)
        if arrived:
            setattr(output, FORECASTS_ATTRIBUTE, arrived)

    def status(self) -> dict[str, Any]:
        """Return where telemetry is published."""
        publisher = self._publisher
        return {"telemetry_endpoint": publisher.endpoint if publisher else None}

    def close(self) -> None:
        """Stop the telemetry."""
        if self._publisher is not None:
            self._publisher.close()

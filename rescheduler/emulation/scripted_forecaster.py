"""Forecasts of scripted answers, as good as is asked for."""

from typing import Any

import numpy as np
import numpy.typing as npt

from data_collection.capture.capture_hook import Cadence, CapturedRows
from data_collection.capture.requests import FinishedRequest
from predictor.live.engine_forecasts import FORECASTS_ATTRIBUTE, GAUGES_ATTRIBUTE, EngineForecasts
from predictor.live.telemetry_publisher import TelemetryPublisher
from rescheduler.emulation.emulate_options import AnswerLengths, ForecastQuality
from rescheduler.emulation.length_posterior import forecast_edges, posterior_survival
from rescheduler.emulation.scripted_answers import Script, ScriptedAnswers, standard_normal

FloatArray = npt.NDArray[np.float64]

_UNKNOWN = 1 << 31


class ScriptedForecaster:
    """A `StepForecaster` that knows the lengths, and shows them through an error.

    Without a publisher, only the engine's own scheduler gets its forecasts.
    """

    cadence: Cadence = "step"

    def __init__(
        self,
        law: AnswerLengths,
        quality: ForecastQuality,
        answers: ScriptedAnswers,
        publisher: TelemetryPublisher | None,
    ) -> None:
        self._law = law
        self._quality = quality
        self._answers = answers
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
        scripts = [self._answers.scripts[name] for name in rows.request_ids]
        whole = np.array([script.length for script in scripts])
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
                survival=self._curves(scripts, generated, remaining),
            )
        )

    def _curves(
        self, scripts: list[Script], generated: npt.NDArray[Any], remaining: npt.NDArray[Any]
    ) -> FloatArray:
        quality = self._quality
        if quality.sigma == 0:
            return (self._edges[None, :] < remaining[:, None]).astype(np.float64)
        pairs = zip(scripts, generated.tolist(), strict=True)
        z = np.array([self._error(script.key, n) for script, n in pairs])
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

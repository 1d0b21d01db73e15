"""The vLLM worker that forecasts its requests, too.

Given to vLLM as ``--worker-cls predictor.live.vllm_worker.LiveHeadwayWorker``, configured by
the ``headway`` section of ``--additional-config`` (see `engine_forecasts`).
"""

from functools import cached_property

from data_collection.vllm_worker import HeadwayWorker
from predictor.live.engine_forecasts import LiveConfig
from predictor.live.forecaster import Forecaster, load_forecaster, load_survival
from predictor.models.survival_mlp import SurvivalMLP


class LiveHeadwayWorker(HeadwayWorker):
    """A capturing worker that also predicts, for its scheduler and for subscribers."""

    config_type = LiveConfig

    def captured(self) -> tuple[int, float]:
        """Return the layer and the half-life that are asked for, or else the predictor's."""
        layer, half_life = super().captured()
        predictor, asked = self._predictor, self._capture
        if predictor is not None and asked.layer is None:
            layer = 0 if predictor.layer == "last" else int(predictor.layer)
        if predictor is not None and asked.state_half_life is None:
            half_life = predictor.state_half_life
        return layer, half_life

    def make_forecaster(self, generated: dict[str, int]) -> Forecaster | None:
        """Return the forecaster, if one is configured."""
        config, predictor = self._capture, self._predictor
        assert isinstance(config, LiveConfig)
        if predictor is None:
            return None
        layer, half_life = self.captured()
        states = str(layer or "last"), half_life, self.state_width()
        return load_forecaster(config, predictor, self.vllm_config, states, self.device, generated)

    @cached_property
    def _predictor(self) -> SurvivalMLP | None:
        assert isinstance(self._capture, LiveConfig)
        forecast = self._capture.forecast
        return None if forecast is None else load_survival(forecast.checkpoint)

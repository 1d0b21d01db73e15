"""The vLLM worker that forecasts its requests, too.

Given to vLLM as ``--worker-cls predictor.live.vllm_worker.LiveHeadwayWorker``, configured by
the ``headway`` section of ``--additional-config`` (see `engine_forecasts`).
"""

from data_collection.vllm_worker import HeadwayWorker
from predictor.live.engine_forecasts import LiveConfig
from predictor.live.forecaster import Forecaster, load_forecaster


class LiveHeadwayWorker(HeadwayWorker):
    """A capturing worker that also predicts, for its scheduler and for subscribers."""

    config_type = LiveConfig

    def make_forecaster(self, generated: dict[str, int]) -> Forecaster | None:
        """Return the forecaster, if one is configured."""
        assert isinstance(self._capture, LiveConfig)
        width = self.state_width()
        return load_forecaster(self._capture, self.vllm_config, width, self.device, generated)

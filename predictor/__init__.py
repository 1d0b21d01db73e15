"""The predictors of remaining length, their training, their comparators and their evaluation."""

from predictor.forecasts.forecast import Forecast, ForecastError, PointForecast, SurvivalForecast
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import CheckpointError, ModelMismatchError, RequestRows
from predictor.models.remaining_length_mlp import RemainingLengthMLP
from predictor.models.survival_mlp import SurvivalMLP

__all__ = [
    "CheckpointError",
    "Forecast",
    "ForecastError",
    "ModelMismatchError",
    "PointForecast",
    "RemainingLengthMLP",
    "RequestRows",
    "SurvivalForecast",
    "SurvivalMLP",
    "load_predictor",
]

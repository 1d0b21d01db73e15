"""The predictors of remaining length, their training, their comparators and their evaluation."""

from predictor.checkpoint import load_predictor
from predictor.forecast import Forecast, ForecastError, PointForecast, SurvivalForecast
from predictor.hidden_state_mlp import CheckpointError, ModelMismatchError, RequestRows
from predictor.remaining_length_mlp import RemainingLengthMLP
from predictor.survival_mlp import SurvivalMLP

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

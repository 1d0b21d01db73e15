"""The predictors of remaining length, their training, their comparators and their evaluation.

Names are loaded when they are first used: forecasts alone need no PyTorch, and neither do routing,
migration and the simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from predictor.forecasts.forecast import Forecast, ForecastError, PointForecast, SurvivalForecast

if TYPE_CHECKING:
    from predictor.models.checkpoint import load_predictor
    from predictor.models.hidden_state_mlp import (
        CheckpointError,
        ModelMismatchError,
        RemainingLengthMLP,
        RequestRows,
    )
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

_MODULES = {
    **dict.fromkeys(
        ("CheckpointError", "ModelMismatchError", "RemainingLengthMLP", "RequestRows"),
        "hidden_state_mlp",
    ),
    "SurvivalMLP": "survival_mlp",
    "load_predictor": "checkpoint",
}


if not TYPE_CHECKING:  # a type checker would take it for any name

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"predictor.models.{_MODULES[name]}"), name)

    def __dir__():
        return sorted({*globals(), *__all__})

"""How good the forecasts of running engines are: scores, metrics, recalibration."""

"""Forecasts of remaining length and what follows from them: ageing, loads, calibration."""

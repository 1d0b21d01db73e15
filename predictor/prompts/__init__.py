"""Forecasts from the prompt alone, before anything is computed."""

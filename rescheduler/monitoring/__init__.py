"""Forecasts watched while they are used: quality, metrics, recalibration."""

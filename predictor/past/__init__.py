"""Forecasts of output lengths from the lengths of earlier requests, without a model."""

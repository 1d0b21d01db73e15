"""Forecasts inside a running vLLM engine, and the telemetry that carries them out."""

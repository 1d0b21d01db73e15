"""The simulator: traces, forecasts and time models around the same policies that serve live."""

"""Traces: read from files, resampled, generated from published lengths."""

"""Emulated GPU engines: vLLM itself, whose model is replaced by a clock and a script."""

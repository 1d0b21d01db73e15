"""Emulated GPU engines: vLLM itself, with its model replaced by a clock and a script."""

"""Capture hidden states in vLLM, drive a workload, write and load labelled datasets."""

"""Deployments and the vLLM engines that they start."""

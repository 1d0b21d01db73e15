"""vLLM's V2 model runner and asynchronous scheduling on a CPU, for tests.

vLLM has a V2 runner for CPUs, but its kernels are Triton's, which has no backend for a CPU: it
falls back to the V1 runner and schedules synchronously. With this folder on ``PYTHONPATH`` and
``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels, and vLLM's plugins keep asynchronous
scheduling as it was asked for. See `tests/builders/v2_engines.py`.
"""

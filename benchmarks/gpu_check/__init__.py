"""Whether all of Headway works on this machine's GPU: see `benchmarks.gpu_check.__main__`."""

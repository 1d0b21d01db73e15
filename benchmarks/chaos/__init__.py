"""Everything that can go wrong, while honest clients wait: see `benchmarks.chaos.__main__`."""

"""What several benchmarks share: reports, figures, a player of recorded streams."""

"""What a predictor is worth beside its comparators."""

"""The remaining-length model, its training, its comparators and its evaluation."""

from predictor.remaining_length_mlp import CheckpointError, ModelMismatchError, RemainingLengthMLP

__all__ = ["CheckpointError", "ModelMismatchError", "RemainingLengthMLP"]

"""Predicting how long an answer will be before its first token (Jain et al. 2025)."""

from predictor.prompt_length.bucket_curve import BucketCurve
from predictor.prompt_length.length_buckets import LengthBuckets
from predictor.prompt_length.length_checkpoint import load_length_predictor, load_task_classifier
from predictor.prompt_length.length_predictor import LengthPredictor
from predictor.prompt_length.prompt_table import Prompts

__all__ = [
    "BucketCurve",
    "LengthBuckets",
    "LengthPredictor",
    "Prompts",
    "load_length_predictor",
    "load_task_classifier",
]

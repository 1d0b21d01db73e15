"""Predicting how long an answer will be before its first token (Jain et al. 2025)."""

from predictor.prompt_length.buckets import BucketCurve, LengthBuckets
from predictor.prompt_length.checkpoint import load_length_predictor, load_task_classifier
from predictor.prompt_length.predictor import LengthPredictor
from predictor.prompt_length.prompt_table import Prompts

__all__ = [
    "BucketCurve",
    "LengthBuckets",
    "LengthPredictor",
    "Prompts",
    "load_length_predictor",
    "load_task_classifier",
]

"""Predicting how long an answer will be before its first token (Jain et al. 2025)."""

from rescheduler.papers.prompt_length.buckets import BucketCurve, LengthBuckets
from rescheduler.papers.prompt_length.length_predictor import (
    LengthPredictor,
    load_length_predictor,
    load_task_classifier,
)
from rescheduler.papers.prompt_length.prompt_table import Prompts

__all__ = [
    "BucketCurve",
    "LengthBuckets",
    "LengthPredictor",
    "Prompts",
    "load_length_predictor",
    "load_task_classifier",
]

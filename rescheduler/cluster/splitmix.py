"""Random numbers without a state: a hash of what they belong to."""

import numpy as np

from predictor.compilation import compiled_inline

__all__ = ["splitmix64"]


@compiled_inline
def splitmix64(number: np.uint64) -> np.uint64:
    """Return the output of SplitMix64 that follows the state ``number`` (Steele et al. 2014)."""
    mixed = number + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))

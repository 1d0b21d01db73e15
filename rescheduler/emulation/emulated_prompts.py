"""What a predictor that reads prompts would expect of scripted answers, in an emulated proxy."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from rescheduler.emulation.emulate_options import AnswerLengths, ForecastQuality
from rescheduler.emulation.length_posterior import posterior_survival
from rescheduler.emulation.scripted_answers import LENGTH, SEED, standard_normal

__all__ = ["EmulatedPrompts"]

_POINTS = 96
_xargs = msgspec.json.Decoder(dict[str, Any])


class EmulatedPrompts:
    """Expects lengths of answers, as well as is asked for, where requests state theirs.

    Args:
        law: of the lengths.
        quality: of the forecasts.
    """

    def __init__(self, law: AnswerLengths, quality: ForecastQuality) -> None:
        self._law, self._quality = law, quality
        self._seen = 0
        self._edges = np.unique(np.round(np.r_[0.0, np.geomspace(1.0, law.longest, _POINTS)]))

    def expected_tokens(self, body: Mapping[str, Raw], most: int | None) -> int | None:
        """Return the tokens that an answer is expected to have; None if its length is not stated.

        Args:
            body: of a request, by the names of its fields.
            most: tokens that it may have at most; None: any number.
        """
        try:
            arguments = _xargs.decode(body["vllm_xargs"])
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        length = arguments.get(LENGTH)
        if isinstance(length, float) and length.is_integer():
            length = int(length)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 < length < 1 << 31:
            return None
        quality, limit = self._quality, min(most or self._law.longest, self._law.longest)
        if quality.sigma == 0:
            return min(length, most or length)
        self._seen += 1
        key = arguments.get(SEED, f"request {self._seen}")
        z = standard_normal(f"prompt {quality.seed} {key} {length}")
        observed = np.log(length) + quality.sigma * z
        edges = np.minimum(self._edges, limit)
        survival = posterior_survival(self._law, quality.sigma, [0], [observed], edges)[0]
        heights = (survival[1:] + survival[:-1]) / 2
        return max(1, round(float((heights * np.diff(edges)).sum())))

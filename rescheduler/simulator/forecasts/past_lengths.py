"""Forecasts of a simulation from the lengths of its own requests that have ended."""

from collections.abc import Iterator
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecasts.kaplan_meier import survival_edges
from predictor.past.length_memory import LengthMemory, Recalled
from predictor.past.log_normal import LONGEST, LogNormal
from rescheduler.simulator.forecasts.forecast_arrays import CURVE, ONCE, ForecastArrays
from rescheduler.simulator.workloads.trace import TraceBlock

_STEP = 0.05
_MEANS = np.arange(0.0, log(LONGEST), _STEP)
_SPREADS = np.geomspace(0.05, 1.2, 14)
_LONGEST_CURVE = 1 << 20
_SALT = bytes(32)
_MODEL = 1
_AT_A_TIME = 8
"""Requests that are forecast together: to go on takes the engine as long as dozens of steps."""


def past_curves() -> ForecastArrays:
    """Return the curves of a grid of log-normal lengths, a template each mean and spread."""
    edges = survival_edges(_LONGEST_CURVE)
    laws = [LogNormal(float(mean), float(spread)) for mean in _MEANS for spread in _SPREADS]
    curves = [[law.above(float(edge)) for edge in edges] for law in laws]
    return ForecastArrays(
        CURVE,
        ONCE,
        edges=edges.astype(np.float64),
        curves=np.array(curves, dtype=np.float32),
        first_row=np.arange(len(laws)),
        n_rows=np.ones(len(laws), dtype=np.int64),
        cap=np.full(len(laws), _LONGEST_CURVE),
    )


def nearest_template(length: LogNormal) -> int:
    """Return the template whose mean and spread are nearest to those of a length."""
    mean = min(max(round(length.mean / _STEP), 0), len(_MEANS) - 1)
    ratio = float(np.log(_SPREADS[1] / _SPREADS[0]))
    spread = round(log(length.spread / float(_SPREADS[0])) / ratio)
    return mean * len(_SPREADS) + min(max(spread, 0), len(_SPREADS) - 1)


class PastLearner:
    """Learns from what ends in one run, and forecasts what arrives."""

    def __init__(self) -> None:
        self._memory = LengthMemory(salt=_SALT)
        self._running: dict[int, Recalled] = {}
        self._number = 0

    def learn(self, finished: npt.NDArray[Any]) -> None:
        """Learn from requests that have ended, or were turned away, [n] with their records."""
        ended = ~np.isnan(finished["end"])
        numbers, outputs = finished["number"].tolist(), finished["output"].tolist()
        for number, tokens, whole in zip(numbers, outputs, ended.tolist(), strict=True):
            recalled = self._running.pop(number, None)
            if whole and recalled is not None:
                self._memory.learn(recalled, tokens)

    def forecast(self, blocks: Iterator[TraceBlock]) -> Iterator[TraceBlock]:
        """Yield a few requests at a time, with their templates as they are asked for."""
        for block in blocks:
            for start in range(0, len(block.prompt), _AT_A_TIME):
                few: list[Any] = [column[start : start + _AT_A_TIME] for column in block]
                yield self._with_templates(TraceBlock(*few))

    def _with_templates(self, block: TraceBlock) -> TraceBlock:
        template = np.empty(len(block.prompt), dtype=np.int64)
        prefixes = block.prefixes if len(block.prefixes) else [b""] * len(template)
        for i, (client, keys) in enumerate(zip(block.client.tolist(), prefixes, strict=True)):
            chain = np.frombuffer(keys, dtype=np.uint64)
            recalled = self._memory.recall(_MODEL, client + 1, chain)
            template[i] = nearest_template(recalled.length)
            self._running[self._number] = recalled
            self._number += 1
        return block._replace(template=template)

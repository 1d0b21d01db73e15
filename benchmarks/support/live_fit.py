"""How long steps, prefills and moves took in a live measurement, for a simulation of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

__all__ = ["StepFit", "fitted_steps", "step_samples"]

FloatArray = npt.NDArray[np.float64]

_EVERY = 8  # tokens of a request that one sample spans, since they come in bursts
_BURST = 1.0  # tokens by which a request may seem behind because they come in bursts
_PAUSE = 30.0  # medians; what takes longer has a pause in it, as of a recomputed prompt


class StepFit(NamedTuple):
    """A decode step takes a + b · requests + c · context tokens.

    Attributes:
        a: seconds of every step.
        b: seconds per request.
        c: seconds per context token.
        explained: part of the variance of the samples that this explains.
    """

    a: float
    b: float
    c: float
    explained: float


def step_samples(result: Mapping[str, Any]) -> FloatArray:
    """Return running requests, context tokens and seconds of steps, [n, 3], of one live run.

    From when tokens came, and from where the proxy had placed and moved their requests. While
    a request gets its next few tokens, as many steps pass, unless another gets further: then
    this one was preempted or waited, and says nothing about a step. Requests that got tokens
    meanwhile count as running.

    Args:
        result: of a run, see `benchmarks.support.live_runs`.
    """
    stays = _stays(result)
    found = []
    for instance in {stay.instance for stay in stays}:
        here = [stay for stay in stays if stay.instance == instance]
        for stay in here:
            inside = (stay.times >= stay.begin) & (stay.times <= stay.end)
            times = stay.times[inside]
            if len(times) <= _EVERY:
                continue
            begin, end = times[:-_EVERY], times[_EVERY:]
            begin, end = begin[end > begin], end[end > begin]
            steps = stay.gained(begin, end)
            running, context, most = np.zeros((3, len(begin)))
            for other in here:
                gained = other.gained(begin, end)
                part = np.minimum(gained / steps, 1.0)
                running += part
                context += part * other.context_at((begin + end) / 2)
                most = np.maximum(most, gained)
            samples = np.column_stack([running, context, (end - begin) / steps])
            found.append(samples[steps >= most - _BURST])
    return np.concatenate(found) if found else np.empty((0, 3))


def fitted_steps(samples: FloatArray) -> StepFit:
    """Return the step time that fits best, none of its parts below 0.

    Args:
        samples: [n, 3] as `step_samples` returns them, of one or more runs.

    Raises:
        ValueError: there are none.
    """
    if len(samples) == 0:
        raise ValueError("no request got enough tokens on one engine to time its steps")
    seconds = samples[:, 2]
    steps = samples[seconds < _PAUSE * np.median(seconds)]
    design = np.column_stack([np.ones(len(steps)), steps[:, 0], steps[:, 1]])
    (a, b, c), _ = nnls(design, steps[:, 2])
    left = steps[:, 2] - design @ np.array([a, b, c])
    return StepFit(float(a), float(b), float(c), float(1 - left.var() / steps[:, 2].var()))


class _Stay(NamedTuple):
    """A request on an instance, from when to when."""

    instance: str
    begin: float
    end: float
    prompt: int
    tokens: FloatArray
    times: FloatArray

    def context_at(self, seconds: FloatArray) -> FloatArray:
        """Return its context tokens at some times."""
        return self.prompt + self._tokens_at(seconds)

    def gained(self, begin: FloatArray, end: FloatArray) -> FloatArray:
        """Return the tokens that came on this instance within some intervals."""
        low, high = np.clip([begin, end], self.begin, self.end)
        return self._tokens_at(high) - self._tokens_at(low)

    def _tokens_at(self, seconds: FloatArray) -> FloatArray:
        after = np.searchsorted(self.times, seconds, "right")
        return np.asarray(np.append(0.0, self.tokens)[after])


def _stays(result: Mapping[str, Any]) -> list[_Stay]:
    known = {one["name"]: one for one in result["requests"]}
    changes: dict[str, list[tuple[float, str]]] = {}
    for one in result["placements"]:
        changes.setdefault(one["request"], []).append((one["seconds"], one["target"]))
    for one in result["moves"]:
        if one["outcome"] == "moved":
            changes[one["request"]].append((one["seconds"] + one["took"], one["target"]))
    stays = []
    for name, found in changes.items():
        found.sort()
        request = known[name]
        tokens, times = np.array(request["times"], dtype=np.float64).reshape(-1, 2).T
        ends = [*(at for at, _ in found[1:]), np.inf]
        for (begin, instance), end in zip(found, ends, strict=True):
            stays.append(_Stay(instance, begin, end, request["prompt"], tokens, times))
    return stays

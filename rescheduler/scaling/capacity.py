"""What a replica serves at a load, from its step time and from what requests are like."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from predictor.forecasts.kaplan_meier import KaplanMeierCurve
from rescheduler.scaling.fleet import Machine
from rescheduler.step_time.step_time import step_seconds

__all__ = ["Lengths", "OperatingPoint", "operating_point", "past_lengths", "sustained_rate"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_POINTS = 1024


@dataclass(frozen=True)
class Lengths:
    """What past requests were like.

    Attributes:
        prompt: mean tokens.
        output: mean tokens that are generated.
        held: tokens that a request holds, summed over its steps.
        survival: [n] P(output > x) at multiples of ``stride``, from 0.
        stride: tokens.
    """

    prompt: float
    output: float
    held: float
    survival: FloatArray
    stride: float

    def at(self, tokens: FloatArray) -> FloatArray:
        """Return P(output > tokens)."""
        return np.interp(tokens / self.stride, self._points, self.survival, right=0.0)

    @cached_property
    def _points(self) -> FloatArray:
        return np.arange(len(self.survival), dtype=np.float64)


def past_lengths(prompt: IntArray, output: IntArray) -> Lengths:
    r"""Return what requests were like; each held :math:`p\,o + o^2/2` token-steps.

    Args:
        prompt: [n] tokens.
        output: [n] tokens.
    """
    stride = float(output.max()) / (_POINTS - 1)
    curve = KaplanMeierCurve.estimate(output, np.zeros(len(output), dtype=np.bool_))
    held = prompt * output.astype(np.float64) + output.astype(np.float64) ** 2 / 2
    survival = curve.at(stride * np.arange(_POINTS))
    return Lengths(float(prompt.mean()), float(output.mean()), float(held.mean()), survival, stride)


@dataclass(frozen=True)
class OperatingPoint:
    """A replica in equilibrium.

    Attributes:
        requests: that it decodes.
        rate: requests a second that it finishes.
        step: seconds of a step, the computation of prompts included: the TPOT.
    """

    requests: float
    rate: float
    step: float


def operating_point(machine: Machine, lengths: Lengths, share: float) -> OperatingPoint:
    r"""Return the equilibrium at a load: a share of the slots, or of the KV cache if that is less.

    B requests of mean length p, o finish, and are replaced, at

    .. math:: \lambda = \frac{B}{o\, t(B, L) + B\, p\, b}, \qquad
        \text{TPOT} = \frac{t(B, L)}{1 - \lambda p b}

    with t a decode step and b the seconds that a prompt token adds.
    """
    context = lengths.held / lengths.output
    requests = share * min(machine.slots, machine.capacity / context)
    step = step_seconds(machine.step_time, requests, requests * context)
    chunk = float(machine.batched_tokens)
    whole = step_seconds(machine.step_time, requests + chunk, requests * context)
    reading = lengths.prompt * (whole - step) / chunk
    rate = requests / (lengths.output * step + requests * reading)
    return OperatingPoint(requests, rate, step / (1 - rate * reading))


def sustained_rate(machine: Machine, lengths: Lengths, tpot: float) -> float:
    """Return the requests a second that a replica finishes within a TPOT (s); 0 if it cannot.

    At most at nine tenths of its slots and KV cache.
    """
    points = (operating_point(machine, lengths, share) for share in np.linspace(0.01, 0.9, 90))
    return max((point.rate for point in points if point.step <= tpot), default=0.0)

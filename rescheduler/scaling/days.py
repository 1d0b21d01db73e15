r"""Days of requests: a trace's own, or its requests at rates that follow the time of day.

Public traces with lengths last an hour or two, and an hour has no season. A day is therefore made
up: requests are runs of consecutive ones of the trace, which arrive at

.. math:: \lambda(t) = \bar\lambda\, d_k\, e^{g(t)}
    \left(1 - a \cos\frac{2\pi t}{P}\right)
    (1 + c\, [\text{surge at } t]) (1 + b\, [\text{burst at } t])

requests a second, Poisson within a minute, with the period P (24 h), a day's own level
:math:`\log d_k \sim N(0, s^2)`, and g an autoregressive process of standard deviation s that
forgets half in 20 minutes: what no season explains. Surges are what a season does explain: each
lasts half an hour and begins at the same time every day, as scheduled jobs and offices do. Bursts
begin as a Poisson process, and last 10 minutes on average (exponential).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rescheduler.cluster.registry import Checked
from rescheduler.simulator.workloads.trace import ResampledTrace, TraceBlock

__all__ = ["MINUTE", "Day", "DayProfile", "made_up_day", "recorded_day"]

FloatArray = npt.NDArray[np.float64]

MINUTE = 60.0
_HALF_LIFE = 20.0
_BURST_MINUTES = 10.0
_SURGE_MINUTES = 30
_MOST_REQUESTS = 20_000_000


@dataclass(frozen=True)
class DayProfile(
    Checked,
    swing="[0, 1]",
    irregular="[0, 1]",
    surges="[0, 1000]",
    surge="[0, 1000]",
    bursts="[0, 1000]",
    burst="[0, 1000]",
    history="[2, 100]",
):
    """How the rate of a made-up day varies.

    Attributes:
        swing: a, of the season; 0.6: the busiest minute has four times the quietest one's rate.
        irregular: s, of the day's level and of what is irregular within it.
        surges: a period, at times that are drawn once and then stay.
        surge: c, by how much a surge adds to the rate.
        bursts: that begin in a period, on average.
        burst: b, by how much a burst adds to the rate.
        history: periods before it, from which the season is learnt.
    """

    swing: float = 0.6
    irregular: float = 0.1
    surges: int = 0
    surge: float = 1.0
    bursts: float = 4.0
    burst: float = 0.5
    history: int = 14

    def _section(self) -> str:
        return "day."

    def rates(
        self, mean: float, minutes: int, periods: int, generator: np.random.Generator
    ) -> FloatArray:
        """Return requests a second in each minute, see the module's equation.

        Args:
            mean: of the season.
            minutes: of a period.
            periods: so many, one after the other; each begins at the quietest minute.
            generator: of what is irregular.

        Returns:
            [periods · minutes]
        """
        n = periods * minutes
        season = 1 - self.swing * np.cos(2 * np.pi * np.arange(n) / minutes)
        days = np.repeat(np.exp(self.irregular * generator.standard_normal(periods)), minutes)
        keep = 0.5 ** (1 / _HALF_LIFE)
        noise = self.irregular * generator.standard_normal(n)
        noise[1:] *= np.sqrt(1 - keep**2)
        for i in range(1, n):
            noise[i] += keep * noise[i - 1]
        surging = np.zeros(minutes)
        for begins in generator.integers(0, minutes, self.surges):
            surging[(begins + np.arange(_SURGE_MINUTES)) % minutes] = self.surge
        bursting = np.zeros(n)
        for begins in generator.integers(0, n, generator.poisson(self.bursts * periods)):
            lasts = int(np.ceil(generator.exponential(_BURST_MINUTES)))
            bursting[begins : begins + lasts] = self.burst
        extra = (1 + np.tile(surging, periods)) * (1 + bursting)
        return np.asarray(mean * season * days * np.exp(noise) * extra)


class Day(NamedTuple):
    """Requests to simulate, and what was seen before them.

    Attributes:
        block: the requests; arrivals in seconds from the day's beginning.
        seconds: that the day lasts, a whole number of minutes.
        period: minutes of a season.
        history: [n] requests in each minute before; [0] without.
        counts: [n_minutes] requests in each of its minutes.
    """

    block: TraceBlock
    seconds: float
    period: int
    history: FloatArray
    counts: FloatArray


def made_up_day(
    trace: ResampledTrace, profile: DayProfile, mean: float, period: float, seed: int
) -> Day:
    """Return a day of a trace's requests at made-up times, after days of which only counts are.

    Args:
        trace: of the requests; its arrival times are not used.
        profile: of the day.
        mean: requests a second.
        period: seconds of a day.
        seed: of everything.

    Raises:
        ValueError: there would be too many requests, or none.
    """
    minutes = round(period / MINUTE)
    times, requests = np.random.default_rng(seed).spawn(2)
    rates = profile.rates(mean, minutes, profile.history + 1, times)
    most = MINUTE * float(rates.reshape(-1, minutes).sum(axis=1).max())
    if most > _MOST_REQUESTS:
        raise ValueError(
            f"{mean:.4g} requests a second for {period / 3600:g} h are {most:,.0f} on a busy day, "
            f"of which at most {_MOST_REQUESTS:,} are simulated: lower --rate or --peak-replicas"
        )
    counts = times.poisson(rates * MINUTE)
    day = counts[-minutes:]
    total = int(day.sum())
    if total == 0:
        raise ValueError(f"{mean:.4g} requests a second make an empty day: raise --rate")
    arrival = MINUTE * (np.repeat(np.arange(minutes), day) + times.random(total))
    drawn = ResampledTrace(trace.name, trace.recorded, total).blocks(requests)
    columns = (np.concatenate(column) for column in zip(*drawn, strict=True))
    block = TraceBlock(*columns)._replace(arrival=np.sort(arrival))
    history = counts[:-minutes].astype(np.float64)
    return Day(block, MINUTE * minutes, minutes, history, day.astype(np.float64))


def recorded_day(trace: ResampledTrace, mean: float, period: float) -> Day:
    """Return the last period of a trace at its own times, all it has if that is less.

    Args:
        trace: with arrival times.
        mean: requests a second. If it is not the trace's own, each request is there more than
            once, spread until the next one, or not at all; the season stays as it is.
        period: seconds of a season.

    Raises:
        ValueError: no arrival times, less than a minute of them, or no requests or too many.
    """
    if not trace.has_arrivals:
        raise ValueError(f"{trace.name}: no arrival times to keep; leave out --times recorded")
    arrival = trace.recorded.arrival - trace.recorded.arrival[0]
    minutes = int((arrival[-1] + 1e-9) // MINUTE)
    if minutes < 1:
        raise ValueError(f"{trace.name}: lasts {arrival[-1]:.3g} s, less than a minute")
    last = min(minutes, round(period / MINUTE))
    begins = MINUTE * (minutes - last)
    copies = mean / trace.rate
    if len(arrival) * copies > _MOST_REQUESTS:
        raise ValueError(
            f"{trace.name}: {len(arrival):,} requests at {copies:.3g} times their rate "
            f"are more than the {_MOST_REQUESTS:,} that are simulated: lower --rate"
        )
    place = np.arange(int(len(arrival) * copies)) / copies
    chosen = np.minimum(place.astype(np.int64), len(arrival) - 1)
    # Copies come between a request and the next one, not all at once.
    following = np.append(arrival[1:], arrival[-1])
    spread = arrival[chosen] + (place - chosen) * (following - arrival)[chosen]
    counts = np.bincount((spread // MINUTE).astype(np.int64), minlength=minutes)[:minutes]
    kept = (spread >= begins) & (spread < MINUTE * minutes)
    if not kept.any():
        raise ValueError(f"{trace.name}: no requests in its last {last} minutes")
    block = TraceBlock(*(column[chosen[kept]] for column in trace.recorded))
    return Day(
        block=block._replace(arrival=spread[kept] - begins),
        seconds=MINUTE * last,
        period=round(period / MINUTE),
        history=counts[: minutes - last].astype(np.float64),
        counts=counts[minutes - last :].astype(np.float64),
    )
